"""Where the cycles of a persistent kernel's steps go on a GPU: ``python -m bench.phases``.

Kernels compiled for this alone have clocks: lane 0 of the first and the last warp of four blocks
writes down when it passes each point of a step. The cycles of a point are those since the point
before it:

- question: the block has asked for what other blocks send. In the first stage this includes all
  that follows the last store: outputs, kept states, the inputs of the next step; in backward also
  the factors of the gradients.
- arrival: the last packet of its warp's products has come. Questions are how often it has asked,
  each time after the answer.
- barrier: products of all warps are in shared memory.
- sums, gates, store: they are added up, a unit is computed, and sent. The last warp does none of
  this.

Microseconds are those of the whole kernel, with clocks and without, and its results must be the
same. The kernel runs alone, over a chunk of random numbers. Probes measure what an exchange is made
of. ``make gpu-libraries`` builds the programs beforehand, for which no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

import fusedrnn

from .machine import nvidia_smi
from .phase_programs import CELLS, CLOCKS, PASSES, PLAIN, PROBES, Programs, name_of, ready
from .report import Report, Run, Table, main
from .sweep import Budget, not_reached, why_none
from .worker import Row, error_row

SEQ_LEN = 1024
SIZES = ((16, 256), (64, 256), (64, 512), (16, 768), (32, 1024))
LAUNCHES = 5
POINTS = ("question", "arrival", "barrier", "sums", "gates", "store")
STAGES = {"gru": ("gru",), "lstm": ("lstm",), "stochastic_gru": ("sample", "gru")}
LAST_WARP = 7


@dataclass(frozen=True)
class Case:
    """A kernel at a size."""

    cell: str
    direction: str
    batch: int
    hidden_size: int

    def __str__(self) -> str:
        return f"{self.cell} {self.direction}, B={self.batch} H={self.hidden_size}"


CASES = tuple(
    Case(cell, direction, *size) for size in SIZES for direction in PASSES for cell in CELLS
)


def run_on_cuda(run: Run) -> Report:
    """Measures all kernels, at the smallest size first, and then the probes."""
    rows: dict[Case, Row] = dict.fromkeys(CASES[: 1 if run.quick else None], not_reached(run))
    probes: dict[str, Row] = dict.fromkeys(PROBES, not_reached(run))
    budget = Budget(run)
    task = run.progress.add_task("phases", total=len(rows) + len(probes))
    programs = ready(nvidia_smi("compute_cap").replace(".", ""))
    first, *others = rows  # the probes say how long what the first case shows should take
    for what in (first, *PROBES, *others):
        if budget.is_spent:
            break
        if isinstance(what, Case):
            rows[what] = measured(what, programs, budget.end)
        else:
            probes[what] = programs.run(PROBES[what], what, end=budget.end)
        run.write(report(rows, probes))
        run.progress.advance(task)
        print(f"{budget.seconds:4.0f} s  {what}", flush=True)
    return report(rows, probes)


def measured(case: Case, programs: Programs, end: float, device: str = "cuda") -> Row:
    """The row of a kernel, by its programs with clocks and without."""
    try:
        steps = chunk_steps(case, device)
    except Exception as error:
        return error_row(error)
    with_clocks, without = (
        programs.run(
            name_of(case.cell, case.direction, kind),
            *(steps, case.batch, case.hidden_size, LAUNCHES),
            end=end,
        )
        for kind in (CLOCKS, PLAIN)
    )
    if why_none(with_clocks):
        return with_clocks
    row = per_step(case, with_clocks)
    if reason := why_none(without):
        return row | {"without_clocks": reason}
    row["us_per_step_without_clocks"] = median(without["us"]) / steps
    if without["hash"] != with_clocks["hash"]:
        row["wrong"] = "the kernel with clocks has other results"
    return row


def chunk_steps(case: Case, device: str) -> int:
    """The steps of a chunk, as training would have them."""
    size = case.hidden_size
    options = {"cell": case.cell, "input_size": size, "hidden_size": size}
    shape = (SEQ_LEN, case.batch, size)
    return fusedrnn.plan(options, shape, torch.bfloat16, device).chunk_steps


def per_step(case: Case, found: Row) -> Row:
    """What a program with clocks has found, per step; it has counted over all launches."""
    steps: int = found["steps"]
    count = steps * len(found["us"])
    names = STAGES[case.cell]
    observers = [
        {
            "block": observer["block"],
            "warp": observer["warp"],
            "cycles": observer["whole"] / count,
            "stages": [
                {
                    "stage": name,
                    "questions": stage["questions"] / count,
                    **{p: c / count for p, c in zip(POINTS, stage["cycles"], strict=True)},
                }
                for name, stage in zip(names, observer["stages"], strict=True)
            ],
        }
        for observer in found["observers"]
    ]
    plan = {name: found[name] for name in ("grid", "groups", "tiles", "depth", "steps")}
    return plan | {"us_per_step": median(found["us"]) / steps, "observers": observers}


def report(rows: dict[Case, Row], probes: dict[str, Row]) -> Report:
    """The tables of all kernels and probes."""
    lines = [line for case, row in rows.items() for line in _lines(case, row)]
    columns = ["", "chunk, tiles, depth", *POINTS, "all", "questions", "µs", "µs without clocks"]
    tables = [
        Table("Cycles per step, bfloat16", columns, lines),
        Table("Probes", ["", "found"], [[name, _said(name, row)] for name, row in probes.items()]),
    ]
    numbers: list[Row] = [vars(case) | row for case, row in rows.items()]
    numbers += [{"probe": name} | row for name, row in probes.items()]
    failures = [
        f"{what}: {reason}"
        for what, row in [*rows.items(), *probes.items()]
        if (reason := row.get("error") or row.get("wrong"))
    ]
    return Report("phases", {"rows": numbers}, tables, [], failures)


def _lines(case: Case, row: Row) -> Iterable[list[str]]:
    """For each stage, the medians of the observers that compute units, and of those that do not."""
    blank = [""] * (len(POINTS) + 4)
    if reason := why_none(row):
        return [[str(case), reason, *blank]]
    plan = f"{row['steps']}, {row['tiles']}, {row['depth']}"
    us = [f"{row['us_per_step']:.2f}", _us_without_clocks(row)]
    lines = []
    for warp in (0, LAST_WARP):
        observers = [of for of in row["observers"] if of["warp"] == warp]
        for s, stage in enumerate(STAGES[case.cell]):
            of_stage = [observer["stages"][s] for observer in observers]
            cycles = {point: median(of[point] for of in of_stage) for point in POINTS}
            whole = median(sum(of[point] for point in POINTS) for of in of_stage)
            is_first = not lines
            name = f"{stage}, warp {warp}"
            lines.append(
                [
                    f"{case}: {name}" if is_first else name,
                    plan if is_first else "",
                    *(f"{cycles[point]:.0f}" for point in POINTS),
                    f"{whole:.0f}",
                    f"{median(of['questions'] for of in of_stage):.2f}",
                    *(us if is_first else ["", ""]),
                ]
            )
    return lines


def _us_without_clocks(row: Row) -> str:
    if "us_per_step_without_clocks" in row:
        return f"{row['us_per_step_without_clocks']:.2f}"
    return str(row["without_clocks"])


def _said(name: str, row: Row) -> str:
    return why_none(row) or "; ".join(row["said"])


if __name__ == "__main__":
    main([], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
