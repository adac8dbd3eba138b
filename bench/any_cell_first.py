"""Seconds of the first use of a compiled cell, in a new process; see any_cell.py.

This is what the first training step takes beyond the second one: once with an empty cache, so that
g++ or nvcc builds the library, and on the CPU also with what that has left there, the median of
five processes. Each process has trained a layer of torch before, so what torch loads at its first
backward does not count; tracing, derivation and trials do, with all that they import. On a CPU the
import of torch's compiler counts too; it is measured apart, since much else imports it first. The
package's files are compiled, as pip does it when it installs them. Python collects no garbage
meanwhile, as in timeit: it would go through all objects of torch, in whichever step its time has
come.
"""

from __future__ import annotations

import compileall
import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fusedrnn
from docs.examples.published_cells import CASES, Case

from .any_cell_steps import Size, start_of
from .faults import names_fault
from .report import Table, Target, set_up_torch
from .worker import Notes, Row, measure_apart

BUILT, CACHED, BY_NVCC = "built by g++", "from the cache", "built by nvcc"
LIMITS_S = {BUILT: 12.0, CACHED: 4.0}
STALL_S, CELL_S = 300.0, 600.0  # without a note from a process, and for all of a cell
CACHED_TIMES = 5  # processes that find a library in the cache, or import torch's compiler
_IMPORT = """
import time, torch
begin = time.perf_counter()
import torch._dynamo
print(time.perf_counter() - begin)
"""
SEQ_LEN = 4  # few, because the seconds are to be those of the first use alone


def first_uses(case: Case, size: Size) -> dict[str, Row]:
    """Seconds and new libraries, first with an empty cache; or why there are none."""
    _compile_package()
    with tempfile.TemporaryDirectory() as cache:
        end = time.monotonic() + CELL_S
        rows = {BUILT: _first_use(BUILT, case, size, cache, end)}
        if "seconds" in rows[BUILT]:
            found = [_first_use(CACHED, case, size, cache, end) for _ in range(CACHED_TIMES)]
            rows[CACHED] = _median(found)
    for row in rows.values():
        if "seconds" in row:
            row |= {"seconds": row["seconds"] + _import_s(), "import_s": _import_s()}
    return rows


@functools.cache
def _import_s() -> float:
    """Seconds of the import of torch's compiler, the median of some processes."""
    command = [sys.executable, "-c", _IMPORT]
    return median(float(subprocess.check_output(command)) for _ in range(CACHED_TIMES))


def first_uses_by_nvcc(
    cases: Sequence[Case], size: Size, cache: str, end: float
) -> dict[str, dict[str, Row]]:
    """The same on a GPU for many cells, as many at the same time as there are cores.

    So all libraries are in the folder ``cache`` afterwards. ``end`` is a time of
    ``time.monotonic()``; what is not reached until then is left out.
    """
    _compile_package()

    def by_nvcc(case: Case) -> Row:
        return _first_use(BY_NVCC, case, size, cache, end)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(by_nvcc, cases))
    reached = [(c.name, row) for c, row in zip(cases, rows, strict=True) if "missing" not in row]
    return {name: {BY_NVCC: row} for name, row in reached}


def _compile_package() -> None:
    compileall.compile_dir(Path(fusedrnn.__file__).parent, quiet=2)


def _first_use(name: str, case: Case, size: Size, cache: str, end: float) -> Row:
    """Of one process."""
    sizes = asdict(size) | {"seq_len": SEQ_LEN}
    device = "cuda" if name == BY_NVCC else "cpu"
    job = {"cell": case.name, "size": sizes, "cache": cache, "device": device}
    missing = {"missing": "there was no time for it"}
    return measure_apart(__name__, job, [name], end=end, stall_s=STALL_S).get(name, missing)


def _median(rows: Sequence[Row]) -> Row:
    """One row of several processes, or the first that failed."""
    for row in rows:
        if "seconds" not in row:
            return row
    each_s = [row["seconds"] for row in rows]
    libraries = sum(row["libraries"] for row in rows)
    return {**rows[0], "seconds": median(each_s), "each_s": each_s, "libraries": libraries}


def measure(job: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the first steps of this process; see worker.py."""
    os.environ["FUSEDRNN_CACHE"] = job["cache"]
    case, size = next(case for case in CASES if case.name == job["cell"]), Size(**job["size"])
    torch.distributions.Distribution.set_default_validate_args(False)
    set_up_torch()
    (name,) = names
    device = job["device"]
    with notes.on(name):
        cell = case.cell(size.width, size.batch, device=device)
        inputs, state = (
            case.inputs(size.seq_len, size.batch, size.width, device=device),
            start_of(cell, size, device),
        )
        _seconds(torch.nn.GRU(8, 8, device=device), torch.randn(2, 2, 8, device=device))
        rnn = fusedrnn.Recurrent(cell, compile="require")
        before = _libraries(job["cache"])
        gc.disable()
        try:
            first = _seconds(rnn, inputs, state)
        except RuntimeError as error:
            if names_fault(str(error)):
                raise
            notes.row(name, {"unable": str(error).split("\n")[0]})
            return
        libraries = len(_libraries(job["cache"]) - before)
        second = _seconds(rnn, inputs, state)
        notes.row(name, {"seconds": first - second, "libraries": libraries, "step_s": second})


def _seconds(rnn: torch.nn.Module, *given: Any) -> float:
    """Of a training step."""
    begin = time.perf_counter()
    output, _ = rnn(*given)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    if leaves[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _libraries(cache: str) -> set[Path]:
    return set(Path(cache).rglob("*.so"))


def table(first: dict[str, dict[str, Row]], size: Size) -> Table:
    """A row for each cell."""
    names = [name for name in (BUILT, CACHED, BY_NVCC) if any(name in r for r in first.values())]
    rows = [
        [
            cell,
            *(
                f"{rows[name]['seconds']:.2f}" if "seconds" in rows.get(name, {}) else "-"
                for name in names
            ),
        ]
        for cell, rows in first.items()
    ]
    title = f"Seconds that a first use takes in a process, T={SEQ_LEN} B={size.batch}"
    title += f" width={size.width}"
    if imports := {
        row["import_s"] for of in first.values() for row in of.values() if "import_s" in row
    }:
        title += f", {imports.pop():.2f} of them the import of torch's compiler"
    if BY_NVCC in names:
        title += ", many processes at the same time"
    return Table(title, ["a compiled cell", *names], rows)


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
