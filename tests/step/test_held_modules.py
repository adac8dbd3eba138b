"""Modules and variables around a step: each of them is written once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recurrent.loops import F64, By, check_same, double, scan_loop
from torch import Tensor, nn

import fusedrnn
from fusedrnn._step.held_modules import held_modules

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 5, 3, 4


def taken(norm: nn.Module, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(norm(h) + x)
    return h, h


class Plain:
    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return taken(self.norm, h, x)

    __call__ = step


class Nested:
    """Its module is in a list of an object of its own."""

    def __init__(self, norm: nn.Module) -> None:
        self.layers = [Plain(norm)]

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[0].step(h, x)


@dataclasses.dataclass(slots=True)
class Slots:
    norm: nn.Module


class Hidden(nn.Module):
    """torch does not find its modules."""

    def __init__(self, norm: nn.Module, holder: Any) -> None:
        super().__init__()
        self.holder = holder(norm)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.holder.norm if isinstance(self.holder, Plain) else self.holder[0]
        return taken(norm, h, x)


def of_default(norm: nn.Module) -> Any:
    def step(h: Tensor, x: Tensor, *, held: Any = SimpleNamespace(norm=norm)) -> Any:  # noqa: B008
        return taken(held.norm, h, x)

    return step


def around(step: Any) -> Any:
    return lambda h, x: step(h, x)


def by(held: Any, found: Callable[[Any], nn.Module]) -> Any:
    """A step that finds its module in ``held``, which is around it."""
    return lambda h, x: taken(found(held), h, x)


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "closure": lambda norm: by(norm, lambda held: held),
    "partial closure": lambda norm: partial(by(norm, lambda held: held)),
    "method": lambda norm: Plain(norm).step,
    "instance": Plain,
    "nested": lambda norm: Nested(norm).step,
    "partial": lambda norm: partial(taken, norm),
    "list in a module": lambda norm: Hidden(norm, lambda norm: [norm]),
    "object in a module": lambda norm: Hidden(norm, Plain),
    # Many containers one after the other, of which each must be looked at.
    "dicts": lambda norm: by([{"a": {}}, {"b": {}}, {"c": norm}], lambda held: held[2]["c"]),
    "namespace": lambda norm: by(SimpleNamespace(norm=norm), lambda held: held.norm),
    "slots": lambda norm: by(Slots(norm), lambda held: held.norm),
    "method in a closure": lambda norm: around(Plain(norm).step),
    "default": of_default,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_statistics_of_batch_norm(hold: Any) -> None:
    """Backward takes the steps again, and must leave no trace."""
    norms = [nn.BatchNorm1d(H, dtype=F64) for _ in range(2)]
    x, start = double(T, B, H), torch.randn(B, H, dtype=F64)
    check_same(
        lambda: fusedrnn.scan(hold(norms[0]), start, x),
        lambda: scan_loop(hold(norms[1]), start, x),
        [x, *norms[0].parameters()],
        their_leaves=[x, *norms[1].parameters()],
    )
    torch.testing.assert_close(norms[0].state_dict(), norms[1].state_dict(), rtol=0, atol=0)
    assert norms[0].num_batches_tracked == T


def test_recurrent_finds_them_too() -> None:
    norm = nn.BatchNorm1d(H)
    cell = By(lambda c, x, h: torch.tanh(c.holder.norm(h) + x), holder=Plain(norm))
    fusedrnn.Recurrent(cell)(torch.randn(T, B, H), torch.zeros(B, H))[0].sum().backward()
    assert norm.num_batches_tracked == T


def test_the_search_ends() -> None:
    """Objects that hold each other, long lists, and what is too deep to belong to a step."""
    norm = nn.BatchNorm1d(H)
    ring, deep = SimpleNamespace(), SimpleNamespace(norm=norm)
    ring.ring, ring.all = ring, [ring]
    for _ in range(5):
        deep = SimpleNamespace(deep=deep)
    data: list[Any] = [0.0] * 10**6
    assert held_modules(lambda h, x: (ring, deep, data)).modules == []
    ring.norm = norm
    assert held_modules(lambda h, x: (ring, deep, data)).modules == [norm]


# Variables around a function


def test_variables_around_a_function() -> None:
    """A count, a list, and a tensor that is set anew, in a closure and in what it calls."""
    x, h = double(T, B, H), double(B, H)

    def results(run: Callable[..., Any]) -> list[Any]:
        count, seen, mean = 0, [], torch.zeros(H, dtype=F64)

        def factor() -> float:
            seen.append(count)
            return 1 + 0.1 * len(seen)

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal count, mean
            count += 1
            mean = 0.9 * mean + 0.1 * h.detach().mean(0)
            h = torch.tanh((h.detach() if count % 4 == 0 else h) * factor() + mean + x)
            return h, h * count

        state, ys = run(step, h, x)
        gradients = torch.autograd.grad(state.sum() + ys.square().sum(), [x, h])
        return [state, ys, *gradients, count, seen, mean]

    torch.testing.assert_close(results(fusedrnn.scan), results(scan_loop))


def test_a_loss_in_a_list_around_a_function() -> None:
    x, h = double(T, B, H), double(B, H)

    def gradients(run: Callable[..., Any]) -> Any:
        losses = []

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h + x)
            losses.append(h.square().mean())
            return h, h

        _, ys = run(step, h, x)
        assert len(losses) == T
        return torch.autograd.grad(ys.sum() + sum(losses), [x, h])

    torch.testing.assert_close(gradients(fusedrnn.scan), gradients(scan_loop))
