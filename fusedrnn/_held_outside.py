"""Modules that a model holds outside of its submodules: in plain lists, tuples, sets and dicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

# What a module has in any case: its submodules and tensors, and hooks of all kinds.
_USUAL = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, set, frozenset, dict)


def modules_outside(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each place of a module that is no submodule of ``root``, such as ``encoder.layers[0]``.

    Looks into containers at any depth, but not into objects of other kinds.
    """
    inside, seen = set(root.modules()), set[int]()  # ids of containers
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        own = ((f"{prefix}{key}", of) for key, of in vars(module).items() if key not in _USUAL)
        found = deque(_worth_a_look(own))
        while found:
            place, value = found.popleft()
            if isinstance(value, nn.Module):
                for inner, submodule in value.named_modules() if value not in inside else ():
                    if submodule not in inside:
                        yield f"{place}.{inner}" if inner else place, submodule
            elif id(value) not in seen:
                seen.add(id(value))
                items = _items(value)
                found.extend((f"{place}[{_text(key)}]", of) for key, of in _worth_a_look(items))


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Without what a class of the user's own may do then."""
    if isinstance(container, dict):
        return dict.items(container)
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    return enumerate(kind.__iter__(container))


def _worth_a_look(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Leaves out what most containers hold, before anything is made of it."""
    return (item for item in items if isinstance(item[1], (nn.Module, *_CONTAINERS)))


def _text(key: object) -> str:
    return repr(key) if type(key) in (str, int) else type(key).__name__
