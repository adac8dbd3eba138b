"""Whether a step runs code of TorchScript, whose first runs save other tensors than later ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .held_modules import Held, attributes_of, is_array, names_in

_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


def uses_torchscript(held: Held, modules: Iterable[nn.Module]) -> bool:
    """As far as functions and methods name it.

    Args:
        held: What the step holds.
        modules: All modules of the step.
    """
    waiting: list[Any] = [*modules, *held.functions, *dict.fromkeys(map(type, held.objects))]
    waiting += [value for one in held.containers for value in _values(one)]
    waiting += [value for one in held.objects for value in attributes_of(one)]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, _SCRIPTED):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            waiting += [type(value), *vars(value).values()]
        elif isinstance(value, type):
            waiting += [one for kind in value.__mro__ if _is_users(kind) for one in _of_class(kind)]
        elif isinstance(value, FunctionType) and _is_users(value):
            waiting += _named_in(value)
    return False


def _values(container: Any) -> Iterable[Any]:
    if is_array(container):
        return ()
    return container.values() if isinstance(container, dict) else container


def _is_users(value: Any) -> bool:
    package = str(value.__module__).partition(".")[0]
    return package not in ("torch", "fusedrnn", "numpy", "builtins")


def _of_class(kind: type) -> Iterator[Any]:
    for value in vars(kind).values():
        yield getattr(value, "__func__", value)


def _named_in(function: FunctionType) -> Iterator[Any]:
    """What a function reads from its file, and from modules that this names."""
    names = names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and _is_users_module(value):
            yield from (vars(value).get(name) for name in names)
        else:
            yield value


def _is_users_module(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] not in ("torch", "fusedrnn", "numpy", "math")
