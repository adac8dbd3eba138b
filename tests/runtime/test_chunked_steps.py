"""Steps in Python under torch.utils.checkpoint: states in attributes, warnings, memory."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recurrent.loops import F64, By, double, linear, plain_loop
from torch import Tensor, nn

import fusedrnn
from bench.clock import measure_memory

T, B, H = 11, 3, 4
START = torch.zeros(B, H, dtype=F64)


def never(cell: nn.Module, **options: Any) -> fusedrnn.Recurrent:
    return fusedrnn.Recurrent(cell, compile="never", **options)


# --- states that steps keep in attributes --------------------------------------------------------


def neuron() -> By:
    """Leaky integrate-and-fire, which keeps its membrane itself."""

    def step(c: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        membrane = c.linear(x) + (0 if c.membrane is None else 0.9 * c.membrane)
        spikes = torch.sigmoid(5 * (membrane - 1))
        c.membrane = membrane - spikes
        return spikes, h

    return By(step, linear=linear(H), membrane=None)


def noting() -> By:
    """Writes its membrane down, and gets it as its state."""

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        c.membrane = c.linear(x) + 0.9 * h
        return torch.tanh(c.membrane)

    return By(step, linear=linear(H), membrane=None)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"recompute": False}], ids=str)
@pytest.mark.parametrize("make", [neuron, noting])
def test_states_in_attributes(make: Callable[[], By], options: Any) -> None:
    """From call to call as in the loop, where a user detaches them."""
    cell, x = make(), double(T, B, H)
    rnn, found = never(cell, **options), []
    for run in (rnn, lambda x, h: plain_loop(cell, x, h)):
        results: list[Tensor] = []
        cell.membrane = None
        for _ in range(2):
            y, _ = run(x, START)
            loss = y.square().sum() + cell.membrane.sin().sum()
            results += [y, *torch.autograd.grad(loss, [x, *cell.parameters()])]
            cell.membrane = cell.membrane.detach()
        found.append([*results, cell.membrane])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "reset": lambda rnn, x: rnn(x, START, reset=torch.rand(T, B) < 0.3),
    "reverse": lambda rnn, x: rnn(x, (START, START), lengths=[T, 4, 7]),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_resets_do_not_reach(call: str) -> None:
    x, is_two = double(T, B, H), call == "reverse"
    for make in (neuron, noting):
        cell = make()
        rnn = never([make(), cell] if is_two else cell, bidirectional=is_two)  # type: ignore[arg-type]
        if make is noting:
            CALLS[call](rnn, x)
            continue
        with pytest.raises(RuntimeError, match="keeps a state in the attribute 'membrane' of By"):
            CALLS[call](rnn, x)
        assert cell.membrane is None


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda h: h,
    "list": lambda h: [h],
    "dict": lambda h: {"h": h},
    "nested": lambda h: (h, [h]),
}


@pytest.mark.parametrize("kept", KEPT)
def test_calls_without_backward_keep_nothing(kept: str) -> None:
    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        c.kept = KEPT[kept](h)
        return torch.tanh(c.linear(h) + x)

    rnn, first = never(By(step, linear=linear(H), kept=None)), []
    for _ in range(4):
        output, _ = rnn(double(T, B, H), START)
        first.append(weakref.ref(output.grad_fn))
    gc.collect()
    assert [reference() is None for reference in first] == [True, True, True, False]


# --- the warning ---------------------------------------------------------------------------------


def sorting() -> By:
    return By(lambda c, x, h: torch.tanh(c.linear(x) + h).sort(-1).values, linear=linear(H))


def test_a_warning_once_for_each_cell() -> None:
    cell, x = sorting(), double(T, B, H)
    with pytest.warns(UserWarning, match=r"^fusedrnn: recurrent.loops.By is not .*sort") as said:
        for _ in range(2):
            fusedrnn.Recurrent(cell)(x, START)
    assert len(said) == 1 and said[0].filename == __file__
    with pytest.warns(UserWarning, match="compile='never' silences this warning"):
        fusedrnn.Recurrent(sorting())(x, START)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h.sort(-1).values, x

    with pytest.warns(UserWarning, match="sort"):
        fusedrnn.scan(step, START, x)


def test_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = double(T, B, H)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        never(sorting())(x, START)
        fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=F64))(x, START)
        fusedrnn.Recurrent(sorting())(x[:, :0], START[:0])
        with FlopCounterMode(display=False):
            fusedrnn.Recurrent(sorting())(x, START)
        monkeypatch.setenv("FUSEDRNN_COMPILE", "0")
        fusedrnn.Recurrent(sorting())(x, START)


# --- gradients of inputs and outputs in one piece ------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("pick", [slice(0, 2), slice(9, 11), slice(4, 6), slice(None)], ids=str)
def test_gradients_of_a_part(pick: slice, reverse: bool) -> None:
    """Of some outputs alone, in two passes through one graph."""
    weight, x = double(H, H), double(T, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight + x)
        return h.detach(), h  # so that chunks do not depend on each other

    _, ours = fusedrnn.scan(step, START, x, reverse=reverse, compile="never")
    _, kept = fusedrnn.scan(step, START, x, reverse=reverse, compile="never", recompute=False)
    for factor in (1.0, 2.0):
        found = [
            torch.autograd.grad(factor * y[pick].square().sum(), [x, weight], retain_graph=True)
            for y in (ours, kept)
        ]
        torch.testing.assert_close(*found)


def test_memory_of_inputs_and_outputs() -> None:
    """One gradient of the input and one sequence of outputs, beside a chunk of small steps."""
    x = torch.randn(400, 16, 64, requires_grad=True)

    def train() -> None:
        _, y = fusedrnn.scan(lambda h, x: (h, (h + x).sin()), x[0].detach(), x, compile="never")
        y.sum().backward()
        x.grad = None

    train()
    assert measure_memory(train).peak_bytes < 2.6 * x.nbytes
