"""Time and memory of a training step over a PackedSequence: ``python -m bench.packed``.

Rows of it are read where they lie. It is compared with the same module over a padded batch with
lengths, unpacked before and packed after, and with torch.nn's over the packed one. The output's
gradient is packed; lengths fall evenly from the whole sequence to nothing, so that half of a padded
batch is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fusedrnn

from .cases import CUDA_QUICK, GRU, LSTM, OUR_GRU, OUR_LSTM, SMALL, Shape
from .clock import cuda_peak_bytes, cuda_time_ms, interleaved_ms, measure_memory, ratio, time_ms
from .report import Report, Run, Table, Target, main, mib
from .sweep import Case, Results, Row, attempt, failures, numbers, why_none

QUICK = Shape(16, 32, 32)
CUDA = Shape(1024, 64, 512)
ROUNDS, BUDGET_S = 20, 10.0
PADDED_GRU, PADDED_LSTM = f"{OUR_GRU}, padded", f"{OUR_LSTM}, padded"
# Peak memory over that of the padded batch, of whose rows half are there.
MEMORY_LIMITS = {(OUR_GRU, PADDED_GRU): 0.5, (OUR_LSTM, PADDED_LSTM): 0.5}


class Padded(nn.Module):
    """A module over packed rows that pads them, and packs its output."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, input: PackedSequence) -> tuple[PackedSequence, Any]:
        """As the module's."""
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
    """The smaller shape of the benchmark."""
    case = Case(QUICK if run.quick else SMALL, torch.float32)
    return _run(run, case, "cpu", lambda call: measure_memory(call).peak_bytes, time_ms)


def run_on_cuda(run: Run) -> Report:
    """In bfloat16."""
    case = Case(CUDA_QUICK if run.quick else CUDA, torch.bfloat16)
    return _run(run, case, "cuda", cuda_peak_bytes, cuda_time_ms)


def packed_input(shape: Shape, device: str, dtype: torch.dtype) -> PackedSequence:
    """Rows whose lengths fall evenly, of which the input needs a gradient."""
    torch.manual_seed(0)
    lengths = torch.linspace(shape.seq_len, 1, shape.batch).round().long()
    size = (shape.seq_len, shape.batch, shape.hidden_size)
    packed = pack_padded_sequence(torch.randn(size).to(device, dtype), lengths)
    return PackedSequence(packed.data.detach().requires_grad_(), packed.batch_sizes)


def _run(
    run: Run,
    case: Case,
    device: str,
    peak: Callable[[Callable[[], object]], int],
    timer: Callable[[Callable[[], object]], float],
) -> Report:
    input = packed_input(case.shape, device, case.dtype)
    gradient = torch.randn_like(input.data)
    calls: dict[str, Callable[[], object]] = {}
    task = run.progress.add_task("packed", total=len(MODULES) + 1)

    def prepare(name: str) -> Row:
        module = MODULES[name](case.shape.hidden_size).to(device, case.dtype)
        leaves: list[Tensor] = [input.data, *module.parameters()]

        def train() -> None:
            torch.autograd.grad(module(input)[0].data, leaves, gradient)

        train()  # loads kernels, and allocates what libraries keep for good
        row = {"peak_bytes": peak(train)}
        calls[name] = train
        run.progress.advance(task)
        return row

    rows = {name: attempt(partial(prepare, name)) for name in MODULES}
    rounds = 3 if run.quick else ROUNDS
    times = interleaved_ms(calls, rounds=rounds, budget_s=BUDGET_S, timer=timer)
    rows = {name: row | {"train_ms": times.get(name)} for name, row in rows.items()}
    run.progress.advance(task)
    return _report({case: rows}, len(input.data))


def _report(results: Results, count: int) -> Report:
    ((case, rows),) = results.items()
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
        line = [name, f"{median(row['train_ms']):.2f}"]
        bases = [rows[base] for base in BASES.get(name, ())]
        texts = [
            [str(ratio(row["train_ms"], base["train_ms"])) for base in bases],
            [f"{row['peak_bytes'] / base['peak_bytes']:.3f}" for base in bases],
        ]
        line += (texts[0] or ["", ""]) + [mib(row["peak_bytes"])] + (texts[1] or ["", ""])
        lines.append(line)
    table = Table(title, columns, lines)
    return Report("packed", numbers(results), [table], targets, failures(results))


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda], cuda_options=())
