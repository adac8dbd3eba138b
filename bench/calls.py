"""Time of short calls, as ratios to torch.nn's, and its parts: ``python -m bench.calls``.

"One step" is the cost for a model that calls a module once per step; a "short call" has a few steps
of a small batch. Both are measured under no_grad and as training steps. The short call is measured
eager and by torch.compile, which leaves nn.GRU and nn.LSTM as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedrnn

from .cases import (
    CALL_LIMITS,
    CALLS,
    GRU,
    ONE_STEP,
    OUR_GRU,
    SHORT_CALL,
    TF32,
    Shape,
    TrainingStep,
    training_step,
)
from .clock import Ratio, cuda_time_ms, interleaved_ms, ratio, ratio_of_medians, time_ms
from .report import Report, Run, Table, Target, main
from .sweep import Budget, Case, Results, failures, kinds, not_reached, numbers, opened, why_none
from .worker import Notes, Row, measure_apart, measure_here

TITLES = {ONE_STEP: "one step", SHORT_CALL: "short call"}
PASSES = {"no_grad": "under no_grad", "training": "training step"}
SUFFIX = ", torch.compile"
# Calls per sample, since a single call is too short to be measured.
CALLS_IN_SAMPLE = {ONE_STEP: 20, SHORT_CALL: 5}
ROUNDS, ROUNDS_QUICK, BUDGET_S, CUDA_BUDGET_S = 40, 3, 5.0, 2.0
WARM_UP = 3
# The parts of a call of GRU, in the order in which a call reaches them.
PARTS = (
    "the module: its parameters and options",
    "checks and autograd, in Python",
    "C++: arguments, plan, memory",
    "multiplications and steps",
    "backward: autograd, in Python",
    "backward, C++: arguments, plan, memory",
    "backward: multiplications and steps",
)

Calls = dict[str, Callable[[], object]]


def run(run: Run) -> Report:
    """Measures ratios to torch.nn, and the time of the parts of a call."""
    compiles = not run.quick
    jobs = [(Case(shape, "float32"), compiled) for shape, compiled in _jobs(compiles)]
    results: Results = {case: {} for case, _ in jobs}
    task = run.progress.add_task("calls", total=len(jobs) + len(CALLS))
    rounds = ROUNDS_QUICK if run.quick else ROUNDS
    obstacle = why_nothing_compiles() if compiles else None
    for case, compiled in jobs:
        names = _names(case.shape, compiled)
        if compiled and obstacle:
            results[case] |= {name: {"missing": obstacle} for name in names}
        else:
            results[case] |= measure_here(measure, _job(case, compiled, "cpu", rounds), names)
        run.progress.advance(task)
    parts = {}
    for shape in CALLS:
        parts[shape] = parts_us(shape, rounds)
        run.progress.advance(task)
    report = _report(results)
    report.numbers["parts_us"] = {TITLES[shape]: of_shape for shape, of_shape in parts.items()}
    report.tables.append(_parts_table(parts))
    return report


def run_on_cuda(run: Run) -> Report:
    """Measures ratios; float32 is rounded to TF32, as by default, unless --dtype says no."""
    jobs = [
        (Case(shape, kind), compiled)
        for shape, compiled in _jobs(compiles=True)
        for kind in kinds(run, [TF32])
    ]
    results: Results = {case: {} for case, _ in jobs}
    for case, compiled in jobs:
        results[case] |= dict.fromkeys(_names(case.shape, compiled), not_reached(run))
    rounds = ROUNDS_QUICK if run.quick else ROUNDS
    task = run.progress.add_task("calls", total=len(jobs))
    budget = Budget(run)
    for case, compiled in jobs:
        if budget.is_spent:
            break
        job, names = _job(case, compiled, "cuda", rounds), _names(case.shape, compiled)
        results[case] |= measure_apart("bench.calls", job, names, end=budget.end)
        run.write(_report(results))
        run.progress.advance(task)
    return _report(results)


def _jobs(compiles: bool) -> list[tuple[Shape, bool]]:
    """Shapes, eager and by torch.compile; these come last, since compiling may use up the time."""
    return [(shape, False) for shape in CALLS] + [(SHORT_CALL, True)] * compiles


def _names(shape: Shape, compiled: bool) -> list[str]:
    """The contenders of a job; torch's come first, because they cannot break the process."""
    names = [*dict.fromkeys([*CALLS[shape].values(), *CALLS[shape]])]
    return [name + SUFFIX for name in names] if compiled else names


def _job(case: Case, compiled: bool, device: str, rounds: int) -> dict[str, Any]:
    return case.numbers() | {"compiled": compiled, "device": device, "rounds": rounds}


def why_nothing_compiles() -> str | None:
    """Why torch.compile compiles nothing here; None if it does."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(2))
    except Exception as error:  # there may be no C++ compiler, or one that it cannot use
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"does not compile: {lines[0]:.150}"
    return None


def measure(numbers: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a case; see worker.py."""
    case, on_cuda = opened(numbers), numbers["device"] == "cuda"
    calls = CALLS_IN_SAMPLE[case.shape]
    steps: dict[str, TrainingStep] = {}
    for name in names:
        with notes.on(name):
            step = training_step(
                name.removesuffix(SUFFIX), case.shape, numbers["device"], case.dtype
            )
            if numbers["compiled"]:
                step.module = torch.compile(step.module)
            for _ in range(WARM_UP):
                step.train()
                step.infer()
            steps[name] = step

    def times_ms(samples: Calls) -> dict[str, list[float]]:
        of_samples = interleaved_ms(
            samples,
            rounds=numbers["rounds"],
            budget_s=CUDA_BUDGET_S if on_cuda else BUDGET_S,
            before=notes.begin,
            timer=cuda_time_ms if on_cuda else time_ms,
        )
        return {name: [ms / calls for ms in times] for name, times in of_samples.items()}

    no_grad_ms = times_ms({name: _without_grad(s.forward, calls) for name, s in steps.items()})
    training_ms = times_ms({name: _repeated(s.train, calls) for name, s in steps.items()})
    for name in steps:
        notes.row(name, {"no_grad_ms": no_grad_ms[name], "training_ms": training_ms[name]})


def _repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def _without_grad(call: Callable[[], object], count: int) -> Callable[[], None]:
    """A sample of calls inside one block of no_grad, as in a loop over steps."""
    return torch.no_grad()(_repeated(call, count))


class Recorded(TorchDispatchMode):
    """Records which of the package's operators are called in this context, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = functools.partial(func, *args, **(kwargs or {}))
        if func.namespace == "fusedrnn":
            self.calls.append(call)
        return call()


def operator_calls(step: TrainingStep) -> list[Callable[[], object]]:
    """Calls of the operators of a training step, forward and backward, with its arguments."""
    with Recorded() as recorded:
        step.train()
    return recorded.calls


def parts_us(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of the parts of a call of GRU, which add up to the whole call.

    A part is the difference between two calls, one of which begins further inside. The work of an
    operator before its first multiplication is measured by a batch of no rows.
    """
    calls = CALLS_IN_SAMPLE[shape]
    whole, torchs, empty = (
        training_step(name, of_shape)
        for name, of_shape in (
            (OUR_GRU, shape),
            (GRU, shape),
            (OUR_GRU, Shape(shape.seq_len, 0, shape.hidden_size)),
        )
    )
    forward, backward = operator_calls(whole)
    empty_forward, empty_backward = operator_calls(empty)
    outputs = {}
    for step in (whole, torchs):
        outputs[step] = step.forward()

    def functional() -> object:
        return fusedrnn.gru(whole.input, whole.weights)

    def backward_of(step: TrainingStep) -> Callable[[], object]:
        def of_step() -> None:
            outputs[step].backward(step.grad_output, retain_graph=True)
            for weight in step.weights:
                weight.grad = None

        return of_step

    without = {
        "torch": torchs.forward,
        "module": whole.forward,
        "functional": functional,
        "operator": forward,
        "empty": empty_forward,
        "backward operator": backward,
        "empty backward": empty_backward,
    }
    with_graph = {
        "torch, graph": torchs.forward,
        "module, graph": whole.forward,
        "functional, graph": functional,
        "torch, backward": backward_of(torchs),
        "backward": backward_of(whole),
    }
    samples = {name: _without_grad(call, calls) for name, call in without.items()}
    samples |= {name: _repeated(call, calls) for name, call in with_graph.items()}
    for sample in samples.values():
        sample()  # warm-up
    times = interleaved_ms(samples, rounds=rounds, budget_s=BUDGET_S)
    us = {name: 1000 * median(ms) / calls for name, ms in times.items()}

    def forward_parts(case: str) -> list[float]:
        module, functional = us["module" + case], us["functional" + case]
        inside, steps = us["empty"], us["operator"] - us["empty"]
        return [module - functional, functional - us["operator"], inside, steps]

    backward_parts = [
        us["backward"] - us["backward operator"],
        us["empty backward"],
        us["backward operator"] - us["empty backward"],
    ]
    return {
        "no_grad": {
            **dict(zip(PARTS, forward_parts(""), strict=False)),
            OUR_GRU: us["module"],
            GRU: us["torch"],
        },
        "training": {
            **dict(zip(PARTS, forward_parts(", graph") + backward_parts, strict=True)),
            OUR_GRU: us["module, graph"] + us["backward"],
            GRU: us["torch, graph"] + us["torch, backward"],
        },
    }


def _report(results: Results) -> Report:
    targets, tables = [], []
    for case, rows in results.items():
        for name, (other, limits) in _compared(case.shape, rows).items():
            for kind, limit in zip(PASSES, limits or (), strict=False):
                if r := _ratio(rows[name], rows[other], kind):
                    what = f"{TITLES[case.shape]}, {PASSES[kind]}, {name} / {other}"
                    targets.append(Target(what, str(case), r.median, limit, r.spread))
        tables.append(_table(case, rows))
    return Report("calls", numbers(results), tables, targets, failures(results))


def _compared(
    shape: Shape, rows: dict[str, Row]
) -> dict[str, tuple[str, tuple[float, float] | None]]:
    """Each contender, the module of torch that it is compared with, and the limits of ratios."""
    compared = {}
    for name in rows:
        plain = name.removesuffix(SUFFIX)
        suffix = name[len(plain) :]
        other = CALLS[shape].get(plain, plain)
        limits = CALL_LIMITS[shape] if plain.startswith("fusedrnn") else None
        compared[name] = other + suffix, limits
    return compared


def _ratio(row: Row, other: Row, kind: str) -> Ratio | None:
    if why_none(row) or why_none(other):
        return None
    times, other_times = row[f"{kind}_ms"], other[f"{kind}_ms"]
    if row.get("process") == other.get("process"):
        return ratio(times, other_times)
    return ratio_of_medians(times, other_times)


def _table(case: Case, rows: dict[str, Row]) -> Table:
    columns = [""]
    for what in PASSES.values():
        columns += [f"{what}, µs", "/ torch.nn"]
    lines = []
    for name, (other, _) in _compared(case.shape, rows).items():
        if reason := why_none(rows[name]):
            lines.append([name, reason, *[""] * (len(columns) - 2)])
            continue
        line = [name]
        for kind in PASSES:
            r = _ratio(rows[name], rows[other], kind)
            line += [f"{1000 * median(rows[name][f'{kind}_ms']):.1f}", str(r) if r else ""]
        lines.append(line)
    return Table(f"Time of a call, {TITLES[case.shape]}, {case}", columns, lines)


def _parts_table(parts: dict[Shape, dict[str, dict[str, float]]]) -> Table:
    found = [parts[shape][kind] for shape in parts for kind in PASSES]
    columns = [f"{TITLES[shape]}, {what}" for shape in parts for what in PASSES.values()]
    rows = [
        [name, *(f"{us[name]:.1f}" if name in us else "" for us in found)]
        for name in (*PARTS, OUR_GRU, GRU)
    ]
    return Table(f"Where the time of a call of {OUR_GRU} goes, µs", ["", *columns], rows)


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda])
