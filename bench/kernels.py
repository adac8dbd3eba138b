"""Where the GPU's time of a training step goes, kernel by kernel: ``python -m bench.kernels``.

torch's profiler says how long each kernel of a training step ran. The table also has their sum and
the time of a step without the profiler: in the difference, the GPU waited.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .cases import CUDA_QUICK, CUDA_SHAPES, GRU, LSTM, OUR_GRU, OUR_LSTM, OURS, TF32, training_step
from .clock import cuda_kernels, cuda_time_ms, interleaved_ms
from .report import Report, Run, Table, main
from .sweep import Budget, Case, Results, kinds, not_reached, numbers, opened, why_none
from .worker import Notes, measure_apart

NAMES = (LSTM, GRU, OURS, OUR_GRU, OUR_LSTM)
KINDS = ("bfloat16", TF32)
STEPS, ROUNDS, BUDGET_S = 2, 5, 0.5
SHOWN = 6  # kernels of a step in the table; the others share a row
NAME_CHARACTERS = 60


def run_on_cuda(run: Run) -> Report:
    """Measures all contenders at all sizes."""
    shapes = run.options.shape or ([CUDA_QUICK] if run.quick else CUDA_SHAPES)
    cases = [Case(shape, kind) for kind in kinds(run, KINDS) for shape in shapes]
    results: Results = {case: dict.fromkeys(NAMES, not_reached(run)) for case in cases}
    budget = Budget(run)
    task = run.progress.add_task("kernels", total=len(cases))
    for case in cases:
        if budget.is_spent:
            break
        results[case] |= measure_apart("bench.kernels", case.numbers(), NAMES, end=budget.end)
        run.write(report(results))
        run.progress.advance(task)
    return report(results)


def measure(numbers: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a case; see worker.py."""
    case = opened(numbers)
    for name in names:
        with notes.on(name):
            step = training_step(name, case.shape, "cuda", case.dtype)
            for _ in range(2):  # loads kernels, and allocates the memory that libraries keep
                step.train()
            train_ms = interleaved_ms(
                {name: step.train}, rounds=ROUNDS, budget_s=BUDGET_S, timer=cuda_time_ms
            )[name]
            of_kernels: dict[str, list[float]] = defaultdict(list)
            for ran in cuda_kernels(step.train, STEPS):
                of_kernels[ran.name].append(ran.end_us - ran.begin_us)
            kernels = [
                {"kernel": kernel, "count": len(us) / STEPS, "us": sum(us) / STEPS}
                for kernel, us in of_kernels.items()
            ]
            kernels.sort(key=lambda of: -of["us"])
            notes.row(name, {"train_ms": train_ms, "kernels": kernels})


def report(results: Results) -> Report:
    """A table for each case."""
    tables = [_table(case, rows) for case, rows in results.items()]
    failures = [
        f"{name} failed at {case}: {row['error']}"
        for case, rows in results.items()
        for name, row in rows.items()
        if name.startswith(OURS) and "error" in row
    ]
    return Report("kernels", numbers(results), tables, failures=failures)


def _table(case: Case, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    lines = []
    for name, row in rows.items():
        if reason := why_none(dict(row)):
            lines.append([name, reason, "", "", ""])
            continue
        kernels, step_us = row["kernels"], 1000 * median(row["train_ms"])
        rest = kernels[SHOWN:]
        shown = [(short(of["kernel"]), of["count"], of["us"]) for of in kernels[:SHOWN]]
        shown.append((f"{len(rest)} other kernels", *(sum(of[k] for of in rest) for k in COLUMNS)))
        busy_us = sum(of["us"] for of in kernels)
        shown.append(("none", 0, step_us - busy_us))
        lines.append([name, "a training step", "", f"{step_us:.0f}", "1.00"])
        lines += [
            ["", kernel, f"{count:g}", f"{us:.0f}", f"{us / step_us:.2f}"]
            for kernel, count, us in shown
        ]
    return Table(f"Kernels, {case}", ["", "kernel", "launches", "µs", "of the step"], lines)


COLUMNS = ("count", "us")


def short(kernel: str) -> str:
    """The name of a kernel, without namespaces and without most of its arguments."""
    name = re.sub(r"\(anonymous namespace\)::|\bvoid |\b(?:at|native|fusedrnn|cuda)::", "", kernel)
    return name if len(name) <= NAME_CHARACTERS else name[: NAME_CHARACTERS - 1] + "…"


if __name__ == "__main__":
    main([], __doc__, on_cuda=[run_on_cuda])
