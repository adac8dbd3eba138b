"""Steps that backward takes again: what must be the same, and what rounding may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recurrent.loops import (
    F64,
    By,
    Unseen,
    check_same,
    check_scan,
    double,
    plain_loop,
    scan_loop,
)
from torch import Tensor, nn

import fusedrnn

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 40, 3, 4
ZEROS = torch.zeros(B, H, dtype=F64)


def weight_of(dtype: torch.dtype = F64) -> Tensor:
    return (torch.randn(H, H, dtype=F64) * 0.3).to(dtype).requires_grad_()


def stopping(c: Any, x: Tensor, state: Any) -> Any:
    """A state whose gradient ends at some steps of some rows, one without gradient, and a count."""
    h, seen, count = state
    h = torch.where((x[:, :1] > 0.5), h.detach(), h)
    new = torch.tanh(c.linear(torch.cat([x, h], -1)))
    return new * seen.detach(), (new, (seen + x).detach(), count + 1)


@pytest.mark.parametrize("return_sequence", [True, False])
@pytest.mark.parametrize("cuts", [False, True])
def test_states_without_gradient(cuts: bool, return_sequence: bool) -> None:
    cell = By(stopping, linear=nn.Linear(2 * H, H, dtype=F64))
    rnn = fusedrnn.Recurrent(cell, return_sequence=return_sequence)
    x, h = double(T, B, H), double(B, H)
    state = (h, h.detach() + 1, torch.zeros(B, dtype=torch.int64))

    def expected() -> Any:
        y, last = plain_loop(cell, x, state)
        return (y if return_sequence else y[-1]), last

    leaves = [x, *cell.parameters()] if cuts else [x, h, *cell.parameters()]
    check_same(lambda: rnn(x, state), expected, leaves, unused_is_zero=True)


def test_a_state_of_integers_and_the_last_output_alone() -> None:
    """There are chunks whose outputs and states have no gradient at all."""
    cell, start = nn.Linear(H, H, dtype=F64), torch.zeros(B, dtype=torch.int64)
    step = lambda count, x: (count + 1, cell(x) * count[:, None])  # noqa: E731
    more = [*cell.parameters()]
    check_scan(step, start, double(T, B, H), more=more, return_sequence=False)


# --- what only rounding tells apart --------------------------------------------------------------


def test_rounding_under_autocast() -> None:
    """Results in float32 of products in bfloat16 differ by as much as those."""
    is_again, cell = Unseen(False), nn.Linear(H, H)

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        rounded = 1 + (2**-9 if is_again.value else 0)  # as by another kernel
        return torch.tanh(x + 0.5 * cell(h).float()) * rounded

    rnn, x, h = fusedrnn.Recurrent(By(step)), torch.randn(T, B, H), torch.zeros(B, H)

    def train() -> None:
        is_again.value = False
        output = rnn(x, h)[0]
        is_again.value = True
        output.sum().backward()

    with torch.autocast("cpu", torch.bfloat16):
        train()
    with pytest.raises(RuntimeError, match=r"a different state\."):
        train()


def test_rounding_below_the_dtype_of_the_state() -> None:
    """A state in float64 of a step that computes in float32."""
    is_again, w = Unseen(False), weight_of(torch.float32)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = 1 + (2**-22 if is_again.value else 0)  # as by another kernel
        h = (torch.tanh(h.float() @ w + x) * rounded).double()
        return h, h

    _, y = fusedrnn.scan(step, ZEROS, torch.randn(T, B, H))
    is_again.value = True
    y.sum().backward()


# --- what steps must give again ------------------------------------------------------------------


def beside(h: Tensor, value: float) -> Tensor:
    return torch.cat([h, torch.full_like(h, value)], 1)


CHANGES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "factor": lambda h, is_again: h * (2 if is_again else 1),
    "order": lambda h, is_again: h.flip(-1) if is_again else h,
    "factor beside NaN": lambda h, is_again: beside(h * (5 if is_again else 1), torch.nan),
    "infinity": lambda h, is_again: beside(h, torch.inf if is_again else -torch.inf),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("returns", [True, False])
def test_outputs_that_do_not_come_again(returns: bool, change: Any) -> None:
    """Though the states are the same."""
    is_again, w = Unseen(False), weight_of()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, change(h, is_again.value)

    _, y = fusedrnn.scan(step, ZEROS, double(T, B, H), return_sequence=returns)
    is_again.value = True
    with pytest.raises(RuntimeError, match="gave a different output"):
        y[..., :H].sum().backward()


def test_a_state_that_is_no_longer_infinite() -> None:
    held, w = Unseen(torch.inf), weight_of()

    def step(s: Any, x: Tensor) -> Any:
        return (s[0], torch.full_like(s[1], held.value)), torch.tanh(s[0] @ w + x)

    _, y = fusedrnn.scan(step, (ZEROS, ZEROS), torch.randn(T, B, H, dtype=F64))
    held.value = 3.0
    with pytest.raises(RuntimeError, match=r"a different state\[1\]\."):
        y.sum().backward()


def test_outputs_that_are_conjugate_views() -> None:
    w = torch.randn(H, H, dtype=torch.complex128, requires_grad=True)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h.conj()

    x = torch.randn(T, B, H, dtype=torch.complex128)
    start = torch.zeros(B, H, dtype=torch.complex128)
    for return_sequence in (True, False):
        _, y = fusedrnn.scan(step, start, x, return_sequence=return_sequence)
        y.abs().sum().backward()


def test_outputs_that_somebody_has_written() -> None:
    """They tell nothing of the step, whose own results are compared instead."""
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    expected = torch.autograd.grad(plain_loop(cell, x, ZEROS)[0].sum(), x)
    for change in (
        lambda y: setattr(y, "data", torch.empty(1, dtype=F64)),
        lambda y: y.untyped_storage().resize_(0),
    ):
        output, _ = fusedrnn.Recurrent(cell)(x, ZEROS)
        loss = output.sum()
        change(output)
        torch.testing.assert_close(torch.autograd.grad(loss, x), expected)
    output, _ = fusedrnn.Recurrent(cell)(x, ZEROS)
    output.data.mul_(2)
    with pytest.raises(RuntimeError, match=r"output \(unless somebody has written to it since\)"):
        output.sum().backward()


def test_weights_that_are_written_without_a_trace() -> None:
    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        h = torch.tanh(x + h * c.weight)
        c.weight.data = 0.5 * c.weight.data
        return h

    cell = By(step, weight=nn.Parameter(torch.ones(H, dtype=F64)))
    with pytest.raises(RuntimeError, match=r"sets .data of a weight of shape \(4,\), so backward"):
        fusedrnn.Recurrent(cell)(double(T, B, H), ZEROS)

    unused = By(lambda c, x, h: torch.tanh(x + h), weight=nn.Parameter(torch.ones(H, dtype=F64)))
    output, _ = fusedrnn.Recurrent(unused)(double(T, B, H), ZEROS)
    with torch.no_grad():
        unused.weight.add_(1)
    with pytest.raises(RuntimeError) as raised:
        output.sum().backward()
    said = [str(raised.value), *getattr(raised.value, "__notes__", ())]  # since Python 3.11
    assert "with the weights of forward, and one" in "".join(said)


def test_where_hooks_of_saved_tensors_are_disabled() -> None:
    cell, x = nn.GRUCell(H, H, dtype=F64), double(T, B, H)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        output, _ = fusedrnn.Recurrent(cell)(x, ZEROS)
    expected = torch.autograd.grad(plain_loop(cell, x, ZEROS)[0].sum(), x)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x), expected)


@pytest.mark.parametrize("empty", [None, (), {}])
@pytest.mark.parametrize("return_sequence", [True, False])
def test_steps_without_output(return_sequence: bool, empty: Any) -> None:
    w, x, start = weight_of(), double(T, B, H), double(B, H)
    cell = By(lambda c, x, h: (empty, torch.tanh(h @ w + x)))

    def run() -> Any:
        y, h = fusedrnn.Recurrent(cell, return_sequence=return_sequence)(x, start)
        swapped = fusedrnn.scan(lambda h, x: cell(x, h)[::-1], start, x)
        assert y == swapped[1] == empty
        return [h]

    def expected() -> Any:
        return [scan_loop(lambda h, x: (torch.tanh(h @ w + x), h), start, x)[0]]

    check_same(run, expected, [w, x, start])
