"""What first uses of steps have found, beside their libraries, for later processes.

A trace of a step, derivatives of its stages and trials at corners take most of the time of a first
use whose library is there. A record has what runs a step that has passed every trial, and the
graphs that it was made by, which few processes need. It is found by the text of the step's graph;
the trial on random numbers is made in each process.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import library_cache
from .call_weights import CallWeights
from .compiled_step import CompiledStep, Generated, Unread
from .derive import Derived
from .operation_graph import CannotStore, Operations, from_json, to_json
from .program import Program


class Record(NamedTuple):
    generated: Generated | None
    """What runs the program; None for that of all results, which runs these results, too."""
    unread: Unread
    library: str
    """The name of the library that has passed its check."""
    stored_graphs: str
    """As JSON: most processes do not read it."""

    def graphs(self) -> tuple[Operations | None, list[Derived]]:
        """What the program was made by: the step, None if another program has it, and stages.

        Raises:
            LookupError, TypeError, ValueError, AttributeError, RuntimeError: It is damaged.
        """
        stored = json.loads(self.stored_graphs)
        derived = [Derived(*map(from_json, pair)) for pair in stored["derived"]]
        module = stored["module"]
        return None if module is None else from_json(module), derived


def key_of(*parts: Any) -> str:
    """The name of a step's record.

    Args:
        parts: All that graphs and trials depend on, of text and of what says all of itself.
    """
    words = [_package(), torch.__version__, *map(str, parts)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:40]


def find(key: str) -> Record | None:
    """The record of this name, if there is one that can be read."""
    if not key:
        return None
    try:
        content = library_cache.read(_path(key))
        if content is None:
            return None
        stored = json.loads(content)
        unread = Unread(*map(frozenset, stored["unread"]))
        fixed = [str(stored[name]) for name in ("library", "graphs")]
        return Record(_to_generated(stored["generated"]), unread, *fixed)
    except (
        library_cache.Unusable,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ):
        return None


def keep(program: CompiledStep, module: Operations | None = None, is_same: bool = False) -> None:
    """Stores a record of a verified program if it can be.

    Args:
        module: The step's graph, or None for programs without unused results.
        is_same: Whether the program of all results runs without these, too.
    """
    if not program.key or program.library is None:
        return
    try:
        derived = [] if is_same else program.derived().stages
        graphs = {
            "module": None if module is None else to_json(module),
            "derived": [[to_json(d.forward), to_json(d.backward)] for d in derived],
        }
        stored = {
            "generated": None if is_same else _of_generated(program.generated),
            "unread": [sorted(part) for part in program.unread],
            "library": program.library.key,
            "graphs": json.dumps(graphs),
        }
        library_cache.write(_path(program.key), json.dumps(stored).encode())
    except (library_cache.Unusable, CannotStore):
        pass


def _of_generated(generated: Generated) -> dict[str, Any]:
    return generated._asdict() | {
        "form": generated.form.numbers(),
        "call_weights": generated.call_weights.to_json(),
    }


def _to_generated(stored: dict[str, Any] | None) -> Generated | None:
    if stored is None:
        return None
    return Generated(
        Program.of_numbers(stored["form"]),
        stored["output_sequences"],
        CallWeights.from_json(stored["call_weights"]),
        stored["text"],
        stored["has_choices"],
    )


def _path(key: str) -> Path:
    return library_cache.open_folder(library_cache.wanted_folder()) / f"{key}.step"


@functools.cache
def _package() -> str:
    """All code that makes graphs, and programs of them."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    rooms = ("_step", "_front", "_compiler")
    for path in sorted(path for room in rooms for path in folder.glob(f"{room}/*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
