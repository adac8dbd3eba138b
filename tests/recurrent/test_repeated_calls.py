"""Calls like one before, which nobody checks again."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedrnn
from fusedrnn._recurrent import repeated_calls

H = 4


class Cell(nn.Module):
    """It draws the state in which it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3 + H, H, dtype=torch.float64)
        self.starts: list[int] = []

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.gate(torch.cat([x, h], -1)))

    def initial_state(self, batch: int) -> Tensor:
        self.starts.append(batch)
        return torch.randn(batch, H, dtype=torch.float64)


def sequence(*sizes: int) -> Tensor:
    return torch.randn(*sizes, 3, dtype=torch.float64)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a call that might have been usual was."""
    found: list[bool] = []
    run = repeated_calls.UsualCalls.run

    def noted(self: Any, *given: Any) -> Any:
        made = run(self, *given)
        found.append(made[0] is not None)
        return made

    monkeypatch.setattr(repeated_calls.UsualCalls, "run", noted)
    return found


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_state_is_made_once_in_a_call(batch_first: bool, ways: list[bool]) -> None:
    cell = Cell()
    x, y, z = sequence(5, 2), sequence(5, 4), sequence(3)
    found = []
    for compile in ("never", "require"):
        torch.manual_seed(0)
        cell.starts.clear()
        rnn = fusedrnn.Recurrent(cell, batch_first=batch_first, compile=compile)
        calls = [x, x, y, y, x, z, x, x.clone().requires_grad_(), x]
        found.append([rnn(one)[0] for one in calls])
        rows = {2: 5, 4: 5} if batch_first else {2: 2, 4: 4}
        assert cell.starts == [1 if one.dim() == 2 else rows[one.shape[1]] for one in calls]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert sum(ways) >= 4


def test_settings_that_are_wrong_are_so_later_too(ways: list[bool]) -> None:
    x, cell = sequence(6, 2), Cell()
    for name, right, wrong in (
        ("chunk_size", 2, 2.0),
        ("chunk_size", 1, True),
        ("recompute", True, 1),
        ("workspace_bytes", 10**6, 1e6),
        ("compile_cell", "auto", "sometimes"),
        ("chunk_size", None, -1),
    ):
        rnn = fusedrnn.Recurrent(cell)
        setattr(rnn, name, right)
        for _ in range(3):
            rnn(x)
        setattr(rnn, name, wrong)
        with pytest.raises((TypeError, ValueError), match="fusedrnn: "):
            rnn(x)
        setattr(rnn, name, right)
        rnn(x)
        assert ways[-1], name


@pytest.mark.parametrize("options", [{}, {"lengths": [5, 3]}], ids=str)
def test_a_replaced_cell_goes(options: dict[str, Any]) -> None:
    rnn, x = fusedrnn.Recurrent(Cell(), compile="require"), sequence(5, 2)
    for _ in range(3):
        rnn(x)
    before = weakref.ref(rnn.cell)
    rnn.cell = Cell()
    gc.collect()
    gc.disable()
    try:
        rnn(x, **options)
        assert before() is None
    finally:
        gc.enable()


def test_inference_training_and_neither(ways: list[bool]) -> None:
    """Tensors of each kind go through what the others have prepared."""
    rnn, x = fusedrnn.Recurrent(Cell(), compile="require"), sequence(5, 2)
    h = torch.zeros(2, H, dtype=torch.float64)
    exact = fusedrnn.Recurrent(rnn.cell, compile="never")(x, h)[0].detach()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode) * 2:
        with mode():
            y, last = rnn(x, h)
        torch.testing.assert_close(y.detach(), exact)
        assert y.is_inference() == last.is_inference() == (mode is torch.inference_mode)
        assert y.requires_grad == (mode is torch.enable_grad)
        if y.requires_grad:
            y.sum().backward()
    assert sum(ways) >= 6


class Parts(Cell):
    """Inputs and states are dicts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width + H, H, dtype=torch.float64)

    def forward(self, x: dict[str, Tensor], state: dict[str, Tensor]) -> Any:  # type: ignore[override]
        h = super().forward(x["features"], state["h"])
        return h, {"h": h * x["gain"], "before": state["h"] - state["before"]}


@pytest.mark.parametrize("width", [3, H], ids=["other shapes", "one shape"])
@pytest.mark.parametrize("ordered", [False, True], ids=["dict", "OrderedDict"])
def test_dicts_of_any_order(width: int, ordered: bool, ways: list[bool]) -> None:
    """Guards of torch.compile do not ask for the order of an input's keys, nor for more keys."""
    kind: Any = OrderedDict if ordered else dict
    cell = Parts(width)
    rnn = fusedrnn.Recurrent(cell, compile="require")
    plain = fusedrnn.Recurrent(cell, compile="never")
    features = torch.randn(5, 2, width, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(5, 2, H, dtype=torch.float64, requires_grad=True)
    more = torch.rand(5, 2, 1)
    h, before = torch.randn(2, 2, H, dtype=torch.float64)
    inputs = [
        kind(features=features, gain=gain),
        kind(gain=gain, features=features),
        kind(more=more, gain=gain, features=features),
        kind(features=features, more=more, gain=gain),
    ]
    states = [{"h": h, "before": before}, {"before": before, "h": h}]

    def found(module: Any, x: Any, state: Any) -> Any:
        output, last = module(x, state)
        assert list(last) == list(state)
        loss = output.square().sum() + sum(leaf.sum() for leaf in last.values())
        weights = [features, gain, *cell.parameters()]
        return output, dict(last), torch.autograd.grad(loss, weights)

    for x, state in itertools.product(inputs * 2, states):
        torch.testing.assert_close(found(rnn, x, state), found(plain, x, state))
    with torch.no_grad():
        for x, state in itertools.product(inputs * 2, states):
            torch.testing.assert_close(rnn(x, state)[0], plain(x, state)[0])
    assert sum(ways) >= 8
    kept = {rnn.explain(x, state).step_bytes for x, state in itertools.product(inputs, states)}
    assert len(kept) == 1


class Named(nn.Module):
    """A state in a dict of some kind, always in the same order, of which one part is read."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H, dtype=torch.float64) * 0.5)
        self.kind = kind

    def forward(self, x: Tensor, state: Any) -> Any:
        h = torch.tanh(x + state["h"] @ self.weight)
        return h, self.kind(h=h, half=h * 0.5, square=h * h)


def with_default(**values: Tensor) -> Any:
    return defaultdict(list, values)


@pytest.mark.parametrize("kind", [dict, OrderedDict, with_default])
def test_a_state_whose_keys_are_in_another_order_than_the_steps(kind: Any) -> None:
    cell = Named(kind)
    found = [fusedrnn.Recurrent(cell, compile=compile) for compile in ("require", "never")]
    x = torch.randn(5, 3, H, dtype=torch.float64)
    for names in [*itertools.permutations(("h", "half", "square")), ("h", "half", "square")]:
        state, to = (
            kind(**{name: torch.randn(3, H, dtype=torch.float64) for name in names})
            for _ in range(2)
        )
        reset = {"reset": torch.rand(5, 3) < 0.4, "reset_to": to}
        for options in ({}, {}, {"lengths": [5, 1, 2]}, reset):
            (ours, last), (exact, exact_last) = (rnn(x, state, **options) for rnn in found)
            torch.testing.assert_close(ours, exact)
            assert type(last) is type(state)
            assert list(last) == list(exact_last) == list(names)
            torch.testing.assert_close(dict(last), dict(exact_last))


@pytest.mark.filterwarnings("ignore:fusedrnn. the cell was compiled for earlier calls")
@pytest.mark.parametrize("rows", [(2, 1), (1, 2), (1, 1)], ids=str)
def test_one_row_of_a_dict_of_any_order(rows: tuple[int, int]) -> None:
    """The program is that of several rows, whose graph may have come with another order."""
    orders = [["features", "gain"], ["gain", "features"], ["more", "gain", "features"]]
    for names in itertools.permutations(orders, 2):
        cell = type("Anew", (Parts,), {})(H)
        found = [fusedrnn.Recurrent(cell, compile=compile) for compile in ("auto", "never")]
        for count, order in [*zip(rows, names, strict=True)] * 2:
            x = {name: torch.rand(5, count, H, dtype=torch.float64) for name in order}
            state = {name: torch.randn(count, H, dtype=torch.float64) for name in ("h", "before")}
            (ours, last), (exact, exact_last) = (rnn(x, state) for rnn in found)
            torch.testing.assert_close(ours, exact)
            torch.testing.assert_close(last, exact_last)
            if all("more" not in one for one in names):
                assert found[0].explain(x, state).is_compiled


class PlainAndTransposed(nn.Module):
    """One matrix in both ways, in products of some of its rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * H, 2 * H, dtype=torch.float64) * 0.3)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([x, h], -1)
        a, b = both @ self.weight, F.linear(both, self.weight)
        return torch.tanh(a[:, :H] + b[:, H:] * a[:, H:] + b[:, :H])


def test_a_matrix_that_is_plain_and_transposed() -> None:
    cell, x = PlainAndTransposed(), torch.randn(5, 2, H, dtype=torch.float64)
    h = torch.zeros(2, H, dtype=torch.float64, requires_grad=True)
    found = []
    for compile in ("never", "require"):
        y, _ = fusedrnn.Recurrent(cell, compile=compile)(x, h)
        found.append([y, *torch.autograd.grad(y.square().sum(), [cell.weight, h])])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
