"""A package of AOTInductor, which runs without Python, takes any number of steps and of rows."""

import pytest
import torch
from cases import allow_tf32
from torch import nn
from torch.export import Dim

import fusedrnn


@pytest.fixture(autouse=True)
def _float32_is_not_rounded():
    """Replaces conftest.py's fixture: torch.export does not run where TF32 is forbidden."""
    allow_tf32(True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = fusedrnn.GRU(4, 5, 2, bidirectional=True)
        self.middle = fusedrnn.StochasticGRU(10, 5, 3)
        self.last = fusedrnn.LSTM(5, 6, 2, return_sequence=False)

    def forward(self, input, lengths):
        output = self.encoder(input, lengths=lengths)[0]
        return self.last(self.middle(output)[0], lengths=lengths)[1]


def test_a_package_takes_any_sizes(tmp_path):
    model = Model().eval()
    steps, batch = Dim("steps", min=1, max=512), Dim("batch", min=1, max=64)
    program = torch.export.export(
        model,
        (torch.randn(6, 3, 4), torch.tensor([6, 2, 1])),
        dynamic_shapes=({0: steps, 1: batch}, {0: batch}),
    )
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    packaged = torch._inductor.aoti_load_package(path)
    for seq_len, rows in ((6, 3), (40, 2), (1, 1)):
        input, lengths = torch.randn(seq_len, rows, 4), torch.arange(rows) % seq_len + 1
        results = []
        for module in (packaged, model):
            torch.manual_seed(3)  # of the noise
            with torch.no_grad():
                results.append(module(input, lengths))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
