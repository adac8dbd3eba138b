"""Modules under torch.compile, whose tracing differs between versions of torch."""

import pytest
import torch
from cases import MODULES, allow_tf32
from checks import gradients
from torch._dynamo.testing import CompileCounterWithBackend

import fusedrnn


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("cell", "recompute"), [("gru", True), ("lstm", False), ("stochastic_gru", True)]
)
def test_compile_fullgraph(cell, recompute):
    rnn = MODULES[cell](
        5, 7, num_layers=2, batch_first=True, bidirectional=True, recompute=recompute
    )
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    input = torch.randn(3, 4, 5, requires_grad=True)
    lengths, reset = torch.tensor([4, 1, 3]), torch.rand(3, 4) < 0.3
    every_options = [{}, {"lengths": [4, 1, 3]}, {"lengths": lengths, "reset": reset}]
    if cell == "stochastic_gru":
        every_options = [{"sample": False}, {"eps": torch.randn(4, 4, 3, 7)}]
    for options in every_options:
        results = []
        for function in (rnn, compiled):
            output, last = function(input, **options)
            last = last[-1] if cell == "lstm" else last
            grads = gradients([output.sum() + last.sum()], None, [input, *rnn.parameters()])
            results.append([output, last, *grads])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected)
    assert compiled(input)[0].shape == (3, 4, 14)


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


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("GRU", {}, (4, 3, 5)),
        ("LSTM", {"proj_size": 2}, (4, 5)),
        ("StochasticGRU", {"latent_size": 6}, (4, 5)),
        ("GRUCell", {}, (3, 5)),
        ("LSTMCell", {}, (5,)),
        ("StochasticGRUCell", {"latent_size": 6}, (3, 5)),
    ],
)
def test_other_calls_fullgraph(name, options, shape):
    rnn = getattr(fusedrnn, name)(5, 7, **options)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    noise = {"sample": False} if "Stochastic" in name else {}
    input = torch.randn(shape)
    torch.testing.assert_close(compiled(input, **noise), rnn(input, **noise))
