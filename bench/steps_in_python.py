"""Memory and time of steps in Python: ``python -m bench.steps_in_python --out bench/results``.

A training step, with gradients of the inputs, by a plain loop, by a loop in which
torch.utils.checkpoint wraps each chunk of sqrt(T) steps, and by ``Recurrent(cell,
compile="never")``, for all cells of docs/examples/published_cells.py and for cells that cannot be
compiled. About 8 minutes on two processors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from docs.examples.published_cells import CASES, Case

from .any_cell import QUICK_SIZE, Size, measured, table, unable, with_ratios
from .any_cell_steps import CHECKPOINT, LOOP, OURS
from .report import Report, Run, Table, main

NAMES = (LOOP, CHECKPOINT, OURS)
SIZE, SMALL_SIZE = Size(100, 32, 256), Size(400, 8, 32)
SMALL_CELLS = ("GRUCell", "ForumCell", "PlaNet")
ROUNDS = 3


class GRUWith(nn.Module):
    """A GRU cell, and something that keeps it from being compiled."""

    def __init__(self, width: int, then: Callable[[Any, Tensor], Tensor], **modules: Any) -> None:
        super().__init__()
        self.gru, self.then, self.count = nn.GRUCell(width, width), then, 0
        self.width, self.membrane = width, None
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.then(self, self.gru(x, h))

    def initial_state(self, batch: int) -> Tensor:
        return self.gru.weight_hh.new_zeros(batch, self.width)


def _by_chance(cell: Any, h: Tensor) -> Tensor:
    return h * 0.9 if random.random() < 0.5 else h


def _noted(cell: Any, h: Tensor) -> Tensor:
    cell.membrane = h * 2
    return torch.tanh(cell.membrane)


def _counted(cell: Any, h: Tensor) -> Tensor:
    cell.count += 1
    return h.detach() if cell.count % 64 == 0 else h


def _with(then: Callable[[Any, Tensor], Tensor], **make: Any) -> Callable[[int], nn.Module]:
    return lambda n: GRUWith(n, then, **{name: of(n) for name, of in make.items()})


NOT_COMPILED = [
    Case("GRU, sorted", _with(lambda c, h: h.sort(-1).values), lambda n: n),
    Case("GRU, batch norm", _with(lambda c, h: c.norm(h), norm=nn.BatchNorm1d), lambda n: n),
    Case("GRU, random.random()", _with(_by_chance), lambda n: n),
    Case("GRU, a noted membrane", _with(_noted), lambda n: n),
    Case("GRU, a counter", _with(_counted), lambda n: n),
]
"""Cells that torch.compile or this package refuses."""


def run(run: Run) -> Report:
    """Measures the cells one after another."""
    torch.distributions.Distribution.set_default_validate_args(False)
    size = QUICK_SIZE if run.quick else SIZE
    cases = [case for case in (*NOT_COMPILED, *CASES) if not run.quick or case.name == "GRUCell"]
    small = [case for case in CASES if case.name in SMALL_CELLS and not run.quick]
    task = run.progress.add_task("steps_in_python", total=len(cases) + len(small))
    parts = (("small", SMALL_SIZE, small), ("cells", size, cases))
    found: dict[str, dict[str, Any]] = {}
    for part, at, some in parts:
        for case in some:
            rows = measured(case, at, NAMES, 2 if run.quick else ROUNDS, of_inputs=True)
            found.setdefault(part, {})[case.name] = with_ratios(rows)
            run.progress.advance(task)
            run.write(_report(found, {"cells": size, "small": SMALL_SIZE}))
    return _report(found, {"cells": size, "small": SMALL_SIZE})


def _report(found: dict[str, dict[str, Any]], sizes: dict[str, Size]) -> Report:
    content, tables = {}, []
    for part, results in found.items():
        at = sizes[part]
        content[part] = {"size": asdict(at), "cells": results}
        of_all = table(at, results, NAMES), _medians(at, results), unable(results)
        tables += [one for one in of_all if one is not None]
    return Report("steps_in_python", content, tables)


def _medians(size: Size, results: dict[str, Any]) -> Table:
    rows = []
    for name in NAMES[1:]:
        measured = [cell[name] for cell in results.values() if "peak_ratio" in cell[name]]
        peaks = [row["peak_ratio"] for row in measured]
        times = [row["time_ratio"]["median"] for row in measured]
        rows.append([name, *(f"{median(of):.2f}" for of in (peaks, times))])
    return Table(f"Medians over the cells, {size}", ["", "peak", "time"], rows)


if __name__ == "__main__":
    main([run], __doc__)
