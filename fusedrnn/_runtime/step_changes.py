"""What the steps of a call change in Python, kept for backward, which takes them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from .python_variables import (
    VariableKey,
    Variables,
    VariableState,
    VariableStates,
    versions_of,
)

_MOST_STATISTICS = 2**20
"""Numbers of a buffer that is looked at: larger ones hold data, which is written with a version."""


class _InGraph:
    """A tensor of a graph, whose numbers alone are kept: the graph may be that of earlier calls."""

    def __init__(self, tensor: Tensor) -> None:
        self.id, self.numbers = id(tensor), tensor.detach()


class Before:
    """What variables were before a chunk of steps."""

    def __init__(self, states: VariableStates, contents: dict[int, Tensor]) -> None:
        """``contents``: numbers of buffers that steps write in place, by id."""
        self._states, self.contents = dict(map(_without_graph, states.items())), contents
        tensors = (state.value for state in states.values())
        self._needs = {id(t): t.requires_grad for t in tensors if isinstance(t, nn.Parameter)}
        """Gradients, of each parameter."""

    def states(self) -> VariableStates:
        """Of that time, for steps to read and to write: buffers are copies."""
        made: dict[int, Tensor] = {}

        def of(leaf: Any) -> Any:
            known = leaf.id if isinstance(leaf, _InGraph) else id(leaf)
            if known not in made:
                if isinstance(leaf, _InGraph):
                    numbers = self.contents.get(known, leaf.numbers)
                    made[known] = numbers.detach().requires_grad_().clone()
                elif known in self.contents:
                    made[known] = self.contents[known].clone()
                elif self._needs.get(known, leaf.requires_grad) != leaf.requires_grad:
                    made[known] = nn.Parameter(leaf.detach(), self._needs[known])
                else:
                    return leaf
            return made[known]

        def is_other(leaf: Any) -> bool:
            return isinstance(leaf, _InGraph) or (isinstance(leaf, Tensor) and of(leaf) is not leaf)

        with torch.enable_grad():
            return {
                key: state.mapped(of, (Tensor, _InGraph))
                if state.versions
                and any(map(is_other, pytree.tree_leaves((state.value, state.entries))))
                else state
                for key, state in self._states.items()
            }


def _without_graph(named: tuple[VariableKey, VariableState]) -> tuple[VariableKey, VariableState]:
    key, state = named
    if any(tensor.grad_fn is not None for tensor in state.tensors):
        state = state.mapped(lambda t: t if t.grad_fn is None else _InGraph(t), Tensor)
    return key, state._replace(tensors=())


class Changes:
    """Looks at what the steps of a call change, chunk by chunk."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables
        self._now = self._first = variables.values()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers by id, and what they were before any step has written them."""
        self._written: set[int] = set()
        self._befores: list[Before] = []
        self._copy_buffers()

    def before(self) -> Before:
        """What is so before the next chunk."""
        contents = {i: self._copies[i][0].detach().clone() for i in self._written}
        self._befores.append(Before(self._now, contents))
        return self._befores[-1]

    def note(self) -> None:
        """Sees what a chunk has changed.

        Raises:
            RuntimeError: It has written a tensor in place that is no buffer.
        """
        for key, state in self._now.items():
            if not state.versions or self._variables.are_parameters(key):
                continue
            now = versions_of(state.tensors)
            if now == state.versions:
                continue
            for tensor, new, old in zip(state.tensors, now, state.versions, strict=True):
                if new != old and id(tensor) not in self._copies:
                    raise RuntimeError(
                        f"fusedrnn: the step changes the tensor in {self._variables.name(key)} in "
                        "place, so backward cannot recompute the step from its old values; make "
                        "it a buffer, or assign a new tensor"
                    )
                if new != old:
                    self._written.add(id(tensor))
        self._written |= self._written_without_version()
        self._now = self._variables.values()
        self._copy_buffers()

    def end(self) -> None:
        """All steps have been taken: what was written late was before as at first."""
        for before in self._befores:
            for i in self._written:
                before.contents.setdefault(i, self._copies[i][1])

    def undo(self) -> None:
        """Gives all variables and buffers what they had at first."""
        self._variables.put_back(self._first)
        for i in self._written | self._written_without_version():
            buffer, copy = self._copies[i]
            with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                buffer.copy_(copy)

    def _written_without_version(self) -> set[int]:
        """As batch norm writes its statistics."""
        copies = self._copies.items()
        return {i for i, both in copies if i not in self._written and _differ(*both)}

    def _copy_buffers(self) -> None:
        for i, buffer in self._variables.buffers(self._now).items():
            if i not in self._copies:
                self._copies[i] = buffer, buffer.detach().clone()


@contextmanager
def aside(variables: Variables) -> Iterator[None]:
    """Within, steps are tried: what they change is afterwards as it was."""
    changes = Changes(variables)
    try:
        yield
    finally:
        changes.undo()


def _differ(a: Tensor, b: Tensor) -> bool:
    try:
        return a.numel() <= _MOST_STATISTICS and not torch.equal(a, b)
    except (RuntimeError, TypeError, AttributeError):  # sparse ones and the like are not compared
        return False
