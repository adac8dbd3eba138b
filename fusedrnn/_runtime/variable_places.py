"""Where the variables are that a step may change: in modules, objects and classes, and around
functions."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from .._step.held_modules import attributes_of_class, names_in, slots_of
from .._step.replicas import names_of_torch

MISSING = object()
VALUES = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, deque, OrderedDict, dict, set)
_CONSTANT = (ModuleType, type, FunctionType, BuiltinFunctionType)
"""What names of a Python module stand for that no step binds anew."""


class Namespace(NamedTuple):
    """Where variables are: a module, the variables around a function, or those of its file."""

    name: str
    """How errors call a variable of it, with a place for the variable's name."""
    variables: dict[Any, Any]
    """Variables by name, or the cells that hold them."""
    only: Sequence[str] | None = None
    """The names that count; None for all that a user may have given."""
    without: frozenset[str] = frozenset()
    """Others that do not count."""
    holds: str = "attributes"
    """Or "parameters", "buffers" or "modules" of a module, or those of a "class"."""
    owner: Any = None
    """Of attributes that are in no dict: an object with ``__slots__``, or a class."""

    def items(self) -> list[tuple[Any, Any]]:
        """Names and values; an object with ``__slots__`` may lack one."""
        if self.holds == "class":
            return attributes_of_class(self.owner)
        if self.only is not None:
            is_all = self.owner is not None
            names = [name for name in self.only if is_all or name in self.variables]
            return [(name, self.read(name)) for name in names]
        if self.holds != "attributes":
            return list(self.variables.items())
        without = self.without
        return [
            item
            for item in list(self.variables.items())
            if item[0] not in without and not str(item[0]).startswith("_fusedrnn_")
        ]

    def read(self, name: str) -> Any:
        if self.owner is not None:
            try:
                return object.__getattribute__(self.owner, name)
            except AttributeError:
                return MISSING
        value = self.variables.get(name, MISSING)
        if isinstance(value, CellType):
            try:
                return value.cell_contents
            except ValueError:  # not yet assigned
                return MISSING
        return value

    def write(self, name: str, value: Any) -> None:
        old = self.variables.get(name)
        if self.owner is not None:
            # Not by methods of the user's, which may refuse, as those of frozen dataclasses.
            kind: Any = type if self.holds == "class" else object
            if value is MISSING:
                kind.__delattr__(self.owner, name)
            else:
                kind.__setattr__(self.owner, name, value)
        elif isinstance(old, CellType):
            if value is MISSING:
                del old.cell_contents
            else:
                old.cell_contents = value
        elif value is MISSING:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value


def of_module(module: nn.Module) -> list[Namespace]:
    kind = type(module).__name__
    attributes, torchs = vars(module), names_of_torch(module)
    return [
        Namespace(f"the attribute {{!r}} of {kind}", attributes, None, torchs - {"training"}),
        Namespace(f"the parameter {{!r}} of {kind}", module._parameters, holds="parameters"),
        Namespace(f"the buffer {{!r}} of {kind}", module._buffers, holds="buffers"),
        Namespace(f"the part {{!r}} of {kind}", module._modules, holds="modules"),
    ]


def of_object(one: Any) -> list[Namespace]:
    name = f"the attribute {{!r}} of a {type(one).__name__}"
    in_slots = Namespace(name, {}, slots_of(one), owner=one)
    try:
        return [Namespace(name, object.__getattribute__(one, "__dict__")), in_slots]
    except AttributeError:
        return [in_slots]


def of_class(kind: type) -> Namespace:
    name = f"the attribute {{!r}} of the class {kind.__name__}"
    return Namespace(name, {}, holds="class", owner=kind)


def around(functions: Iterable[FunctionType]) -> Iterator[Namespace]:
    """The variables around functions, those of their Python modules that they name, and theirs."""
    for function in functions:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own = function.__globals__
        names = [
            name
            for name in sorted(names_in(function.__code__))  # the same order in each process
            if not isinstance(own.get(name), _CONSTANT)
        ]
        yield Namespace("the variable {!r}", cells, tuple(cells))
        yield Namespace("the variable {!r}", own, names)
        yield Namespace(f"the attribute {{!r}} of {function.__name__}", vars(function))
