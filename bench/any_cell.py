"""Memory and time of cells that users write: ``python -m bench.any_cell``.

A training step of each cell of docs/examples/published_cells.py, by a plain loop, by a loop in
which torch.utils.checkpoint wraps each chunk, and by Recurrent, compiled and with steps in Python.
With --torch-compile also by a loop over the cell by torch.compile, and by torch's own ``scan``,
which takes minutes per cell. torch.distributions do not check arguments, as torch.compile has it.

Also seconds of the first use of a compiled cell: any_cell_first.py. On a GPU these come first, so
nvcc has built all libraries; each cell has a process of its own, and allocations are not counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from docs.examples.published_cells import CASES, Case

from . import any_cell_first
from .any_cell_steps import (
    BUILT_IN,
    CHECKPOINT,
    COMPILED_LOOP,
    LOOP,
    OURS,
    PROGRAM,
    SCAN,
    Size,
    Step,
    contenders,
)
from .clock import (
    cuda_peak_bytes,
    cuda_time_ms,
    interleaved_ms,
    measure_memory,
    ratio,
    ratio_of_medians,
)
from .faults import names_fault
from .plots import peaks_over_seq_len
from .report import Report, Run, Table, Target, main, mib, set_up_torch
from .sweep import LATER_STALL_S, Budget, not_reached, release, why_none
from .worker import Notes, Row, measure_apart

ON_CPU = (LOOP, CHECKPOINT, PROGRAM, BUILT_IN, OURS)
WITH_COMPILER = (COMPILED_LOOP, SCAN)
ON_CUDA_FIRST, ON_CUDA_THEN = (LOOP, PROGRAM, BUILT_IN), (OURS, CHECKPOINT)

PEAK_LIMIT = 0.25
BUILT_IN_LIMIT, BUILT_IN_TARGET = 1.1, "ForumCell"  # of a program's memory and time
TIME_LIMITS = {OURS: 1.6, PROGRAM: 0.75}
ROUNDS, BUDGET_S = 5, 20.0  # seconds for the times of a cell, or of a contender on a GPU
CUDA_BUDGET_S = 1.0
STALL_S = 60.0  # without a note from a contender, on a GPU

SIZE, QUICK_SIZE = Size(256, 32, 256), Size(64, 4, 16)
OVER_SEQ_LEN, QUICK_OVER_SEQ_LEN = (64, 128, 256, 512, 1024), (16, 64)
PLOTTED = "ForumCell"
# Measured first, because on a GPU the time may not suffice for all: the cells that the documents
# and the design of compiled cells name, and those that this package has built in.
FIRST = (
    *("ForumCell", "MinimalGatedUnit", "GRUCell", "LateResetGRU", "ResetBeforeGRU", "LSTMCell"),
    *("RNNCell", "PlaNet", "PeepholeLSTM", "LateResetGRU-no-norm", "sLSTM", "DreamerV3"),
)
QUICK_CELLS = ("ForumCell", "GRUCell", "LateResetGRU", "AttentionDecoder")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --cell and --torch-compile."""
    names = [case.name for case in CASES]
    parser.add_argument("--cell", choices=names, help="this cell only", default=None)
    parser.add_argument("--torch-compile", action="store_true", help="two loops by torch, too")


def run(run: Run) -> Report:
    """Measures all cells, and the peak of one of them over the length of the sequence."""
    size, cases = _size(run), _cases(run)
    names = (*ON_CPU, *WITH_COMPILER) if run.options.torch_compile else ON_CPU
    over = QUICK_OVER_SEQ_LEN if run.quick else OVER_SEQ_LEN
    torch.distributions.Distribution.set_default_validate_args(False)
    first_cases = cases[:1] if run.quick else cases
    total = len(cases) * len(names) + len(first_cases) + len(over)
    task = run.progress.add_task("any_cell", total=total)
    first = {}
    for case in first_cases:
        first[case.name] = any_cell_first.first_uses(case, size)
        run.progress.advance(task)
    results: dict[str, dict[str, Row]] = {}
    for case in cases:
        here = contenders(case, names)
        results[case.name] = measured(case, size, here, 2 if run.quick else ROUNDS)
        run.progress.advance(task, len(names))
    growth = []
    plotted = next(case for case in CASES if case.name == PLOTTED)
    for seq_len in over:
        long = Size(seq_len, size.batch, size.width)
        peaks = {
            name: measure_memory(_warm(Step(name, plotted, long, "cpu"))).peak_bytes
            for name in (LOOP, CHECKPOINT, OURS, PROGRAM)
        }
        growth.append({"seq_len": seq_len, "peak_bytes": peaks})
        run.progress.advance(task)
    _plot(run, growth, size)
    left_out = () if run.options.torch_compile else ("what needs --torch-compile",)
    return _report(size, names, results, growth, first, left_out)


def run_on_cuda(run: Run) -> Report:
    """Measures all cells on a GPU, until the time is up."""
    size, cases = _size(run), _cases(run)
    names = ON_CUDA_FIRST + ON_CUDA_THEN + WITH_COMPILER * run.options.torch_compile
    results: dict[str, dict[str, Row]] = {
        c.name: dict.fromkeys(contenders(c, names), not_reached(run)) for c in cases
    }
    # What needs torch's compiler takes longest, and comes when all cells have the rest.
    jobs = [(case, group, STALL_S) for group in (ON_CUDA_FIRST, ON_CUDA_THEN) for case in cases]
    if run.options.torch_compile:
        jobs += [(case, WITH_COMPILER, LATER_STALL_S) for case in cases]
    task = run.progress.add_task("any_cell", total=1 + len(jobs))
    budget = Budget(run)
    with tempfile.TemporaryDirectory() as cache:
        first = any_cell_first.first_uses_by_nvcc(cases, size, cache, budget.end)
        run.progress.advance(task)
        for case, group, stall_s in jobs:
            if budget.is_spent:
                break
            job = {"cell": case.name, "size": asdict(size), "cache": cache}
            results[case.name] |= measure_apart(
                "bench.any_cell", job, contenders(case, group), end=budget.end, stall_s=stall_s
            )
            run.write(_report(size, names, results, first=first))
            run.progress.advance(task)
    return _report(size, names, results, first=first)


def measure(job: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a cell on a GPU; see worker.py."""
    os.environ["FUSEDRNN_CACHE"] = job["cache"]
    case, size = next(case for case in CASES if case.name == job["cell"]), Size(**job["size"])
    torch.distributions.Distribution.set_default_validate_args(False)
    set_up_torch()
    for name in names:
        with notes.on(name):
            row, step = _memory_of(name, case, size, "cuda")
            if step is not None:
                row["each_ms"] = interleaved_ms(
                    {name: step.train}, rounds=ROUNDS, budget_s=CUDA_BUDGET_S, timer=cuda_time_ms
                )[name]
            notes.row(name, row)
            del step
            release()


def _size(run: Run) -> Size:
    return QUICK_SIZE if run.quick else SIZE


def _cases(run: Run) -> list[Case]:
    """Those of --cell; else all, or with --quick a few, in the order of FIRST."""
    if run.options.cell is not None:
        return [case for case in CASES if case.name == run.options.cell]
    cases = [case for case in CASES if not run.quick or case.name in QUICK_CELLS]
    place = {name: i for i, name in enumerate(FIRST)}
    return sorted(cases, key=lambda case: place.get(case.name, len(FIRST)))


def measured(
    case: Case, size: Size, names: Sequence[str], rounds: int, of_inputs: bool = False
) -> dict[str, Row]:
    """Peaks, allocations and times on the CPU, or why there are none.

    Args:
        of_inputs: Whether the inputs get gradients, too.
    """
    torch.compiler.reset()
    rows: dict[str, Row] = {}
    steps = {}
    for name in names:
        rows[name], step = _memory_of(name, case, size, "cpu", of_inputs)
        if step is not None:
            steps[name] = step.train
    times = interleaved_ms(steps, rounds=rounds, budget_s=BUDGET_S)
    for name, each in times.items():
        rows[name]["each_ms"] = each
    return rows


def _memory_of(
    name: str, case: Case, size: Size, device: str, of_inputs: bool = False
) -> tuple[Row, Step | None]:
    """The row of a contender without its times, and its step; or why there is none."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = Step(name, case, size, device, of_inputs)
            if device == "cuda":
                row = {"peak_bytes": cuda_peak_bytes(_warm(step))}
            else:
                row = asdict(measure_memory(_warm(step)))
            row["output_bytes"] = step.output_bytes
    except Exception as error:  # whatever the compiler raises
        if names_fault(str(error)):
            raise
        first_line = str(error).strip().split("\n")[0]
        return {"unable": f"{type(error).__name__}: {first_line}"}, None
    notes = [str(w.message) for w in caught if str(w.message).startswith("fusedrnn")]
    return row | ({"note": notes[0]} if notes else {}), step


def _warm(step: Step) -> Callable[[], object]:
    """What takes a training step, after the first one, which may compile."""
    step.train()
    return step.train


def _report(
    size: Size,
    names: Sequence[str],
    rows: dict[str, dict[str, Row]],
    growth: Sequence[dict[str, Any]] = (),
    first: dict[str, dict[str, Row]] | None = None,
    left_out: Sequence[str] = (),
) -> Report:
    results = {cell: with_ratios(of_cell) for cell, of_cell in rows.items()}
    tables = [table(size, results, names), unable(results)]
    content: dict[str, Any] = {"size": asdict(size), "cells": results}
    if growth:
        content["over_seq_len"] = growth
        tables.append(_growth_table(growth, size))
    targets = [
        target for name, result in results.items() for target in _targets(name, result, size)
    ]
    failures = [
        f"{name} failed at {cell}: {row['error']}"
        for cell, result in results.items()
        for name, row in result.items()
        if name.startswith("Recurrent") and "error" in row
    ]
    if first:
        content["first_use"] = first
        tables.append(any_cell_first.table(first, size))
        targets += any_cell_first.targets(first, size)
        failures += any_cell_first.failures(first)
    return Report("any_cell", content, [t for t in tables if t], targets, failures, left_out)


def with_ratios(rows: dict[str, Row]) -> dict[str, Row]:
    """Also multiples of the loop's memory and time; of medians, if each had its own process."""
    loop, found = rows[LOOP], {}
    for name, row in rows.items():
        found[name] = row = {**row}
        if "each_ms" not in row:
            continue
        each = row.pop("each_ms")
        row["ms"] = median(each)
        compared = ratio_of_medians if "process" in row else ratio
        if "each_ms" in loop:
            row["time_ratio"] = asdict(compared(each, loop["each_ms"]))
            row["peak_ratio"] = row["peak_bytes"] / loop["peak_bytes"]
        built_in = rows.get(BUILT_IN, {})
        if name == PROGRAM and "each_ms" in built_in:
            row["time_to_built_in"] = asdict(compared(each, built_in["each_ms"]))
            row["peak_to_built_in"] = row["peak_bytes"] / built_in["peak_bytes"]
    return found


def _targets(cell: str, result: dict[str, Any], size: Size) -> list[Target]:
    found = []

    def add(names: str, peak: float, peak_limit: float, time: Row, time_limit: float) -> None:
        found.append(Target(f"{cell}, peak, {names}", str(size), peak, peak_limit))
        spread = f"({time['least']:.2f}-{time['most']:.2f})"
        what = f"{cell}, time, {names}"
        found.append(Target(what, str(size), time["median"], time_limit, spread))

    for name, limit in TIME_LIMITS.items():
        row = result.get(name, {})
        if "time_ratio" in row:
            add(f"{name} / {LOOP}", row["peak_ratio"], PEAK_LIMIT, row["time_ratio"], limit)
    row = result.get(PROGRAM, {})
    if cell == BUILT_IN_TARGET and "time_to_built_in" in row:
        peak, time = row["peak_to_built_in"], row["time_to_built_in"]
        add(f"{PROGRAM} / {BUILT_IN}", peak, BUILT_IN_LIMIT, time, BUILT_IN_LIMIT)
    return found


def table(size: Size, results: dict[str, Any], names: Sequence[str]) -> Table:
    names = [name for name in names if any(name in result for result in results.values())]
    columns = ["", "outputs MiB", "loop MiB", "loop ms"]
    columns += [f"{name}: {what}" for name in names if name != LOOP for what in ("peak", "time")]
    rows = []
    for cell, result in results.items():
        loop = result[LOOP]
        row = (
            [cell, mib(loop["output_bytes"]), mib(loop["peak_bytes"]), f"{loop['ms']:.0f}"]
            if "ms" in loop
            else [cell, "-", "-", "-"]
        )
        for name in names:
            if name != LOOP:
                measured = result.get(name, {})
                has_any = "time_ratio" in measured
                row.append(f"{measured['peak_ratio']:.2f}" if has_any else "-")
                row.append(f"{measured['time_ratio']['median']:.2f}" if has_any else "-")
        rows.append(row)
    return Table(f"A training step as a multiple of the plain loop's, {size}", columns, rows)


def unable(results: dict[str, Any]) -> Table | None:
    """Contenders that did not run, and why; None if all did."""
    rows = [
        [cell, name, reason]
        for cell, result in results.items()
        for name, measured in result.items()
        if (reason := measured.get("unable") or measured.get("note") or why_none(measured))
    ]
    return Table("What did not run, or not compiled", ["cell", "", "why"], rows) if rows else None


def _growth_table(growth: Sequence[dict[str, Any]], size: Size) -> Table:
    names = list(growth[0]["peak_bytes"])
    rows = [
        [str(row["seq_len"]), *(mib(row["peak_bytes"][name]) for name in names)] for row in growth
    ]
    title = f"Peak memory in MiB over T, {PLOTTED}, B={size.batch} width={size.width}"
    return Table(title, ["T", *names], rows)


def _plot(run: Run, growth: Sequence[dict[str, Any]], size: Size) -> None:
    names = list(growth[0]["peak_bytes"])
    peaks_over_seq_len(
        run.out / "any_cell_over_seq_len.png",
        f"{PLOTTED}, B={size.batch} width={size.width}, float32",
        [row["seq_len"] for row in growth],
        {name: [row["peak_bytes"][name] for row in growth] for name in names},
        bold=OURS,
    )


if __name__ == "__main__":
    main([run], __doc__, add_options, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
