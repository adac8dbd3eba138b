"""``recompute=False`` of steps in Python: the graph of a loop, with the noise of any call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent.loops import Noisy, check_same, generator
from torch import Tensor, nn

import fusedrnn

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 9, 3, 4


@pytest.mark.parametrize("returns_sequence", [True, False])
@pytest.mark.parametrize("lengths", [None, [4, 9, 1]])
def test_equals_steps_that_are_taken_again(lengths: Any, returns_sequence: bool) -> None:
    cell = Noisy()
    x = torch.randn(T, B, H, dtype=torch.float64, requires_grad=True)
    h = torch.zeros(B, H, dtype=torch.float64, requires_grad=True)
    kept, again = (
        fusedrnn.Recurrent(cell, return_sequence=returns_sequence, recompute=recompute)
        for recompute in (False, True)
    )
    check_same(
        lambda: kept(x, h, lengths, generator=generator()),
        lambda: again(x, h, lengths, generator=generator()),
        [x, h, *cell.parameters()],
    )


def test_no_step_is_taken_again() -> None:
    calls = []

    class Cell(nn.RNNCell):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:  # type: ignore[override]
            calls.append(1)
            return super().forward(x, h)

    rnn = fusedrnn.Recurrent(Cell(H, H), recompute=False)
    rnn(torch.randn(T, B, H), torch.zeros(B, H))[0].sum().backward()
    assert len(calls) == T
    found = rnn.explain(torch.randn(T, B, H), torch.zeros(B, H))
    assert (found.chunk_steps, found.workspace_bytes) == (T, 0)
    assert "since recompute=False" in found.chunk_reason


def test_numbers_of_two_generators() -> None:
    class Cell(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(x + h + torch.randint(5, h.shape) + torch.rand(h.shape))

    x, found = torch.randn(T, B, H), []
    for recompute in (False, True):
        torch.manual_seed(1)
        found.append(fusedrnn.Recurrent(Cell(), recompute=recompute)(x, torch.zeros(B, H))[0])
    torch.testing.assert_close(*found)


def test_what_it_excludes() -> None:
    with pytest.raises(ValueError, match="recompute=False cannot be used with chunk_size"):
        fusedrnn.Recurrent(nn.RNNCell(H, H), recompute=False, chunk_size=3)
    with pytest.raises(TypeError, match="recompute"):
        fusedrnn.Recurrent(nn.RNNCell(H, H), recompute=None)  # type: ignore[arg-type]
