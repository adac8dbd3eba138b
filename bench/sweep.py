"""Measures contenders on a GPU over shapes and dtypes, important ones first, until time is up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .cases import (
    CUDA_KINDS,
    CUDA_QUICK,
    CUDA_SHAPES,
    ON_CUDA,
    ON_CUDA_LATER,
    OURS,
    TF32,
    Shape,
    has_targets,
)
from .report import Report, Run, set_up_torch
from .worker import STALL_S, Row, measure_apart

# Seconds that a process may go on for after the budget is spent.
OVERTIME_S = 20.0
# Compiling a step takes minutes.
LATER_STALL_S = 240.0


@dataclass(frozen=True)
class Case:
    """The shape and dtype at which contenders are compared.

    Attributes:
        shape: Its sizes.
        kind: Its dtype, by the name that --dtype has for it.
    """

    shape: Shape
    kind: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.kind}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return CUDA_KINDS[self.kind]

    def numbers(self) -> dict[str, Any]:
        """The case as JSON data."""
        return {"shape": vars(self.shape), "dtype": self.kind}

    @classmethod
    def of_numbers(cls, numbers: dict[str, Any]) -> Case:
        """The case from the result of ``numbers()``."""
        return cls(Shape(**numbers["shape"]), numbers["dtype"])


Results = dict[Case, dict[str, Row]]


def sweep(
    run: Run,
    module: str,
    groups: Sequence[Sequence[str]],
    report: Callable[[Results], Report],
    cases: Sequence[Case] = (),
) -> Report:
    """Fills in a row for every contender in every case, and writes the report after each job.

    A job is a group of contenders that the module's ``measure`` has in one process, or a single one
    of those that run later. If ``cases`` are given, there are no others, and nothing runs later.
    """
    later = () if cases else ON_CUDA_LATER
    cases = cases or _cases(run)
    missing = not_reached(run)
    names = [name for name in ON_CUDA if any(name in group for group in groups)]
    results: Results = {case: dict.fromkeys((*names, *later), missing) for case in cases}
    jobs = [(group, case, STALL_S) for case in cases for group in groups]
    jobs += [((name,), case, LATER_STALL_S) for case in cases for name in later]
    task = run.progress.add_task(report(results).name, total=len(jobs))

    clock = Budget(run)
    for group, case, stall_s in jobs:
        if clock.is_spent:
            break
        results[case] |= measure_apart(
            module, case.numbers(), group, end=clock.end, stall_s=stall_s
        )
        run.write(report(results))
        run.progress.advance(task)
        print(f"{clock.seconds:4.0f} s  {case}: {'; '.join(group)}", flush=True)
    return report(results)


class Budget:
    """The time budget of a run, which starts when it is created."""

    def __init__(self, run: Run) -> None:
        self.begin, self.budget_s = time.monotonic(), run.budget_s

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begin

    @property
    def is_spent(self) -> bool:
        """Whether the time is up, and nothing new may begin."""
        return self.seconds > self.budget_s

    @property
    def end(self) -> float:
        """The time of ``time.monotonic()`` at which everything must have ended."""
        return self.begin + self.budget_s + OVERTIME_S


def _cases(run: Run) -> list[Case]:
    shapes = run.options.shape or ([CUDA_QUICK] if run.quick else CUDA_SHAPES)
    cases = [Case(shape, kind) for kind in kinds(run, CUDA_KINDS) for shape in shapes]
    return sorted(cases, key=lambda case: not has_targets(case.shape, case.kind))


def kinds(run: Run, unless_chosen: Iterable[str]) -> Iterable[str]:
    """The dtypes of a run, by name."""
    chosen: list[str] = run.options.dtype or [*unless_chosen]
    return CUDA_KINDS if "all" in chosen else chosen


def opened(numbers: dict[str, Any]) -> Case:
    """The case of a job, in the process that measures it."""
    case = Case.of_numbers(numbers)
    set_up_torch(tf32=case.kind == TF32)
    return case


def release() -> None:
    """Frees a contender's memory, so that the next one finds as much."""
    torch.compiler.reset()  # it compiles a function for at most eight shapes
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # frees gigabytes of pinned memory; there is no public name


def not_reached(run: Run) -> Row:
    """The row of a contender that had not begun when the budget was spent."""
    return {"missing": f"not reached within {run.budget_s:.0f} s"}


def why_none(row: Row) -> str | None:
    """Why a row has no numbers; None if it has."""
    return row.get("error") or row.get("missing")


def numbers(results: Results) -> dict[str, Any]:
    """Results for JSON."""
    return {"cases": [case.numbers() | {"contenders": rows} for case, rows in results.items()]}


def failures(results: Results) -> list[str]:
    """Errors and missing rows of our modules. Errors of other contenders are in their rows only."""
    return [
        f"{name} failed at {case}: {row['error']}"
        if "error" in row
        else f"{name} is missing at {case}: {row['missing']}"
        for case, rows in results.items()
        for name, row in rows.items()
        if name.startswith(OURS)
        and ("error" in row or ("missing" in row and has_targets(case.shape, case.kind)))
    ]
