"""Output of the benchmarks: tables on the terminal, JSON and Markdown in a folder.

Longer than 350 lines, because terminal, JSON and Markdown show the same tables.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    import rich.table
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text
except ImportError:  # tables are then printed as Markdown, without a progress bar
    rich = None

import fusedrnn

from .cases import CUDA_BUDGET_S, CUDA_KINDS, TF32, THREADS, Shape

DTYPES = {name: dtype for name, dtype in CUDA_KINDS.items() if name != TF32}

# bench/results has the README's numbers; only --out writes there.
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
    """The results of a benchmark: ``numbers`` for machines, tables for people, and failures."""

    name: str
    numbers: dict[str, Any]
    tables: list[Table]
    targets: list[Target] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: Sequence[str] = ()  # measurements for which a short run has no time


@dataclass(frozen=True)
class Run:
    """The arguments of a benchmark: its options, its progress bar, and the folder of results."""

    quick: bool
    out: Path
    progress: Progress | NoProgress
    options: argparse.Namespace
    about: dict[str, Any]

    @property
    def everything(self) -> bool:
        """Whether --all was given, and everything is to be measured."""
        return bool(getattr(self.options, "all", True))

    @property
    def budget_s(self) -> float:
        """Seconds after which a benchmark begins nothing new; unlimited on the CPU."""
        given = getattr(self.options, "budget_s", None)
        if given is not None:
            return float(given)
        return CUDA_BUDGET_S if self.options.device == "cuda" else math.inf

    def write(self, report: Report) -> None:
        """Writes the JSON of a report, which may be unfinished."""
        targets = [asdict(target) | {"passed": target.passed} for target in report.targets]
        content = {"environment": self.about, "targets": targets, "failures": report.failures}
        content |= report.numbers | {"tables": list(map(markdown_table, report.tables))}
        whole = self.out / f"{report.name}.json"
        partial = whole.with_suffix(".partial")  # so that an interruption leaves no half of a file
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(whole)


class NoProgress:
    """Replaces rich's progress bar if rich is not installed; does nothing."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_task(self, description: str, total: int) -> Any:
        """Does nothing."""
        return 0

    def advance(self, task: Any, steps: int = 1) -> None:
        """Does nothing."""

    def update(self, task: Any, *, completed: int) -> None:
        """Does nothing."""


class Screen:
    """The terminal, through rich, or in plain text if rich is not installed."""

    def __init__(self) -> None:
        self.console = Console() if rich else None
        if self.console and not self.console.is_terminal:
            self.console.width = 120  # for a file: the default of 80 would break lines

    def progress(self) -> Progress | NoProgress:
        """A bar for each benchmark."""
        if not self.console:
            return NoProgress()
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )

    def table(self, table: Table, *, mark: bool = False) -> None:
        """Prints a table; with ``mark``, its last column in colours."""
        if self.console:
            self.console.print(_rich_table(table, mark=mark))
        else:
            print(markdown_table(table))

    def line(self, text: str, style: str | None = None) -> None:
        """Prints a line."""
        if self.console:
            self.console.print(text, style=style, markup=False)
        else:
            print(text)


Benchmark = Callable[[Run], Report]


def main(
    benchmarks: Sequence[Benchmark],
    description: str | None,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    on_cuda: Sequence[Benchmark] = (),
    cuda_options: Sequence[str] = ("--dtype", "--shape", "--budget-s"),
    afterwards: Callable[[Run], object] = lambda run: None,
) -> None:
    """Runs benchmarks as a command and exits: with status 1 if a result is wrong.

    A missed target is not a wrong result, since a busy machine misses targets too. ``on_cuda`` are
    the benchmarks for ``--device cuda``, the default if there are no others; ``cuda_options`` are
    their options. ``afterwards`` is called when all results are written.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of results ({RESULTS})")
    parser.set_defaults(device="cpu" if benchmarks else "cuda")
    add_options(parser)
    if on_cuda:
        _add_cuda_options(parser, cuda_options)
    options = parser.parse_args()
    if options.device == "cuda":
        if getattr(options, "all", False):
            parser.error("--all needs --device cpu")
        benchmarks = on_cuda
    elif on_cuda and any(getattr(options, name) is not None for name in map(_field, cuda_options)):
        parser.error(f"{', '.join(cuda_options)} need --device cuda")
    elif not benchmarks:
        parser.error("there is nothing to measure but with --device cuda")
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    set_up_torch()

    screen = Screen()
    about = _environment(sys.argv[1:], options.device)
    reports = []
    with screen.progress() as progress:
        for benchmark in benchmarks:
            run = Run(options.quick, out, progress, options, about)
            report = benchmark(run)
            reports.append(report)
            for table in report.tables:
                screen.table(table)
            run.write(report)

    targets = [target for report in reports for target in report.targets]
    if targets:
        screen.table(_target_table(targets), mark=True)
    if len(reports) > 1:
        (out / f"{options.device}.md").write_text(_markdown(reports, targets, about))
    afterwards(Run(options.quick, out, NoProgress(), options, about))
    screen.line(f"{about['command']}: {machine(about)}")
    screen.line(f"Results are in {out}")
    if left_out := _left_out(reports):
        screen.line(left_out)
    failures = [failure for report in reports for failure in report.failures]
    for failure in failures:
        screen.line(failure, style="red")
    sys.exit(1 if failures else 0)


def set_up_torch(*, tf32: bool = False) -> None:
    """Sets up torch, the same in every process that measures.

    ``tf32``: whether recurrent layers may round products of float32, nn.LSTM and ours alike.
    """
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))  # OMP_NUM_THREADS may be less
    torch.backends.cuda.matmul.allow_tf32 = False  # torch's default, also while cuDNN may use TF32
    torch.backends.cudnn.allow_tf32 = tf32


def _add_cuda_options(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    known: dict[str, dict[str, Any]] = {
        "--dtype": {"action": "append", "choices": [*CUDA_KINDS, "all"], "help": "may be repeated"},
        "--shape": {
            "action": "append",
            "type": _shape,
            "metavar": "T,B,H",
            "help": "may be repeated",
        },
        "--budget-s": {
            "type": float,
            "metavar": "S",
            "help": f"seconds after which a benchmark begins nothing new ({CUDA_BUDGET_S})",
        },
    }
    default = parser.get_default("device")
    parser.add_argument("--device", type=_device, help=f"cpu or cuda ({default})")
    cuda = parser.add_argument_group("with --device cuda")
    for option in options:
        cuda.add_argument(option, **known[option])


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _device(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU")
    return name


def _shape(text: str) -> Shape:
    try:
        seq_len, batch, hidden_size = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be T,B,H, got {text}") from None
    return Shape(seq_len, batch, hidden_size)


def mib(size_bytes: float) -> str:
    """A size as text, in MiB."""
    return f"{size_bytes / 2**20:.1f}"


def _environment(arguments: list[str], device: str) -> dict[str, Any]:
    module = Path(sys.argv[0])
    name = "bench" if module.stem == "__main__" else f"bench.{module.stem}"
    about = {
        "command": " ".join(["python -m", name, *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fusedrnn": fusedrnn.__version__,
    }
    if device == "cuda":
        about |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": f"in rows of {TF32} alone",
        }
    return about


def machine(about: dict[str, Any]) -> str:
    """The machine of a measurement, as text."""
    if "gpu" in about:
        tf32 = f"TF32 {about['tf32']}"
        return f"{about['gpu']}, torch {about['torch']}, CUDA {about['cuda']}, {tf32}"
    threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}"
    return f"{about['cpu']}, {threads}, torch {about['torch']}"


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _target_table(targets: list[Target]) -> Table:
    rows = [
        [
            target.what,
            target.where,
            f"{target.value:.4g}" + (f" {target.spread}" if target.spread else ""),
            f"≤ {target.limit:.2f}",
            "met" if target.passed else "missed",
        ]
        for target in targets
    ]
    return Table("Targets", ["ratio", "at", "measured", "target", ""], rows)


def _left_out(reports: list[Report]) -> str:
    """A line with everything that a short run has left out; empty if nothing was."""
    names = ", ".join(what for report in reports for what in report.left_out)
    return names and f"Left out, with their targets, and measured by python -m bench --all: {names}"


def _rich_table(table: Table, *, mark: bool = False) -> rich.table.Table:
    result = rich.table.Table(title=table.title, title_justify="left")
    for i, column in enumerate(table.columns):
        result.add_column(column, justify="left" if i == 0 else "right")
    for row in table.rows:
        colour = ("green" if row[-1] == "met" else "red") if mark else None
        result.add_row(*map(Text, row[:-1]), Text(row[-1], style=colour or ""))
    return result


def _markdown(reports: list[Report], targets: list[Target], about: dict[str, Any]) -> str:
    tables = [_target_table(targets), *(table for report in reports for table in report.tables)]
    dtype = "" if "gpu" in about else "float32, "
    head = f"`{about['command']}` on {machine(about)}, {dtype}{about['date'][:10]}.\n"
    left_out = [f"{line}\n"] if (line := _left_out(reports)) else []
    return "\n".join([head, *(markdown_table(table) for table in tables), *left_out])


def markdown_table(table: Table) -> str:
    """A table as text."""
    return f"**{table.title}**\n\n{markdown_rows(table)}"


def markdown_rows(table: Table) -> str:
    """A table as text, without its title."""
    lines = ["| " + " | ".join(table.columns) + " |"]
    lines.append("|" + "|".join([":--", *["--:"] * (len(table.columns) - 1)]) + "|")
    for row in table.rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"
