"""How errors grow with the sequence, against float64: ``python -m bench.numerics``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedrnn
from fusedrnn import reference

from .report import Report, Run, Table, Target, main
from .sweep import Budget, not_reached, why_none
from .worker import Notes, Row, measure_apart, measure_here

BATCH, SIZE = 8, 64
LENGTHS, LENGTHS_QUICK = (16, 64, 256, 1024, 4096), (16, 32)
OURS, TORCH, LOOP = "fusedrnn", "torch.nn", "plain loop"
PROCESSES = 8  # at the same time, on a GPU
LIMIT = 2.0  # times the error of torch's module, or of the loop where torch has none
RESULTS = ("output", "d input", "d weights")
TF32 = "tf32"
ON_CPU = ("float32", "bfloat16", "float16")
ON_CUDA = (*ON_CPU, TF32)

# input, weights, eps -> output, from a state of zeros
Cell = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]


def _torch_gru(input: Tensor, weights: Sequence[Tensor], eps: Tensor) -> Tensor:
    hx = input.new_zeros(1, BATCH, SIZE)
    output: Tensor = torch.gru(input, hx, list(weights), True, 1, 0.0, True, False, False)[0]
    return output


def _torch_lstm(input: Tensor, weights: Sequence[Tensor], eps: Tensor) -> Tensor:
    hx = [input.new_zeros(1, BATCH, SIZE)] * 2
    output: Tensor = torch.lstm(input, hx, list(weights), True, 1, 0.0, True, False, False)[0]
    return output


def _stochastic(library: Any, **options: bool) -> Cell:
    return lambda input, weights, eps: library.stochastic_gru(input, weights, eps=eps, **options)[0]


# What short sequences would save is recomputed, as in long ones.
CELLS: dict[str, dict[str, Cell]] = {
    "gru": {
        OURS: lambda input, weights, eps: fusedrnn.gru(input, weights, recompute=True)[0],
        TORCH: _torch_gru,
        LOOP: lambda input, weights, eps: reference.gru(input, weights)[0],
    },
    "lstm": {
        OURS: lambda input, weights, eps: fusedrnn.lstm(input, weights, recompute=True)[0],
        TORCH: _torch_lstm,
        LOOP: lambda input, weights, eps: reference.lstm(input, weights)[0],
    },
    "stochastic_gru": {OURS: _stochastic(fusedrnn, recompute=True), LOOP: _stochastic(reference)},
}
MODULES = {"gru": fusedrnn.GRU, "lstm": fusedrnn.LSTM, "stochastic_gru": fusedrnn.StochasticGRU}


@dataclass(frozen=True)
class Problem:
    """Numbers of one dtype, the same for all contenders; float64 gives the true results."""

    input: Tensor
    eps: Tensor
    weights: list[Tensor]
    grad_output: Tensor

    def results(self, cell: Cell, dtype: torch.dtype) -> list[Tensor]:
        """Output, gradient of the input, and all gradients of weights as one tensor."""
        input, *weights = (
            t.to(dtype).detach().requires_grad_() for t in (self.input, *self.weights)
        )
        output = cell(input, weights, self.eps.to(dtype))
        grads = torch.autograd.grad(output, [input, *weights], self.grad_output.to(dtype))
        flat = torch.cat([grad.double().flatten() for grad in grads[1:]])
        return [output.detach().double(), grads[0].double(), flat]


def problem(name: str, seq_len: int, dtype: torch.dtype, device: str) -> Problem:
    """A problem with normal inputs and fresh weights."""
    torch.manual_seed(seq_len)
    with torch.device(device):
        sizes = (seq_len, BATCH, SIZE)
        input, eps, grad_output = (torch.randn(sizes).to(dtype) for _ in range(3))
        weights = [w.detach().to(dtype) for w in MODULES[name](SIZE, SIZE).parameters()]
    return Problem(input, eps.unsqueeze(0), weights, grad_output)


def errors(name: str, seq_len: int, kind: str, device: str) -> dict[str, list[float]]:
    """The errors of each contender: the norm of each result's error over the norm of the result."""
    dtype = torch.float32 if kind == TF32 else getattr(torch, kind)
    case = problem(name, seq_len, dtype, device)
    truth = case.results(CELLS[name][LOOP], torch.float64)
    found = {}
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = kind == TF32
    try:
        for contender, cell in CELLS[name].items():
            results = case.results(cell, dtype)
            found[contender] = [
                float((a - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True)
            ]
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = allowed
    return found


def run(run: Run) -> Report:
    """Measures every cell, dtype and length."""
    return _run(run, "cpu", ON_CPU)


def run_on_cuda(run: Run) -> Report:
    """Measures the same on a GPU, and float32 with products rounded to TF32 too."""
    return _run(run, "cuda", ON_CUDA)


def _run(run: Run, device: str, kinds: Sequence[str]) -> Report:
    """Measures shorter sequences first, since time may run out."""
    lengths = LENGTHS_QUICK if run.quick else LENGTHS
    rows = {
        (name, kind, seq_len): not_reached(run)
        for name in CELLS
        for kind in kinds
        for seq_len in lengths
    }
    places = list(itertools.product(CELLS, kinds))
    task = run.progress.add_task("numerics", total=len(places))
    budget = Budget(run)

    def found(place: tuple[str, str]) -> dict[str, Row]:
        case, names = [*place, device], [str(seq_len) for seq_len in lengths]
        if budget.is_spent:
            return {}
        if device == "cuda":
            return measure_apart("bench.numerics", case, names, end=budget.end)
        return measure_here(measure, case, names)

    # Several at the same time: a loop needs a core and hardly the GPU, and no time is measured.
    with ThreadPoolExecutor(PROCESSES if device == "cuda" else 1) as pool:
        for place, of_place in zip(places, pool.map(found, places), strict=True):
            rows |= {(*place, int(seq_len)): row for seq_len, row in of_place.items()}
            run.write(_report(rows, device))
            run.progress.advance(task)
    return _report(rows, device)


def measure(case: list[str], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a cell and dtype, one for each length; see worker.py."""
    name, kind, device = case
    for seq_len in names:
        with notes.on(seq_len):
            notes.row(seq_len, {"errors": errors(name, int(seq_len), kind, device)})


def _report(rows: dict[tuple[str, str, int], Row], device: str) -> Report:
    lines: dict[str, list[list[str]]] = {name: [] for name in CELLS}
    targets, failures = [], []
    for (name, kind, seq_len), row in rows.items():
        contenders = CELLS[name]
        where = f"{name}, {kind}, T={seq_len}"
        if reason := why_none(row):
            lines[name].append([kind, str(seq_len), reason, *[""] * (3 * len(contenders))])
            failures.append(f"{where}: {reason}")
            continue
        found = row["errors"]
        worst = max(a / b for a, b in zip(found[OURS], found[_other(name)], strict=True))
        targets.append(Target(f"error, {OURS} / {_other(name)}", where, worst, LIMIT))
        texts = [f"{found[c][i]:.1e}" for i in range(len(RESULTS)) for c in contenders]
        lines[name].append([kind, str(seq_len), *texts, f"{worst:.2f}"])
    tables = [
        Table(
            f"Relative errors, {name}, B={BATCH} H={SIZE}, {device}",
            [
                *("dtype", "T"),
                *(f"{result}, {c}" for result in RESULTS for c in CELLS[name]),
                f"worst / {_other(name)}",
            ],
            lines[name],
        )
        for name in CELLS
    ]
    numbers = [
        {"cell": name, "dtype": kind, "seq_len": seq_len} | row
        for (name, kind, seq_len), row in rows.items()
    ]
    return Report("numerics", {"rows": numbers}, tables, targets, failures)


def _other(name: str) -> str:
    """The contender whose errors ours are divided by."""
    return TORCH if TORCH in CELLS[name] else LOOP


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
