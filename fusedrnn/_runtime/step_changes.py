"""What the steps of a call change in Python, kept for backward, which takes them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.weak import TensorWeakRef

from .._step.generators import is_capturing
from .._step.unusual_tensors import PLAIN
from .python_variables import MOST_NUMBERS, Variables, VariableState, VariableStates, versions_of


class _InGraph:
    """A tensor of a graph, whose numbers alone are kept: the graph may be that of earlier calls."""

    def __init__(self, tensor: Tensor) -> None:
        self.id, self._numbers, self._version = id(tensor), tensor.detach(), versions_of([tensor])

    def tensor(self) -> Tensor:
        """Of a graph that ends here."""
        if versions_of([self._numbers]) != self._version:
            raise RuntimeError(
                f"fusedrnn: a tensor of shape {tuple(self._numbers.shape)} that the step reads has "
                "been changed in place between forward and backward"
            )
        return self._numbers.detach().requires_grad_().clone()


class _Weight:
    """A weight, which autograd keeps: hooks of saved tensors may have it elsewhere meanwhile."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.id, self.number, self.needs = id(tensor), number, tensor.requires_grad
        self._ref, self._is_parameter = TensorWeakRef(tensor), isinstance(tensor, nn.Parameter)

    def tensor(self, kept: Tensor) -> tuple[Tensor, bool]:
        """It, and whether it is another one than in forward, which is gone or has changed."""
        first = self._ref()
        if first is not None and first.requires_grad == self.needs and has_memory_of(first, kept):
            return first, False
        make = nn.Parameter if self._is_parameter else Tensor.requires_grad_
        return make(kept.detach(), self.needs), True


_Placeholder = (_InGraph, _Weight)


class Before:
    """What variables were before a chunk of steps."""

    def __init__(
        self, states: VariableStates, contents: dict[int, Tensor], copies: dict[int, _Copy]
    ) -> None:
        """
        Args:
            states: With placeholders for what is not kept here.
            contents: Numbers of tensors that steps write in place, by id.
            copies: Of what might be written meanwhile, by id.
        """
        self.states_then, self.contents, self._copies = states, contents, copies

    def states(self, weights: Sequence[Tensor]) -> VariableStates:
        """Of that time, for steps to read and to write: buffers are copies.

        Args:
            weights: As autograd has kept them.
        """
        made: dict[int, tuple[Tensor, bool]] = {}

        def look(leaf: Any) -> tuple[Tensor, bool]:
            known = leaf.id if isinstance(leaf, _Placeholder) else id(leaf)
            if known not in made:
                if known in self.contents:
                    made[known] = self.contents[known].clone(), True
                elif isinstance(leaf, _InGraph):
                    made[known] = leaf.tensor(), True
                elif isinstance(leaf, _Weight):
                    made[known] = leaf.tensor(weights[leaf.number])
                elif known in self._copies and self._copies[known].differs():
                    made[known] = self._copies[known].numbers.clone(), True
                else:
                    return leaf, False
            return made[known]

        def of(state: VariableState) -> VariableState:
            found = [look(leaf) for leaf in state.tensors]
            if all(tensor is leaf for (tensor, _), leaf in zip(found, state.tensors, strict=True)):
                return state
            then = state.mapped(lambda leaf: look(leaf)[0], (Tensor, *_Placeholder))
            return then.apart() if any(is_other for _, is_other in found) else then

        with torch.enable_grad():
            return {
                key: of(state) if state.tensors else state
                for key, state in self.states_then.items()
            }


class _Copy:
    """Of a tensor before any step has written it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.numbers = tensor, tensor.detach().clone()
        self._version = versions_of([tensor])

    def differs(self) -> bool:
        """Whether it has been written since; batch norm does so without a version."""
        if versions_of([self.tensor]) != self._version:
            return True
        if is_capturing(self.tensor.device):
            return False
        try:
            is_small = self.tensor.numel() <= MOST_NUMBERS
            return is_small and not torch.equal(self.tensor, self.numbers)
        except (RuntimeError, TypeError, AttributeError):  # as of sparse ones
            return False


def has_memory_of(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same memory."""
    return a is b or (
        type(b) in PLAIN
        and (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        and a.layout == torch.strided
        and (a.stride(), a.data_ptr()) == (b.stride(), b.data_ptr())
    )


class Changes:
    """Looks at what the steps of a call change, chunk by chunk."""

    def __init__(self, variables: Variables, weights: Sequence[Tensor] = ()) -> None:
        """``weights``: what autograd keeps of each chunk."""
        self._variables = variables
        self._weights = {id(tensor): _Weight(tensor, i) for i, tensor in enumerate(weights)}
        self._now = self._first = variables.values()
        self._kept = self._with_placeholders(self._now)
        self._copies: dict[int, _Copy] = {}
        """By id: of buffers, and other small tensors."""
        self._written: set[int] = set()
        self._befores: list[Before] = []
        self._copy(all_small=True)

    def before(self) -> Before:
        """What is so before the next chunk."""
        contents = {i: self._copies[i].tensor.detach().clone() for i in self._written}
        self._befores.append(Before(self._kept, contents, self._copies))
        return self._befores[-1]

    def note(self) -> None:
        """Sees what a chunk has changed.

        Raises:
            RuntimeError: It has written a tensor in place of which there is no copy.
        """
        for key, state in self._now.items():
            if not state.versions or (now := versions_of(state.tensors)) == state.versions:
                continue
            for tensor, new, old in zip(state.tensors, now, state.versions, strict=True):
                if new != old and id(tensor) not in self._copies:
                    raise RuntimeError(
                        f"fusedrnn: the step changes the tensor in {self._variables.name(key)} in "
                        "place, so backward cannot recompute the step from its old values; make "
                        "it a buffer, assign a new tensor, or pass recompute=False"
                    )
                if new != old:
                    self._written.add(id(tensor))
        self._written |= self._found_written()
        states = self._variables.values(self._now)
        changed = self._variables.other(states, self._now)
        self._variables.are_changing |= bool(changed or self._written)
        if changed:
            found = self._variables.grow(states, changed)  # as far as is known they were so before
            self._now, kept = {**states, **found}, self._with_placeholders(found)
            for earlier in (self._first, *(before.states_then for before in self._befores)):
                earlier.update(found if earlier is self._first else kept)
            self._kept = self._with_placeholders(self._now)
            self._copy()

    def undo(self) -> None:
        """Gives all variables and buffers what they had at first."""
        self._variables.put_back(self._first)
        for i in self._written | self._found_written():
            copy = self._copies[i]
            with torch.no_grad(), _unsafe_preserve_version_counter(copy.tensor):
                copy.tensor.copy_(copy.numbers)

    def _with_placeholders(self, states: VariableStates) -> VariableStates:
        def of(tensor: Tensor) -> Any:
            if id(tensor) in self._weights:
                return self._weights[id(tensor)]
            return tensor if tensor.grad_fn is None else _InGraph(tensor)

        return {
            key: state.mapped(of, Tensor) if state.tensors else state
            for key, state in states.items()
        }

    def _found_written(self) -> set[int]:
        return {i for i, one in self._copies.items() if i not in self._written and one.differs()}

    def _copy(self, all_small: bool = False) -> None:
        for i, tensor in self._variables.copied(self._now, all_small).items():
            if i not in self._copies:
                self._copies[i] = _Copy(tensor)


@contextmanager
def aside(variables: Variables) -> Iterator[None]:
    """Within, steps are tried: what they change is afterwards as it was."""
    changes = Changes(variables)
    try:
        yield
    finally:
        changes.undo()
