"""Recorders for the CPU, in place of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedrnn._recurrent import layer_call
from fusedrnn._runtime import cuda_graphs

T = TypeVar("T")


class Repeated(TorchDispatchMode):
    """As a CUDA graph: values are there after a replay only, and only in the same places."""

    count = 0
    """Of what was recorded since a test began."""
    replays = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._work: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        type(self).count += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        fresh = [
            (i, leaf.detach())
            for i, leaf in enumerate(pytree.tree_leaves(made))
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given
        ]
        self._work.append((function, args, kwargs or {}, fresh))
        return made

    def record(self, function: Callable[[], T]) -> T:
        with self:
            made = function()
        for *_, fresh in self._work:
            for _, leaf in fresh:
                leaf.fill_(torch.nan if leaf.is_floating_point() else 1)
        return made

    @torch.no_grad()
    def replay(self) -> None:
        type(self).replays += 1
        for function, args, kwargs, fresh in self._work:
            made = pytree.tree_leaves(function(*args, **kwargs))
            for i, leaf in fresh:
                leaf.copy_(made[i])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class CalledAgain:
    """Takes all again from Python, for the compiler does nothing below a TorchDispatchMode."""

    count = 0

    def __init__(self, device: torch.device) -> None:
        type(self).count += 1

    def record(self, function: Callable[[], T]) -> T:
        self._function, self._made = function, function()
        return self._made

    @torch.no_grad()
    def replay(self) -> None:
        for old, new in zip(_tensors(self._made), _tensors(self._function()), strict=True):
            old.copy_(new)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Repeated]:
    """Records what a CUDA graph would, on the CPU; counts from 0."""
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", Repeated)
    Repeated.count = Repeated.replays = 0
    layer_call.have_run.clear()
    return Repeated
