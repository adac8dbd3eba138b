"""Puts measured numbers into README.md and docs/gpu.md: ``python -m bench.readme``.

Reads what benchmarks left in bench/results, writes bench/results/readme.md (the rows and the
sentence about a GPU in the README), own_cell.md (its line on a cell of the user's), speed_map.md
(the table in docs/performance.md), gpu-h100.md (that in docs/gpu.md), any_cell.md and
steps_in_python.md (those in docs/any-cells.md), and copies them between the markers of these
documents. Measures nothing: `python -m bench --all --out bench/results` does, and then writes
readme.md too. What the same command found on another processor is in a folder of bench/results; the
README has a column for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .cases import (
    CHECKPOINTED_LSTM_LOOP,
    GRAPHED,
    GRU,
    GRU_GRAPHED,
    LARGE,
    LOOP,
    LSTM,
    LSTM_GRAPHED,
    LSTM_LOOP,
    OUR_GRU,
    OUR_LSTM,
    OURS,
    SAVED_LSTM,
    Shape,
)
from .report import Run, Table, machine, markdown_rows, mib
from .speed import compared
from .speed_map import WORST
from .worker import Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
GPU = "gpu-h100"

# Our module, the one it replaces, and the README's names of both.
PAIRS = (
    (OURS, LOOP, "`fusedrnn.StochasticGRU`", "a hand-written loop"),
    (OUR_GRU, GRU, "`fusedrnn.GRU`", "`nn.GRU`"),
    (OUR_LSTM, LSTM, "`fusedrnn.LSTM`", "`nn.LSTM`"),
    (SAVED_LSTM, LSTM, "`LSTM(recompute=False)`", "`nn.LSTM`"),
    (LSTM_LOOP, LSTM, "a loop of `nn.LSTMCell`", "`nn.LSTM`"),
    (CHECKPOINTED_LSTM_LOOP, LSTM, "the same loop, checkpointed", "`nn.LSTM`"),
)
# Our module, the one it is compared with on a GPU, and the latter in a CUDA graph.
GPU_PAIRS = (
    (OUR_LSTM, LSTM, LSTM_GRAPHED),
    (OUR_GRU, GRU, GRU_GRAPHED),
    (OURS, LOOP, GRAPHED),
)

# Contenders for cells that users write, as they are shown; results may lack some.
ANY_CELL = (
    *("Recurrent, compiled cell", "built-in"),
    "loop, torch.compile",
    "torch's scan",
)


def afterwards(run: Run) -> None:
    """Writes readme.md next to the other results of a run that measured everything."""
    if run.everything and not run.quick:
        (run.out / "readme.md").write_text(summary(run.out))


def summary(results: Path) -> str:
    """The block of the README: rows of the CPU, and a sentence about a GPU, if measured."""
    text = f"{_cpu_rows(results)}\n{_cpu_source(results)}\n"
    return text + f"\n{_gpu_sentence(results)}\n" if (results / f"{GPU}.json").exists() else text


def _cpu_rows(results: Path) -> str:
    memory = _at(LARGE, _load(results, "memory")["shapes"])["contenders"]
    speed = _at(LARGE, _load(results, "speed")["shapes"])
    others = [_at(LARGE, _load(folder, "speed")["shapes"]) for folder in _of_others(results)]
    rows = []
    for ours, other, name, other_name in PAIRS:
        bytes_ = [memory[each]["peak_bytes"] for each in (ours, other)]
        times_ms = [median(speed["train_ms"][each]) for each in (ours, other)]
        ratios = [of["ratios"][f"{ours} / {other}"] for of in (speed, *others)]
        rows.append(
            [
                f"{name} / {other_name}",
                f"{mib(bytes_[0])} / {mib(bytes_[1])} MiB",
                f"**{bytes_[0] / bytes_[1]:.2f}**",
                f"{times_ms[0]:,.0f} / {times_ms[1]:,.0f} ms",
                *(
                    f"**{ratio['median']:.2f}** ({ratio['least']:.2f}–{ratio['most']:.2f})"
                    for ratio in ratios
                ),
            ]
        )
    columns = ["one training step of", "peak memory", "ratio", "time", "ratio"]
    for folder in _of_others(results):
        columns.append(f"ratio of times, {_load(folder, 'speed')['environment']['cpu']}")
    return markdown_rows(Table("", columns, rows))


def _cpu_source(results: Path) -> str:
    machines = []
    for folder in (results, *_of_others(results)):
        about = _load(folder, "speed")["environment"]
        machines.append(f"{machine(about)}, {about['date'][:10]}")
    return (
        f"{LARGE}, float32, {'; '.join(machines)}. Peak memory includes output "
        "and gradients, not weights and input. A ratio of times is the median of the rounds' "
        "(least–most), and not that of the two medians beside it."
        + (" Memory and milliseconds are the first processor's." if machines[1:] else "")
    )


def _of_others(results: Path) -> list[Path]:
    """Folders with the results of other processors."""
    return sorted(path.parent for path in results.glob("*/speed.json"))


def gpu_table(results: Path) -> str:
    """Training steps in bfloat16 on a GPU: milliseconds, and ratios to torch's and the loop's."""
    columns = ["(B, H)"]
    for ours, other, graphed in GPU_PAIRS:
        columns += [f"{_name(ours)}, ms", f"/ {other}", f"/ {graphed}"]
    rows = []
    for shape, contenders in _gpu_cases(results):
        row = [f"({shape.batch}, {shape.hidden_size})"]
        for ours, *others in GPU_PAIRS:
            row.append(f"{median(contenders[ours]['train_ms']):.2f}")
            row += [_ratio_text(_gpu_ratio(contenders, ours, other)) for other in others]
        rows.append(row)
    return f"{markdown_rows(Table('', columns, rows))}\n{_gpu_source(results)}.\n"


def _gpu_sentence(results: Path) -> str:
    def least_and_most(ours: str, other: str) -> str:
        ratios = [_gpu_ratio(contenders, ours, other) for _, contenders in _gpu_cases(results)]
        return f"{_ratio_text(min(ratios))} to {_ratio_text(max(ratios))}"

    parts = [
        f"{_name(ours)} / {_name(other)} {least_and_most(ours, other)} "
        f"({least_and_most(ours, graphed)} if {_name(other)} runs in a CUDA graph)"
        for ours, other, graphed in GPU_PAIRS
    ]
    return f"Time of a training step on one {_gpu_source(results)}: {'; '.join(parts)}."


def _gpu_source(results: Path) -> str:
    about = _load(results, GPU)["speed"]["environment"]
    shapes = [shape for shape, _ in _gpu_cases(results)]
    sizes = ", ".join(f"({shape.batch}, {shape.hidden_size})" for shape in shapes)
    return (
        f"{about['gpu']}, torch {about['torch']}, bfloat16, T={shapes[0].seq_len}, (B, H) = "
        f"{sizes}, {about['date'][:10]}"
    )


def _gpu_cases(results: Path) -> list[tuple[Shape, dict[str, Row]]]:
    """The cases in bfloat16 that were measured; others may lack for want of time."""
    needed = [name for pair in GPU_PAIRS for name in pair]
    return [
        (Shape(**case["shape"]), case["contenders"])
        for case in _load(results, GPU)["speed"]["cases"]
        if case["dtype"] == "bfloat16"
        and all("train_ms" in case["contenders"].get(name, {}) for name in needed)
    ]


def _gpu_ratio(contenders: dict[str, Row], ours: str, other: str) -> float:
    ratio = compared(contenders, ours, other, "train_ms")
    assert ratio is not None
    return ratio.median


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def _name(contender: str) -> str:
    return {OURS: "StochasticGRU", LOOP: "a hand-written loop"}.get(
        contender, contender.removeprefix("fusedrnn.")
    )


def _at(shape: Shape, measured: list[dict[str, Any]]) -> dict[str, Any]:
    return next(result for result in measured if result["shape"] == vars(shape))


def _load(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return content


def between(text: str, name: str) -> str:
    """The text of a document between its markers ``<!-- name -->`` and ``<!-- end of name -->``."""
    return _split(text, name)[1]


def replaced(text: str, name: str, block: str) -> str:
    """A document with another block between its markers."""
    before, _, after = _split(text, name)
    return before + block + after


def _split(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    shown, after = rest.split(end)
    return before + begin, shown, end + after


def any_cell_table(results: Path) -> str:
    """Peak memory and time of cells that users write, as multiples of the plain loop's."""
    content = _load(results, "any_cell")
    cells = content["cells"]
    names = [name for name in ANY_CELL if any(name in rows for rows in cells.values())]
    rows = []
    for cell, measured in cells.items():
        loop = measured["plain loop"]
        row = [cell, f"{mib(loop['output_bytes'])} MiB"]
        row.append(f"{mib(loop['peak_bytes'])} MiB, {loop['ms']:,.0f} ms")
        for name in names:
            other = measured.get(name, {})
            ratios = "–"
            if "ms" in other:
                ratios = f"{other['peak_ratio']:.2f}, {other['time_ratio']['median']:.2f}"
            row.append(ratios)
        rows.append(row)
    about, size = content["environment"], content["size"]
    columns = ["peak memory, time", "outputs", "plain loop", *names]
    return (
        f"{markdown_rows(Table('', columns, rows))}\n"
        f"A training step at T={size['seq_len']} B={size['batch']}, width {size['width']}, "
        f"float32, {machine(about)}, {about['date'][:10]}; multiples of the plain loop's.\n"
    )


def steps_table(results: Path) -> str:
    """The same of steps in Python, and of a loop that a user has checkpointed by hand."""
    content = _load(results, "steps_in_python")
    rows, about = [], content["environment"]
    for part in filter(content.__contains__, ("cells", "small")):
        of_all: dict[str, list[tuple[float, float]]] = {}
        size = content[part]["size"]
        for cell, measured in content[part]["cells"].items():
            loop = measured["plain loop"]
            row = [cell, f"{mib(loop['peak_bytes'])} MiB, {loop['ms']:,.0f} ms"]
            for name in ("checkpoint per chunk", "Recurrent, loop"):
                one = measured[name]
                if "ms" not in one:
                    row.append("–")
                    continue
                both = one["peak_ratio"], one["time_ratio"]["median"]
                of_all.setdefault(name, []).append(both)
                row.append(f"{both[0]:.2f}, {both[1]:.2f}")
            rows.append(row)
        medians = [
            ", ".join(f"{median(of):.2f}" for of in zip(*x, strict=True)) for x in of_all.values()
        ]
        shape = f"T={size['seq_len']} B={size['batch']} width {size['width']}"
        rows.append([f"**median at {shape}**", "", *medians])
    columns = ["peak memory, time", "plain loop", "checkpoint per chunk", "Recurrent, in Python"]
    return (
        f"{markdown_rows(Table('', columns, rows))}\n"
        f"A training step with gradients of the inputs, float32, {machine(about)}, "
        f"{about['date'][:10]}; multiples of the plain loop's, whose median is below its rows.\n"
    )


def own_cell_line(results: Path) -> str:
    """Peak memory and time of a cell in Python that is compiled, as multiples of its loop's."""
    content = _load(results, "any_cell")
    row, about = content["cells"]["ForumCell"]["Recurrent, compiled cell"], content["environment"]
    size = content["size"]
    return (
        "**Your own cell**, written in plain PyTorch, is compiled at its first call: "
        "`fusedrnn.Recurrent(cell)` trains a stochastic GRU in "
        f"**{row['peak_ratio']:.2f}** of its loop's memory and {row['time_ratio']['median']:.2f} "
        f"of its time (T={size['seq_len']} B={size['batch']} H={size['width']}, float32, "
        f"{machine(about)}, {about['date'][:10]}): "
        "[docs/your-own-cell.md](docs/your-own-cell.md).\n"
    )


def speed_map_table(results: Path) -> str:
    """Time over torch.nn's at many sizes, on each processor that was measured."""
    columns = ["time / torch.nn", "median", "least", "most", "at", "bound", "sizes above it"]
    parts = []
    for path in sorted(results.glob("speed_map-*.json")):
        content = json.loads(path.read_text())
        about, rows = content["environment"], []
        for place in content["maps"]:
            sizes = sorted(place["rows"], key=lambda row: row["median"])
            ratios = [row["median"] for row in sizes]
            threads, bound = place["threads"], WORST[place["mode"]]
            rows.append(
                [
                    f"{place['cell'].upper()}, {place['mode']}, "
                    f"{threads} thread{'s' * (threads > 1)}",
                    *(f"{x:.2f}" for x in (median(ratios), ratios[0], ratios[-1])),
                    str(Shape(*(sizes[-1][name] for name in vars(LARGE)))),
                    f"{bound:.2f}",
                    f"{sum(x > bound for x in ratios)} of {len(ratios)}",
                ]
            )
        parts.append(
            f"{about['cpu']}, {content['instructions']}, torch {about['torch']}, "
            f"{about['date'][:10]}:\n\n{markdown_rows(Table('', columns, rows))}"
        )
    return "\n".join(parts)


DOCUMENTS: dict[str, tuple[Callable[[Path], str], Path]] = {
    "readme": (summary, ROOT / "README.md"),
    "own_cell": (own_cell_line, ROOT / "README.md"),
    GPU: (gpu_table, ROOT / "docs/gpu.md"),
    "speed_map": (speed_map_table, ROOT / "docs/performance.md"),
    "any_cell": (any_cell_table, ROOT / "docs/any-cells.md"),
    "steps_in_python": (steps_table, ROOT / "docs/any-cells.md"),
}


def main() -> None:
    """Writes the files, and copies them into the documents."""
    for name, (make, document) in DOCUMENTS.items():
        text = make(RESULTS)
        (RESULTS / f"{name}.md").write_text(text)
        document.write_text(replaced(document.read_text(), name, text))


if __name__ == "__main__":
    main()
