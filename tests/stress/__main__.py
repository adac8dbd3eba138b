"""Stresses the operators: ``python -m stress`` in the folder tests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import rich
import rich.progress
from rich.table import Table

from . import Row, Scale, growth, no_memory, poison, processes, threads
from .isolation import Broken, isolated


@dataclass(frozen=True)
class Experiment:
    """Runs an experiment; returns its row of the table."""

    run: Callable[[Scale], Row]
    environment: Mapping[str, str]
    # A limit for hangs, several times what an experiment takes on two busy cores.
    seconds: float = 1_200

    def row(self, scale: Scale) -> Row:
        """Runs an experiment in a process of its own."""
        try:
            row: Row = isolated(self.run, scale, seconds=self.seconds, environment=self.environment)
        except Broken as broken:
            row = Row(done="", wrong=[str(broken)])
        return row


EXPERIMENTS = {
    "training": Experiment(growth.training, growth.ENVIRONMENT),
    "failing": Experiment(growth.failing, growth.ENVIRONMENT),
    "threads": Experiment(threads.threads, threads.ENVIRONMENT),
    "no memory": Experiment(no_memory.no_memory, no_memory.ENVIRONMENT),
    "forked": Experiment(processes.forked, processes.ENVIRONMENT),
    "spawned": Experiment(processes.spawned, processes.ENVIRONMENT),
    "poison": Experiment(poison.poison, threads.ENVIRONMENT),
    "repetition": Experiment(threads.repetition, threads.ENVIRONMENT),
}


def main() -> None:
    """Prints a row for each experiment; exits with status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m stress", description=__doc__)
    parser.add_argument("--short", action="store_true", help="less of everything: about a minute")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scale = Scale(options.short, options.seed)
    names = [name for name in EXPERIMENTS if name in (options.only or EXPERIMENTS)]
    rows: dict[str, Row] = {}
    for name in rich.progress.track(names, transient=True):
        rows[name] = EXPERIMENTS[name].row(scale)
        print(f"{name}: {verdict(rows[name])}", flush=True)
    table = Table("experiment", "done", "measured", "verdict", show_lines=True)
    for name, row in rows.items():
        table.add_row(name, row.done, row.measured, verdict(row))
    rich.print(table)
    sys.exit(1 if any(row.wrong for row in rows.values()) else 0)


def verdict(row: Row) -> str:
    """What is wrong, or ok."""
    return "\n".join(row.wrong) or "ok"


if __name__ == "__main__":
    main()
