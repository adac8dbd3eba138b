"""Forms of lengths and resets, and steps that have no derivative elsewhere, against the loop.

runtime/test_published_cells.py has calls with all masks, by steps in Python too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent.loops import F64, By, check_same, double
from runtime.plain import Masks, loop
from torch import Tensor, nn

import fusedrnn

pytestmark = [
    pytest.mark.usefixtures("steps_in_python"),
    pytest.mark.filterwarnings("error:fusedrnn"),
]
T, B, H = 8, 3, 4
LENGTHS = [5, 8, 1]
RESET = torch.tensor(
    [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1]],
    dtype=torch.bool,
)


def spending(c: Any, x: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of a budget, whose root has no derivative below 0."""
    left = left - c.rate * x
    return torch.sqrt(left), left


def logarithm(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Has no value at zero."""
    return torch.tanh(c.rate * x.log() + h)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("step", "padding"), [(spending, 0.0), (logarithm, torch.nan)])
def test_rows_that_have_ended_take_no_steps_that_are_not_in_the_data(
    step: Any, padding: float, resets: bool
) -> None:
    """Their own state with the input of another row could be NaN, and so could gradients."""
    cell = By(step, rate=nn.Parameter(torch.tensor([0.9], dtype=F64)))
    ended = torch.arange(T)[:, None] >= torch.tensor(LENGTHS)
    x = torch.rand(T, B, 1, dtype=F64).masked_fill(ended[..., None], 0)
    x = (x / x.sum(0)).masked_fill(ended[..., None], padding).requires_grad_()
    start = torch.ones(B, 1, dtype=F64, requires_grad=True)
    to = torch.full((1, 1), 1.5, dtype=F64, requires_grad=True)
    masks = (LENGTHS, RESET, to) if resets else (LENGTHS,)
    check_same(
        lambda: fusedrnn.Recurrent(cell)(x, start, *masks),
        lambda: loop(cell, x, start, Masks(*masks)),
        [x, start, *cell.parameters(), *([to] if resets else [])],
    )


def test_reset_without_a_batch() -> None:
    cell, x, to = nn.GRUCell(3, H, dtype=F64), double(T, 3), double(H)

    def expected() -> tuple[Any, Any]:
        start = torch.zeros(1, H, dtype=F64)
        output, state = loop(cell, x[:, None], start, Masks([T], RESET[:, :1], to[None]))
        return output[:, 0], state[0]

    rnn = fusedrnn.Recurrent(cell)
    leaves = [x, to, *cell.parameters()]
    check_same(lambda: rnn(x, reset=RESET[:, 0], reset_to=to), expected, leaves)


@pytest.mark.parametrize("is_sequence", [True, False])
def test_no_rows(is_sequence: bool) -> None:
    cell = nn.GRUCell(2, H)
    rnn = fusedrnn.Recurrent(cell, batch_first=True, return_sequence=is_sequence)
    x, reset = torch.randn(0, 5, 2, requires_grad=True), torch.zeros(0, 5, dtype=torch.bool)
    output, state = rnn(x, lengths=[], reset=reset, reset_to=torch.zeros(1, H))
    assert output.shape == ((0, 5, H) if is_sequence else (0, H))
    assert state.shape == (0, H)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    with pytest.raises(RuntimeError, match=r"lengths must have shape \(0,\)"):
        rnn(x, lengths=[3])
