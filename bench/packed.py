"""Time and memory of a training step over a PackedSequence: ``python -m bench.packed``.

A packed call reads rows in place. It is compared with the same module over a padded batch with
lengths, padded before and packed after the call, and with torch.nn's module over the packed
sequence. The output's gradient is packed. Lengths fall evenly from the whole sequence to nothing,
so that half of a padded batch is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fusedrnn

from .cases import CUDA_QUICK, GRU, LSTM, OUR_GRU, OUR_LSTM, SMALL, Shape
from .clock import cuda_peak_bytes, cuda_time_ms, interleaved_ms, measure_memory, ratio, time_ms
from .report import Report, Run, Table, Target, main, mib
from .sweep import Budget, Case, Results, failures, not_reached, numbers, opened, why_none
from .worker import Notes, Row, measure_apart, measure_here

QUICK = Shape(16, 32, 32)
CUDA = Shape(1024, 64, 512)
ROUNDS, BUDGET_S = 20, 10.0
PADDED_GRU, PADDED_LSTM = f"{OUR_GRU}, padded", f"{OUR_LSTM}, padded"
# Limits of peak memory over the padded batch's, half of which is padding.
MEMORY_LIMITS = {(OUR_GRU, PADDED_GRU): 0.5, (OUR_LSTM, PADDED_LSTM): 0.5}


class Padded(nn.Module):
    """A module over packed rows that pads them, and packs its output."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, input: PackedSequence) -> tuple[PackedSequence, Any]:
        """Pads the input, calls the module, and packs its output."""
        padded, lengths = pad_packed_sequence(input)
        output, last = self.rnn(padded, lengths=lengths)
        return pack_padded_sequence(output, lengths), last


MODULES: dict[str, Callable[[int], nn.Module]] = {
    OUR_GRU: lambda width: fusedrnn.GRU(width, width),
    PADDED_GRU: lambda width: Padded(fusedrnn.GRU(width, width)),
    GRU: lambda width: nn.GRU(width, width),
    OUR_LSTM: lambda width: fusedrnn.LSTM(width, width),
    PADDED_LSTM: lambda width: Padded(fusedrnn.LSTM(width, width)),
    LSTM: lambda width: nn.LSTM(width, width),
}
BASES = {OUR_GRU: (PADDED_GRU, GRU), OUR_LSTM: (PADDED_LSTM, LSTM)}


def run(run: Run) -> Report:
    """Measures the smaller shape of the benchmark."""
    return _run(run, Case(QUICK if run.quick else SMALL, "float32"), "cpu")


def run_on_cuda(run: Run) -> Report:
    """Measures on a GPU, in bfloat16."""
    return _run(run, Case(CUDA_QUICK if run.quick else CUDA, "bfloat16"), "cuda")


def packed_input(shape: Shape, device: str, dtype: torch.dtype) -> PackedSequence:
    """A PackedSequence whose lengths fall evenly, and whose data need a gradient."""
    torch.manual_seed(0)
    lengths = torch.linspace(shape.seq_len, 1, shape.batch).round().long()
    size = (shape.seq_len, shape.batch, shape.hidden_size)
    packed = pack_padded_sequence(torch.randn(size).to(device, dtype), lengths)
    return PackedSequence(packed.data.detach().requires_grad_(), packed.batch_sizes)


def _run(run: Run, case: Case, device: str) -> Report:
    rows = dict.fromkeys(MODULES, not_reached(run))
    task = run.progress.add_task("packed", total=1)
    numbers = case.numbers() | {"device": device, "rounds": 3 if run.quick else ROUNDS}
    if device == "cuda":
        rows |= measure_apart("bench.packed", numbers, list(MODULES), end=Budget(run).end)
    else:
        rows |= measure_here(measure, numbers, list(MODULES))
    run.progress.advance(task)
    return _report({case: rows})


def measure(numbers: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a case; see worker.py."""
    case, device = opened(numbers), numbers["device"]
    input = packed_input(case.shape, device, case.dtype)
    gradient = torch.randn_like(input.data)
    calls: dict[str, Callable[[], object]] = {}
    rows: dict[str, Row] = {}
    for name in sorted(names, key=lambda name: name not in (GRU, LSTM)):  # cannot break a process
        with notes.on(name):
            module = MODULES[name](case.shape.hidden_size).to(device, case.dtype)
            train = _training_call(module, input, gradient)
            train()  # loads kernels, and allocates the memory that libraries keep
            if device == "cuda":
                rows[name] = {"peak_bytes": cuda_peak_bytes(train)}
            else:
                rows[name] = {"peak_bytes": measure_memory(train).peak_bytes}
            calls[name] = train
    times = interleaved_ms(
        calls,
        rounds=numbers["rounds"],
        budget_s=BUDGET_S,
        before=notes.begin,
        timer=cuda_time_ms if device == "cuda" else time_ms,
    )
    for name, train_ms in times.items():
        notes.row(name, rows[name] | {"train_ms": train_ms})


def _training_call(
    module: nn.Module, input: PackedSequence, gradient: Tensor
) -> Callable[[], object]:
    leaves: list[Tensor] = [input.data, *module.parameters()]
    return lambda: torch.autograd.grad(module(input)[0].data, leaves, gradient)


def _report(results: Results) -> Report:
    ((case, rows),) = results.items()
    count = len(packed_input(case.shape, "cpu", case.dtype).data)
    targets = [
        Target(
            f"peak memory, packed, {a} / {b}",
            str(case),
            rows[a]["peak_bytes"] / rows[b]["peak_bytes"],
            limit,
        )
        for (a, b), limit in MEMORY_LIMITS.items()
        if not why_none(rows[a]) and not why_none(rows[b])
    ]
    title = f"Training step over {count:,} packed rows, {case}"
    columns = ["", "ms", "/ padded", "/ torch.nn", "peak MiB", "/ padded", "/ torch.nn"]
    lines = []
    for name, row in rows.items():
        if reason := why_none(row):
            lines.append([name, reason, *[""] * (len(columns) - 2)])
            continue
        times, sizes = [""] * 2, [""] * 2
        for i, base in enumerate(rows[base] for base in BASES.get(name, ())):
            if not why_none(base):
                times[i] = str(ratio(row["train_ms"], base["train_ms"]))
                sizes[i] = f"{row['peak_bytes'] / base['peak_bytes']:.3f}"
        line = [name, f"{median(row['train_ms']):.2f}"]
        lines.append([*line, *times, mib(row["peak_bytes"]), *sizes])
    table = Table(title, columns, lines)
    return Report("packed", numbers(results), [table], targets, failures(results))


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda], cuda_options=("--budget-s",))
