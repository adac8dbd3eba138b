"""Steps whose programs would be wrong where the trial with random numbers does not look."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

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


def refused(cell: nn.Module, x: Any, h: Tensor) -> str:
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


class Step(nn.Module):
    """A GRU, and an output of all that a step gets and of a table."""

    def __init__(self, function: Callable[[Any, Tensor, nn.Embedding], Any]) -> None:
        super().__init__()
        self.gru, self.table, self.function = nn.GRUCell(H, H), nn.Embedding(5, H), function

    def forward(self, x: Any, h: Tensor) -> Any:
        return self.function(x, h, self.table), self.gru(h, h)


def numbers(*shape: int) -> Tensor:
    return torch.ones(3, 2, *shape, dtype=torch.int64)


Function = Callable[[Any, Tensor, nn.Embedding], Any]
NAMED: dict[str, tuple[Function, Any, str]] = {
    "integers": (
        lambda x, h, table: x + h,
        numbers(1),
        r"the input of torch\.int64 is used in arithmetic, by aten\.add",
    ),
    "some integers": (
        lambda x, h, table: (x["n"] > 0) * h,
        {"x": torch.randn(3, 2, H), "n": numbers(1)},
        r"input 1 of torch\.int64 is used in arithmetic, by aten\.gt",
    ),
    "a cast": (lambda x, h, table: x.to(h.dtype) @ table.weight, numbers(5), r"aten\._to_copy"),
    "an output": (lambda x, h, table: h > 0, numbers(), r"an output of the step is of torch\.bool"),
    "of several outputs": (lambda x, h, table: (h, h > 0), numbers(), "output 1 of the step is of"),
    "mixed rows": (lambda x, h, table: h.flip(0), numbers(), "an output of the step mixes"),
    "a part of an input": (
        lambda x, h, table: table(x[:, 0]),
        numbers(2),
        r"aten\.embedding of a part of the input",
    ),
    "a factor": (
        lambda x, h, table: torch.addmm(h, h, table.weight.t() @ table.weight, beta=2),
        numbers(),
        r"aten\.addmm with beta or alpha",
    ),
    "a sum": (
        lambda x, h, table: torch.addmm(h, h, table.weight.t() @ table.weight),
        numbers(),
        r"aten\.addmm adds a product to another activation",
    ),
    "parts": (
        lambda x, h, table: torch.cat([h > 0, h.flip(1) > 1], -1).any(-1, keepdim=True) * h,
        numbers(),
        r"aten\.any of columns that are computed apart",
    ),
    "many values": (
        lambda x, h, table: sum(x[:, i : i + 1].tanh() * h[:, i % H, None] for i in range(40)),
        torch.randn(3, 2, 40),
        r"aten\.\w+ is made of more than 32 values in each column",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_reasons_name_what_the_user_knows(name: str) -> None:
    """The operation, or the input or output, and the line; nothing that only a graph has."""
    function, x, text = NAMED[name]
    reason = refused(Step(function), x, torch.zeros(2, H))
    assert re.search(rf"{text}.* \(test_refusals\.py:\d+\)$", reason), reason
    assert not re.search(r"arg\d|_\d", reason)


@pytest.mark.parametrize("rows", [1, 7])
def test_steps_that_decide_by_the_number_of_rows(rows: int) -> None:
    cell = Cell(lambda h, x: 2 * h if len(h) == rows else h)
    assert "in another batch" in refused(cell, torch.randn(3, rows, H), torch.zeros(rows, H))
