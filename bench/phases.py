"""Where the cycles of a persistent kernel's steps go on a GPU: ``python -m bench.phases``.

Kernels compiled for this alone have clocks: lane 0 of the first and the last warp of four blocks
writes down when it passes each point of a step. The cycles of a point are those since the point
before it:

- outputs: what follows the last store is done: outputs, kept states, and where a group has one
  tile, the wait of all warps for each other.
- inputs: the inputs of the next step have been asked for; in backward also the factors of the
  gradients have been computed.
- question: the block has asked for what other blocks send.
- arrival: the last packet of its warp's products has come. Questions are how often it has asked,
  each time after the answer.
- barrier: products of all warps are in shared memory.
- sums, gates, store: they are added up, a unit is computed, and sent. The last warp does none of
  this.

Microseconds are those of the whole kernel, with clocks and without, and its results must be the
same. The kernel runs alone, over a chunk of random numbers. Probes measure what an exchange is made
of.

Other ways to take a step (csrc/persistent/variant.h), which the package does not have, are compared
with the package's, one after the other in one process, twice; their results must be the same too:

- plain: no mask, zoneout or given eps, and one protocol, for the compiler too;
- ring, in backward: what a unit reads from memory is copied into shared memory three steps before,
  as forward does.

``make gpu-libraries`` builds the programs beforehand, for which no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import fusedrnn

from .machine import nvidia_smi
from .phase_programs import (
    CELLS,
    CLOCKS,
    PASSES,
    PLAIN,
    PROBES,
    VARIANTS,
    Programs,
    name_of,
    ready,
)
from .report import Report, Run, Table, main
from .sweep import Budget, not_reached, why_none
from .worker import Row, error_row

SEQ_LEN = 1024
SIZES = ((16, 256), (64, 256), (64, 512), (16, 768), (32, 1024))
LAUNCHES = 5
PACKAGE = "package"
VARIANT_NAMES = (PACKAGE, "plain", "ring", "plain, ring")  # the last two only backward
POINTS = ("outputs", "inputs", "question", "arrival", "barrier", "sums", "gates", "store")
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
    """Measures all kernels, at the smallest size first, then the probes, and then variants."""
    found = Found(run)
    budget = Budget(run)
    count = len(found.rows) + len(found.probes) + len(found.variants)
    task = run.progress.add_task("phases", total=count)
    programs = ready(nvidia_smi("compute_cap").replace(".", ""))
    # the probes say how long what the first case shows should take
    first, *others = [(found.rows, case) for case in found.rows]
    probes = [(found.probes, probe) for probe in found.probes]
    variants = [(found.variants, case) for case in found.variants]
    for rows, what in (first, *probes, *others, *variants):
        if budget.is_spent:
            break
        if isinstance(what, str):
            rows[what] = programs.run(PROBES[what], what, end=budget.end)
        elif rows is found.rows:
            rows[what] = measured(what, programs, budget.end)
        else:
            rows[what] = compared(what, programs, budget.end)
        run.write(found.report())
        run.progress.advance(task)
        print(f"{budget.seconds:4.0f} s  {what}", flush=True)
    return found.report()


class Found:
    """The rows of all kernels with clocks, of the probes, and of the kernels in all variants."""

    def __init__(self, run: Run) -> None:
        cases = CASES[: 1 if run.quick else None]
        self.rows: dict[Any, Row] = dict.fromkeys(cases, not_reached(run))
        self.probes: dict[Any, Row] = dict.fromkeys(PROBES, not_reached(run))
        self.variants: dict[Any, Row] = dict.fromkeys(cases, not_reached(run))

    def report(self) -> Report:
        """Three tables."""
        lines = [line for case, row in self.rows.items() for line in _lines(case, row)]
        columns = ["", "chunk, tiles, depth", *POINTS, "all", "questions", "µs"]
        tables = [
            Table("Cycles per step, bfloat16", [*columns, "µs without clocks"], lines),
            Table(
                "Other ways to take a step, bfloat16, µs per step",
                ["", *VARIANT_NAMES],
                [_line_of_variants(case, row) for case, row in self.variants.items()],
            ),
            Table("Probes", ["", "found"], [[n, _said(row)] for n, row in self.probes.items()]),
        ]
        numbers: list[Row] = [vars(case) | row for case, row in self.rows.items()]
        numbers += [vars(case) | row for case, row in self.variants.items()]
        numbers += [{"probe": name} | row for name, row in self.probes.items()]
        failures = [
            f"{what}: {reason}"
            for what, row in (*self.rows.items(), *self.variants.items(), *self.probes.items())
            if (reason := row.get("error") or row.get("wrong"))
        ]
        return Report("phases", {"rows": numbers}, tables, [], failures)


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


def compared(case: Case, programs: Programs, end: float, device: str = "cuda") -> Row:
    """The row of a kernel in all variants: microseconds per step, by the variant's name."""
    try:
        steps = chunk_steps(case, device)
    except Exception as error:
        return error_row(error)
    found = programs.run(
        name_of(case.cell, case.direction, VARIANTS),
        *(steps, case.batch, case.hidden_size, LAUNCHES),
        end=end,
    )
    if why_none(found):
        return found
    runs = found["variants"]
    names = dict.fromkeys(run["name"] for run in runs)
    row: Row = {
        "us_per_step_of_variants": {
            name: median(us for run in runs if run["name"] == name for us in run["us"]) / steps
            for name in names
        }
    }
    if others := sorted({run["name"] for run in runs if run["hash"] != runs[0]["hash"]}):
        row["wrong"] = f"other results than the package: {', '.join(others)}"
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


def _line_of_variants(case: Case, row: Row) -> list[str]:
    if reason := why_none(row):
        return [str(case), reason, *[""] * (len(VARIANT_NAMES) - 1)]
    us = row["us_per_step_of_variants"]
    return [str(case), *(f"{us[name]:.2f}" if name in us else "" for name in VARIANT_NAMES)]


def _said(row: Row) -> str:
    return why_none(row) or "; ".join(row["said"])


if __name__ == "__main__":
    main([], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
