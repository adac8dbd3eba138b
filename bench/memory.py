"""Memory of a training step: ``python -m bench.memory``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .cases import (
    BESIDE,
    COMPILED,
    DROP_INS,
    HAS_LAST_STATE_ONLY,
    LARGE,
    LAST_STATE,
    LONG,
    LONG_QUICK,
    LSTM,
    LSTM_LOOPS,
    MEMORY_LIMITS,
    ON_CPU,
    ON_CPU_SHORT,
    ON_CUDA_TOGETHER,
    OUR_GRU,
    OUR_LSTM,
    OURS,
    OVER_SEQ_LEN,
    OVER_SEQ_LEN_QUICK,
    SMALL,
    Group,
    Shape,
    groups,
    memory_limit,
    training_step,
    why_not_compiled,
)
from .clock import cuda_peak_bytes, cuda_saved_bytes, measure_memory, saved_sizes_bytes
from .plots import peaks_over_seq_len
from .report import Report, Run, Table, Target, main, mib
from .sweep import Case, Results, failures, numbers, opened, release, sweep, why_none
from .worker import Notes, Row

LEFT_OUT = (
    "memory of the loop by torch.compile, of recompute=False, over T, and of last states alone",
)


def run(run: Run) -> Report:
    """Measures peaks at two shapes, growth with the sequence, and the last state of a long one."""
    shapes = [SMALL] if run.quick else [LARGE, SMALL]
    over_seq_len = OVER_SEQ_LEN_QUICK if run.quick else OVER_SEQ_LEN
    long = LONG_QUICK if run.quick else LONG
    on_long = LAST_STATE.names if HAS_LAST_STATE_ONLY else ()
    names = ON_CPU
    if not run.everything:
        names, over_seq_len, on_long = ON_CPU_SHORT, (), ()
    contenders = [name for name in names if not (run.quick and name == COMPILED)]
    over_contenders = [name for name in contenders if name not in (*DROP_INS, *LSTM_LOOPS)]
    steps = 1 + len(contenders) * len(shapes) + len(over_contenders) * len(over_seq_len)
    task = run.progress.add_task("memory", total=steps + len(on_long))

    compiles = COMPILED in contenders
    not_compiled = why_not_compiled([*shapes, *over_seq_len]) if compiles else None
    run.progress.advance(task)
    if not_compiled:
        contenders.remove(COMPILED)
        over_contenders.remove(COMPILED)

    def measure_all(shape: Shape, names: Sequence[str]) -> dict[str, Any]:
        measured = {}
        for name in names:
            measured[name] = _measure(name, shape)
            run.progress.advance(task)
        return {"shape": vars(shape), "output_bytes": shape.output_bytes, "contenders": measured}

    at_shapes = {shape: measure_all(shape, contenders) for shape in shapes}
    over = [measure_all(shape, over_contenders) for shape in over_seq_len]
    at_long = {long: measure_all(long, on_long)} if on_long else {}
    targets = [
        Target(f"peak memory, {a} / {b}", str(shape), _ratio(result, a, b), limit)
        for shape, result in (at_shapes | at_long).items()
        for (a, b), limit in MEMORY_LIMITS.get(shape, {}).items()
    ]
    tables = [
        _shape_table(group, shape, result)
        for shape, result in at_shapes.items()
        for group in groups(contenders)
    ]
    tables += [_shape_table(LAST_STATE, shape, result) for shape, result in at_long.items()]
    if over:
        tables += [_growth_table(over), _peak_table(over, over_contenders)]
        _plot(run, over, over_contenders)
    if not_compiled:
        tables.append(Table(COMPILED, [not_compiled], []))
    content = {
        "shapes": list(at_shapes.values()),
        "over_seq_len": over,
        "last_state": list(at_long.values()),
        "compiled_loop": not_compiled or ("ran" if compiles else "left out"),
    }
    return Report("memory", content, tables, targets, left_out=() if run.everything else LEFT_OUT)


def run_on_cuda(run: Run) -> Report:
    """Measures peaks, and what is saved for backward, over shapes and dtypes."""
    # One by one, because rows are independent; contenders that cannot break a process come first.
    names = [name for group in ON_CUDA_TOGETHER for name in group if name not in BESIDE.values()]
    return sweep(run, "bench.memory", [names], _report_on_cuda)


def _measure(name: str, shape: Shape) -> dict[str, Any]:
    """Bytes of a training step. Workspace: the peak without output, gradients and saved tensors."""
    step = training_step(name, shape)
    weights = list(step.module.parameters())
    saved = saved_sizes_bytes(step.forward, [step.input, *weights])
    memory = measure_memory(step.train)
    gradient_bytes = sum(w.nbytes for w in weights)
    output_bytes = step.grad_output.nbytes
    return {
        "peak_bytes": memory.peak_bytes,
        "allocations": memory.allocations,
        "saved_bytes": sum(saved),
        "largest_saved_bytes": [size for size in saved if size > 0][:4],
        "gradient_bytes": gradient_bytes,
        "workspace_bytes": memory.peak_bytes - gradient_bytes - max(sum(saved), output_bytes),
    }


def _ratio(result: dict[str, Any], name: str, other: str) -> float:
    measured = result["contenders"]
    return float(measured[name]["peak_bytes"] / measured[other]["peak_bytes"])


def _shape_table(group: Group, shape: Shape, result: dict[str, Any]) -> Table:
    rows = []
    for name in group.names:
        measured = result["contenders"][name]
        saved_bytes = measured["saved_bytes"]
        rows.append(
            [
                name,
                mib(measured["peak_bytes"]),
                *(f"{_ratio(result, name, other(name)):.3f}" for other in group.over.values()),
                mib(saved_bytes),
                f"{saved_bytes / shape.output_bytes:.2f}",
                str(measured["allocations"]),
            ]
        )
    columns = ["", "peak MiB", *group.over, "saved MiB", "saved / output", "allocations"]
    return Table(f"Memory of a training step, {group.title}{shape}", columns, rows)


def _growth_table(over: list[dict[str, Any]]) -> Table:
    rows = []
    for result in over:
        ours = result["contenders"][OURS]
        output_bytes, *others = ours["largest_saved_bytes"]
        rows.append(
            [
                str(result["shape"]["seq_len"]),
                mib(result["output_bytes"]),
                mib(output_bytes),
                " + ".join(str(size) for size in others),
                mib(ours["workspace_bytes"]),
                str(ours["allocations"]),
            ]
        )
    columns = ["T", "output MiB", "saved MiB", "+ hx, seed (bytes)", "workspace MiB", "allocations"]
    return Table(f"{OURS} over T, {_fixed(over)}", columns, rows)


def _peak_table(over: list[dict[str, Any]], contenders: list[str]) -> Table:
    rows = [
        [str(r["shape"]["seq_len"])]
        + [mib(r["contenders"][name]["peak_bytes"]) for name in contenders]
        for r in over
    ]
    return Table(f"Peak memory in MiB over T, {_fixed(over)}", ["T", *contenders], rows)


def _fixed(over: list[dict[str, Any]]) -> str:
    return "B={batch} H={hidden_size}".format(**over[0]["shape"])


def _plot(run: Run, over: list[dict[str, Any]], contenders: list[str]) -> None:
    peaks_over_seq_len(
        run.out / "memory_over_seq_len.png",
        f"{_fixed(over)}, float32, CPU",
        [r["shape"]["seq_len"] for r in over],
        {name: [r["contenders"][name]["peak_bytes"] for r in over] for name in contenders},
        bold=OURS,
    )


def measure(numbers: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures the rows of a case on a GPU; see worker.py."""
    case = opened(numbers)

    def peaks(name: str) -> Row:
        # The first step compiles, and allocates the memory that libraries keep. A graph is captured
        # in the second step again, and takes its memory then: a replay allocates nothing.
        training_step(name, case.shape, "cuda", case.dtype).train()
        step = training_step(name, case.shape, "cuda", case.dtype)
        saved_bytes, host_bytes = cuda_saved_bytes(step.forward)
        return {
            "peak_bytes": cuda_peak_bytes(step.train),
            "saved_bytes": saved_bytes,
            "host_bytes": host_bytes,
        }

    for name in names:
        with notes.on(name):
            notes.row(name, peaks(name))
        release()


def _report_on_cuda(results: Results) -> Report:
    targets = []
    for name, (case, rows) in itertools.product((OURS, OUR_GRU, OUR_LSTM), results.items()):
        if why_none(rows[name]) or why_none(rows[LSTM]):
            continue
        peak_bytes, lstm_bytes = rows[name]["peak_bytes"], rows[LSTM]["peak_bytes"]
        what, limit = f"peak memory, {name} / {LSTM}", memory_limit(lstm_bytes)
        targets.append(Target(what, str(case), peak_bytes / lstm_bytes, limit))
    tables = [
        _case_table(group, case, rows) for case, rows in results.items() for group in groups(rows)
    ]
    return Report("memory", numbers(results), tables, targets, failures(results))


def _case_table(group: Group, case: Case, rows: dict[str, Row]) -> Table:
    def over(row: Row, other: str) -> str:
        other_bytes = rows[other].get("peak_bytes")
        return f"{row['peak_bytes'] / other_bytes:.3f}" if other_bytes else ""

    output_bytes = case.shape.output_bytes_in(case.dtype)
    columns = ["", "peak MiB", *group.over, "saved MiB", "saved / output", "host MiB"]
    lines = []
    for name in group.names:
        row = rows[name]
        if reason := why_none(row):
            lines.append([name, reason, *[""] * (len(columns) - 2)])
            continue
        saved_bytes = row["saved_bytes"]
        lines.append(
            [
                name,
                mib(row["peak_bytes"]),
                *(over(row, other(name)) for other in group.over.values()),
                mib(saved_bytes),
                f"{saved_bytes / output_bytes:.2f}",
                mib(row["host_bytes"]),
            ]
        )
    return Table(f"Memory of a training step, {group.title}{case}", columns, lines)


if __name__ == "__main__":
    main([run], __doc__, on_cuda=[run_on_cuda])
