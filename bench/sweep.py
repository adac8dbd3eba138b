"""Contenders on a GPU, over shapes and dtypes: what matters most first, until time is over."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .cases import (
    CUDA_DTYPES,
    CUDA_QUICK,
    CUDA_SHAPES,
    ON_CUDA,
    ON_CUDA_LATER,
    OURS,
    Shape,
    has_targets,
)
from .report import DTYPES, Report, Run

# Numbers of a contender, or why there are none, under "error" or "missing".
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Where contenders are compared."""

    shape: Shape
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        """As in --dtype."""
        return str(self.dtype).removeprefix("torch.")


Results = dict[Case, dict[str, Row]]


def sweep(
    run: Run,
    measure: Callable[[Sequence[str], Case], dict[str, Row]],
    report: Callable[[Results], Report],
) -> Report:
    """Fills in a row for every contender in every case, and writes the report after each job."""
    cases = _cases(run)
    missing = not_reached(run)
    results: Results = {case: dict.fromkeys((*ON_CUDA, *ON_CUDA_LATER), missing) for case in cases}
    jobs: list[tuple[tuple[str, ...], Case]] = [(ON_CUDA, case) for case in cases]
    jobs += [((name,), case) for case in cases for name in ON_CUDA_LATER]
    task = run.progress.add_task(report(results).name, total=len(jobs))

    begin = time.perf_counter()
    for names, case in jobs:
        if time.perf_counter() - begin > run.budget_s:
            break
        results[case] = results[case] | measure(names, case)
        run.write(report(results))
        release()
        run.progress.advance(task)
        print(f"{time.perf_counter() - begin:4.0f} s  {case}: {'; '.join(names)}", flush=True)
    return report(results)


def _cases(run: Run) -> list[Case]:
    chosen = run.options.dtype or ["all"]
    dtypes = CUDA_DTYPES if "all" in chosen else [DTYPES[name] for name in chosen]
    shapes = run.options.shape or ([CUDA_QUICK] if run.quick else CUDA_SHAPES)
    cases = [Case(shape, dtype) for dtype in dtypes for shape in shapes]
    return sorted(cases, key=lambda case: not has_targets(case.shape, case.dtype))


def release() -> None:
    """Gives back what a job took, so that none finds less memory than the one before."""
    torch.compiler.reset()  # it compiles one function for eight shapes only
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # gigabytes of pinned memory; has no public name


def attempt(call: Callable[[], Row]) -> Row:
    """What a call returns, or its error: a contender that fails must not end all."""
    try:
        return call()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]:.150}"}


def not_reached(run: Run) -> Row:
    """The row of what has not begun when the budget is spent."""
    return {"missing": f"not reached within {run.budget_s:.0f} s"}


def why_none(row: Row) -> str | None:
    """Why a row has no numbers; None if it has."""
    return row.get("error") or row.get("missing")


def numbers(results: Results) -> dict[str, Any]:
    """Results for JSON."""
    return {
        "cases": [
            {"shape": vars(case.shape), "dtype": case.dtype_name, "contenders": rows}
            for case, rows in results.items()
        ]
    }


def failures(results: Results) -> list[str]:
    """Errors of ours. Those of others are theirs, and stand in their rows."""
    return [
        f"{name} failed at {case}: {row['error']}"
        for case, rows in results.items()
        for name, row in rows.items()
        if name.startswith(OURS) and "error" in row
    ]
