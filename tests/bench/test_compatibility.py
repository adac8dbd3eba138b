"""Rows of docs/compatibility.md: what holds of fusedrnn, and that the document says so.

Most rows run for one of our modules in turn, and nightly for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import allow_tf32

sys.path.append(str(Path(__file__).parents[2]))  # last, so that fusedrnn is the installed one
from bench.compatibility import document, rows
from bench.compatibility.subjects import OURS, RIVALS, SUBJECTS

ROWS = rows.all_rows()
SAID = document.written(document.DOCUMENT.read_text())
# Rows in which fusedrnn does not work, each with its reason. A row that works after all has to
# leave the list.
KNOWN: dict[str, str] = {
    "export: jit.script": "modules take keyword-only arguments, which TorchScript refuses",
}
WORKS_NOW = "this row works now, or others do not: see the list of known differences"
RECURRENT = "Recurrent"
FIXED = "steps are taken one by one, as many as the example has"
KNOWN_OF_RECURRENT = {
    "autograd: selective checkpoint": "outputs are written in place, step by step",
    "func: make_fx, symbolic": FIXED,
    "func: vmap over lengths": "lengths are read as numbers",
    "library: fake tensors": "states of a step are compared with those of its repetition",
    "library: meta tensors": "inputs must have numbers",
    "amp: dtypes under autocast": "a state keeps the dtype in which it came",
    "export: dynamic steps and batch": FIXED,
    "export: saved and loaded": FIXED,
    "export: run_decompositions": FIXED,
    "export: dynamic, lengths and reset": FIXED,
    "export: training after export, dynamic": FIXED,
    "export: return_sequence=False, dynamic steps": FIXED,
    "export: AOTInductor, dynamic steps and batch": FIXED,
    "export: jit.trace": FIXED,
    "export: jit.trace, saved and loaded": FIXED,
    "export: fx.symbolic_trace": "inputs must be tensors",
}
FINE = (rows.WORKS, rows.LOOP, rows.NOT_AVAILABLE, rows.SKIPPED)


@pytest.fixture(autouse=True)
def _float32_is_not_rounded() -> None:
    """Leaves TF32 alone, in place of the fixture of all tests: export refuses what that sets."""
    allow_tf32(True)


def said_of(row: rows.Row) -> dict[str, str]:
    return SAID.get((document.TITLES[row.group], row.name), {})


def is_due(row: rows.Row, column: str, found: dict[str, rows.Outcome]) -> bool:
    """Whether a column must work: results are right, whatever the rival or another cell can.

    A Recurrent may refuse to be in one graph with what is around it.
    """
    if column == RECURRENT and found[column].note.startswith("Unsupported:"):
        return False
    rival = said_of(row)[RIVALS[column]]
    another_works = any(outcome.kind == rows.WORKS for outcome in found.values())
    is_bad = found[column].kind in (rows.WRONG, rows.SLOW)
    return is_bad or another_works or rival in (rows.WORKS, rows.NOT_AVAILABLE)


def parts() -> Iterator[object]:
    """Rows with the columns that a test is about."""
    for i, (key, row) in enumerate(ROWS.items()):
        able = [c for c in OURS if said_of(row).get(c) != rows.NOT_AVAILABLE] or OURS
        first = able[i % len(able)]
        rest = tuple(column for column in OURS if column != first)
        marks = [getattr(pytest.mark, row.speed)] if row.speed else []
        if key in KNOWN or key in KNOWN_OF_RECURRENT:  # known by comparing modules
            yield pytest.param(key, OURS, marks=marks, id=key)
            continue
        yield pytest.param(key, (first,), marks=marks, id=key)
        yield pytest.param(key, rest, marks=pytest.mark.nightly, id=f"{key}, the others")


@pytest.mark.parametrize(("key", "columns"), list(parts()))
def test_row(key: str, columns: tuple[str, ...]) -> None:
    row = ROWS[key]
    found = {column: rows.outcome(row, SUBJECTS[column]) for column in columns}
    bad = {
        column: outcome
        for column, outcome in found.items()
        if outcome.kind not in FINE and is_due(row, column, found)
    }
    if key in KNOWN:
        assert bad, WORKS_NOW
    elif key in KNOWN_OF_RECURRENT:
        assert bad.keys() == {RECURRENT}, WORKS_NOW
    else:
        assert not bad
    said = said_of(row)
    now = {c: o.kind for c, o in found.items() if rows.SKIPPED not in (o.kind, said[c])}
    before = {column: said[column] for column in now}
    assert now == before, "run python -m bench.compatibility"


def test_the_document_has_these_rows() -> None:
    expected = [(document.TITLES[row.group], row.name, row.says) for row in ROWS.values()]
    assert [(*key, said["says"]) for key, said in SAID.items()] == expected, (
        "run python -m bench.compatibility"
    )


def test_known_differences_are_rows() -> None:
    assert KNOWN.keys() | KNOWN_OF_RECURRENT.keys() <= ROWS.keys()
