"""What first uses of steps have found, beside their libraries, for later processes.

A trace of a step, derivatives of its stages and trials at corners take most of the time of a first
use whose library is there. A record has what runs a step that has passed every trial, and the
graphs that it was made by, which few processes need. It is found by all that the step does, and by
the code that does it; the trial on random numbers, which shows what no log of operations can, is
made in each process.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..recurrent.objects import Same, Unordered
from . import cache
from .cell import Printed, Program, Unread
from .graphs import CannotStore, Operations, from_json, to_json
from .outside import Outside
from .program import Program as Form

if TYPE_CHECKING:
    from .derive import Derived


class Graphs(NamedTuple):
    """What a program was made by."""

    module: Operations | None
    """Of the step; None if another program has it."""
    derived: list[Derived]
    """Of each stage."""


class Record(NamedTuple):
    printed: Printed | None
    """What runs the program; None for that of all results, which runs these results, too."""
    unread: Unread
    library: str
    """The name of the library that has passed its check."""
    log: str
    """What the step does with a few rows; see Program."""
    stored_graphs: str
    """As JSON: most processes do not read it."""

    def graphs(self) -> Graphs:
        """
        Raises:
            LookupError, TypeError, ValueError, AttributeError, RuntimeError: It is damaged.
        """
        from .derive import Derived

        stored = json.loads(self.stored_graphs)
        derived = [Derived(*map(from_json, pair)) for pair in stored["derived"]]
        module = stored["module"]
        return Graphs(None if module is None else from_json(module), derived)


_PLAIN = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    *(range, PurePath, type(vars(Record)["library"])),
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
        unread = Unread(*map(frozenset, stored["unread"]))
        fixed = [str(stored[name]) for name in ("library", "log", "graphs")]
        return Record(_to_printed(stored["printed"]), unread, *fixed)
    except (cache.Unusable, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


def keep(program: Program, module: Operations | None = None, is_same: bool = False) -> None:
    """Stores a record of a verified program if it can be.

    Args:
        module: The step's graph, or None for programs without unused results.
        is_same: Whether the program of all results runs without these, too.
    """
    if not program.key or program.library is None:
        return
    try:
        derived = [] if is_same else program.made().derived
        graphs = {
            "module": None if module is None else to_json(module),
            "derived": [[to_json(d.forward), to_json(d.backward)] for d in derived],
        }
        stored = {
            "printed": None if is_same else _of_printed(program.printed),
            "unread": [sorted(part) for part in program.unread],
            "library": program.library.key,
            "log": program.log,
            "graphs": json.dumps(graphs),
        }
        cache.write(_path(program.key), json.dumps(stored).encode())
    except (cache.Unusable, CannotStore):
        pass


def _of_printed(printed: Printed) -> dict[str, Any]:
    return printed._asdict() | {
        "form": printed.form.numbers(),
        "outside": printed.outside.to_json(),
    }


def _to_printed(stored: dict[str, Any] | None) -> Printed | None:
    if stored is None:
        return None
    return Printed(
        Form.of_numbers(stored["form"]),
        stored["output_sequences"],
        Outside.from_json(stored["outside"]),
        stored["text"],
        stored["has_choices"],
    )


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
