"""All that a step may read in Python besides its arguments, as a key that another value changes.

A program holds what its trace has read: attributes of modules and of objects in them, functions
with their closures and defaults, and variables of the Python modules and classes that these
functions name. Each call looks at all of it again, as a walk over a graph of objects.

Attributes and entries count all, since ``getattr`` and ``vars`` may read any. Of a Python module
or a class only those count whose names appear in the code that the step may run: else half of a
user's program would be looked at. Installed packages other than the cell's own are constant.
"""

from __future__ import annotations

import functools
import marshal
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .chance import (
    Chance,
    asked_of,
    check_asked,
    check_class,
    check_function,
    kind_of_chance,
)
from .objects import (
    NoKey,
    Same,
    TooMuch,
    Unordered,
    as_list,
    bytes_of,
    contents,
    has_bytes,
    holds_attributes,
    imported_by,
    is_installed,
    is_number_of_numpy,
    names_of,
    package,
    wrapped_by,
)
from .replicas import names_of_torch
from .variables import versions_of

_MOST_ATOMS = 100_000
"""Of a container of numbers and texts, which also take some milliseconds."""
_MOST = 10_000
"""Values that are looked at in a call, which then takes some milliseconds."""

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...))
_ATOM_KINDS = frozenset(_ATOMS)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_IMPLICIT = frozenset(
    f"__{name}__"
    for names in (
        "call getattr getattribute get getitem missing len iter next contains enter exit array",
        "bool float int index complex round eq ne lt le gt ge neg pos abs invert torch_function",
        "add sub mul truediv floordiv mod pow matmul and or xor",
        "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor",
    )
    for name in names.split()
) | {"forward"}
"""What is called without its name in any code of the user's."""
_MAKING = frozenset(["__new__", "__init__", "__post_init__"])
"""Also called of a class that a step makes objects of."""
_DERIVING = frozenset(["backward", "vjp", "jvp", "setup_context"])
"""The same of an autograd.Function, which autograd calls."""
_CachedFunction = type(functools.lru_cache(len))
_DECORATED = (FunctionType, MethodType, MappingProxyType, functools.partial, _CachedFunction)
"""What a decorator of another package has around a function of the user's."""


def surroundings(modules: Iterable[nn.Module]) -> Any:
    """The key of a step that calls these modules.

    Raises:
        NoKey: There are too many values to look at in each call; or one of them is such that a
            program could not do what the step does.
    """
    return _Walk().key(modules)


class _Walk:
    """Values in a fixed order; each says what it is and how many others it has, then come these."""

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._waiting: list[Any] = []
        self._places: dict[int, int] = {}
        self._held: list[Any] = []  # else another object could get the id of one that was made here
        self._names = set(_IMPLICIT)
        self._classes: set[type] = set()
        self._spaces: list[tuple[Any, frozenset[str], set[str]]] = []
        """Classes and Python modules; names that each is asked for in any case; those that have
        been looked up."""
        self._codes: list[CodeType] = []
        self._clocks: list[Any] = []
        """Python modules and classes that give something else each time."""

    def key(self, modules: Iterable[nn.Module]) -> Any:
        roots = list(modules)
        self._packages = {package(type(module).__module__) for module in roots}
        self._packages -= {"torch", "fusedrnn"}
        self._has(*roots)
        while True:
            while self._waiting:
                if len(self._places) > _MOST:
                    raise TooMuch(
                        f"what its modules hold, or functions and objects around them, is more "
                        f"than {_MOST:,} values, any of which may change"
                    )
                self._look(self._waiting.pop())
            if not self._look_up():
                break
        if self._clocks:
            check_asked(self._codes, self._clocks)
        return tuple(self._key)

    def _look_up(self) -> bool:
        """Variables of classes and Python modules by the names that code has; False without any."""
        for space, own, done in self._spaces:
            new = (self._names | own) - done
            done |= new
            variables = vars(space)
            found = sorted(new & variables.keys())
            self._key += found
            self._has(*[variables[name] for name in found])
        return bool(self._waiting)

    def _has(self, *values: Any) -> None:
        self._key.append(len(values))
        self._waiting += reversed(values)

    def _is(self, *tokens: Any) -> None:
        self._key += tokens

    def _look(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            return self._is(value)
        if kind in _ATOMS:  # 1 is not True, 0.0 not -0.0, and nan is nan
            return self._is(marshal.dumps(value, 2))
        if id(value) in self._places:
            return self._is(self._places[id(value)])
        self._places[id(value)] = len(self._places)
        self._held.append(value)
        self._is(kind)
        if kind in _CONTAINERS:
            entries = as_list(value) if len(value) <= _MOST_ATOMS else []
            if entries and _ATOM_KINDS.issuperset(map(type, entries)):  # all at once
                is_set = kind in (set, frozenset)
                return self._is(Unordered(entries) if is_set else marshal.dumps(entries, 2))
            if len(value) > _MOST:
                raise TooMuch(
                    f"a {kind.__name__} of {len(value):,} entries that its modules hold may change"
                )
            return self._has(*entries)
        self._look_at_one(value, kind)

    def _look_at_one(self, value: Any, kind: type) -> None:
        """What nobody has looked at, and is no number or text."""
        if isinstance(value, Tensor):
            self._is(Same(value), *versions_of([value]))
        elif isinstance(value, nn.Module):
            self._module(value)
        elif kind is FunctionType:
            self._function(value)
        elif kind is MethodType:
            self._has(value.__self__, value.__func__)
        elif kind in (BuiltinMethodType, MethodWrapperType):
            own = value.__self__
            self._is(value.__name__)
            if isinstance(own, type | ModuleType):
                check_function(value, own.__name__)
            self._has(None if isinstance(own, ModuleType) else own)
        elif isinstance(value, type | ModuleType):
            self._is(Same(value))
            check_class(value)
            self._clocks += [value] if asked_of(value) else []
            is_function = isinstance(value, type) and issubclass(value, torch.autograd.Function)
            own = _MAKING | _DERIVING if is_function else _MAKING
            self._spaces += [(base, own, set()) for base in self._bases(value)]
            self._class(kind)  # a metaclass
        elif isinstance(value, property | functools.cached_property):
            self._has(*(getattr(value, name, None) for name in ("fget", "func")))
        elif isinstance(value, staticmethod | classmethod):
            self._has(value.__func__)
        elif isinstance(value, functools.partial | functools.partialmethod):
            self._has(value.func, value.args, value.keywords)
        elif isinstance(value, weakref.ref):
            self._has(value())
        elif kind is ContextVar:
            self._has(value.get(None))
        elif kind is MappingProxyType:
            self._has(*value.items())
        elif kind is _CachedFunction:
            self._has(value.__wrapped__)
        elif has_bytes(value):
            self._is(*bytes_of(value))
        else:
            self._object(value, kind)

    def _module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise NoKey("a scripted module cannot be traced: pass its Python class")
        self._is(module.training)
        if isinstance(module, LazyModuleMixin):
            return self._is(Same(module))
        of_torch = names_of_torch(module)
        own = [
            (name, value)
            for name, value in list(vars(module).items())
            if name not in of_torch
            and not str(name).startswith("_fusedrnn_")
            and not (name == "_memories" and type(module).__module__.startswith("fusedrnn."))
        ]
        self._is(*(name for name, _ in own))
        self._has(*(value for _, value in own), module._modules)
        self._class(type(module))

    def _function(self, function: FunctionType) -> None:
        if not self._is_of_user(function):
            self._is(Same(function))
            check_function(function, function.__module__)
            held = (*contents(function), *vars(function).values())
            return self._has(*(value for value in held if isinstance(value, _DECORATED)))
        code, around = function.__code__, function.__globals__
        names = names_of(code)
        self._codes.append(code)
        self._names |= names.attributes
        self._is(Same(code))
        own = {k: v for k, v in vars(function).items() if not k.startswith("_fusedrnn_")}
        found = [name for name in names.variables if name in around]
        self._is(*found)
        cells = contents(function)
        kept = (function.__defaults__, function.__kwdefaults__, own or None)
        self._has(*kept, *cells, *(around[name] for name in found), *imported_by(function))

    def _object(self, value: Any, kind: type) -> None:
        """Any other: what it contains, its attributes, and what a call of its methods reads."""
        if what := kind_of_chance(value, kind, self._is_of_user(kind)):
            raise Chance(what, value)
        if isinstance(value, torch.jit.ScriptFunction):
            raise NoKey("a scripted function cannot be traced: call the function in Python")
        inner: list[Any] = []
        atom: Any = next((one for one in _ATOMS if isinstance(value, one)), None)
        if atom is not None:
            self._is(atom.__repr__(value))
        elif isinstance(value, _CONTAINERS):
            inner += as_list(value)
            inner += [value.default_factory] if isinstance(value, defaultdict) else []
        elif is_number_of_numpy(value):
            return self._is(value.tobytes())
        attributes = list(self._attributes(value, kind))
        if not attributes and not inner and atom is None:
            self._is(Same(value))
            inner += wrapped_by(value)
        self._is(*(name for name, _ in attributes))
        self._has(*inner, *(one for _, one in attributes))
        self._class(kind)

    def _attributes(self, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
        if not self._is_of_user(kind) and not holds_attributes(kind):
            return
        is_of_thread = isinstance(value, threading.local)
        read: Any = type(value).__getattribute__ if is_of_thread else object.__getattribute__
        with suppress(AttributeError):
            yield from list(read(value, "__dict__").items())
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                is_private = name.startswith("__") and not name.endswith("__")
                known = f"_{base.__name__.lstrip('_')}{name}" if is_private else name
                with suppress(AttributeError):
                    yield name, object.__getattribute__(value, known)

    def _class(self, kind: type) -> None:
        """The class of an object, of which its methods are called."""
        if kind not in self._classes:
            self._classes.add(kind)
            self._spaces += [(base, frozenset(), set()) for base in self._bases(kind)]

    def _bases(self, space: Any) -> list[Any]:
        """Of a class or a Python module, where variables may change."""
        bases = space.__mro__ if isinstance(space, type) else (space,)
        return [base for base in bases if self._is_of_user(base)]

    def _is_of_user(self, value: Any) -> bool:
        """Whether a function, class or Python module may change: no installed one does."""
        name: Any = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if isinstance(value, FunctionType):
            name = value.__globals__.get("__name__")
        name = name if isinstance(name, str) else ""
        return package(name) in self._packages or not is_installed(name)
