"""Memory and time of cells that users write: ``python -m bench.any_cell``.

A training step of each cell of docs/examples/published_cells.py, by a plain loop, by a loop in
which torch.utils.checkpoint wraps each chunk, and by Recurrent in its modes, on a GPU also with
CUDA graphs. With --compiled also with steps by torch.compile, and by torch's own ``scan``, which
takes minutes per cell. torch.distributions do not check arguments, as torch.compile has it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusedrnn
from docs.examples.published_cells import CASES, Case

from .clock import cuda_peak_bytes, cuda_time_ms, interleaved_ms, measure_memory, ratio, time_ms
from .plots import peaks_over_seq_len
from .report import Report, Run, Table, Target, main, mib

LOOP, CHECKPOINT, COMPILED_LOOP = "plain loop", "checkpoint per chunk", "loop, compiled step"
OURS, PARALLEL, COMPILED = "Recurrent", "Recurrent, parallel", "Recurrent, compiled step"
GRAPHS, COMPILED_GRAPHS = "Recurrent, CUDA graphs", "Recurrent, compiled step, CUDA graphs"
SCAN = "torch's scan"
EAGER = (LOOP, CHECKPOINT, OURS, PARALLEL)
WITH_COMPILER = (COMPILED_LOOP, COMPILED, SCAN)

PEAK_LIMIT = 0.25
TIME_LIMITS = {OURS: 1.6, COMPILED: 1.1, GRAPHS: 0.3, COMPILED_GRAPHS: 0.3}
ROUNDS, BUDGET_S = 5, 20.0


@dataclass(frozen=True)
class Size:
    """Of a training step."""

    seq_len: int
    batch: int
    width: int

    def __str__(self) -> str:
        return f"T={self.seq_len} B={self.batch} width={self.width}"


SIZE, QUICK_SIZE = Size(256, 32, 256), Size(64, 4, 16)
OVER_SEQ_LEN, QUICK_OVER_SEQ_LEN = (64, 128, 256, 512, 1024), (16, 64)
PLOTTED = "ForumCell"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --cell and --compiled."""
    names = [case.name for case in CASES]
    parser.add_argument("--cell", choices=names, help="this cell only", default=None)
    parser.add_argument("--compiled", action="store_true", help="what needs torch.compile, too")


class Step:
    """A training step of a cell by one of the contenders."""

    def __init__(self, name: str, case: Case, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.cell = case.cell(size.width, size.batch, device=device)
        inputs = case.inputs(size.seq_len, size.batch, size.width, device=device)
        self.inputs = pytree.tree_map(lambda leaf: leaf.detach(), inputs)
        self.state = start_of(self.cell, size, device)
        self.structure = pytree.tree_structure(self.state)
        self.chunk = round(size.seq_len**0.5)
        self.forward = self._forwards()[name]
        self.gradients: list[Tensor] | None = None

    def _forwards(self) -> dict[str, Callable[[], Any]]:
        def ours(**named: Any) -> Callable[[], Any]:
            rnn = fusedrnn.Recurrent(self.cell, **named)
            return lambda: rnn(self.inputs, self.state)[0]

        compiled = torch.compile(self.cell)
        return {
            LOOP: lambda: self._loop(self.cell),
            CHECKPOINT: self._checkpointed,
            COMPILED_LOOP: lambda: self._loop(compiled),
            OURS: ours(),
            PARALLEL: ours(mode="parallel"),
            COMPILED: ours(torch_compile=True),
            GRAPHS: ours(cuda_graphs=True),
            COMPILED_GRAPHS: ours(torch_compile=True, cuda_graphs=True),
            SCAN: self._scan,
        }

    def train(self) -> None:
        """Forward and backward, with the same gradient of every output in all calls."""
        memory = getattr(self.cell, "memory", None)
        if memory is not None:
            self.cell.attend(memory)  # its graph is of one backward only
        outputs = [leaf for leaf in pytree.tree_leaves(self.forward()) if leaf.requires_grad]
        if self.gradients is None:
            self.gradients = [torch.ones_like(leaf) for leaf in outputs]
        torch.autograd.backward(outputs, self.gradients)
        self.cell.zero_grad(set_to_none=True)

    def _step(self, cell: Callable[..., Any], state: Any, time: int) -> tuple[Any, Any]:
        x = pytree.tree_map(lambda leaf: leaf[time], self.inputs)
        result = cell(x, state)
        if pytree.tree_structure(result) == self.structure:
            return result, pytree.tree_leaves(result)[0]
        return result[1], result[0]

    def _loop(self, cell: Callable[..., Any]) -> Any:
        state, outputs = self.state, []
        for time in range(self.seq_len):
            state, y = self._step(cell, state, time)
            outputs.append(y)
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *outputs)

    @property
    def seq_len(self) -> int:
        return int(pytree.tree_leaves(self.inputs)[0].shape[0])

    def _checkpointed(self) -> Any:
        def steps(state: Any, begin: int, end: int) -> tuple[Any, Any]:
            outputs = []
            for time in range(begin, end):
                state, y = self._step(self.cell, state, time)
                outputs.append(y)
            return state, pytree.tree_map(lambda *leaves: torch.stack(leaves), *outputs)

        state, parts = self.state, []
        for begin in range(0, self.seq_len, self.chunk):
            end = min(begin + self.chunk, self.seq_len)
            state, part = checkpoint(steps, state, begin, end, use_reentrant=False)
            parts.append(part)
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)

    def _scan(self) -> Any:
        from torch._higher_order_ops.scan import scan

        def combine(state: Any, x: Any) -> tuple[Any, Any]:
            result = self.cell(x, state)
            if pytree.tree_structure(result) == self.structure:
                return result, pytree.tree_leaves(result)[0].clone()
            return result[1], pytree.tree_map(torch.clone, result[0])

        return scan(combine, self.state, self.inputs)[1]


def start_of(cell: nn.Module, size: Size, device: str) -> Any:
    """The state before the first step."""
    if hasattr(cell, "initial_state"):
        return cell.initial_state(size.batch)
    zeros = torch.zeros(size.batch, size.width, device=device)
    return (zeros, zeros.clone()) if isinstance(cell, nn.LSTMCell) else zeros


def run(run: Run) -> Report:
    """Measures all cells, and the peak of one of them over the length of the sequence."""
    return _run(run, "cpu")


def run_on_cuda(run: Run) -> Report:
    """The same on a GPU, where allocations are not counted."""
    return _run(run, "cuda")


def _run(run: Run, device: str) -> Report:
    size = QUICK_SIZE if run.quick else SIZE
    over = QUICK_OVER_SEQ_LEN if run.quick else OVER_SEQ_LEN
    cases = [case for case in CASES if run.options.cell in (None, case.name)]
    names = (*EAGER, *WITH_COMPILER) if run.options.compiled else EAGER
    if device == "cuda":
        names += (GRAPHS, COMPILED_GRAPHS) if run.options.compiled else (GRAPHS,)
    torch.distributions.Distribution.set_default_validate_args(False)
    task = run.progress.add_task("any_cell", total=len(cases) * len(names) + len(over))
    results: dict[str, Any] = {}
    for case in cases:
        results[case.name] = _measure(case, size, names, 2 if run.quick else ROUNDS, device)
        run.progress.advance(task, len(names))
    growth = []
    plotted = next(case for case in CASES if case.name == PLOTTED)
    for seq_len in over:
        here = Size(seq_len, size.batch, size.width)
        peaks = {
            name: _peak(Step(name, plotted, here, device), device)["peak_bytes"]
            for name in (LOOP, CHECKPOINT, OURS)
        }
        growth.append({"seq_len": seq_len, "peak_bytes": peaks})
        run.progress.advance(task)
    _plot(run, growth, size)
    content = {"size": asdict(size), "cells": results, "over_seq_len": growth}
    tables = [_table(size, results, names), _unable(results), _growth_table(growth, size)]
    targets = [
        target for name, result in results.items() for target in _targets(name, result, size)
    ]
    left_out = () if run.options.compiled else ("what needs --compiled",)
    return Report("any_cell", content, [t for t in tables if t], targets, left_out=left_out)


def _peak(step: Step, device: str) -> dict[str, int]:
    step.train()
    if device == "cuda":
        return {"peak_bytes": cuda_peak_bytes(step.train)}
    return asdict(measure_memory(step.train))


def _measure(
    case: Case, size: Size, names: tuple[str, ...], rounds: int, device: str
) -> dict[str, Any]:
    """Peaks, allocations and times, or why there are none."""
    torch.compiler.reset()
    found: dict[str, Any] = {}
    steps = {}
    for name in names:
        step = Step(name, case, size, device)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                measured = _peak(step, device)
        except Exception as error:  # whatever the compiler or the cell's row-wise check raises
            first_line = str(error).strip().split("\n")[0]
            found[name] = {"unable": f"{type(error).__name__}: {first_line}"}
            continue
        found[name] = dict(measured)
        notes = [str(w.message) for w in caught if str(w.message).startswith("fusedrnn")]
        if notes:
            found[name]["note"] = notes[0]
        steps[name] = step.train
    timer = cuda_time_ms if device == "cuda" else time_ms
    times = interleaved_ms(steps, rounds=rounds, budget_s=BUDGET_S, timer=timer)
    for name, each in times.items():
        found[name]["ms"] = median(each)
        found[name]["time_ratio"] = asdict(ratio(each, times[LOOP]))
        found[name]["peak_ratio"] = found[name]["peak_bytes"] / found[LOOP]["peak_bytes"]
    return found


def _targets(cell: str, result: dict[str, Any], size: Size) -> list[Target]:
    found = []
    for name, limit in TIME_LIMITS.items():
        measured = result.get(name, {})
        if "ms" not in measured:
            continue
        peak, time = measured["peak_ratio"], measured["time_ratio"]
        found.append(Target(f"{cell}, peak, {name} / {LOOP}", str(size), peak, PEAK_LIMIT))
        spread = f"({time['least']:.2f}-{time['most']:.2f})"
        what = f"{cell}, time, {name} / {LOOP}"
        found.append(Target(what, str(size), time["median"], limit, spread))
    return found


def _table(size: Size, results: dict[str, Any], names: tuple[str, ...]) -> Table:
    columns = ["", "loop MiB", "loop ms"]
    columns += [f"{name}: {what}" for name in names if name != LOOP for what in ("peak", "time")]
    rows = []
    for cell, result in results.items():
        row = [cell, mib(result[LOOP]["peak_bytes"]), f"{result[LOOP]['ms']:.0f}"]
        for name in names:
            if name != LOOP:
                measured = result[name]
                has_any = "ms" in measured
                row.append(f"{measured['peak_ratio']:.2f}" if has_any else "-")
                row.append(f"{measured['time_ratio']['median']:.2f}" if has_any else "-")
        rows.append(row)
    return Table(f"A training step as a multiple of the plain loop's, {size}", columns, rows)


def _unable(results: dict[str, Any]) -> Table | None:
    rows = [
        [cell, name, measured.get("unable") or measured.get("note")]
        for cell, result in results.items()
        for name, measured in result.items()
        if "unable" in measured or "note" in measured
    ]
    return Table("What did not run, or not compiled", ["cell", "", "why"], rows) if rows else None


def _growth_table(growth: list[dict[str, Any]], size: Size) -> Table:
    names = list(growth[0]["peak_bytes"])
    rows = [
        [str(row["seq_len"]), *(mib(row["peak_bytes"][name]) for name in names)] for row in growth
    ]
    title = f"Peak memory in MiB over T, {PLOTTED}, B={size.batch} width={size.width}"
    return Table(title, ["T", *names], rows)


def _plot(run: Run, growth: list[dict[str, Any]], size: Size) -> None:
    names = list(growth[0]["peak_bytes"])
    peaks_over_seq_len(
        run.out / "any_cell_over_seq_len.png",
        f"{PLOTTED}, B={size.batch} width={size.width}, float32",
        [row["seq_len"] for row in growth],
        {name: [row["peak_bytes"][name] for row in growth] for name in names},
        bold=OURS,
    )


if __name__ == "__main__":
    main([run], __doc__, add_options, on_cuda=[run_on_cuda], cuda_options=())
