"""Wrong calls of compiled cells: errors are those of the cell, and warnings are for cells."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedrnn

H = 4


class Cell(nn.Module):
    """It can ask for values, for which there is no program."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3 + 2 + H, H)
        self.asks = False

    def forward(self, x: dict[str, Tensor], h: Tensor) -> Tensor:
        made = torch.tanh(self.gate(torch.cat([x["obs"], x["action"], h], -1)))
        return made + 1 if self.asks and made.sum() > 0 else made


def given(**changes: Any) -> dict[str, Tensor]:
    x = {"obs": torch.randn(5, 2, 3), "action": torch.randn(5, 2, 2)} | changes
    return {name: leaf for name, leaf in x.items() if leaf is not None}


@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("compile", ["auto", "require"])
@pytest.mark.parametrize(
    "changes, kind, said",
    [
        ({"action": None}, KeyError, "action"),
        ({"obs": torch.randn(5, 2, 1)}, RuntimeError, r"2x7 and 9x4"),
        ({name: leaf.double() for name, leaf in given().items()}, RuntimeError, "same dtype"),
    ],
    ids=["a key", "a width", "a dtype"],
)
def test_the_error_is_that_of_the_cell(
    changes: dict[str, Any], kind: type[Exception], said: str, compile: str, calls_before: int
) -> None:
    rnn, h = fusedrnn.Recurrent(Cell(), compile=compile), torch.zeros(2, H)
    for _ in range(calls_before):
        rnn(given(), h)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind, match=said):
            rnn(given(**changes), h)
        rnn(given(), h)
        assert rnn.explain(given(), h).is_compiled


def test_a_mistake_takes_no_warning_away() -> None:
    cell, h = Cell(), torch.zeros(2, H)
    rnn = fusedrnn.Recurrent(cell)
    rnn(given(), h)
    with pytest.raises(KeyError):
        rnn(given(action=None), h)
    cell.asks = True
    with pytest.warns(UserWarning, match="compiled for earlier calls; .* steps in Python, because"):
        rnn(given(), h)


def test_what_can_not_be_compiled_is_said_where_the_cell_is_right() -> None:
    cell, h = Cell(), torch.zeros(2, H)
    cell.asks = True
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        fusedrnn.Recurrent(cell, compile="require")(given(), h)
