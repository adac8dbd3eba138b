"""How results leave the benchmark: tables on the terminal, JSON and Markdown in a folder."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rich.table
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import fusedrnn

from .cases import THREADS

# bench/results holds what the README shows; it is only written to when asked for by --out.
RESULTS = Path("build/bench")


@dataclass(frozen=True)
class Table:
    """A title, column headings and rows of text; the first column is aligned left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Target:
    """A measured ratio and its upper bound."""

    what: str
    where: str
    value: float
    limit: float
    spread: str = ""

    @property
    def passed(self) -> bool:
        """Whether the ratio is within its bound."""
        return self.value <= self.limit


@dataclass
class Report:
    """All of one benchmark: ``numbers`` for machines, tables for people, and what went wrong."""

    name: str
    numbers: dict[str, Any]
    tables: list[Table]
    targets: list[Target] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """What a benchmark is given: its options and the bar to advance."""

    quick: bool
    out: Path
    progress: Progress
    options: argparse.Namespace


def main(
    benchmarks: Sequence[Callable[[Run], Report]],
    description: str | None,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """Runs benchmarks as a command and exits: with status 1 if a result is wrong.

    A missed target is no wrong result: a busy machine misses them too.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of results ({RESULTS})")
    add_options(parser)
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(THREADS)

    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file has no width of its own, and 80 breaks the lines
    about = _environment(sys.argv[1:])
    reports = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for benchmark in benchmarks:
            report = benchmark(Run(options.quick, out, progress, options))
            reports.append(report)
            for table in report.tables:
                progress.console.print(_rich_table(table))
            _write_json(out / f"{report.name}.json", report, about)

    targets = [target for report in reports for target in report.targets]
    if targets:
        console.print(_rich_table(_target_table(targets), mark=True))
    if len(reports) > 1:
        (out / "cpu.md").write_text(_markdown(reports, targets, about))
    console.print(f"{about['command']}: {about['cpu']}, {THREADS} threads, torch {about['torch']}")
    console.print(f"Results are in {out}")
    failures = [failure for report in reports for failure in report.failures]
    for failure in failures:
        console.print(f"[red]{failure}")
    sys.exit(1 if failures else 0)


def mib(size_bytes: float) -> str:
    """A size as text, in MiB."""
    return f"{size_bytes / 2**20:.1f}"


def _environment(arguments: list[str]) -> dict[str, Any]:
    module = Path(sys.argv[0])
    name = "bench" if module.stem == "__main__" else f"bench.{module.stem}"
    return {
        "command": " ".join(["python -m", name, *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fusedrnn": fusedrnn.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _write_json(path: Path, report: Report, about: dict[str, Any]) -> None:
    targets = [asdict(target) | {"passed": target.passed} for target in report.targets]
    content = {"environment": about, "targets": targets, **report.numbers}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _target_table(targets: list[Target]) -> Table:
    rows = [
        [
            target.what,
            target.where,
            f"{target.value:.3g}" + (f" {target.spread}" if target.spread else ""),
            f"≤ {target.limit:.2f}",
            "met" if target.passed else "missed",
        ]
        for target in targets
    ]
    return Table("Targets", ["ratio", "at", "measured", "target", ""], rows)


def _rich_table(table: Table, *, mark: bool = False) -> rich.table.Table:
    result = rich.table.Table(title=table.title, title_justify="left")
    for i, column in enumerate(table.columns):
        result.add_column(column, justify="left" if i == 0 else "right")
    for row in table.rows:
        colour = ("green" if row[-1] == "met" else "red") if mark else None
        result.add_row(*row[:-1], f"[{colour}]{row[-1]}" if colour else row[-1])
    return result


def _markdown(reports: list[Report], targets: list[Target], about: dict[str, Any]) -> str:
    tables = [_target_table(targets), *(table for report in reports for table in report.tables)]
    head = (
        f"`{about['command']}` on {about['cpu']}, {THREADS} threads, torch {about['torch']}, "
        f"float32, {about['date'][:10]}.\n"
    )
    return "\n".join([head, *(_markdown_table(table) for table in tables)])


def _markdown_table(table: Table) -> str:
    lines = [f"**{table.title}**", ""]
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|" + "|".join([":--", *["--:"] * (len(table.columns) - 1)]) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"
