"""Steps whose programs would be wrong where the trial with random numbers does not look."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted import interpreted
from torch import Tensor, nn

import fusedrnn

H = 5


class Cell(nn.Module):
    """A GRU and what is made of its state."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gru, self.function = nn.GRUCell(H, H), function

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(x[:, :H].to(h.dtype), h)
        return self.function(h, x), h


LARGEST = {
    "derivative": lambda h, x: h.amax(-1),
    "difference": lambda h, x: h - h.amax(-1, keepdim=True),
    "groups": lambda h, x: torch.cat([h, h], -1).view(-1, 2, H).amin(-1),
    "equal": lambda h, x: torch.where(h == h.detach().amax(-1, keepdim=True).detach(), h, 0.0),
    "not less": lambda h, x: h * (h >= h.max(-1, keepdim=True).values),
    "moved": lambda h, x: (h + 1 >= (h.detach().amax(-1, keepdim=True) + 1).detach()).to(h.dtype),
}


def refused(cell: nn.Module, x: Tensor, h: Tensor) -> str:
    with interpreted(), pytest.raises(RuntimeError, match="cannot be compiled") as error:
        fusedrnn.Recurrent(cell, compile="require")(x, h)
    return str(error.value)


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparisons_to_the_largest_of_some_numbers(name: str, dtype: torch.dtype) -> None:
    """Backward makes sums of products again, maybe with another rounding."""
    x, h = torch.randn(3, 2, H, dtype=dtype), torch.zeros(2, H, dtype=dtype)
    reason = refused(Cell(LARGEST[name]).to(dtype), x, h)
    assert "the largest of them" in reason or "between equal numbers" in reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h, x: torch.floor(torch.log2(h.abs() + 1)), "aten.log2"),
        (lambda h, x: torch.floor(torch.log10(h.abs() + 1)), "aten.log10"),
        (lambda h, x: h // 0.1, "aten.div with rounding_mode='floor'"),
        (lambda h, x: torch.where(h > 0.99, h.round(decimals=1), h), "aten.round with decimals=1"),
    ],
)
def test_operations_that_jump_elsewhere_than_those_of_torch(
    function: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    assert reason in refused(Cell(function), torch.randn(3, 2, H), torch.zeros(2, H))


def test_softmax_and_choices_are_compiled() -> None:
    def function(h: Tensor, x: Tensor) -> Tensor:
        probabilities = torch.softmax(h, -1)
        chosen = nn.functional.one_hot(h.argmax(-1), H).to(h.dtype)
        return probabilities + chosen + torch.logsumexp(h, -1, keepdim=True) + h.max(-1)[0][:, None]

    x, h = torch.randn(3, 2, H), torch.zeros(2, H)
    with interpreted():
        fusedrnn.Recurrent(Cell(function), compile="require")(x, h)


@pytest.mark.parametrize(
    ("wide", "narrow"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_inputs_that_would_be_rounded(wide: torch.dtype, narrow: torch.dtype) -> None:
    x, h = torch.randn(3, 2, H, dtype=wide), torch.zeros(2, H, dtype=narrow)
    cell = Cell(lambda h, x: (x - 300.5 > 0).to(h.dtype)).to(narrow)
    assert f"an input is of {wide}" in refused(cell, x, h)


@pytest.mark.parametrize("rows", [1, 7])
def test_steps_that_decide_by_the_number_of_rows(rows: int) -> None:
    cell = Cell(lambda h, x: 2 * h if len(h) == rows else h)
    assert "in another batch" in refused(cell, torch.randn(3, rows, H), torch.zeros(rows, H))
