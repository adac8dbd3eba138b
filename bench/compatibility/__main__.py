"""Runs the checks and writes the document: ``python -m bench.compatibility``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..report import Screen
from ..worker import measure_apart
from .document import DOCUMENT, markdown, notes, table
from .rows import ERROR, GROUPS, Outcome, Row, all_rows, name_of
from .subjects import SUBJECTS

# A row that takes longer is a row that hangs; AOTInductor takes a quarter of it.
ROW_S = 120.0
RUN_S = 1800.0
PROCESSES = 2


def run(rows: Sequence[Row]) -> dict[tuple[str, str], Outcome]:
    """Every check for every column, in processes that a crash or a hang ends alone."""
    end = time.monotonic() + RUN_S
    slowest = ("export", "compile")  # these come first, in a process for each column
    parts = [
        [(row, column) for row in rows if row.group == group for column in columns]
        for group in sorted(GROUPS, key=lambda group: group not in slowest)
        for columns in ([[c] for c in SUBJECTS] if group in slowest else [list(SUBJECTS)])
    ]

    def measure(part: list[tuple[Row, str]]) -> dict[tuple[str, str], Outcome]:
        names = {name_of(row, column): (row.key, column) for row, column in part}
        found = measure_apart("bench.compatibility.rows", None, list(names), end=end, stall_s=ROW_S)
        return {key: _outcome(found.get(name, {})) for name, key in names.items()}

    outcomes: dict[tuple[str, str], Outcome] = {}
    with ThreadPoolExecutor(PROCESSES) as pool:
        for found in pool.map(measure, [part for part in parts if part]):
            outcomes |= found
    return outcomes


def _outcome(row: dict[str, str]) -> Outcome:
    if "kind" in row:
        return Outcome(row["kind"], row["note"])
    return Outcome(ERROR, row.get("error") or row.get("missing") or "was not reached")


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", choices=list(GROUPS), help="the rows of one group")
    parser.add_argument("--row", help="the rows whose name contains this text")
    parser.add_argument("--out", type=Path, help=f"the document ({DOCUMENT.name} in docs)")
    options = parser.parse_args()
    rows = {
        key: row
        for key, row in all_rows().items()
        if options.group in (None, row.group) and (options.row or "") in key
    }
    if not rows:
        parser.error("no row has this name")
    is_part = options.group is not None or options.row is not None
    if is_part and options.out is not None:
        parser.error("--out needs all rows")

    outcomes = run(list(rows.values()))
    screen = Screen()
    for group in GROUPS:
        own = [row for row in rows.values() if row.group == group]
        if own:
            screen.table(table(group, own, outcomes))
    for row in rows.values():
        for note in notes(row, outcomes):
            screen.line(note)
    if not is_part:
        out = options.out or DOCUMENT
        out.write_text(markdown(rows, outcomes))
        screen.line(f"The document is {out}")


if __name__ == "__main__":
    main()
