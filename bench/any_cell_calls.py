"""Short calls of cells that users write, compiled, beside loops over the cells themselves.

``python -m bench.any_cell_calls --out bench/results``: processor time of calls of one step and of
four, for one row of width 64 in float32, on one thread: without gradients, as an agent acts, and
with backward. A call has hardly anything to compute, so this is what it costs besides. Loops take
steps from views of the input and put no outputs together. Beside cells of torch.nn stand the layers
that torch has of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fusedrnn
from docs.examples.published_cells import CASES, Case

from .any_cell_steps import Size, start_of
from .clock import interleaved_ms, ratio, several
from .report import Report, Run, Table, Target, main

LENGTHS, WIDTH = (1, 4), 64
LIMITS = {1: 1.5, 4: 1.0}  # of the loop's time
CALLS, ROUNDS, BUDGET_S = 20, 60, 4.0
WAYS = ("no gradients", "training")
OURS, LOOP, TORCH = "Recurrent", "loop", "torch.nn"
LAYERS: dict[str, type[nn.RNNBase]] = {
    "RNNCell": nn.RNN,
    "GRUCell": nn.GRU,
    "LSTMCell": nn.LSTM,
}
"""Of cells of torch.nn, by their names."""


def run(run: Run) -> Report:
    """Measures the cells one after another."""
    torch.distributions.Distribution.set_default_validate_args(False)
    cases = [case for case in CASES if not run.quick or case.name == "GRUCell"]
    task = run.progress.add_task("any_cell_calls", total=len(cases))
    results: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in cases:
            if _is_compiled(case):
                results[case.name] = {
                    f"T={steps}, {way}": _measured(case, steps, way, 3 if run.quick else ROUNDS)
                    for steps in LENGTHS
                    for way in WAYS
                }
            run.progress.advance(task)
    finally:
        torch.set_num_threads(threads)
    targets = [
        Target(f"{cell}, {what}, {OURS} / {LOOP}", f"B=1 width={WIDTH}", row["ratio"], row["limit"])
        for cell, rows in results.items()
        for what, row in rows.items()
    ]
    columns = [f"T={steps}, {way}" for steps in LENGTHS for way in WAYS]
    rows = [
        [cell, *(f"{r[c]['ratio']:.2f} ({r[c]['us']:.0f} us)" for c in columns)]
        for cell, r in results.items()
    ]
    layers = [
        [f"torch.nn.{LAYERS[cell].__name__}", *(f"{r[c][TORCH]:.2f}" for c in columns)]
        for cell, r in results.items()
        if cell in LAYERS
    ]
    title = f"Processor time of a call / of a loop over the cell, B=1 width={WIDTH}, 1 thread"
    tables = [Table(title, ["cell", *columns], rows)]
    tables.append(Table("The same of torch's own layers", ["layer", *columns], layers))
    return Report("any_cell_calls", {"cells": results}, tables, targets)


def _is_compiled(case: Case) -> bool:
    """Whether it is for a batch of any size."""
    size = Size(1, 2, WIDTH)
    rnn = fusedrnn.Recurrent(case.cell(WIDTH, size.batch))
    state = start_of(rnn.cell, size, "cpu")
    return rnn.explain(case.inputs(1, size.batch, WIDTH), state).is_compiled


def _measured(case: Case, steps: int, way: str, rounds: int) -> dict[str, float]:
    """Microseconds of a call and of the loop, and their ratio."""
    calls = {
        name: several(call, CALLS) for name, call in _calls(case, steps, way == WAYS[1]).items()
    }
    for call in calls.values():
        call()
    times = interleaved_ms(calls, rounds=rounds, budget_s=BUDGET_S, timer=_processor_ms)
    found = ratio(times[OURS], times[LOOP])
    us = {name: 1000 * min(all_ms) / CALLS for name, all_ms in times.items()}
    layer = {TORCH: ratio(times[TORCH], times[LOOP]).median} if TORCH in times else {}
    return layer | {
        "ratio": found.median,
        "least": found.least,
        "most": found.most,
        "us": us[OURS],
        "loop_us": us[LOOP],
        "limit": LIMITS[steps],
    }


def _processor_ms(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return 1000 * (time.process_time() - begin)


def _calls(case: Case, steps: int, is_training: bool) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    cell = case.cell(WIDTH, 1)
    inputs = pytree.tree_map(torch.Tensor.detach, case.inputs(steps, 1, WIDTH))
    state = pytree.tree_map(torch.Tensor.detach, start_of(cell, Size(steps, 1, WIDTH), "cpu"))
    structure = pytree.tree_structure(state)
    step_inputs = [pytree.tree_map(lambda x, t=t: x[t], inputs) for t in range(steps)]
    returns_state = pytree.tree_structure(cell(step_inputs[0], state)) == structure
    rnn = fusedrnn.Recurrent(cell, compile="require")

    def loop() -> list[Any]:
        now, made = state, []
        for x in step_inputs:
            result = cell(x, now)
            now, y = (result, result) if returns_state else (result[1], result[0])
            made.append(y)
        return made

    forwards: dict[str, Callable[[], Any]] = {LOOP: loop, OURS: lambda: rnn(inputs, state)[0]}
    if case.name in LAYERS:
        layer = LAYERS[case.name](WIDTH, WIDTH)
        start = pytree.tree_map(lambda leaf: leaf[None], state)
        forwards[TORCH] = lambda: layer(inputs, start)[0]
    return {name: _call(forward, is_training) for name, forward in forwards.items()}


def _call(forward: Callable[[], Any], is_training: bool) -> Callable[[], object]:
    if not is_training:
        return torch.no_grad()(forward)

    def train() -> None:
        outputs = [leaf for leaf in pytree.tree_leaves(forward()) if leaf.requires_grad]
        torch.stack([leaf.sum() for leaf in outputs]).sum().backward()

    return train


if __name__ == "__main__":
    main([run], __doc__)
