"""Runs contenders in processes of their own, so that a fault costs only one contender's row.

``measure_apart`` starts ``python -m bench.worker MODULE CASE NAMES FILE``, which calls
``measure(case, names, notes)`` of the module. That says what it is about to do and what it has
found; of a process that crashes, hangs or loses its GPU all of that is known, and the next one goes
on with what is left. Torch is imported by the module, not here.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import contain
from .faults import names_fault

# The numbers of a contender; or the reason why there are none, under "error" or "missing".
Row = dict[str, Any]

START_S = 90.0  # for a process to import torch from a cold disk
STALL_S = 30.0  # without a note from a contender
SAID_BYTES = 4096  # of the output of a failed process


class Lost(Exception):
    """The process has lost its GPU; the reason is in a row."""


class Notes:
    """Notes that a process writes about its contenders.

    Args:
        write: Gets each note.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write = write
        self.at: str | None = None

    def begin(self, name: str) -> None:
        """Notes that the process begins to work on a contender."""
        self.at = name
        self._write({"begin": name})

    def row(self, name: str, row: Row) -> None:
        """Notes a contender's row, unless it has one already."""
        self._write({"name": name, "row": row})

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Works on a contender. An error becomes its row, and the process goes on.

        Raises:
            Lost: The error has cost the process its GPU.
        """
        self.begin(name)
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Notes an error as the row of the current contender; see ``on``."""
        if isinstance(error, Lost) or self.at is None:
            raise error
        self.row(self.at, error_row(error))
        if names_fault(str(error)):
            raise Lost from error


def error_row(error: Exception) -> Row:
    """The row of a contender that raised an error."""
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0]:.150}"}


def measure_here(
    measure: Callable[[Any, Sequence[str], Notes], object], case: Any, names: Sequence[str]
) -> dict[str, Row]:
    """Does the same as ``measure_apart`` in this process, which must survive it."""
    rows: dict[str, Row] = {}

    def write(note: dict[str, Any]) -> None:
        if "row" in note:
            rows.setdefault(note["name"], note["row"])

    while left := [name for name in names if name not in rows]:
        notes, before = Notes(write), len(rows)
        try:
            measure(case, left, notes)
        except Lost:
            pass
        except Exception as error:
            with suppress(Lost):
                notes.fail(error)
        if len(rows) == before:
            break
    return rows


def measure_apart(
    module: str,
    case: Any,
    names: Sequence[str],
    *,
    end: float,
    stall_s: float = STALL_S,
) -> dict[str, Row]:
    """The rows of all contenders that are reached before ``end``, each measured in a process apart.

    ``end`` is a time of ``time.monotonic()``. Each row names its process.
    """
    rows: dict[str, Row] = {}
    while (left := [name for name in names if name not in rows]) and time.monotonic() < end:
        found = _by_one_process(module, case, left, end, stall_s)
        rows |= found
        if not found:
            break
    return rows


def _by_one_process(
    module: str, case: Any, names: Sequence[str], end: float, stall_s: float
) -> dict[str, Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "notes")
        file.touch()
        size, until = 0, time.monotonic() + START_S

        def deadline() -> float:
            nonlocal size, until
            now_bytes = file.stat().st_size
            if now_bytes > size:
                size, until = now_bytes, time.monotonic() + stall_s
            return min(until, end)

        arguments = [module, json.dumps(case), json.dumps(list(names)), str(file)]
        ended = contain.run([sys.executable, "-m", "bench.worker", *arguments], deadline)
        notes = file.read_text().split("\n")[:-1]  # the last line may be half of one
    rows: dict[str, Row] = {}
    at = None
    for note in map(json.loads, notes):
        at = note.get("begin", at)
        if "row" in note:
            rows.setdefault(note["name"], note["row"] | {"process": ended.pid})
    if ended.status == 0 and not set(names) - rows.keys():
        return rows
    if ended.status is None and time.monotonic() >= end:
        why = {"missing": f"{ended.how}, when time was over"}
    elif ended.status is None:
        why = {"error": f"stopped after it had said nothing for {stall_s if at else START_S:.0f} s"}
    else:
        said = [line.strip() for line in ended.tail.splitlines() if line.strip()]
        last = said[-1] if said and ended.status > 0 else ""
        why = {"error": f"{ended.how}: {last:.150}".strip(": ")}
    # A process that has not reached its first contender would not reach it the next time either.
    of_the_rest = dict.fromkeys(names if at is None else [at], why)
    print(ended.tail[-SAID_BYTES:])
    print(f"{module}, {case}, {at or 'at the start'}: {ended.how}", flush=True)
    return of_the_rest | rows


def main() -> None:
    """Measures the contenders that the arguments name; see the top of this file."""
    faulthandler.enable()  # prints where a crash happened
    module, case, names, path = sys.argv[1:]
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    notes = Notes(lambda note: os.write(file, (json.dumps(note) + "\n").encode()))
    status = 0
    try:
        importlib.import_module(module).measure(json.loads(case), json.loads(names), notes)
    except Exception as error:
        traceback.print_exc()
        status = 1
        with suppress(Exception):
            notes.fail(error)
    sys.stdout.flush()
    os._exit(status)  # without cleanup, which may hang if the GPU is lost


if __name__ == "__main__":
    main()
