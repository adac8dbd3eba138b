"""Compiled cells, launched and as one CUDA graph: ``python -m bench.cell_graphs``.

Forward under no_grad and a training step of six cells of docs/examples/published_cells.py, which
differ in the products and sums of a step. Once as they are, where the host launches each stage of
each step, and once as a graph that torch has captured of the whole call, where launches cost
little. What a graph takes, a persistent kernel for such cells would have to be faster than.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from docs.examples.published_cells import CASES

from . import any_cell_first
from .any_cell_steps import PROGRAM, Size, Step
from .clock import cuda_time_ms, interleaved_ms
from .report import Report, Run, Table, main, set_up_torch
from .steps import captured
from .sweep import Budget, not_reached, release, why_none
from .worker import Notes, Row, measure_apart

CELLS = ("PlaNet", "LayerNormLSTM", "DreamerV3", "sLSTM", "ForumCell", "IndRNN")
SIZE, QUICK_SIZE = Size(256, 32, 256), Size(16, 4, 16)
LAUNCHED, GRAPH = "launched", "CUDA graph"
PASSES = {"forward": "forward", "train": "training step"}
ROUNDS, BUDGET_S = 10, 1.5

Results = dict[str, dict[str, Row]]


def run_on_cuda(run: Run) -> Report:
    """Builds all libraries at the same time, then measures the cells one by one."""
    size = QUICK_SIZE if run.quick else SIZE
    rows: Results = {cell: dict.fromkeys((LAUNCHED, GRAPH), not_reached(run)) for cell in CELLS}
    first: Results = {}
    task = run.progress.add_task("cell_graphs", total=3)
    budget = Budget(run)
    with tempfile.TemporaryDirectory() as cache:
        cases = [case for case in CASES if case.name in CELLS]
        first = any_cell_first.first_uses_by_nvcc(cases, size, cache, budget.end)
        run.progress.advance(task)
        for how in (LAUNCHED, GRAPH):  # a process each, since a failed capture may cost more
            if budget.is_spent:
                break
            job = {"how": how, "size": asdict(size), "cache": cache}
            found = measure_apart("bench.cell_graphs", job, CELLS, end=budget.end)
            for cell, row in found.items():
                rows[cell][how] = row
            run.write(report(rows, first, size))
            run.progress.advance(task)
    return report(rows, first, size)


def measure(job: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures cells in one of the two ways; see worker.py."""
    os.environ["FUSEDRNN_CACHE"] = job["cache"]
    cases = {case.name: case for case in CASES}
    torch.distributions.Distribution.set_default_validate_args(False)
    set_up_torch()
    for name in names:
        with notes.on(name):
            step = Step(PROGRAM, cases[name], Size(**job["size"]), "cuda")
            calls: dict[str, Callable[[], object]] = {
                "forward": torch.no_grad()(step.forward),
                "train": step.train,
            }
            for call in calls.values():
                call()
                call()  # the first one looks for the library, and compares
            if job["how"] == GRAPH:
                calls = {which: captured(call).replay for which, call in calls.items()}
            times = interleaved_ms(calls, rounds=ROUNDS, budget_s=BUDGET_S, timer=cuda_time_ms)
            notes.row(name, {f"{which}_ms": ms for which, ms in times.items()})
            del step, calls
            release()


def report(rows: Results, first: Results, size: Size) -> Report:
    """Microseconds per step, side by side; and the seconds of first uses."""
    lines, failures = [], any_cell_first.failures(first)
    for cell, of in rows.items():
        failures += [f"{cell}, {name}: {why}" for name, row in of.items() if (why := why_none(row))]
        line = [cell]
        for which in PASSES:
            us = [_step_us(of[name], which, size) for name in (LAUNCHED, GRAPH)]
            ratio = f"{us[1] / us[0]:.2f}" if us[0] and us[1] else "-"
            line += [*(f"{of_step:.1f}" if of_step else "-" for of_step in us), ratio]
        lines.append(line)
    columns = ["microseconds per step"]
    columns += [f"{of}, {what}" for of in PASSES.values() for what in (LAUNCHED, GRAPH, "ratio")]
    tables = [Table(f"Compiled cells, {size}, float32", columns, lines)]
    if first:
        tables.append(any_cell_first.table(first, size))
    content = {
        "size": asdict(size),
        "first_use": first,
        "rows": [
            {"cell": cell, "how": name} | row
            for cell, of in rows.items()
            for name, row in of.items()
        ],
    }
    return Report("cell_graphs", content, tables, [], failures)


def _step_us(row: Row, which: str, size: Size) -> float | None:
    times = row.get(f"{which}_ms")
    return 1e3 * median(times) / size.seq_len if times else None


if __name__ == "__main__":
    main([], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
