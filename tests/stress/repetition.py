"""Repeats calls, also after failures and among threads, and compares bits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from cases import DTYPES
from torch import Tensor

from . import CELLS, Row, Scale, large, masked, results_of
from .bits import changed, copied, denormals_are_kept
from .threads import Shared, together
from .wrong_calls import failure_of, wrong_calls

Results = Callable[[], dict[str, Tensor]]


def _calls() -> Iterator[tuple[str, int, Results]]:
    for (name, case), dtype, count in itertools.product(CELLS.items(), DTYPES, (1, 2)):
        for sized in (masked(case), large(case)):
            changed_case = replace(sized, dtype=dtype)
            arguments = changed_case.tensors().to(dtype)
            what = f"{changed_case} ({name}, {count} threads)"
            yield what, count, functools.partial(results_of, changed_case, arguments)


def repetitions(what: str, call: Results, expected: dict[str, Tensor], times: int) -> list[str]:
    """How often each result changed."""
    found = [changed(call(), expected) for _ in range(times)]
    names = sorted(set().union(*found))
    count = sum(bool(f) for f in found)
    return [f"{what}: {count} of {times} times others: {', '.join(names)}"] if count else []


def repetition(scale: Scale) -> Row:
    """Repeats calls; in between, calls fail and other threads call the same operators."""
    torch.manual_seed(scale.seed)
    every = list(_calls())
    expected = []
    for _, count, call in every:
        torch.set_num_threads(count)
        expected.append(copied(call()))
    shared = [Shared.of(name, replace(c, noise="eps")) for name, c in CELLS.items()]
    wrong_ones = [call for case in CELLS.values() for _, call in wrong_calls(case)]
    rounds, times = scale.choose(10, 2), scale.choose(20, 3)
    wrong = []
    for number in range(rounds):
        for call in wrong_ones:
            failure_of(call)
        verdicts = together(shared, calls=10, seed=scale.seed + number)
        wrong += [v for v in verdicts if v.startswith("wrong")]
        for (what, count, call), results in zip(every, expected, strict=True):
            torch.set_num_threads(count)
            wrong += repetitions(what, call, results, times)
    if not denormals_are_kept():
        wrong.append("denormals are flushed afterwards")
    return Row(
        f"{len(every)} calls, {rounds * times} times each, in {rounds} rounds after "
        f"{len(wrong_ones)} failures and 8 threads",
        f"{len(every) * rounds * times:,} results with the same bits" if not wrong else "",
        wrong,
    )
