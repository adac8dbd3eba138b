"""Rates of products, alone and in whole layers, over torch.mm's: ``python -m bench.products``.

Products alone are those of one step of an LSTM, and those of a chunk of 256 rows, on one thread,
by the CPU's kernels and by torch.mm. A layer's rate is the operations of its matrix products in
forward over the time of forward under no_grad; a multiply-add counts as two. torch.mm's peak is its
fastest rate over some sizes, measured again in the same rounds as the layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from . import products_alone
from .cases import CONTENDERS, GRU, LSTM, OUR_GRU, OUR_LSTM, Shape, training_step
from .clock import Ratio, interleaved_ms, ratio
from .report import Report, Run, Table, Target, main
from .speed_map import seq_len, whole_number

PEAK_SIZES, PEAK_SIZES_QUICK = (256, 512, 768, 1024), (32,)
HIDDEN, BATCH = (256, 512, 1024), (16, 64, 128)
CONTENDER_NAMES = (OUR_LSTM, LSTM, OUR_GRU, GRU)
QUICK = Shape(8, 4, 16)
ROUNDS, BUDGET_S = 15, 2.0
SHARE = 0.7  # of torch.mm's peak, that our layers and products of steps should have
CHUNK_SHARE = 0.8  # and products of chunks
CHUNK_ROWS = 256
CALLS = 20  # of a product alone between two looks at the clock


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --threads."""
    parser.add_argument("--threads", type=whole_number, default=1, help="threads of torch (1)")


def run(run: Run) -> Report:
    """Measures all layers at all sizes."""
    shapes = [Shape(seq_len(b, h), b, h) for h in HIDDEN for b in BATCH]
    shapes = [QUICK] if run.quick else shapes
    rounds = 3 if run.quick else ROUNDS
    threads_before = torch.get_num_threads()
    torch.set_num_threads(run.options.threads)
    task = run.progress.add_task("products", total=len(shapes))
    why_not_alone = products_alone.why_not()
    try:
        peak_size, of_sizes = _peak(PEAK_SIZES_QUICK if run.quick else PEAK_SIZES, rounds)
        times = {}
        for shape in shapes:
            times[shape] = _times_ms(shape, peak_size, rounds)
            run.progress.advance(task)
        torch.set_num_threads(1)
        sizes = sorted(
            {(shape.batch, shape.hidden_size) for shape in shapes}, key=lambda s: s[::-1]
        )
        alone = [] if why_not_alone else _alone(sizes, peak_size, rounds)
    finally:
        torch.set_num_threads(threads_before)
    report = _report(run.options.threads, peak_size, of_sizes, times)
    if why_not_alone:
        return replace(report, left_out=[f"products alone ({why_not_alone})"])
    return _with_alone(report, alone)


def _mm(size: int) -> Callable[[], object]:
    a, b, out = torch.randn(3, size, size).unbind()
    return lambda: torch.mm(a, b, out=out)


def _gflops(operations: float, time_ms: float) -> float:
    return operations / (1e6 * time_ms)


def _peak(sizes: tuple[int, ...], rounds: int) -> tuple[int, dict[int, float]]:
    """The size at which torch.mm is fastest, and the rate at each."""
    calls = {str(size): _mm(size) for size in sizes}
    for call in calls.values():
        call()
    times = interleaved_ms(calls, rounds=rounds, budget_s=BUDGET_S)
    rates = {size: _gflops(2 * size**3, median(times[str(size)])) for size in sizes}
    return max(rates, key=lambda size: rates[size]), rates


def _times_ms(shape: Shape, peak_size: int, rounds: int) -> dict[str, list[float]]:
    """Times of forward of each layer, and of the product with the peak rate, as "torch.mm"."""
    calls: dict[str, Callable[[], object]] = {"torch.mm": _mm(peak_size)}
    calls |= {name: training_step(name, shape).infer for name in CONTENDER_NAMES}
    for call in calls.values():  # allocates the memory that libraries keep
        call()
    return interleaved_ms(calls, rounds=rounds, budget_s=BUDGET_S)


@dataclass(frozen=True)
class _Alone:
    """Times of one product, ours and torch.mm's, and of torch.mm's fastest, each per operation."""

    name: str
    share_wanted: float
    ns: dict[str, list[float]]

    @property
    def share(self) -> Ratio:
        """Of torch.mm's peak rate: times per operation, the other way round."""
        return ratio(self.ns["peak"], self.ns["ours"])


def _alone(sizes: list[tuple[int, int]], peak_size: int, rounds: int) -> list[_Alone]:
    measured = []
    for batch, hidden in sizes:
        calls = products_alone.step(batch, hidden)
        name = f"a step, B={batch} H={hidden}"
        measured.append(_one_alone(name, SHARE, calls, 8 * batch * hidden**2, peak_size, rounds))
    for hidden in sorted({hidden for _, hidden in sizes}):
        for name, calls in products_alone.chunk(CHUNK_ROWS, hidden).items():
            operations = 8 * CHUNK_ROWS * hidden**2
            name = f"a chunk's {name}, H={hidden}"
            measured.append(_one_alone(name, CHUNK_SHARE, calls, operations, peak_size, rounds))
    return measured


def _one_alone(
    name: str,
    share_wanted: float,
    calls: dict[str, Callable[[], object]],
    operations: int,
    peak_size: int,
    rounds: int,
) -> _Alone:
    def repeated(call: Callable[[], object]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(CALLS):
                call()

        return repeat

    timed = {what: repeated(call) for what, call in calls.items()} | {"peak": _mm(peak_size)}
    for call in timed.values():
        call()
    times = interleaved_ms(timed, rounds=rounds, budget_s=BUDGET_S)
    counts = {what: CALLS * operations for what in calls} | {"peak": 2 * peak_size**3}
    ns = {what: [1e6 * ms / counts[what] for ms in times[what]] for what in times}
    return _Alone(name, share_wanted, ns)


def _with_alone(report: Report, alone: list[_Alone]) -> Report:
    lines, rows, targets = [], [], []
    for product in alone:
        rates = {what: 1 / median(ns) for what, ns in product.ns.items()}
        share = product.share
        lines.append([product.name, f"{rates['ours']:.1f}", f"{rates['torch.mm']:.1f}", str(share)])
        rows.append({"name": product.name, "gflops": rates, "share": asdict(share)})
        what, bound = "torch.mm's peak rate / a product's alone", 1 / product.share_wanted
        targets.append(Target(what, product.name, 1 / share.median, bound))
    table = Table(
        "Products alone, 1 thread", ["", "GF/s", "torch.mm, GF/s", "of torch.mm's peak"], lines
    )
    return replace(
        report,
        numbers=report.numbers | {"alone": rows},
        tables=[*report.tables, table],
        targets=[*report.targets, *targets],
    )


def _report(
    threads: int,
    peak_size: int,
    of_sizes: dict[int, float],
    times: dict[Shape, dict[str, list[float]]],
) -> Report:
    lines, targets = [], []
    rows: list[dict[str, Any]] = []
    for shape, of_shape in times.items():
        for name in CONTENDER_NAMES:
            forward, _ = CONTENDERS[name].gemms
            products = 2 * forward * shape.seq_len * shape.batch * shape.hidden_size**2
            # Times per operation; their ratio is that of the rates, the other way round.
            of_peak = [ms / (2 * peak_size**3) for ms in of_shape["torch.mm"]]
            share = ratio(of_peak, [ms / products for ms in of_shape[name]])
            rate = _gflops(products, median(of_shape[name]))
            lines.append([f"{name}, {shape}", f"{rate:.1f}", str(share)])
            rows.append(vars(shape) | {"name": name, "gflops": rate, "share": asdict(share)})
            if name in (OUR_LSTM, OUR_GRU):
                what = f"torch.mm's peak rate / {name}'s"
                targets.append(Target(what, str(shape), 1 / share.median, 1 / SHARE))
    plural = "s" * (threads > 1)
    peaks = [[f"{size} x {size}", f"{rate:.1f}"] for size, rate in of_sizes.items()]
    tables = [
        Table(f"torch.mm, {threads} thread{plural}", ["", "GF/s"], peaks),
        Table(
            f"Products in forward under no_grad, {threads} thread{plural}",
            ["", "GF/s", "of torch.mm's peak"],
            lines,
        ),
    ]
    content = {"used_threads": threads, "torch_mm_gflops": of_sizes, "rows": rows}
    return Report("products", content, tables, targets)


if __name__ == "__main__":
    main([run], __doc__, add_options)
