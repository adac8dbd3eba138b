"""The rows: a list of checks, each with its outcome for a column."""

from __future__ import annotations

import functools
import importlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..worker import Notes
from .subjects import NOT_COMPILED, SUBJECTS, NotAvailable, Skipped, Slow, Subject, Wrong

WORKS, LOOP, ERROR, WRONG, SLOW = "works", "loop", "error", "wrong", "slow"
NOT_AVAILABLE, SKIPPED = "n/a", "skipped"
# How fusedrnn warns of steps in Python.
_TAKES_LOOP = re.compile("run as a plain loop over the steps|take the steps in Python")
Check = Callable[[Subject], None]


@dataclass(frozen=True)
class Row:
    """A check.

    Attributes:
        says: What it checks, in a sentence.
        speed: The mark of its test: "" for less than a few seconds, "slow" or "nightly".
    """

    group: str
    name: str
    says: str
    check: Check
    speed: str = ""

    @property
    def key(self) -> str:
        """Its name among all rows."""
        return f"{self.group}: {self.name}"


@dataclass(frozen=True)
class Outcome:
    """What a check found for a column; ``note`` says why it does not work."""

    kind: str
    note: str = ""


_rows: dict[str, Row] = {}
# The groups, with the modules of their checks.
GROUPS = {
    "inputs": ("inputs", "refusals"),
    "autograd": ("backward", "changes", "higher_order", "hooks"),
    "func": ("transforms", "batching"),
    "library": ("operators",),
    "amp": ("mixed_precision",),
    "compile": ("compiled", "compiled_options"),
    "export": ("exported",),
    "checkpoints": ("checkpoints", "hugging_face", "distributed"),
}


def group(name: str) -> Callable[..., Callable[[Check], Check]]:
    """The decorator of the checks of a group; a check's docstring is the row's sentence."""

    def row(title: str, *, speed: str = "", says: str = "") -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            sentence = says or " ".join((check.__doc__ or "").split())
            made = Row(name, title, sentence, check, speed)
            if made.key in _rows:
                raise ValueError(f"two rows are named {made.key!r}")
            _rows[made.key] = made
            return check

        return add

    return row


def table(row: Callable[..., Any], check: Callable[..., None], *rows: Any, speed: str = "") -> None:
    """Adds rows of one check. rows: title, sentence, and further arguments of the check."""
    for title, says, options in rows:
        row(title, says=says, speed=speed)(functools.partial(check, **options))


def all_rows() -> dict[str, Row]:
    """Every row by its key, in the order of the document."""
    for modules in GROUPS.values():
        for module in modules:
            importlib.import_module(f"bench.compatibility.{module}")
    return {row.key: row for name in GROUPS for row in _rows.values() if row.group == name}


def outcome(row: Row, subject: Subject) -> Outcome:
    """Runs a check for a column; once more with steps in Python if a cell cannot be compiled."""
    found = _outcome(row, subject)
    refused = re.search(f"{NOT_COMPILED}: (.*)", found.note)
    if refused is None:
        return found
    in_python = _outcome(row, subject.by_default)
    is_right = in_python.kind in (WORKS, LOOP)
    return Outcome(LOOP, f"steps in Python: {refused[1]}") if is_right else in_python


def _outcome(row: Row, subject: Subject) -> Outcome:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            row.check(subject)
    except NotAvailable:
        return Outcome(NOT_AVAILABLE)
    except Skipped as reason:
        return Outcome(SKIPPED, str(reason))
    except Wrong as error:
        return Outcome(WRONG, _first_line(str(error)))
    except Slow as error:
        return Outcome(SLOW, _first_line(str(error)))
    except Exception as error:  # whatever a feature of torch raises is the row's result
        return Outcome(ERROR, f"{type(error).__name__}: {_first_line(str(error))}")
    finally:
        torch._dynamo.reset()
    return Outcome(LOOP if any(_TAKES_LOOP.search(str(one.message)) for one in said) else WORKS)


def _first_line(text: str) -> str:
    """The first line of a message, without what differs from run to run."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = re.sub(r"\x1b\[[0-9;]*m", "", lines[0])
    line = re.sub(r"0x[0-9a-f]+", "0x…", line)
    line = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", line)
    return line if len(line) <= 150 else line[:149] + "…"


def name_of(row: Row, column: str) -> str:
    """How a worker is told what to run."""
    return f"{column} | {row.key}"


def measure(case: Any, names: Sequence[str], notes: Notes) -> None:
    """Runs checks in a worker: see bench.worker."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    rows = all_rows()
    for name in names:
        column, key = name.split(" | ")
        with notes.on(name):
            found = outcome(rows[key], SUBJECTS[column])
            notes.row(name, {"kind": found.kind, "note": found.note})
