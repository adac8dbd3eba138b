"""Time of a training step, as ratios within one run: ``python -m bench.speed``.

Longer than 350 lines, because measuring, ratios and tables are of one result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch

from fusedrnn import plan

from .cases import (
    BESIDE,
    BY_FLAGS,
    CAPTURED,
    COMPILED,
    CONTENDERS,
    CUDA_FORWARD_LIMITS,
    CUDA_SHAPES,
    CUDA_SPEED_LIMITS,
    CUDA_STEP_US,
    CUDA_TRAINING_LIMITS,
    CUDNN_PERSISTENT,
    DENORMAL_LIMIT,
    GEMM_BOUND,
    GEMMS,
    GRU,
    LARGE,
    LOOP,
    LSTM,
    LSTM_GRAPHED,
    LSTM_LOOPS,
    ON_CPU,
    ON_CPU_SHORT,
    ON_CUDA_TOGETHER,
    OUR_GRU,
    OUR_LSTM,
    OURS,
    OVERLAPPED,
    PERSISTENT,
    SAVED_GEMMS,
    SMALL,
    SPEED_LIMITS,
    TF32,
    Group,
    Shape,
    TrainingStep,
    groups,
    training_step,
    why_not_compiled,
)
from .clock import (
    Ratio,
    busy_us,
    cuda_kernels,
    cuda_time_ms,
    interleaved_ms,
    ratio,
    ratio_of_medians,
)
from .faults import names_fault
from .report import Report, Run, Table, Target, main
from .sweep import Case, Results, failures, numbers, opened, sweep, why_none
from .worker import Notes, Row

Calls = dict[str, Callable[[], object]]
RECOMPUTE = "recomputing GEMMs"
FORWARD_ONLY = (LSTM, GRU, LOOP, OURS, OUR_GRU, OUR_LSTM)
QUICK = Shape(16, 32, 32)
# The most rounds and seconds for contenders side by side on a GPU; a slow loop gets LEAST_ROUNDS.
CUDA_ROUNDS, CUDA_TRAIN_S, CUDA_FORWARD_S, CUDA_BACKWARD_S = 20, 2.5, 1.0, 1.0
# With --only: contenders that run in one process, and the cases at which they do.
_BY_KIND = {"float16": (CUDNN_PERSISTENT,), "bfloat16": CUDA_SHAPES[4:6], TF32: CUDA_SHAPES[:1]}
ONLY = {
    "lstm": (
        (LSTM, LSTM_GRAPHED, OUR_LSTM),
        [Case(shape, kind) for kind, shapes in _BY_KIND.items() for shape in shapes],
    ),
    "variants": (
        (OURS, OUR_GRU, OUR_LSTM, BY_FLAGS, OVERLAPPED, CAPTURED),
        [Case(shape, "bfloat16") for shape in (CUDA_SHAPES[0], *CUDA_SHAPES[2:4])],
    ),
}
LEFT_OUT = ("time of the loop by torch.compile and of recompute=False",)
DENORMAL, DENORMAL_QUICK = Shape(64, 32, 256), Shape(64, 32, 32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --only."""
    what = "with --device cuda: LSTM beside torch's where that is hard, or variants of ours"
    parser.add_argument("--only", choices=ONLY, help=what)


def run(run: Run) -> Report:
    """Measures training step and forward at two shapes, and backward through denormals."""
    if getattr(run.options, "only", None):
        raise SystemExit("--only needs --device cuda")
    names = ON_CPU if run.everything else ON_CPU_SHORT
    shapes = {LARGE: 4, SMALL: 15} if run.everything else {LARGE: 3, SMALL: 9}
    if run.quick:
        shapes = {QUICK: 3}  # shapes, each with its rounds
    contenders = [name for name in names if not (run.quick and name == COMPILED)]
    denormal_rounds = 3 if run.quick else 9
    calls_in_round = len(contenders) + 2 + len(FORWARD_ONLY)
    total = 1 + sum(shapes.values()) * calls_in_round + denormal_rounds * 4
    task = run.progress.add_task("speed", total=total)

    compiles = COMPILED in contenders
    not_compiled = why_not_compiled(list(shapes)) if compiles else None
    run.progress.advance(task)
    if not_compiled:
        contenders.remove(COMPILED)

    def measure(calls: Calls, rounds: int, budget_s: float) -> dict[str, list[float]]:
        def advance(_: str) -> None:
            run.progress.advance(task)

        return interleaved_ms(calls, rounds=rounds, budget_s=budget_s, before=advance)

    results, tables, targets = [], [], []
    for shape, rounds in shapes.items():
        train_ms = measure(_training_calls(shape, contenders), rounds, budget_s=40)
        recompute_ms = train_ms.pop(RECOMPUTE)
        train_ms[GEMMS] = [a + b for a, b in zip(train_ms[SAVED_GEMMS], recompute_ms, strict=True)]
        forward_ms = measure(_forward_calls(shape), rounds, budget_s=12)
        pairs = [pair for pair in SPEED_LIMITS[LARGE] if pair[0] in train_ms]
        pairs += [(name, LSTM) for name in LSTM_LOOPS if name in train_ms]
        ratios = {(a, b): ratio(train_ms[a], train_ms[b]) for a, b in pairs}
        for (a, b), limit in SPEED_LIMITS.get(shape, {}).items():
            if (a, b) not in ratios:
                continue
            r = ratios[a, b]
            targets.append(Target(f"time, {a} / {b}", str(shape), r.median, limit, r.spread))
        tables += [_table("Training step, ", g, shape, train_ms) for g in groups(train_ms)]
        tables += [
            _table("Forward under no_grad, ", g, shape, forward_ms) for g in groups(forward_ms)
        ]
        results.append(
            {
                "shape": vars(shape),
                "train_ms": train_ms,
                "forward_ms": forward_ms,
                "ratios": {f"{a} / {b}": asdict(r) for (a, b), r in ratios.items()},
            }
        )

    shape = DENORMAL_QUICK if run.quick else DENORMAL
    backward_ms = measure(_backward_calls(shape), denormal_rounds, budget_s=15)
    slowdown = {
        name: ratio(backward_ms[f"{name}, denormals"], backward_ms[name]) for name in (LOOP, OURS)
    }
    rows = [
        [name, *(f"{median(backward_ms[name + case]):.1f}" for case in ("", ", denormals")), str(r)]
        for name, r in slowdown.items()
    ]
    columns = ["", "ordinary ms", "denormals ms", "denormals / ordinary"]
    tables.append(Table(f"Backward, gradients through denormals, {shape}", columns, rows))
    if not run.quick:
        r = slowdown[OURS]
        what = f"backward time, {OURS}, denormals / ordinary"
        targets.append(Target(what, str(shape), r.median, DENORMAL_LIMIT, r.spread))
    run.progress.update(task, completed=total)  # also if its time ended it early
    content = {
        "shapes": results,
        "denormals": {
            "shape": vars(shape),
            "backward_ms": backward_ms,
            "slowdown": {name: asdict(r) for name, r in slowdown.items()},
        },
        "compiled_loop": not_compiled or ("ran" if compiles else "left out"),
    }
    if not_compiled:
        tables.append(Table(COMPILED, [not_compiled], []))
    return Report("speed", content, tables, targets, left_out=() if run.everything else LEFT_OUT)


def run_on_cuda(run: Run) -> Report:
    """Measures training step and forward pass over shapes and dtypes."""
    if chosen := getattr(run.options, "only", None):
        names, cases = ONLY[chosen]
        report = partial(_report_on_cuda, name=chosen)
        return sweep(run, "bench.speed", [names], report, cases)
    return sweep(run, "bench.speed", ON_CUDA_TOGETHER, _report_on_cuda)


def _training_calls(shape: Shape, contenders: list[str]) -> Calls:
    calls: Calls = {}
    for name in contenders:
        step = training_step(name, shape)
        _warm_up(step, step.train)
        calls[name] = step.train
    gemms = Gemms(shape)
    gemms.saved()
    gemms.recompute()
    return calls | {SAVED_GEMMS: gemms.saved, RECOMPUTE: gemms.recompute}


def _forward_calls(shape: Shape) -> Calls:
    calls: Calls = {}
    for name in FORWARD_ONLY:
        step = training_step(name, shape)
        _warm_up(step, step.infer)
        calls[name] = step.infer
    return calls


def _warm_up(step: TrainingStep, call: Callable[[], object]) -> None:
    """Warms up on a few steps, because a whole sequence would cost as much as a round."""
    whole = step.input, step.grad_output
    step.input, step.grad_output = (tensor[:16] for tensor in whole)
    call()
    step.input, step.grad_output = whole


class Gemms:
    """The op's matrix products and nothing else, back to back, into memory allocated before.

    Products over several steps cover the rows of a chunk, as in the op. Chunks must be whole here.
    """

    def __init__(self, shape: Shape) -> None:
        width = shape.hidden_size
        sizes = {"cell": "stochastic_gru", "input_size": width, "hidden_size": width}
        steps = plan(sizes, (shape.seq_len, shape.batch, width), device="cpu").chunk_steps
        rows = steps * shape.batch  # in the op's products over several steps
        chunks, rest = divmod(shape.seq_len, steps)
        if rest:
            raise ValueError(f"{shape} has no whole number of chunks of {steps} steps")
        self.x, self.h, self.z = torch.randn(3, chunks, rows, width).unbind()
        self.w_ih, self.w_zh = torch.randn(2, 3 * width, width).unbind()
        self.w_hz = torch.randn(2 * width, width)
        self.grad_ih, self.grad_zh = torch.zeros(2, 3 * width, width).unbind()
        self.grad_hz = torch.zeros(2 * width, width)
        self.input_gates, self.gates = torch.randn(2, rows, 3 * width).unbind()
        self.posterior = torch.randn(rows, 2 * width)
        self.of_step = torch.empty(shape.batch, width)
        self.batch = shape.batch

    def saved(self) -> None:
        """Forward and backward with ``recompute=False``."""
        gates, posterior = self.gates.split(self.batch), self.posterior.split(self.batch)
        for x, h, z in zip(self.x, self.h, self.z, strict=True):
            torch.mm(x, self.w_ih.t(), out=self.input_gates)
            steps = zip(h.split(self.batch), z.split(self.batch), gates, posterior, strict=True)
            for h_t, z_t, gates_t, posterior_t in steps:
                torch.mm(h_t, self.w_hz.t(), out=posterior_t)
                torch.mm(z_t, self.w_zh.t(), out=gates_t)
        for x, h, z in zip(self.x, self.h, self.z, strict=True):
            for gates_t, posterior_t in zip(gates, posterior, strict=True):
                torch.mm(gates_t, self.w_zh, out=self.of_step)
                torch.mm(posterior_t, self.w_hz, out=self.of_step)
            self.grad_ih.addmm_(self.input_gates.t(), x)
            self.grad_zh.addmm_(self.gates.t(), z)
            self.grad_hz.addmm_(self.posterior.t(), h)

    def recompute(self) -> None:
        """What backward does in addition with ``recompute=True``."""
        for x, h, z in zip(self.x, self.h, self.z, strict=True):
            torch.mm(x, self.w_ih.t(), out=self.input_gates)
            torch.mm(h, self.w_hz.t(), out=self.posterior)
            torch.mm(z, self.w_zh.t(), out=self.gates)


def _backward_calls(shape: Shape) -> Calls:
    calls: Calls = {}
    for name in (LOOP, OURS):
        for case in ("", ", denormals"):
            step = training_step(name, shape)
            if case:
                _saturate(step)
            calls[name + case] = _backward(step, step.forward())
            calls[name + case]()  # warm-up
    return calls


def _saturate(step: TrainingStep) -> None:
    """Sets biases such that the update gate nearly keeps the state; only h_n has a gradient.

    Gradients shrink by a constant factor with each step, until first their products with weights
    and then they themselves are denormal.
    """
    biases = dict(step.module.named_parameters(remove_duplicate=False))
    name = next(name for name in biases if name.endswith("bias_ih_l0"))
    with torch.no_grad():
        biases[name].chunk(3)[1].fill_(3.0)
    step.grad_output[:-1] = 0
    step.grad_output *= 1e-34


def _backward(step: TrainingStep, output: torch.Tensor) -> Callable[[], None]:
    def backward() -> None:
        output.backward(step.grad_output, retain_graph=True)
        step.module.zero_grad(set_to_none=True)

    return backward


def _table(title: str, group: Group, shape: Shape, times_ms: dict[str, list[float]]) -> Table:
    rows = [
        [
            name,
            f"{median(times_ms[name]):.1f}",
            *(str(ratio(times_ms[name], times_ms[other(name)])) for other in group.over.values()),
        ]
        for name in group.names
    ]
    return Table(f"{title}{group.title}{shape}", ["", "ms", *group.over], rows)


def measure(numbers: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a case on a GPU; see worker.py."""
    case = opened(numbers)
    steps: dict[str, TrainingStep] = {}
    for name in names:
        with notes.on(name):
            step = training_step(name, case.shape, "cuda", case.dtype)
            for _ in range(2):  # the first compiles or captures; the second is like all later ones
                step.train()
                step.infer()
            torch.cuda.synchronize()  # so that its faults are not blamed on the next contender
            steps[name] = step

    def times_ms(calls: Calls, budget_s: float) -> dict[str, list[float]]:
        return interleaved_ms(
            calls, rounds=CUDA_ROUNDS, budget_s=budget_s, before=notes.begin, timer=cuda_time_ms
        )

    train_ms = times_ms({name: step.train for name, step in steps.items()}, CUDA_TRAIN_S)
    forward_ms = times_ms({name: step.infer for name, step in steps.items()}, CUDA_FORWARD_S)
    backward: Calls = {
        name: _backward(steps[name], steps[name].forward())
        for name in (*PERSISTENT, *PERSISTENT.values())
        if name in steps
    }
    backward_ms = times_ms(backward, CUDA_BACKWARD_S)
    for name in steps:
        notes.begin(name)
        optional = {"backward_ms": backward_ms.get(name), "busy_ms": _busy_ms(name, steps[name])}
        row = _row(name, case, train_ms[name], forward_ms[name])
        notes.row(name, row | {key: ms for key, ms in optional.items() if ms})


def _busy_ms(name: str, step: TrainingStep) -> float | None:
    """Milliseconds of forward in which a kernel runs; None if the profiler has not seen any."""
    if name.partition(",")[0] in (LOOP, COMPILED):
        return None  # tens of thousands of kernels
    try:
        return busy_us(cuda_kernels(step.infer)) / 1e3
    except RuntimeError as error:  # the profiler may be refused, and nothing else depends on it
        if names_fault(str(error)):
            raise
        print(f"{name}: {error}")
        return None


def _row(name: str, case: Case, train_ms: list[float], forward_ms: list[float]) -> Row:
    contender = CONTENDERS[name]
    return {
        "train_ms": train_ms,
        "train_tflops": contender.tflops(case.shape, median(train_ms), training=True),
        "forward_ms": forward_ms,
        "forward_tflops": contender.tflops(case.shape, median(forward_ms), training=False),
    }


def _report_on_cuda(results: Results, name: str = "speed") -> Report:
    targets = [target for case, rows in results.items() for target in _targets(case, rows)]
    tables = [
        _case_table(group, case, rows) for case, rows in results.items() for group in groups(rows)
    ]
    tables += [table for table in (_steps_table(results), _backward_table(results)) if table.rows]
    return Report(name, numbers(results), tables, targets, failures(results))


def compared(rows: dict[str, Row], a: str, b: str, times: str) -> Ratio | None:
    """The ratio of two contenders' times, None if one of them is not there or was not measured.

    Contenders of one process are compared round by round; torch's modules run in either process.
    """
    beside = BESIDE.get(b, b)
    if a not in rows or not {b, beside} & rows.keys():
        return None
    other = next(
        (rows[n] for n in (b, beside) if n in rows and _are_together(rows[a], rows[n])),
        rows.get(b, {}),
    )
    ours_ms, other_ms = rows[a].get(times), other.get(times)
    if not ours_ms or not other_ms:
        return None
    if _are_together(rows[a], other):
        return ratio(ours_ms, other_ms)
    return ratio_of_medians(ours_ms, other_ms)


def _are_together(row: Row, other: Row) -> bool:
    return row.get("process") == other.get("process") and not (why_none(row) or why_none(other))


def _targets(case: Case, rows: dict[str, Row]) -> list[Target]:
    """The targets of contenders that were measured."""
    targets = []

    def compare(what: str, limits: dict[tuple[str, str], float], times: str) -> None:
        for (a, b), limit in limits.items():
            if r := compared(rows, a, b, times):
                targets.append(Target(f"{what}, {a} / {b}", str(case), r.median, limit, r.spread))

    def bound_steps(name: str, limit: float) -> None:
        if name in rows and why_none(rows[name]) is None:
            us = [1000 * ms / case.shape.seq_len for ms in rows[name]["forward_ms"]]
            what, spread = "microseconds per step of forward", f"({min(us):.2f}–{max(us):.2f})"
            if apart := _step_us(case, rows[name]):
                spread += f", kernels {apart[1]:.2f}, host {apart[2]:.2f}"
            targets.append(Target(f"{what}, {name}", str(case), median(us), limit, spread))

    if case.kind != "float32" or case.shape not in GEMM_BOUND:
        compare("time", CUDA_SPEED_LIMITS, "train_ms")
    compare("time", CUDA_TRAINING_LIMITS.get(case.kind, {}).get(case.shape, {}), "train_ms")
    if case.kind == "bfloat16" and (step_us := CUDA_STEP_US.get(case.shape)):
        stochastic, drop_in = step_us
        for name, limit in ((OURS, stochastic), (OUR_GRU, drop_in), (OUR_LSTM, drop_in)):
            bound_steps(name, limit)
        compare("forward time", CUDA_FORWARD_LIMITS, "forward_ms")
    if case.kind == "float16" and case.shape == CUDNN_PERSISTENT:
        compare("forward time", {(OUR_LSTM, LSTM): 1.0}, "forward_ms")
    return targets


def _step_us(case: Case, row: Row) -> tuple[float, float, float] | None:
    """Microseconds per step of forward: of the call, with kernels, and without."""
    if "busy_ms" not in row:
        return None
    whole, kernels = (
        1e3 * ms / case.shape.seq_len for ms in (median(row["forward_ms"]), row["busy_ms"])
    )
    return whole, kernels, whole - kernels


def _steps_table(results: Results) -> Table:
    lines = [
        [str(case), name, *(f"{us:.2f}" for us in apart)]
        for case, rows in results.items()
        for name, row in rows.items()
        if (apart := _step_us(case, row))
    ]
    title = "Microseconds per step of forward: of a call; while a kernel ran, by torch's profiler; "
    title += "and the rest, in which the GPU waited for the host"
    return Table(title, ["", "", "call", "kernels", "host"], lines)


def _backward_table(results: Results) -> Table:
    lines = []
    for case, rows in results.items():
        ratios = [compared(rows, a, b, "backward_ms") for a, b in PERSISTENT.items()]
        if any(ratios):
            lines.append([str(case), *(str(r) if r else "" for r in ratios)])
    return Table("Backward, persistent kernels / stepwise", ["", *PERSISTENT], lines)


def _case_table(group: Group, case: Case, rows: dict[str, Row]) -> Table:
    def over(name: str, other: str) -> str:
        r = compared(rows, name, other, "train_ms")
        return f"{r.median:.3f}" if r else ""

    def ms(times: list[float]) -> list[str]:
        return [f"{median(times):.2f}", f"{min(times):.2f}–{max(times):.2f}"]

    columns = ["", "training ms", "spread", *group.over, "TFLOP/s"]
    columns += ["forward ms", "spread", "TFLOP/s"]
    lines = []
    for name in group.names:
        row = rows[name]
        if reason := why_none(row):
            lines.append([name, reason, *[""] * (len(columns) - 2)])
            continue
        train_ms = row["train_ms"]
        lines.append(
            [
                name,
                *ms(train_ms),
                *(over(name, other(name)) for other in group.over.values()),
                f"{row['train_tflops']:.1f}",
                *ms(row["forward_ms"]),
                f"{row['forward_tflops']:.1f}",
            ]
        )
    tf32 = " (TF32 off)" if case.kind == "float32" else ""
    return Table(f"Training step and forward pass, {group.title}{case}{tf32}", columns, lines)


if __name__ == "__main__":
    main([run], __doc__, add_options, on_cuda=[run_on_cuda])
