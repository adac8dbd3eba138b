"""Finds the first wrong number that a GPU computes: ``python -m bench.smoke``.

One mma of each dtype, and hops between two blocks by each way of exchange, with their time; a few
steps of a persistent kernel, of every cell, dtype, depth and way of exchange, forward and backward,
beside single steps; and single steps over tensors in odd strides, that is matrix products of every
layout, beside the CPU. Each probe is a process of its own, which goes on in another one after a
fault. What is wrong is named by step, row, unit and gate. With --quick one step of each cell.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from . import contain
from .contain import ROOT
from .machine import cuda_tool, nvidia_smi
from .report import DTYPES, Report, Run, Table, main, set_up_torch
from .step_probe import LAYOUTS, SIZES, SIZES_FLOAT32, Step, persistent, strided
from .sweep import Budget, not_reached, why_none
from .worker import Notes, Row, error_row, measure_apart

SOURCE = ROOT / "bench" / "smoke.cu"
PROGRAM = ROOT / "build" / "gpu-check-smoke"
COMPILE_S = 60
PROGRAM_PROBES = ("mma", "packets", "flags")  # one by one, since hops are timed
CELLS = {
    "gru": Step("gru"),
    "lstm": Step("lstm"),
    "projected lstm": Step("projected_lstm"),
    "stochastic gru": Step("stochastic_gru"),
    "stochastic gru, given noise": Step("stochastic_gru", noise="eps"),
    "stochastic gru, no noise": Step("stochastic_gru", noise="none"),
}
STRIDES = "single steps in odd strides"
PROCESSES = 4
MOST_SAID = 5  # findings of a probe that are printed

# The rows of a probe, by trial.
Rows = dict[str, Row]


def run_on_cuda(run: Run) -> Report:
    """Runs all probes, the smallest first."""
    of_program = () if run.quick else PROGRAM_PROBES
    probes: dict[str, Rows] = {name: {name: not_reached(run)} for name in of_program}
    for name in (*CELLS, STRIDES):
        chosen = list(trials(name))[: 1 if run.quick else None]
        probes[name] = dict.fromkeys(chosen, not_reached(run))
    budget = Budget(run)
    task = run.progress.add_task("smoke", total=len(probes))

    def apart(name: str) -> tuple[str, Rows]:
        return name, measure_apart("bench.smoke", name, list(probes[name]), end=budget.end)

    try:
        if of_program:
            compile_program(PROGRAM)
    except (OSError, RuntimeError) as error:
        probes |= {name: {name: error_row(error)} for name in of_program}
    else:
        for name in of_program:
            probes[name] = {name: program_row(PROGRAM, name, budget.end)}
            run.write(report(probes))
            run.progress.advance(task)
    with ThreadPoolExecutor(PROCESSES) as pool:
        for name, rows in pool.map(apart, (*CELLS, STRIDES)):
            probes[name] |= rows
            run.write(report(probes))
            run.progress.advance(task)
    return report(probes)


def compile_program(to: Path, architecture: str | None = None) -> None:
    """Compiles the program of the first probes for the GPU of this machine.

    Raises:
        OSError: There is no nvcc.
        RuntimeError: It does not compile.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    target = architecture or f"sm_{nvidia_smi('compute_cap').replace('.', '')}"
    command = [cuda_tool("nvcc"), "-std=c++17", "-O3", f"-arch={target}", "-o", str(to)]
    end = time.monotonic() + COMPILE_S
    ended = contain.run([*command, str(SOURCE)], lambda: end)
    if ended.status != 0:
        print(ended.tail)
        raise RuntimeError(f"{SOURCE.name} does not compile: {ended.how}")


def program_row(program: Path, name: str, end: float) -> Row:
    """The row of a probe that the program runs."""
    ended = contain.run([str(program), name], lambda: end)
    said = ended.tail.strip().splitlines()
    row: Row = {"said": said, "wrong": [line for line in said if line.startswith("wrong: ")]}
    if found := re.search(r"(\d+) ns", ended.tail):
        row["hop_ns"] = int(found[1])
    if ended.status != 0 and not row["wrong"]:
        row["error"] = f"{ended.how}: {(said or [''])[-1]}"
    return row


def trials(probe: str) -> dict[str, Callable[[], list[str]]]:
    """The trials of a probe by name, the smallest first; each returns what is wrong."""
    if probe == STRIDES:
        return {
            f"{step}, {layout}": partial(strided, step, layout)
            for dtype in (*DTYPES.values(), torch.float64)
            for step in (Step("gru", dtype, seq_len=3),)
            for layout in LAYOUTS
        }
    steps = [
        replace(CELLS[probe], dtype=dtype, seq_len=seq_len, size=size, by_flags=by_flags)
        for dtype in DTYPES.values()
        for size in (SIZES_FLOAT32 if dtype is torch.float32 else SIZES).values()
        for seq_len, by_flags in itertools.product((1, 2, 3), (False, True))
    ]
    return {str(step): partial(persistent, step) for step in steps}


def measure(probe: str, names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a probe, one for each trial; see worker.py."""
    set_up_torch()
    # float32 has persistent kernels only with products rounded to TF32.
    torch.backends.cudnn.rnn.fp32_precision = "ieee" if probe == STRIDES else "tf32"
    tried = trials(probe)
    for name in names:
        with notes.on(name):
            notes.row(name, {"wrong": tried[name]()})


def report(probes: dict[str, Rows]) -> Report:
    """The outcome of all probes."""
    lines, failures = [], []
    for name, rows in probes.items():
        reasons = [f"{what}: {reason}" for what, row in rows.items() if (reason := why_none(row))]
        reasons += [
            f"{what}: {wrong}" for what, row in rows.items() for wrong in row.get("wrong", [])
        ]
        failures += reasons[:MOST_SAID]
        if reasons[MOST_SAID:]:
            failures.append(f"{name}: and {len(reasons) - MOST_SAID} more")
        said = [line for row in rows.values() for line in row.get("said", [])]
        lines.append([name, str(len(rows)), "; ".join(reasons[:1] or said) or "right"])
    table = Table("Probes", ["", "tried", "found"], lines)
    found = [
        {"probe": name, "tried": what} | row
        for name, of in probes.items()
        for what, row in of.items()
    ]
    return Report("smoke", {"rows": found}, [table], [], failures)


if __name__ == "__main__":
    main([], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
