"""Memory of a training step: ``python -m bench.memory``."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from .cases import (
    COMPILED,
    CONTENDERS,
    LARGE,
    LOOP,
    LSTM,
    MEMORY_LIMITS,
    OURS,
    OVER_SEQ_LEN,
    OVER_SEQ_LEN_QUICK,
    SMALL,
    Shape,
    TrainingStep,
    why_not_compiled,
)
from .clock import measure_memory, saved_sizes_bytes
from .report import Report, Run, Table, Target, main, mib


def run(run: Run) -> Report:
    """Peaks at two shapes, and how everything grows with the sequence."""
    shapes = [SMALL] if run.quick else [LARGE, SMALL]
    over_seq_len = OVER_SEQ_LEN_QUICK if run.quick else OVER_SEQ_LEN
    contenders = [name for name in CONTENDERS if not (run.quick and name == COMPILED)]
    steps = 1 + len(contenders) * (len(shapes) + len(over_seq_len))
    task = run.progress.add_task("memory", total=steps)

    not_compiled = None if run.quick else why_not_compiled([*shapes, *over_seq_len])
    run.progress.advance(task)
    if not_compiled:
        contenders.remove(COMPILED)

    def measure_all(shape: Shape) -> dict[str, Any]:
        measured = {}
        for name in contenders:
            measured[name] = _measure(name, shape)
            run.progress.advance(task)
        return {"shape": vars(shape), "output_bytes": shape.output_bytes, "contenders": measured}

    at_shapes = [measure_all(shape) for shape in shapes]
    over = [measure_all(shape) for shape in over_seq_len]
    _plot(run, over, contenders)
    targets = [
        Target(f"peak memory, {OURS} / {LSTM}", str(shape), _ratio(result, LSTM), limit)
        for shape, result in zip(shapes, at_shapes, strict=True)
        for limit in [MEMORY_LIMITS[shape]]
    ]
    tables = [_shape_table(shape, r) for shape, r in zip(shapes, at_shapes, strict=True)]
    tables += [_growth_table(over), _peak_table(over, contenders)]
    if not_compiled:
        tables.append(Table(COMPILED, [not_compiled], []))
    numbers = {"shapes": at_shapes, "over_seq_len": over, "compiled_loop": not_compiled or "ran"}
    return Report("memory", numbers, tables, targets)


def _measure(name: str, shape: Shape) -> dict[str, Any]:
    """Everything in bytes. Workspace is what the peak holds beyond output, gradients and saved."""
    step = TrainingStep(name, shape)
    weights = list(step.module.parameters())
    saved = saved_sizes_bytes(step.forward, [step.input, *weights])
    memory = measure_memory(step.train)
    gradient_bytes = sum(w.nbytes for w in weights)
    return {
        "peak_bytes": memory.peak_bytes,
        "allocations": memory.allocations,
        "saved_bytes": sum(saved),
        "largest_saved_bytes": saved[:4],
        "gradient_bytes": gradient_bytes,
        "workspace_bytes": memory.peak_bytes - gradient_bytes - max(sum(saved), shape.output_bytes),
    }


def _ratio(result: dict[str, Any], other: str) -> float:
    measured = result["contenders"]
    return float(measured[OURS]["peak_bytes"] / measured[other]["peak_bytes"])


def _shape_table(shape: Shape, result: dict[str, Any]) -> Table:
    contenders = result["contenders"]
    lstm, loop = (contenders[name]["peak_bytes"] for name in (LSTM, LOOP))
    rows = [
        [
            name,
            mib(m["peak_bytes"]),
            f"{m['peak_bytes'] / lstm:.3f}",
            f"{m['peak_bytes'] / loop:.3f}",
            mib(m["saved_bytes"]),
            f"{m['saved_bytes'] / shape.output_bytes:.2f}",
            str(m["allocations"]),
        ]
        for name, m in contenders.items()
    ]
    columns = ["", "peak MiB", "/ LSTM", "/ loop", "saved MiB", "saved / output", "allocations"]
    return Table(f"Memory of a training step, {shape}", columns, rows)


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
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    seq_lens = [r["shape"]["seq_len"] for r in over]
    for name in contenders:
        peaks = [r["contenders"][name]["peak_bytes"] / 2**20 for r in over]
        axes.plot(seq_lens, peaks, marker="o", label=name, linewidth=3 if name == OURS else 1.5)
    axes.set_xlabel("sequence length T")
    axes.set_ylabel("peak memory of a training step, MiB")
    axes.set_title(f"{_fixed(over)}, float32, CPU", fontsize="medium")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(run.out / "memory_over_seq_len.png", dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main([run], __doc__)
