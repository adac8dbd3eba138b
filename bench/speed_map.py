"""Time of ours over torch.nn's, over H and B: ``python -m bench.speed_map --out bench/results``.

Training, training with ``recompute=False`` and forward under no_grad, of LSTM and GRU in float32,
with one thread and with two. Both are interleaved in one process, and a number is the median of the
rounds' ratios. All of it takes about ten minutes on two cores. A sequence is the shorter the larger
its steps are, so the tables say T too.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from .cases import GRU, LSTM, OUR_GRU, OUR_LSTM, SAVED_GRU, SAVED_LSTM, Shape, training_step
from .clock import Ratio, interleaved_ms, ratio
from .report import Report, Run, Table, Target, cpu_name, main

HIDDEN, BATCH = (8, 16, 32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32, 64, 128)
HIDDEN_QUICK, BATCH_QUICK = (8, 16), (1, 2)
THREADS = (1, 2)
# Of torch's module, of ours, and of ours with recompute=False.
CELLS = {"lstm": (LSTM, OUR_LSTM, SAVED_LSTM), "gru": (GRU, OUR_GRU, SAVED_GRU)}
TRAINING, SAVED, INFERENCE = "training", "training, recompute=False", "inference"
# The upper bound of every ratio of a mode, and of the median ratio of each mode.
WORST = {TRAINING: 1.05, SAVED: 1.0, INFERENCE: 1.0}
MEDIAN = 0.9
LENGTHS = (8, 16, 32, 64, 128, 256)
# Multiply-adds of forward in a call: a training step of these takes about a tenth of a second.
CALL_PRODUCTS = 2e9
ROUNDS, ROUNDS_QUICK, BUDGET_S = 15, 3, 0.8


@dataclass(frozen=True)
class Place:
    """A row of the results but for its sizes: what is measured, and with how many threads."""

    cell: str
    mode: str
    threads: int

    def __str__(self) -> str:
        return f"{self.cell}, {self.mode}, {self.threads} thread{'s' * (self.threads > 1)}"


# The ratio to torch.nn at each shape.
Map = dict[Shape, Ratio]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds a choice of cells, threads and sizes."""
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=[*CELLS])
    parser.add_argument("--threads", nargs="+", type=whole_number, default=[*THREADS])
    parser.add_argument("--hidden", nargs="+", type=whole_number, help=f"{HIDDEN}")
    parser.add_argument("--batch", nargs="+", type=whole_number, help=f"{BATCH}")


def whole_number(text: str) -> int:
    """An option's number, from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return int(text)


def seq_len(batch: int, hidden_size: int) -> int:
    """T for a step's size."""
    steps = CALL_PRODUCTS / (8 * batch * hidden_size**2)
    return max((length for length in LENGTHS if length <= steps), default=LENGTHS[0])


def run(run: Run) -> Report:
    """Measures all that the options name."""
    options = run.options
    hidden = options.hidden or (HIDDEN_QUICK if run.quick else HIDDEN)
    batch = options.batch or (BATCH_QUICK if run.quick else BATCH)
    shapes = [Shape(seq_len(b, h), b, h) for h, b in itertools.product(hidden, batch)]
    rounds = ROUNDS_QUICK if run.quick else ROUNDS
    maps: dict[Place, Map] = {
        Place(cell, mode, threads): {}
        for cell, threads, mode in itertools.product(options.cells, options.threads, WORST)
    }
    task = run.progress.add_task("speed_map", total=len(shapes) * len(maps) // len(WORST))
    threads_before = torch.get_num_threads()
    try:
        for threads, cell in itertools.product(options.threads, options.cells):
            torch.set_num_threads(threads)
            for shape in shapes:
                for mode, found in measure(cell, shape, rounds).items():
                    maps[Place(cell, mode, threads)][shape] = found
                run.progress.advance(task)
            run.write(report(maps))
    finally:
        torch.set_num_threads(threads_before)
    return report(maps)


def measure(cell: str, shape: Shape, rounds: int) -> dict[str, Ratio]:
    """The ratio of each mode at a shape, with the threads that torch has now."""
    theirs, ours, saved = CELLS[cell]
    steps = {name: training_step(name, shape) for name in (ours, saved, theirs)}

    def times_ms(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        for call in calls.values():  # allocates the memory that libraries keep
            call()
        return interleaved_ms(calls, rounds=rounds, budget_s=BUDGET_S)

    train_ms = times_ms({name: step.train for name, step in steps.items()})
    infer_ms = times_ms({name: steps[name].infer for name in (ours, theirs)})
    return {
        TRAINING: ratio(train_ms[ours], train_ms[theirs]),
        SAVED: ratio(train_ms[saved], train_ms[theirs]),
        INFERENCE: ratio(infer_ms[ours], infer_ms[theirs]),
    }


def report(maps: dict[Place, Map]) -> Report:
    """Tables, and bounds for each place that has been measured."""
    measured = {place: found for place, found in maps.items() if found}
    lines, targets = [], []
    for place, found in measured.items():
        middle = median(r.median for r in found.values())
        worst = max(found, key=lambda shape: found[shape].median)
        targets += [
            Target("time / torch.nn, median", str(place), middle, MEDIAN),
            Target(
                f"time / torch.nn, worst, {worst}",
                str(place),
                found[worst].median,
                WORST[place.mode],
                found[worst].spread,
            ),
        ]
        slower = sum(r.median > WORST[place.mode] for r in found.values())
        texts = [f"{middle:.2f}", f"{found[worst].median:.2f}", str(worst)]
        texts += [f"{WORST[place.mode]:.2f}", f"{slower} of {len(found)}"]
        lines.append([str(place), *texts])
    columns = ["time / torch.nn", "median", "worst", "at", "bound", "above it"]
    tables = [_table(place, found) for place, found in measured.items()]
    tables += [_steps(list(next(iter(measured.values()))))] if measured else []
    tables.append(Table(f"All sizes (bound of the median: {MEDIAN})", columns, lines))
    content = {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "maps": [
            asdict(place)
            | {"rows": [vars(shape) | asdict(found) for shape, found in of_place.items()]}
            for place, of_place in measured.items()
        ],
    }
    processor = re.sub(r"\W+", "-", cpu_name().lower()).strip("-")
    return Report(f"speed_map-{processor}", content, tables, targets)


def _table(place: Place, found: Map) -> Table:
    return _over_sizes(
        f"Time / torch.nn, {place}", list(found), lambda shape: f"{found[shape].median:.2f}"
    )


def _steps(shapes: Sequence[Shape]) -> Table:
    return _over_sizes("Steps T at each size", shapes, lambda shape: str(shape.seq_len))


def _over_sizes(title: str, shapes: Sequence[Shape], text: Callable[[Shape], str]) -> Table:
    batches = list(dict.fromkeys(shape.batch for shape in shapes))
    lines: dict[int, list[str]] = {}
    for shape in shapes:
        lines.setdefault(shape.hidden_size, [f"H={shape.hidden_size}"]).append(text(shape))
    return Table(title, ["", *(f"B={batch}" for batch in batches)], list(lines.values()))


if __name__ == "__main__":
    main([run], __doc__, add_options)
