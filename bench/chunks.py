"""Time and memory of a training step of StochasticGRU over chunk_size: ``python -m bench.chunks``.

Shows how far the automatic chunk is from the best one, which is the fastest whose peak memory is at
most half of nn.LSTM's, or a quarter from a GiB on. Longer chunks may be faster still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import fusedrnn

from .cases import (
    CHUNKS_KINDS,
    CHUNKS_LIMIT,
    CHUNKS_SHAPES,
    CUDA_QUICK,
    LSTM,
    SMALL,
    Shape,
    TrainingStep,
    memory_limit,
    training_step,
)
from .clock import cuda_peak_bytes, cuda_time_ms, interleaved_ms, measure_memory, ratio, time_ms
from .report import Report, Run, Table, Target, main, mib
from .sweep import Budget, Case, Results, kinds, not_reached, numbers, opened, why_none
from .worker import Notes, Row, measure_apart, measure_here

QUICK = Shape(64, 32, 32)
ROUNDS, BUDGET_S = 20, 6.0
AUTOMATIC = "automatic"
LEAST_STEPS = 16


def run(run: Run) -> Report:
    """Measures the smaller shape of the benchmark."""
    cases = [Case(QUICK if run.quick else SMALL, "float32")]
    return _run(run, cases, "cpu")


def run_on_cuda(run: Run) -> Report:
    """Measures shapes on a GPU, in bfloat16 unless --dtype says otherwise."""
    shapes = run.options.shape or ([CUDA_QUICK] if run.quick else CHUNKS_SHAPES)
    cases = [Case(shape, kind) for kind in kinds(run, CHUNKS_KINDS) for shape in shapes]
    return _run(run, cases, "cuda")


def _run(run: Run, cases: Sequence[Case], device: str) -> Report:
    results: Results = {
        case: dict.fromkeys(_chunks(case.shape), not_reached(run)) for case in cases
    }
    task = run.progress.add_task("chunks", total=len(cases))
    budget = Budget(run)
    for case in cases:
        if budget.is_spent:
            break
        numbers = case.numbers() | {"device": device, "rounds": 3 if run.quick else ROUNDS}
        names = list(_chunks(case.shape))
        if device == "cuda":
            results[case] |= measure_apart("bench.chunks", numbers, names, end=budget.end)
        else:
            results[case] |= measure_here(measure, numbers, names)
        run.write(_report(results, device))
        run.progress.advance(task)
    return _report(results, device)


def _chunks(shape: Shape) -> dict[str, int | None]:
    """Names and chunk_size of all that is measured: powers of two, and the whole sequence."""
    steps = [LEAST_STEPS]
    while steps[-1] < shape.seq_len:
        steps.append(min(2 * steps[-1], shape.seq_len))
    return {AUTOMATIC: None, **{str(count): count for count in steps}, LSTM: None}


def measure(numbers: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a case; see worker.py. torch's come first: they break no process."""
    case, on_cuda = opened(numbers), numbers["device"] == "cuda"
    sizes = _chunks(case.shape)
    steps: dict[str, TrainingStep] = {}
    rows: dict[str, Row] = {}
    for name in sorted(names, key=lambda name: name != LSTM):
        with notes.on(name):
            step = _training_step(name, sizes[name], case, numbers["device"])
            step.train()  # loads kernels, and allocates the memory that libraries keep
            if on_cuda:
                rows[name] = {"peak_bytes": cuda_peak_bytes(step.train)}
            else:
                rows[name] = {"peak_bytes": measure_memory(step.train).peak_bytes}
            if name != LSTM:
                rows[name]["chunk_steps"] = _chunk_steps(step, case, numbers["device"])
            steps[name] = step
    times = interleaved_ms(
        {name: step.train for name, step in steps.items()},
        rounds=numbers["rounds"],
        budget_s=BUDGET_S,
        before=notes.begin,
        timer=cuda_time_ms if on_cuda else time_ms,
    )
    for name, train_ms in times.items():
        notes.row(name, rows[name] | {"train_ms": train_ms})


def _training_step(name: str, chunk_size: int | None, case: Case, device: str) -> TrainingStep:
    def make(width: int) -> fusedrnn.StochasticGRU:
        return fusedrnn.StochasticGRU(width, width, chunk_size=chunk_size)

    if name == LSTM:
        return training_step(LSTM, case.shape, device, case.dtype)
    return TrainingStep(make, case.shape, device, case.dtype)


def _chunk_steps(step: TrainingStep, case: Case, device: str) -> int:
    assert isinstance(step.module, fusedrnn.StochasticGRU)
    return fusedrnn.plan(step.module, tuple(step.input.shape), case.dtype, device).chunk_steps


def _report(results: Results, device: str) -> Report:
    targets = []
    for case, rows in results.items():
        best = _best(rows)
        if device == "cuda" and best and not why_none(rows[AUTOMATIC]):
            r = ratio(rows[AUTOMATIC]["train_ms"], rows[best]["train_ms"])
            what = "time, automatic chunk / the best one"
            targets.append(Target(what, str(case), r.median, CHUNKS_LIMIT, r.spread))
    tables = [_table(case, rows) for case, rows in results.items()]
    failures = [
        f"chunk_size {name} {what} at {case}: {row[reason]}"
        for case, rows in results.items()
        for name, row in rows.items()
        for reason, what in (("error", "failed"), ("missing", "is missing"))
        if name != LSTM and reason in row and (reason == "error" or case.shape in CHUNKS_SHAPES)
    ]
    return Report("chunks", numbers(results), tables, targets, failures)


def _best(rows: dict[str, Row]) -> str | None:
    """The fastest chunk whose memory is within the limit; None if it was not measured."""
    if why_none(rows[LSTM]):
        return None
    lstm_bytes = rows[LSTM]["peak_bytes"]
    most_bytes = memory_limit(lstm_bytes) * lstm_bytes
    measured = [name for name, row in rows.items() if name != LSTM and not why_none(row)]
    fitting = [name for name in measured if rows[name]["peak_bytes"] <= most_bytes]
    return min(fitting, key=lambda name: median(rows[name]["train_ms"]), default=None)


def _table(case: Case, rows: dict[str, Row]) -> Table:
    best = _best(rows)

    def over(row: Row, other: str | None, field: str, text: Callable[[Any, Any], str]) -> str:
        if other is None or why_none(rows[other]):
            return ""
        return text(row[field], rows[other][field])

    lines = []
    columns = ["chunk_size", "steps", "ms", "/ best", "peak MiB", "/ LSTM"]
    for name, row in rows.items():
        if reason := why_none(row):
            lines.append([name, reason, *[""] * (len(columns) - 2)])
            continue
        lines.append(
            [
                name,
                str(row.get("chunk_steps", "")),
                f"{median(row['train_ms']):.2f}",
                over(row, best, "train_ms", lambda a, b: str(ratio(a, b))),
                mib(row["peak_bytes"]),
                over(row, LSTM, "peak_bytes", lambda a, b: f"{a / b:.3f}"),
            ]
        )
    return Table(f"Training step of StochasticGRU, {case}", columns, lines)


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda])
