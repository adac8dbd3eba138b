"""Steps that mix the rows of the batch: parallel mode says so, in the trial or in backward.

And steps that do not: no rounding makes it say so.

Longer than 350 lines, because its tests are of one topic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import (
    F64,
    MODES,
    By,
    Unseen,
    check_same,
    check_scan,
    double,
    generator,
    loss_of,
    plain_loop,
    scan_loop,
)
from torch import Tensor, nn

import fusedrnn

T, B, H = 40, 3, 4
Step = Callable[[Any, Tensor, Tensor], Any]


ZEROS = torch.zeros(B, H, dtype=F64)


def weight_of(dtype: torch.dtype = F64) -> Tensor:
    return (torch.randn(H, H, dtype=F64) * 0.3).to(dtype).requires_grad_()


def gradient_of(step: Step, state: Any, w: Tensor, mode: str, scale: float = 1.0) -> Tensor:
    """Of the weight, which is a parameter of the step."""
    x = torch.randn(T, B, H, dtype=w.dtype, generator=generator())
    _, y = fusedrnn.scan(step, state, x, w, mode=mode)
    return torch.autograd.grad((y * x * scale).sum(), w)[0]


# --- what the trial finds ------------------------------------------------------------------------


class Averaged(torch.autograd.Function):
    """A product whose gradient of the weight is a mean over the batch."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, w = ctx.saved_tensors
        return g @ w.T, h.T @ g / len(g)


def straight_through_mean(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h @ w + x)
    mean = h.mean(0, keepdim=True)
    h = h + (mean - mean.detach())
    return h, h


def averaged(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(Averaged.apply(h, w) + x)
    return h, h


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (straight_through_mean, "the gradient of state"),
        (averaged, "the gradient of leaf 0 of what"),
    ],
)
def test_gradients_that_mix_rows(step: Step, what: str) -> None:
    with pytest.raises(ValueError, match=f"at once, {what} .*differs"):
        gradient_of(step, ZEROS, weight_of(), "parallel")
    gradient_of(step, ZEROS, weight_of(), "replay")


@pytest.mark.parametrize("is_module", [False, True])
def test_gradients_of_weights_and_closed_over_tensors(is_module: bool) -> None:
    """Like those of params; hooks of the user are not called by the trial."""

    def averaged(c: Any, x: Tensor, h: Tensor) -> Tensor:
        w = c.weight if is_module else closed_over
        return torch.tanh(Averaged.apply(h, w.clone()) + x)

    cell, closed_over, calls = By(averaged, weight=nn.Parameter(weight_of())), weight_of(), []
    for leaf in (cell.weight, closed_over):
        leaf.register_hook(lambda g: calls.append(g))
    what = "the weight weight" if is_module else "a tensor that the step closes over"
    with pytest.raises(ValueError, match=f"the gradient of {what} differs"):
        fusedrnn.Recurrent(cell, mode="parallel")(double(T, B, H), double(B, H))
    assert not calls


def with_hook(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / (g.norm() + 1))
    return h


def test_a_hook_that_mixes_rows() -> None:
    rnn = fusedrnn.Recurrent(By(lambda c, x, h: with_hook(torch.tanh(h + x))), mode="parallel")
    with pytest.raises(ValueError, match=r"gradient of .* differs"):
        rnn(double(T, 12, H), torch.zeros(12, H, dtype=F64))


def test_a_clock_beside_a_state_that_mixes_rows() -> None:
    """Each column has its own scale."""

    def step(s: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(s[:, 1:] @ w + x)
        h = h - 0.9 * h.mean(0)
        s = torch.cat([s[:, :1] + 1, h], 1)
        return s, s[:, 1:]

    state = torch.cat([torch.full((B, 1), 1e5), torch.zeros(B, H)], 1)
    with pytest.raises(ValueError, match="state differs"):
        gradient_of(step, state, weight_of(torch.float32), "parallel")


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_a_small_share_of_other_rows_in_few_bits(dtype: torch.dtype, share: float) -> None:
    def step(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        h = h + share * h.mean(0)
        return h, h

    torch.manual_seed(1)
    with pytest.raises(ValueError, match="differs"):
        gradient_of(step, torch.zeros(B, H, dtype=dtype), weight_of(dtype), "parallel")


# --- what backward finds -------------------------------------------------------------------------


GRADIENT = r"the gradient of state\[0\] is another one for the steps of a chunk at once"
OUTPUT = "another output than in forward"


def scaled(a: Tensor) -> Tensor:
    if a.requires_grad:
        a.register_hook(lambda g: g * (10.0 / g.norm()).clamp(max=1.0))
    return a


def burnt_in(h: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach() if time[0] < 20 else h
    return h, h


LATER: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "burn-in": (burnt_in, GRADIENT),
    "clipped gradient": (lambda h, time: (scaled(h), h), GRADIENT + r'.*mode="replay" suits any'),
    "rolled": (lambda h, time: (h, h.roll(1, 0) if time[0] >= 10 else h), OUTPUT),
    # Where there are more rows than in the trial.
    "norm of all": (lambda h, time: (h, h / h.norm().clamp(min=5)), OUTPUT),
}


@pytest.mark.parametrize(("change", "message"), LATER.values(), ids=LATER)
def test_rows_that_are_mixed_later(change: Any, message: str) -> None:
    def step(s: Any, x: Tensor, w: Tensor) -> Any:
        h, y = change(torch.tanh(s[0] @ w + x), s[1])
        return (h, s[1] + 1), y

    state, w = (ZEROS, ZEROS[:, 0]), weight_of()
    with pytest.raises(RuntimeError, match=message):
        gradient_of(step, state, w, "parallel", scale=20.0)
    gradient_of(step, state, w, "replay", scale=20.0)


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
    rnn = fusedrnn.Recurrent(cell, mode="parallel", return_sequence=return_sequence)
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
    options: Any = {"mode": "parallel", "return_sequence": False}
    check_scan(step, start, double(T, B, H), more=[*cell.parameters()], **options)


# --- what only rounding tells apart --------------------------------------------------------------


def test_rounding_under_autocast() -> None:
    """Results in float32 of products in bfloat16 differ by as much as those."""

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        rounded = 1 + (2**-9 if x.shape[0] > B else 0)  # as by another kernel for more rows
        return torch.tanh(x + 0.5 * h) * rounded

    rnn = fusedrnn.Recurrent(By(step), mode="parallel")
    x, h = torch.randn(T, B, H, requires_grad=True), torch.zeros(B, H)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = rnn(x, h)
    loss_of(output, state).backward()
    with pytest.raises(ValueError, match="differs"):
        rnn(x, h)


def test_rounding_below_the_dtype_of_the_state() -> None:
    """A state in float64 of a step that computes in float32."""

    def step(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rounded = 1 + (2**-22 if x.shape[0] > B else 0)  # as by another kernel for more rows
        h = (torch.tanh(h.float() @ w + x) * rounded).double()
        return h, h

    gradient_of(step, ZEROS, weight_of(torch.float32), "parallel")


@pytest.mark.parametrize("scale", [1e300, torch.inf, torch.nan])
def test_gradients_that_overflow(scale: float) -> None:
    """As those of a loss scale that torch.amp.GradScaler then makes smaller."""
    cell = nn.GRUCell(H, H, dtype=F64)
    x = double(T, B, H)
    output = fusedrnn.Recurrent(cell, mode="parallel")(x, double(B, H) * 1e5)[0]
    (output * scale * 1e8).sum().backward()


# --- what steps must give again ------------------------------------------------------------------


def beside(h: Tensor, value: float) -> Tensor:
    return torch.cat([h, torch.full_like(h, value)], 1)


CHANGES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "factor": lambda h, is_again: h * (2 if is_again else 1),
    "order": lambda h, is_again: h.flip(-1) if is_again else h,
    "factor beside NaN": lambda h, is_again: beside(h * (5 if is_again else 1), torch.nan),
    "infinity": lambda h, is_again: beside(h, torch.inf if is_again else -torch.inf),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("returns", [True, False])
def test_outputs_that_do_not_come_again(returns: bool, change: Any, mode: str) -> None:
    """Though the states are the same."""
    is_again, w = Unseen(False), weight_of()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, change(h, is_again.value)

    _, y = fusedrnn.scan(step, ZEROS, double(T, B, H), mode=mode, return_sequence=returns)
    is_again.value = True
    with pytest.raises(RuntimeError, match="the steps give another output than in forward"):
        y[..., :H].sum().backward()


def test_a_state_that_is_no_longer_infinite() -> None:
    held, w = Unseen(torch.inf), weight_of()

    def step(s: Any, x: Tensor) -> Any:
        return (s[0], torch.full_like(s[1], held.value)), torch.tanh(s[0] @ w + x)

    _, y = fusedrnn.scan(step, (ZEROS, ZEROS), torch.randn(T, B, H, dtype=F64))
    held.value = 3.0
    with pytest.raises(RuntimeError, match=r"another state\[1\] than in forward"):
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", [None, (), {}])
@pytest.mark.parametrize("return_sequence", [True, False])
def test_steps_without_output(return_sequence: bool, empty: Any, mode: str) -> None:
    w, x, start = weight_of(), double(T, B, H), double(B, H)
    cell = By(lambda c, x, h: (empty, torch.tanh(h @ w + x)))

    def run() -> Any:
        y, h = fusedrnn.Recurrent(cell, mode=mode, return_sequence=return_sequence)(x, start)
        swapped = fusedrnn.scan(lambda h, x: cell(x, h)[::-1], start, x, mode=mode)
        assert y == swapped[1] == empty
        return [h]

    def expected() -> Any:
        return [scan_loop(lambda h, x: (torch.tanh(h @ w + x), h), start, x)[0]]

    check_same(run, expected, [w, x, start])


# --- what is not for ever ------------------------------------------------------------------------


def test_a_call_under_torch_func_says_nothing_of_rows() -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=F64), mode="parallel")
    x, h = double(5, B, H), double(B, H)
    with pytest.warns(UserWarning, match="plain loop"):
        torch.func.jacrev(lambda x: rnn(x, h)[1])(x)
    assert rnn.explain(x, h).mode == "parallel"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("draws", {"mode": "parallel"}),
        ("draws", {"cuda_graphs": True}),
        ("raises", {"mode": "parallel"}),
    ],
)
@pytest.mark.usefixtures("recorder")
def test_an_obstacle_of_the_moment(kind: str, options: Any) -> None:
    """Another thread draws from torch's generator during the trial, or memory is short."""
    count = Unseen(0)

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        count.value += 1
        if count.value == 1 and kind == "draws":
            torch.randint(2, (1,))
        if count.value == 1 and kind == "raises":
            raise torch.OutOfMemoryError("out of memory")
        return torch.tanh(x + h)

    rnn = fusedrnn.Recurrent(By(step), **options)
    x, h = double(16, B, H), double(B, H)
    if kind == "raises":
        with pytest.raises(ValueError, match="a step raises OutOfMemoryError"):
            rnn(x, h)
    rnn(x, h)
    assert rnn.explain(x, h).is_recorded == ("cuda_graphs" in options)
