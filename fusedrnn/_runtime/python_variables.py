"""What a step changes in Python: attributes of its modules, and variables around a function.

A step that counts, or that keeps a list, changes what it reads the next time. Backward takes steps
again, so it must put everything back to what it was, as it does with buffers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

from .._step.held_modules import Held, names_in
from .._step.replicas import names_of_torch

_MOST_ENTRIES = 1000
"""Of a container that is looked into: larger ones hold data, and a look would take too long."""
_MISSING = object()
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, deque, OrderedDict, dict, set)
_WITHOUT_VARIABLES = (torch.jit.ScriptModule, LazyModuleMixin)


class Namespace(NamedTuple):
    """Where variables are: a module, the variables around a function, or those of its module."""

    name: str
    """How errors call a variable of it, with a place for the variable's name."""
    variables: dict[Any, Any]
    """Variables by name, or the cells that hold them."""
    only: tuple[str, ...] | None = None
    """The names that count; None for all that a user may have given."""
    without: frozenset[str] = frozenset()
    """Others that do not count."""

    def names(self) -> Iterable[str]:
        if self.only is not None:
            return [name for name in self.only if name in self.variables]
        without = self.without
        return [
            name
            for name in self.variables
            if name not in without and not str(name).startswith("_fusedrnn_")
        ]

    def read(self, name: str) -> Any:
        value = self.variables.get(name, _MISSING)
        if isinstance(value, CellType):
            try:
                return value.cell_contents
            except ValueError:  # not yet assigned
                return _MISSING
        return value

    def write(self, name: str, value: Any) -> None:
        old = self.variables.get(name)
        if isinstance(old, CellType):
            if value is _MISSING:
                del old.cell_contents
            else:
                old.cell_contents = value
        elif value is _MISSING:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value


def _around(functions: Iterable[FunctionType]) -> list[Namespace]:
    """The variables around functions, and those of their Python modules that they name."""
    found = []
    for function in functions:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        names = tuple(sorted(names_in(function.__code__)))  # the same order in each process
        found.append(Namespace("the variable {!r}", cells, tuple(cells)))
        found.append(Namespace("the variable {!r}", function.__globals__, names))
    return found


class VariableState(NamedTuple):
    """Of a variable at some time."""

    value: Any
    entries: Any
    """A copy of a container, one level deep."""
    versions: tuple[int, ...]
    """Of its tensors."""

    @classmethod
    def of(cls, value: Any) -> VariableState:
        entries = None
        if isinstance(value, _CONTAINERS) and len(value) <= _MOST_ENTRIES:
            entries = value.copy()
        made = cls(value, entries, ())
        tensors = made.tensors()
        return made._replace(versions=versions_of(tensors)) if tensors else made

    def is_same(self, other: VariableState) -> bool:
        if not _are_same(self.value, other.value) or self.versions != other.versions:
            return False
        ours, theirs = self.entries, other.entries
        if ours is None or theirs is None:
            return ours is theirs
        if len(ours) != len(theirs):
            return False
        if isinstance(ours, set):
            return bool(ours == theirs)
        if isinstance(ours, dict):
            return all(k in theirs and _are_same(v, theirs[k]) for k, v in ours.items())
        return all(map(_are_same, ours, theirs))

    def put_back(self) -> Any:
        """The value, a container with the entries that it had."""
        value, entries = self.value, self.entries
        if entries is not None and not self.is_same(VariableState.of(value)):
            # Not the methods of a subclass, which may forbid it.
            kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
            kind.clear(value)
            (kind.extend if hasattr(kind, "extend") else kind.update)(value, entries)
        return value

    def mapped(self, function: Callable[[Any], Any]) -> VariableState:
        """The same with other leaves, of a container in its entries alone."""
        entries = self.entries
        if entries is None:
            return self._replace(value=pytree.tree_map(function, self.value))
        if isinstance(entries, dict):
            made: Any = {key: pytree.tree_map(function, of) for key, of in entries.items()}
        else:
            made = type(entries)(pytree.tree_map(function, of) for of in entries)
        return self._replace(entries=made)

    def tensors(self) -> list[Tensor]:
        if isinstance(self.value, Tensor):
            return [self.value]
        held = self.value if isinstance(self.value, tuple) else self.entries
        return _tensors_in(held) if held else []


def _tensors_in(held: Any) -> list[Tensor]:
    """Of containers in containers, which may contain themselves."""
    try:
        return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]
    except RecursionError:
        found, seen, waiting = list[Tensor](), set[int](), [held]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, Tensor):
                found.append(one)
            elif isinstance(one, (*_CONTAINERS, tuple)):
                waiting += one.values() if isinstance(one, dict) else one
        return found


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """What rises when a tensor is written."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _are_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _VALUES) and a == b)


VariableKey = tuple[int, str]
"""Number of a namespace, and the name of a variable in it."""
VariableStates = dict[VariableKey, VariableState]


class Variables:
    """All variables that a step may change."""

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self._namespaces = namespaces

    @classmethod
    def of(cls, modules: Iterable[nn.Module], held: Held) -> Variables:
        """Attributes of modules and objects, variables around functions, and containers."""
        found = [
            Namespace(
                f"the attribute {{!r}} of {type(module).__name__}",
                vars(module),
                None,
                names_of_torch(module),
            )
            for module in modules
            if not isinstance(module, _WITHOUT_VARIABLES)
            and not str(type(module).__module__).startswith(("fusedrnn.", "torch._dynamo"))
        ]
        found += [
            Namespace(f"the attribute {{!r}} of a {type(one).__name__}", vars(one))
            for one in held.objects
        ]
        found += _around(held.functions)
        known = {id(space.read(name)) for space in found for name in space.names()}
        inner = [one for one in held.containers if id(one) not in known]
        found.append(Namespace("a container that the step holds", dict(enumerate(inner))))
        return cls(found)

    def values(self, keys: Iterable[VariableKey] | None = None) -> VariableStates:
        """What variables are now. ``keys``: these alone."""
        if keys is None:
            keys = ((i, name) for i, space in enumerate(self._namespaces) for name in space.names())
        return {key: VariableState.of(self._namespaces[key[0]].read(key[1])) for key in keys}

    def changed(self, before: VariableStates) -> list[VariableKey]:
        """The variables that have been set, deleted or written into since."""
        now = self.values()
        missing = VariableState.of(_MISSING)
        return [
            key
            for key in {**before, **now}
            if not now.get(key, missing).is_same(before.get(key, missing))
        ]

    def put_back(self, before: VariableStates, keys: Iterable[VariableKey]) -> None:
        """Gives these variables the values of an earlier time."""
        missing = VariableState.of(_MISSING)
        for key in keys:
            number, name = key
            self._namespaces[number].write(name, before.get(key, missing).put_back())

    def with_leaves(
        self, before: VariableStates, keys: Iterable[VariableKey], known: Collection[int]
    ) -> tuple[VariableStates, dict[int, tuple[Tensor, str]]]:
        """The same values, in which tensors of some variables are leaves of a graph of their own.

        Args:
            known: Ids of tensors that stay.

        Returns:
            The values; and the leaves by id, with the names of their variables.
        """
        found, leaves = dict(before), dict[int, tuple[Tensor, str]]()
        for key in keys:
            if key not in before:
                continue
            name = self.name(key)

            def leaf_of(value: Any) -> Any:
                if not isinstance(value, Tensor) or id(value) in known:
                    return value
                if not value.is_floating_point():
                    return value
                leaf = value.detach().requires_grad_()
                leaves[id(leaf)] = (leaf, name)  # noqa: B023
                return leaf

            found[key] = before[key].mapped(leaf_of)
        return found, leaves

    def name(self, key: VariableKey) -> str:
        """How errors call a variable."""
        return self._namespaces[key[0]].name.format(key[1])

    def written(self, before: VariableStates) -> str | None:
        """The name of a tensor that has been written in place since, which nobody can put back."""
        for key, old in before.items():
            if old.versions and versions_of(old.tensors()) != old.versions:
                return self.name(key)
        return None

    def with_tensors(
        self, before: VariableStates, keys: Iterable[VariableKey], needs_gradient: bool
    ) -> list[VariableKey]:
        """Those of these variables that have got a tensor since, or one with gradient."""
        now = self.values(keys)
        return [
            key
            for key, value in now.items()
            if any(
                t.requires_grad or not needs_gradient for t in _new_tensors(before.get(key), value)
            )
        ]

    def refuse_gradients(
        self, before: VariableStates, keys: Iterable[VariableKey], tensors: Sequence[Tensor]
    ) -> None:
        """Makes it an error to ask for a gradient of what these variables have got since.

        Args:
            tensors: Of which there could be one.
        """
        for key, value in self.values(keys).items():
            new = {id(t) for t in _new_tensors(before.get(key), value) if t.is_floating_point()}
            if not new:
                continue
            refuse = _refusal(self.name(key), new, tensors)
            self.put_back({key: value.mapped(refuse)}, [key])


def tensors_of(values: VariableStates) -> set[int]:
    """Ids of the tensors in variables."""
    return {id(tensor) for value in values.values() for tensor in value.tensors()}


def _new_tensors(old: VariableState | None, now: VariableState) -> list[Tensor]:
    known = () if old is None else {id(tensor) for tensor in old.tensors()}
    return [tensor for tensor in now.tensors() if id(tensor) not in known]


def _refusal(name: str, ids: set[int], tensors: Sequence[Tensor]) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in ids:
            return value
        with torch.enable_grad():
            refused: Tensor = _Refused.apply(name, value.detach(), *tensors)
        return refused

    return refuse


class _Refused(torch.autograd.Function):
    """A tensor whose gradient is an error: the steps that made it ran without a graph."""

    @staticmethod
    def forward(ctx: Any, name: str, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.name = name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            f"fusedrnn: a tensor that the step keeps in {ctx.name} has no gradient; return it "
            "from the step as an output, or detach it"
        )
