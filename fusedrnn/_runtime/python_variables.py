"""What a step may change besides what it returns: attributes, weights and buffers of its modules,
and variables around a function.

A step that counts, or that keeps a list, changes what it reads the next time. Backward takes steps
again, so it must find everything as it was, and leave everything as it found it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from .._step.held_modules import Held, held_modules, is_array
from .variable_places import (
    CONTAINERS,
    MISSING,
    VALUES,
    Namespace,
    around,
    of_class,
    of_module,
    of_object,
)

_MOST_ENTRIES = 1000
"""Of a container that is looked into: of longer ones the length and the ends are."""
MOST_NUMBERS = 2**20
"""Of a tensor that is no buffer, or an array of NumPy, that is copied: larger ones hold data."""
_LEAVES = (*VALUES, Tensor)
_WITHOUT_VARIABLES = (torch.jit.ScriptModule, LazyModuleMixin)


T = TypeVar("T")


class VariableState(NamedTuple):
    """Of a variable at some time."""

    value: Any
    entries: Any
    """A copy of a container, one level deep."""
    tensors: tuple[Tensor, ...] = ()
    """That it held then."""
    versions: tuple[int, ...] = ()
    """Of its tensors."""

    ends: tuple[int, int, int] | None = None
    """Of a long container: its length, and which ones its first and last entries are."""

    @classmethod
    def of(cls, value: Any, last: VariableState | None = None) -> VariableState:
        """``last``: what it was, which is kept of a long container."""
        if isinstance(value, (*VALUES, nn.Module)):
            return cls(value, None)
        if isinstance(value, Tensor):
            return cls(value, None, (value,), versions_of((value,)))
        if is_array(value):
            return cls(value, value.copy() if value.size <= MOST_NUMBERS else None)
        is_container, ends = isinstance(value, CONTAINERS), None
        if is_container and len(value) > _MOST_ENTRIES:
            last_entry = None if isinstance(value, set) else next(reversed(value))
            ends = len(value), id(next(iter(value))), id(last_entry)
            if last is not None and value is last.value and ends == last.ends:
                return last
        entries = _copy_of(value) if is_container else None
        held = value if isinstance(value, tuple) else entries
        tensors = tuple(_tensors_in(held)) if held and ends is None else ()
        return cls(value, entries, tensors, versions_of(tensors), ends)

    def may_have_changed(self) -> bool:
        """Whether the value, the same object, is to be looked at again."""
        if self.entries is not None:
            return True
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if not tensor.is_inference() and tensor._version != version:
                return True
        return False

    def is_same(self, other: VariableState) -> bool:
        if self is other:
            return True
        if not _are_same(self.value, other.value) or self.versions != other.versions:
            return False
        ours, theirs = self.entries, other.entries
        if ours is None or theirs is None:
            return ours is theirs
        if self.ends is not None or other.ends is not None:
            return self.ends == other.ends
        if is_array(ours):
            return ours.tobytes() == theirs.tobytes()
        if len(ours) != len(theirs):
            return False
        if isinstance(ours, set):
            return bool(ours == theirs)
        if isinstance(ours, dict):
            is_same = all(map(_are_same, ours.values(), theirs.values()))
            return is_same and [*ours] == [*theirs]  # in this order
        return all(map(_are_same, ours, theirs))

    def put_back(self) -> Any:
        """The value, a container with the entries that it had."""
        value, entries = self.value, self.entries
        if entries is not None and not self.is_same(VariableState.of(value, self)):
            _fill(value, entries)
        return value

    def mapped(self, function: Callable[[Any], Any], kinds: Any) -> VariableState:
        """Of other leaves in the place of these kinds; a container stays what it is."""

        def of(tree: Any) -> Any:
            if isinstance(tree, kinds):
                return function(tree)
            return pytree.tree_map_only(kinds, function, tree)

        entries, tensors = self.entries, tuple(map(function, self.tensors))
        if entries is None:
            return self._replace(value=of(self.value), tensors=tensors)
        if isinstance(entries, dict):
            made: Any = {key: of(entry) for key, entry in entries.items()}
        else:
            made = type(entries)(map(of, entries))
        return self._replace(entries=made, tensors=tensors)

    def apart(self) -> VariableState:
        """The same in another container, if it is one."""
        if self.entries is None:
            return self
        value = copy.copy(self.value)
        _fill(value, self.entries)
        return self._replace(value=value)


def _kind_of(container: Any) -> Any:
    """Whose methods are called, not those of a subclass, which may forbid it."""
    return next(kind for kind in CONTAINERS if isinstance(container, kind))


def _copy_of(container: Any) -> Any:
    kind = _kind_of(container)
    if issubclass(kind, dict):
        return dict(kind.items(container))
    return set(container) if kind is set else list(kind.__iter__(container))


def _fill(container: Any, entries: Any) -> None:
    if is_array(container):
        if container.shape != entries.shape:
            container.resize(entries.shape, refcheck=False)
        container[...] = entries
        return
    kind = _kind_of(container)
    kind.clear(container)
    (kind.extend if hasattr(kind, "extend") else kind.update)(container, entries)


def _tensors_in(held: Any) -> list[Tensor]:
    """Of containers in containers; none of such that contain themselves."""
    try:
        return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]
    except RecursionError:
        return []


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """What rises when a tensor is written."""
    with torch._C.DisableTorchFunction():  # which is quick, whatever modes are around
        return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def _are_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, VALUES):
        return False
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)  # -0.0 is not 0.0


VariableKey = tuple[int, str]
"""Number of a namespace, and the name of a variable in it."""
VariableStates = dict[VariableKey, VariableState]


class Variables:
    """All variables that a step may change."""

    def __init__(self, modules: Sequence[nn.Module], held: Held) -> None:
        """Of modules and objects, around functions, and in containers."""
        self.are_changing = False
        """Whether steps have changed one, so that backward exchanges them."""
        self._spaces: list[Namespace] = []
        self._known: dict[int, Any] = {}
        self._add(modules, held)
        if any(map(parametrize.is_parametrized, modules)):
            cache = ("_cache", "_cache_enabled")  # of parametrize.cached()
            self._spaces.append(Namespace("torch's {}", vars(parametrize), cache))

    def _add(self, modules: Iterable[nn.Module], held: Held) -> None:
        modules, objects = self._new(modules), self._new(held.objects)
        spaces = [
            space
            for module in modules
            if not isinstance(module, _WITHOUT_VARIABLES)
            and not str(type(module).__module__).startswith(("fusedrnn.", "torch._dynamo"))
            for space in of_module(module)
        ]
        spaces += [space for one in objects for space in of_object(one)]
        spaces += map(of_class, self._new(held.classes))
        spaces += around(self._new(held.functions))
        self._spaces += [space for space in spaces if space.only is None or space.items()]
        direct = {id(value) for space in self._spaces for _, value in space.items()}
        # Which may be known as objects with attributes, too.
        if inner := [one for one in held.containers if id(one) not in direct]:
            self._known.update((id(one), one) for one in inner)
            self._spaces.append(
                Namespace("a container that the step holds", dict(enumerate(inner)))
            )

    def _new(self, found: Iterable[T]) -> list[T]:
        """Those that are not known yet, and now are."""
        new = [one for one in found if id(one) not in self._known]
        self._known.update((id(one), one) for one in new)
        return new

    def grow(self, states: VariableStates, keys: Iterable[VariableKey]) -> VariableStates:
        """Looks for more variables in what some variables hold; what those are now."""
        count = len(self._spaces)
        for value in [states[key].value for key in keys if key in states]:
            held_by = value if isinstance(value, CONTAINERS) else [value]
            inner = held_by.values() if isinstance(held_by, dict) else held_by
            if not all(isinstance(one, _LEAVES) for one in inner):
                held = held_modules(value)
                self._add([m for module in held.modules for m in module.modules()], held)
        return self.values(first=count)

    def values(self, last: VariableStates | None = None, first: int = 0) -> VariableStates:
        """What variables are now.

        Args:
            last: What they were.
            first: The first namespace that counts.
        """
        states: VariableStates = {}
        with torch._C.DisableTorchFunction():  # asking is quick, whatever modes are around
            for i, space in enumerate(self._spaces[first:], first):
                for name, value in space.items():
                    key = i, name
                    state = last.get(key) if last else None
                    if state is None or state.value is not value or state.may_have_changed():
                        state = VariableState.of(value, state)
                    states[key] = state
        return states

    def name(self, key: VariableKey) -> str:
        """How errors call a variable."""
        return self._spaces[key[0]].name.format(key[1])

    def copied(self, states: VariableStates, all_small: bool) -> dict[int, Tensor]:
        """Tensors that steps may write in place, by id: buffers of modules.

        Args:
            all_small: Other small ones without gradient, too.
        """
        found = {}
        for key, state in states.items():
            tensor, holds = state.value, self._spaces[key[0]].holds
            if isinstance(tensor, Tensor) and holds != "parameters":
                is_small = all_small and not tensor.requires_grad and tensor.numel() <= MOST_NUMBERS
                if holds == "buffers" or is_small:
                    found[id(tensor)] = tensor
        return found

    @contextmanager
    def exchanged(self, then: VariableStates) -> Iterator[None]:
        """Within, variables have the states of another time, and afterwards those of now.

        One thread does so at a time: another one would take these states for those of now.
        """
        with _EXCHANGING if self.are_changing else nullcontext():
            yield from self._exchanged(then)

    def _exchanged(self, then: VariableStates) -> Iterator[None]:
        now = self.values(then)
        wanted = [(key, then.get(key, _NOTHING)) for key in self.other(now, then)]
        # Containers that are in no variable any more get back what they have now.
        others = [
            VariableState.of(state.value, state) for _, state in wanted if state.entries is not None
        ]
        try:
            for key, state in wanted:
                self._spaces[key[0]].write(key[1], state.put_back())
            yield
        finally:
            for state in others:
                state.put_back()
            self.put_back(now)

    def put_back(self, then: VariableStates) -> None:
        """Gives variables the states of an earlier time."""
        for key in self.other(self.values(then), then):
            self._spaces[key[0]].write(key[1], then.get(key, _NOTHING).put_back())

    def other(self, now: VariableStates, then: VariableStates) -> list[VariableKey]:
        """Variables with another state."""
        keys = now if now.keys() == then.keys() else {**then, **now}
        return [key for key in keys if not now.get(key, _NOTHING).is_same(then.get(key, _NOTHING))]


_NOTHING = VariableState.of(MISSING)
_EXCHANGING = threading.RLock()
