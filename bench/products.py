"""Rates of products in whole layers, over torch.mm's: ``python -m bench.products``.

A layer's rate is the operations of its matrix products in forward over the time of forward under
no_grad; a multiply-add counts as two. torch.mm's peak is its fastest rate over some sizes, measured
again in the same rounds as the layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from .cases import CONTENDERS, GRU, LSTM, OUR_GRU, OUR_LSTM, Shape, training_step
from .clock import interleaved_ms, ratio
from .report import Report, Run, Table, Target, main
from .speed_map import seq_len, whole_number

PEAK_SIZES, PEAK_SIZES_QUICK = (256, 512, 768, 1024), (32,)
HIDDEN, BATCH = (256, 512, 1024), (16, 64, 128)
CONTENDER_NAMES = (OUR_LSTM, LSTM, OUR_GRU, GRU)
QUICK = Shape(8, 4, 16)
ROUNDS, BUDGET_S = 15, 2.0
SHARE = 0.7  # of torch.mm's peak, that our layers should have


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
    try:
        peak_size, of_sizes = _peak(PEAK_SIZES_QUICK if run.quick else PEAK_SIZES, rounds)
        times = {}
        for shape in shapes:
            times[shape] = _times_ms(shape, peak_size, rounds)
            run.progress.advance(task)
    finally:
        torch.set_num_threads(threads_before)
    return _report(run.options.threads, peak_size, of_sizes, times)


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
