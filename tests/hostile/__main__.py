"""The counts of hostile cases and the worst errors: ``python -m hostile`` in the folder tests."""

from __future__ import annotations

import argparse
import itertools
import sys

import rich.progress
from cases import DTYPES
from rich.table import Table

from . import BACKENDS, CELLS, cases, has_case
from .judge import judge


def main() -> None:
    """Of each backend and dtype. Exit status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hostile", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every option with every change")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="(all but cuda)")
    parser.add_argument("--dtype", choices=[str(d)[6:] for d in DTYPES], action="append")
    options = parser.parse_args()
    backends = options.backend or [b for b in BACKENDS if b != "cuda"]
    dtypes = [d for d in DTYPES if not options.dtype or str(d)[6:] in options.dtype]
    table = Table("backend", "dtype", "cases", "rows", "not judged", "worst", "wrong")
    wrong = 0
    totals = [0, 0, 0]
    places = list(itertools.product(backends, dtypes))
    for backend, dtype in rich.progress.track(places, transient=True):
        if not has_case(backend, dtype):
            continue
        every = [c for cell in CELLS for c in cases(cell, dtype, backend, options.all)]
        findings = [f for case in every for f in judge(case, case.ours(backend))]
        bad = sum(finding.is_wrong for finding in findings)
        counts = [len(every), sum(f.rows for f in findings), sum(f.unjudged for f in findings)]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        wrong += bad
        worst = max(finding.excess for finding in findings)
        table.add_row(backend, str(dtype)[6:], *map(str, counts), f"{worst:.2f}", str(bad))
    table.add_row("all", "", *map(str, totals), "", str(wrong))
    rich.print(table)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
