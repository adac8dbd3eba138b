"""Runs hostile cases, counts them and finds the worst errors: ``python -m hostile`` in tests."""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
from dataclasses import dataclass

import rich.progress
import torch
from cases import DTYPES
from rich.table import Table

from . import BACKENDS, CELLS, cases, has_case
from .judge import Finding, judge


@dataclass
class Counts:
    """Sums over cases; ``worst`` is the largest ratio of an error to its bound."""

    cases: int = 0
    rows: int = 0
    unjudged: int = 0
    worst: float = 0.0
    wrong: int = 0

    def add(self, findings: list[Finding]) -> None:
        """Adds a case."""
        self.cases += 1
        self.rows += sum(finding.rows for finding in findings)
        self.unjudged += sum(finding.unjudged for finding in findings)
        self.worst = max(self.worst, *(finding.excess for finding in findings))
        self.wrong += sum(finding.is_wrong for finding in findings)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.cases + other.cases,
            self.rows + other.rows,
            self.unjudged + other.unjudged,
            max(self.worst, other.worst),
            self.wrong + other.wrong,
        )

    def texts(self) -> list[str]:
        """The counts as text, in the order of the table."""
        counts = (self.cases, self.rows, self.unjudged)
        return [*(f"{n:,}" for n in counts), f"{self.worst:.2f}", str(self.wrong)]


def main() -> None:
    """Prints counts for each backend and dtype; exits with status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hostile", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every option with every change")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="(all but cuda)")
    parser.add_argument("--dtype", choices=[str(d)[6:] for d in DTYPES], action="append")
    options = parser.parse_args()
    backends = options.backend or [b for b in BACKENDS if b != "cuda"]
    dtypes = [d for d in DTYPES if not options.dtype or str(d)[6:] in options.dtype]
    torch.set_num_threads(1)  # tensors are small, so threads would only wait for each other
    # Backends vary fastest, because they share a cached truth.
    places = [p for p in itertools.product(dtypes, CELLS, backends) if has_case(p[2], p[0])]
    counts: dict[tuple[str, str], Counts] = collections.defaultdict(Counts)
    for dtype, cell, backend in rich.progress.track(places, transient=True):
        for case in cases(cell, dtype, backend, options.all):
            counts[backend, str(dtype)[6:]].add(judge(case, case.ours(backend)))
    table = Table("backend", "dtype", "cases", "rows", "not judged", "worst", "wrong")
    for place in sorted(counts, key=lambda place: backends.index(place[0])):
        table.add_row(*place, *counts[place].texts())
    everything = sum(counts.values(), Counts())
    table.add_row("all", "", *everything.texts(), end_section=True)
    rich.print(table)
    sys.exit(1 if everything.wrong else 0)


if __name__ == "__main__":
    main()
