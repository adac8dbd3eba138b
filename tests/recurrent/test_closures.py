"""Modules that a step holds in some way: each of their buffers is written once per step."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import loss_of
from torch import Tensor, nn

import fusedrnn
from fusedrnn.recurrent.closures import held_by

T, B, H = 5, 3, 4
F64 = torch.float64


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


def of_two_dicts(norm: nn.Module) -> Any:
    """Many containers one after the other, of which each must be looked at."""
    dicts = [{"a": {}}, {"b": {}}, {"c": {"norm": norm}}]
    return lambda h, x: taken(dicts[2]["c"]["norm"], h, x)


def of_namespace(norm: nn.Module) -> Any:
    space = SimpleNamespace(norm=norm)
    return lambda h, x: taken(space.norm, h, x)


def of_slots(norm: nn.Module) -> Any:
    held = Slots(norm)
    return lambda h, x: taken(held.norm, h, x)


def of_method(norm: nn.Module) -> Any:
    inner = Plain(norm).step
    return lambda h, x: inner(h, x)


def of_default(norm: nn.Module) -> Any:
    def step(h: Tensor, x: Tensor, *, held: Any = SimpleNamespace(norm=norm)) -> Any:  # noqa: B008
        return taken(held.norm, h, x)

    return step


HOLDERS = {
    "method": lambda norm: Plain(norm).step,
    "instance": Plain,
    "nested": lambda norm: Nested(norm).step,
    "partial": lambda norm: partial(taken, norm),
    "list in a module": lambda norm: Hidden(norm, lambda norm: [norm]),
    "object in a module": lambda norm: Hidden(norm, Plain),
    "dicts": of_two_dicts,
    "namespace": of_namespace,
    "slots": of_slots,
    "method in a closure": of_method,
    "default": of_default,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_statistics_of_batch_norm(hold: Any) -> None:
    """Backward takes the steps again, and must leave no trace."""
    norms = [nn.BatchNorm1d(H, dtype=F64) for _ in range(2)]
    x = torch.randn(T, B, H, dtype=F64, requires_grad=True)
    start = torch.randn(B, H, dtype=F64)
    results = []
    for norm, run in zip(norms, (fusedrnn.scan, loop), strict=True):
        output = run(hold(norm), start, x)[1]
        results.append(torch.autograd.grad(loss_of(output), [x, *norm.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norms[0].state_dict(), norms[1].state_dict(), rtol=0, atol=0)
    assert norms[0].num_batches_tracked == T


def loop(step: Any, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for x in inputs:
        state, y = step(state, x)
        outputs.append(y)
    return state, torch.stack(outputs)


def test_recurrent_finds_them_too() -> None:
    class Cell(Hidden):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(h, x)[0]

    norm = nn.BatchNorm1d(H)
    x, start = torch.randn(T, B, H), torch.zeros(B, H)
    fusedrnn.Recurrent(Cell(norm, Plain))(x, start)[0].sum().backward()
    assert norm.num_batches_tracked == T


def test_the_search_ends() -> None:
    """Objects that hold each other, long lists, and what is too deep to belong to a step."""
    norm = nn.BatchNorm1d(H)
    ring, deep = SimpleNamespace(), SimpleNamespace(norm=norm)
    ring.ring, ring.all = ring, [ring]
    for _ in range(5):
        deep = SimpleNamespace(deep=deep)
    data: list[Any] = [0.0] * 10**6
    assert held_by(lambda h, x: (ring, deep, data)).modules == []
    ring.norm = norm
    assert held_by(lambda h, x: (ring, deep, data)).modules == [norm]
