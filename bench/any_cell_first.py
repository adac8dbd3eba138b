"""Seconds of the first use of a compiled cell, in a new process; see any_cell.py.

This is what the first training step takes beyond the second one: once with an empty cache, so that
g++ builds the library, and once with what that has left there. Each process has trained a layer of
torch before, so what torch loads at its first backward does not count; tracing, derivation and
trials do, with all that they import. The package's files are compiled, as pip does it when it
installs them.
"""

from __future__ import annotations

import compileall
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fusedrnn
from docs.examples.published_cells import CASES, Case

from .any_cell_steps import Size, start_of
from .report import Table, Target, set_up_torch
from .worker import Notes, Row, measure_apart

BUILT, CACHED = "built by g++", "from the cache"
LIMITS_S = {BUILT: 10.0, CACHED: 0.1}
STALL_S, CELL_S = 300.0, 600.0  # without a note from a process, and for both of a cell
SEQ_LEN = 16  # few, because the seconds are to be those of the first use alone


def first_uses(case: Case, size: Size) -> dict[str, Row]:
    """Seconds and new libraries, first with an empty cache; or why there are none."""
    compileall.compile_dir(Path(fusedrnn.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory() as cache:
        job = {"cell": case.name, "size": asdict(size) | {"seq_len": SEQ_LEN}, "cache": cache}
        rows: dict[str, Row] = {}
        end = time.monotonic() + CELL_S
        for name in (BUILT, CACHED):
            rows |= measure_apart(__name__, job, [name], end=end, stall_s=STALL_S)
            if "seconds" not in rows.get(name, {}):
                break
    return rows


def measure(job: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the first steps of this process; see worker.py."""
    os.environ["FUSEDRNN_CACHE"] = job["cache"]
    case, size = next(case for case in CASES if case.name == job["cell"]), Size(**job["size"])
    torch.distributions.Distribution.set_default_validate_args(False)
    set_up_torch()
    (name,) = names
    with notes.on(name):
        cell = case.cell(size.width, size.batch)
        inputs, state = (
            case.inputs(size.seq_len, size.batch, size.width),
            start_of(cell, size, "cpu"),
        )
        _train(torch.nn.GRU(8, 8), torch.randn(2, 2, 8))
        rnn = fusedrnn.Recurrent(cell, compile="require")
        before = _libraries(job["cache"])
        begin = time.perf_counter()
        try:
            _train(rnn, inputs, state)
        except RuntimeError as error:
            notes.row(name, {"unable": str(error).split("\n")[0]})
            return
        first = time.perf_counter() - begin
        libraries = len(_libraries(job["cache"]) - before)
        begin = time.perf_counter()
        _train(rnn, inputs, state)
        second = time.perf_counter() - begin
        notes.row(name, {"seconds": first - second, "libraries": libraries, "step_s": second})


def _train(rnn: torch.nn.Module, *given: Any) -> None:
    output, _ = rnn(*given)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


def _libraries(cache: str) -> set[Path]:
    return set(Path(cache).rglob("*.so"))


def table(first: dict[str, dict[str, Row]], size: Size) -> Table:
    """A row for each cell."""
    rows = [
        [
            cell,
            *(
                f"{rows[name]['seconds']:.2f}" if "seconds" in rows.get(name, {}) else "-"
                for name in (BUILT, CACHED)
            ),
        ]
        for cell, rows in first.items()
    ]
    title = f"Seconds that a first use takes in a process, T={SEQ_LEN} B={size.batch}"
    return Table(f"{title} width={size.width}", ["a compiled cell", BUILT, CACHED], rows)


def targets(first: dict[str, dict[str, Row]], size: Size) -> list[Target]:
    """Two for each cell that g++ has built a library for."""
    where = f"B={size.batch} width={size.width}"
    return [
        Target(f"{cell}, seconds of the first use, {name}", where, rows[name]["seconds"], limit)
        for cell, rows in first.items()
        for name, limit in LIMITS_S.items()
        if "seconds" in rows.get(name, {})
    ]


def failures(first: dict[str, dict[str, Row]]) -> list[str]:
    """Processes that failed, or took too long."""
    return [
        f"The first use of {cell}, {name}: {why}"
        for cell, rows in first.items()
        for name, row in rows.items()
        if (why := row.get("error") or row.get("missing"))
    ]
