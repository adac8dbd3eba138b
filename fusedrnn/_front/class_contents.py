"""What the users' classes of modules hold, which torch.compile's guards do not look at."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

_OTHERS = ("torch", "builtins", "abc", "typing", "fusedrnn")
"""Packages whose classes nobody changes."""


def users_classes(modules: Iterable[nn.Module]) -> dict[type, None]:
    return {
        kind: None
        for own in dict.fromkeys(map(type, modules))
        for kind in own.__mro__
        if str(kind.__module__).partition(".")[0] not in _OTHERS
    }


class Contents:
    """All methods and variables of some classes, when they were first seen."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()

    def are_as_before(self, classes: Iterable[type]) -> bool:
        for kind in classes:
            known, now = self._of.get(kind), vars(kind)
            if known is None:
                self._of[kind] = _contents(kind)
                continue
            if len(now) != len(known):
                return False
            for name, value in now.items():
                held = known.get(name, _contents)
                if held is not value and (type(held) is not weakref.ref or held() is not value):
                    return False
        return True


def _contents(kind: type) -> dict[str, Any]:
    """By name; functions, which hold their class, only for as long as they live."""
    return {
        name: weakref.ref(value) if isinstance(value, types.FunctionType) else value
        for name, value in vars(kind).items()
    }
