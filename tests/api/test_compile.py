"""Modules under torch.compile, whose tracing differs between versions of torch."""

import pytest
import torch
from cases import allow_tf32
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import fusedrnn


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()


def test_a_compiled_module_follows_the_switch_of_tf32():
    """On the CPU, where it has no effect, the switch is no guard of the graph."""
    for device, graphs in (("meta", 2), ("cpu", 1)):
        counter = CompileCounterWithBackend("aot_eager")
        rnn = torch.compile(fusedrnn.GRU(3, 5, device=device), fullgraph=True, backend=counter)
        input = torch.randn(2, 4, 3, requires_grad=True, device=device)
        for allowed in (False, True, False, True):
            allow_tf32(allowed)
            rnn(input)[0].sum().backward()
        assert counter.frame_count == graphs


LENGTHS = torch.tensor([6, 2, 3])


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS.int(),
        LENGTHS.to(torch.uint8),
        LENGTHS.int().numpy(),
        list(LENGTHS.numpy()),
        list(LENGTHS.int()),
        tuple(LENGTHS.tolist()),
    ],
    ids=lambda lengths: f"{type(lengths).__name__} of {lengths[0].__class__.__name__}",
)
def test_lengths_are_integers_of_any_kind(lengths):
    rnn, x = fusedrnn.GRU(4, 5), torch.randn(6, 3, 4)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    found = compiled(x, lengths=lengths)
    torch.testing.assert_close(found, rnn(x, lengths=LENGTHS), rtol=0, atol=0)


@pytest.mark.parametrize(
    "lengths", [LENGTHS.float(), LENGTHS.float().numpy(), [6.0, 2.0, 3.0]], ids=type
)
def test_lengths_that_are_no_integers_are_refused(lengths):
    compiled = torch.compile(fusedrnn.GRU(4, 5), backend="aot_eager")
    with pytest.raises((TypeError, ValueError), match=r"^fusedrnn: lengths must be a tensor or a"):
        compiled(torch.randn(6, 3, 4), lengths=lengths)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = fusedrnn.GRU(4, 5, 2, bidirectional=True)
        self.middle = fusedrnn.StochasticGRU(10, 5, 3)
        self.last = fusedrnn.LSTM(5, 6, 2, return_sequence=False)

    def forward(self, input, lengths):
        output = self.encoder(input, lengths=lengths)[0]
        return self.last(self.middle(output)[0], lengths=lengths)[1]


@pytest.mark.slow
def test_a_package_takes_any_sizes(tmp_path):
    """A package of AOTInductor, which runs without Python."""
    allow_tf32(True)  # torch.export does not run where TF32 is forbidden
    model = Model().eval()
    steps, batch = Dim("steps", min=1, max=512), Dim("batch", min=1, max=64)
    program = torch.export.export(
        model,
        (torch.randn(6, 3, 4), torch.tensor([6, 2, 1])),
        dynamic_shapes=({0: steps, 1: batch}, {0: batch}),
    )
    package = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    packaged = torch._inductor.aoti_load_package(package)
    for seq_len, rows in ((6, 3), (40, 2), (1, 1)):
        input, lengths = torch.randn(seq_len, rows, 4), torch.arange(rows) % seq_len + 1
        results = []
        for module in (packaged, model):
            torch.manual_seed(3)  # of the noise
            with torch.no_grad():
                results.append(module(input, lengths))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
