"""Runs calls of hostile scales and finds the worst errors: ``python -m calls`` in tests."""

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

from . import BACKENDS, computing
from .draw import HOSTILE, scales
from .judge import Finding, judge
from .trial import Trial


@dataclass
class Counts:
    """Sums over calls; ``worst`` is the largest ratio of an error to its bound."""

    calls: int = 0
    rows: int = 0
    unjudged: int = 0
    worst: float = 0.0
    wrong: int = 0

    def add(self, findings: list[Finding]) -> None:
        """Adds a call."""
        self.calls += 1
        self.rows += sum(finding.rows for finding in findings)
        self.unjudged += sum(finding.unjudged for finding in findings)
        self.worst = max(self.worst, *(finding.excess for finding in findings))
        self.wrong += sum(finding.is_wrong for finding in findings)


def main() -> None:
    """Prints counts for each backend and dtype; exits with status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m calls", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every option with every change")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="(all but cuda)")
    parser.add_argument("--dtype", choices=[str(d)[6:] for d in DTYPES], action="append")
    options = parser.parse_args()
    backends = options.backend or [b for b in BACKENDS if b != "cuda"]
    dtypes = [d for d in DTYPES if not options.dtype or str(d)[6:] in options.dtype]
    torch.set_num_threads(1)  # tensors are small, so threads would only wait for each other
    counts: dict[tuple[str, str], Counts] = collections.defaultdict(Counts)
    everything = Counts()
    for dtype, cell in rich.progress.track([*itertools.product(dtypes, HOSTILE)], transient=True):
        for call, some in scales(cell, dtype, backends, options.all):
            trial = Trial(call)
            for backend in some:
                with computing(backend) as device:
                    findings = judge(trial, trial.ours(device))
                for sums in (counts[backend, str(dtype)[6:]], everything):
                    sums.add(findings)
    table = Table("backend", "dtype", "calls", "rows", "not judged", "worst", "wrong")
    places = sorted(counts, key=lambda place: backends.index(place[0]))
    for place in [*places, ("all", "")]:
        c = counts.get(place, everything)
        numbers = [f"{n:,}" for n in (c.calls, c.rows, c.unjudged)]
        table.add_row(*place, *numbers, f"{c.worst:.2f}", str(c.wrong))
    rich.print(table)
    sys.exit(1 if everything.wrong else 0)


if __name__ == "__main__":
    main()
