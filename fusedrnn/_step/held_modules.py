"""What a step holds: in its object, in the variables around it, and in its defaults."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from .generators import is_generator
from .replicas import names_of_torch

_DEEPEST = 3
"""Objects inside of each other that are looked into; behind them is the rest of the program."""
_OF_MODULES = 1
"""How deep the attributes of modules are, and what their methods read."""
_MOST = 10_000
"""Values that are looked at in all."""
_LONGEST = 1000
"""Containers with more elements hold data, no modules."""

_OTHERS = ("torch", "fusedrnn", "numpy", "builtins", "abc", "typing", "enum")
"""Packages whose classes have no variables of a step."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SKIPPED: tuple[Any, ...] = (*_PLAIN, ModuleType, *weakref.ProxyTypes)


class Held(NamedTuple):
    """What a step is, is a method of, or finds in what it holds."""

    modules: list[nn.Module]
    """Also those that a module has in a list or in an object, where torch does not find them."""
    functions: list[FunctionType]
    """But those of torch."""
    parameters: list[Tensor]
    """That are held by themselves, not by their modules; and others that have gradients."""
    objects: list[Any]
    """Others that have attributes."""
    classes: list[type]
    """Of the user's modules and objects, and others that functions name."""
    containers: list[Any]
    """Lists, dicts and sets, and arrays of NumPy."""
    generators: list[Any]
    """Of random numbers, but torch's."""


def held_modules(step: Any) -> Held:
    """What a step holds."""
    modules: dict[nn.Module, None] = {}
    held = Held([], [], [], [], [], [], [])
    seen: set[int] = set()

    # No function that calls itself: that is a cycle, which would keep all this until gc runs.
    waiting: list[tuple[Any, int]] = [(step, 0)]
    names, methods = {"forward"}, dict[str, list[FunctionType]]()
    while True:
        if not waiting:  # methods that functions name
            for name in sorted(names & methods.keys()):
                waiting += [(method, _OF_MODULES) for method in methods.pop(name)]
        if not waiting:
            break
        value, depth = waiting.pop()
        if id(value) in seen or isinstance(value, _SKIPPED) or len(seen) > _MOST:
            continue
        seen.add(id(value))  # of what somebody holds: other ids would come again
        if isinstance(value, Tensor):
            is_weight = isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf)
            held.parameters.extend([value] if is_weight else [])
            continue
        inner: Collection[Any]
        if isinstance(value, nn.Module):
            modules[value] = None
            kinds = dict.fromkeys(map(type, value.modules()))
            inner, depth = [*_hidden_in(value), *kinds], _OF_MODULES
        elif isinstance(value, type):
            if not is_of_user(value):
                continue
            held.classes.append(value)
            for name, method in _methods_of(value):
                methods.setdefault(name, []).append(method)
            inner = [*value.__bases__, *(one for _, one in attributes_of_class(value))]
        elif isinstance(value, MethodType):
            inner = (value.__self__, value.__func__)
        elif isinstance(value, BuiltinFunctionType):
            inner = (value.__self__,)
        elif isinstance(value, partial):
            inner = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, FunctionType):
            if _is_of_torch(value):
                continue
            held.functions.append(value)
            names |= names_in(value.__code__)
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            inner = (*_contents(value), *_globals_of(value), *defaults)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            inner = value.values() if isinstance(value, dict) else value
            held.containers.extend([] if isinstance(value, tuple | frozenset) else [value])
            is_own = is_of_user(type(value)) and type(value).__module__ != "collections"
            if is_own and len(inner) <= _LONGEST:  # one of its own class may have attributes
                held.objects.append(value)
                inner = [*inner, *attributes_of(value), type(value)]
        elif is_array(value):
            held.containers.append(value)
            continue
        elif is_generator(value):
            held.generators.append(value)
            continue
        elif depth < _DEEPEST:
            inner, depth = [*attributes_of(value), type(value)], depth + 1
            held.objects.extend([value] if is_of_user(type(value)) else [])
        else:
            continue
        if len(inner) <= _LONGEST:
            waiting += [(one, depth) for one in reversed(list(inner))]
    return held._replace(modules=list(modules))


def _is_of_torch(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).split(".")[0] == "torch"


def is_array(value: Any) -> bool:
    """Of NumPy, if somebody has imported it."""
    kind = getattr(sys.modules.get("numpy"), "ndarray", None)
    return kind is not None and isinstance(value, kind)


def is_of_user(kind: type) -> bool:
    return str(kind.__module__).split(".")[0] not in _OTHERS


def _hidden_in(module: nn.Module) -> list[Any]:
    """What a module and those inside of it hold besides modules and tensors; their functions.

    Not of scripted ones: their attributes hold themselves in other forms, of the same weights.
    """
    found: list[Any] = []
    for one in module.modules():
        if isinstance(one, ScriptModule):
            continue
        of_torch = names_of_torch(one)
        found += [
            value
            for name, value in vars(one).items()
            if name not in of_torch and type(value) not in _PLAIN
        ]
        found += [*one._forward_hooks.values(), *one._forward_pre_hooks.values()]
    return found


def _methods_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(kind).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield name, function


def attributes_of_class(kind: type) -> list[tuple[str, Any]]:
    """What a class itself holds besides methods and what describes it."""
    return [
        (name, value)
        for name, value in list(vars(kind).items())
        if not name.startswith(("__", "_fusedrnn_")) and not hasattr(type(value), "__get__")
    ]


def _contents(function: FunctionType) -> list[Any]:
    """What a function reads from the functions around it."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not yet assigned
            values.append(cell.cell_contents)
    return values


def _globals_of(function: FunctionType) -> list[Any]:
    """What a function reads from its own Python module."""
    values = [function.__globals__.get(name) for name in names_in(function.__code__)]
    return [
        value
        for value in values
        if not isinstance(value, FunctionType) or value.__module__ == function.__module__
    ]


def attributes_of(value: Any) -> list[Any]:
    """What an object holds, and the function that a call of it is."""
    values: list[Any] = []
    with suppress(AttributeError):
        values += object.__getattribute__(value, "__dict__").values()
    for name in slots_of(value):
        with suppress(AttributeError):
            values.append(object.__getattribute__(value, name))
    return [*values, getattr(type(value), "__call__", None)]  # noqa: B004


def slots_of(value: Any) -> list[str]:
    """Names of its attributes that are in no dict."""
    found: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{kind.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if not name.startswith("__")]


@functools.lru_cache(2**12)
def names_in(code: CodeType) -> frozenset[str]:
    """What a function and those within it may read from its Python module."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(code.co_names).union(*inner)
