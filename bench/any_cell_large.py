"""Cells that users write, compiled, beside their plain loops at a large size.

``python -m bench.any_cell_large --out bench/results``: a training step of five cells at
(T, B, width) = (256, 64, 512) in float32, about a minute for each. Besides, the loop checkpointed
by chunks of sqrt(T) steps, and the compiled cell without recompute.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from docs.examples.published_cells import CASES

from .any_cell import LOOP, PROGRAM, QUICK_SIZE, Size, measured, table, with_ratios
from .any_cell_steps import CHECKPOINT, SAVED
from .report import Report, Run, Target, main

SIZE = Size(256, 64, 512)
CELLS = ("ForumCell", "LayerNormLSTM", "PlaNet", "sLSTM", "MinimalGatedUnit")
LIMIT = 0.8  # of the plain loop's time
ROUNDS, ROUNDS_QUICK = 5, 2


def run(run: Run) -> Report:
    """Measures the cells one after another."""
    size, rounds = (QUICK_SIZE, ROUNDS_QUICK) if run.quick else (SIZE, ROUNDS)
    names = (LOOP, CHECKPOINT, PROGRAM, SAVED)
    torch.distributions.Distribution.set_default_validate_args(False)
    cells = CELLS[:1] if run.quick else CELLS
    cases = [case for case in CASES if case.name in cells]
    task = run.progress.add_task("any_cell_large", total=len(cases))
    results = {}
    for case in cases:
        results[case.name] = with_ratios(measured(case, size, names, rounds))
        run.progress.advance(task)
    targets = []
    for cell, rows in results.items():
        for name in (PROGRAM, SAVED):
            time = rows[name]["time_ratio"]
            spread = f"({time['least']:.2f}-{time['most']:.2f})"
            what = f"{cell}, time, {name} / {LOOP}"
            targets.append(Target(what, str(size), time["median"], LIMIT, spread))
    content = {"size": asdict(size), "cells": results}
    return Report("any_cell_large", content, [table(size, results, names)], targets)


if __name__ == "__main__":
    main([run], __doc__)
