"""What first uses of steps have found, beside their libraries, for later processes.

A trace of a step, derivatives of its stages and trials at corners take most of the time of a first
use whose library is there. A record has the graphs of a step that has passed every trial. It is
found by all that the step does, and by the code that does it; the trial on random numbers, which
shows what no log of operations can, is made in each process.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from ..recurrent.objects import Same, Unordered
from . import cache
from .derive import Derived
from .graphs import CannotStore, Operations, from_json, to_json


class Record(NamedTuple):
    module: Operations
    """Of the step."""
    derived: list[Derived]
    """Of each stage."""
    log: str
    """What the step does; see first_use.py."""


_PLAIN = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    *(range, PurePath, type(vars(Record)["module"])),
)
"""Whose ``repr`` is all of them."""


class _Opaque(Exception):
    """An object that cannot be told from others of its type."""


def key_of(log: str, around: Any, others: Sequence[Any]) -> str:
    """The name of a step's record; nothing if there can be none.

    Args:
        log: What the step does.
        around: What is around it in Python; see surroundings.py.
        others: What else trials and graphs depend on.
    """
    try:
        parts = [_package(), torch.__version__, log, _text(around), _text(others)]
    except _Opaque:
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def find(key: str) -> Record | None:
    """The record of this name, if there is one that can be read."""
    if not key:
        return None
    try:
        content = cache.read(_path(key))
        if content is None:
            return None
        stored = json.loads(content)
        derived = [Derived(*map(from_json, pair)) for pair in stored["derived"]]
        return Record(from_json(stored["module"]), derived, str(stored["log"]))
    except (cache.Unusable, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


def keep(key: str, record: Record) -> None:
    """Stores a record if it can be."""
    try:
        derived = [[to_json(d.forward), to_json(d.backward)] for d in record.derived]
        stored = {"module": to_json(record.module), "derived": derived, "log": record.log}
        content = json.dumps(stored)
        cache.write(_path(key), content.encode())
    except (cache.Unusable, CannotStore):
        pass


def _path(key: str) -> Path:
    return cache.open_folder(cache.wanted_folder()) / f"{key}.step"


@functools.cache
def _package() -> str:
    """All code that makes graphs, and programs of them."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted([*folder.glob("_compile/*.py"), *folder.glob("recurrent/*.py")]):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _text(value: Any) -> str:
    """A value in words that are the same in each process."""
    if isinstance(value, Same):
        return _of_object(value.get())
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, Unordered | frozenset):  # the log shows the order if it matters
        entries = value.entries if isinstance(value, Unordered) else value
        return f"{{{', '.join(sorted(map(_text, entries)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return _name(value) if isinstance(value, type) else repr(value)


def _of_object(value: Any) -> str:
    if isinstance(value, CodeType):
        return _text(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _name(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, _PLAIN):
        return repr(value)
    raise _Opaque


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_PARTS = ["code", "flags", "argcount", "posonlyargcount", "kwonlyargcount", "exceptiontable"]
_PARTS += ["names", "varnames", "freevars", "cellvars"]
"""Of code, all but where it stands in a file."""


def _of_code(code: CodeType) -> str:
    parts = [getattr(code, f"co_{part}", None) for part in _PARTS]
    return _text([*parts, *code.co_consts])
