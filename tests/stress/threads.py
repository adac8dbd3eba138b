"""Eight threads share modules, while the number of torch's own threads changes.

And calls are repeated, after failures and among threads, and give the same bits.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from cases import DTYPES, Arguments, Case
from torch import Tensor, nn

from . import CELLS, Row, Scale, large, masked, module_of, module_results, results_of
from .bits import beyond_rounding, changed, copied, denormals_are_kept
from .wrong_calls import failure_of, wrong_calls

Call = Callable[[], dict[str, Tensor]]
WORKERS, COUNTS = 8, (1, 2, 4)
# More threads than cores: they should sleep rather than spin while they wait for each other.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


def verdict(results: Mapping[str, Tensor], expected: list[dict[str, Tensor]]) -> str:
    """Whether results are those of one number of threads, of a mixture of several, or wrong.

    The number may change within a call, and each product takes what it finds.
    """
    wrong = [changed(results, e) for e in expected]
    if [] in wrong:
        return "same bits"
    far = beyond_rounding(results, expected[0])
    return f"wrong: {', '.join(far)}" if far else "same but for rounding"


@dataclass
class Shared:
    """A module for all threads, its arguments, and its results by number of torch's threads."""

    name: str
    rnn: nn.Module
    arguments: Arguments
    expected: dict[bool, list[dict[str, Tensor]]]  # with gradients and without

    @classmethod
    def of(cls, name: str, case: Case) -> Shared:
        rnn, arguments = module_of(case), case.tensors().to(case.dtype)
        shared = cls(name, rnn, arguments, {})
        for grad in (False, True):
            shared.expected[grad] = []
            for count in COUNTS:
                torch.set_num_threads(count)
                shared.expected[grad].append(copied(shared.results(grad)))
        return shared

    def results(self, grad: bool) -> dict[str, Tensor]:
        with torch.set_grad_enabled(grad):  # only for this thread
            return module_results(self.rnn, self.arguments)


def _shared() -> Iterator[Shared]:
    for (name, case), dtype in itertools.product(CELLS.items(), (torch.float32, torch.bfloat16)):
        # Small cases are called often, large ones use several threads. The noise is given: a
        # module would draw another seed for every call.
        for sized in (masked(case), large(case)):
            yield Shared.of(f"{name}, {dtype}", replace(sized, dtype=dtype, noise="eps"))


def together(everything: list[Shared], calls: int, seed: int) -> Counter[str]:
    """Runs all calls of all threads; returns their verdicts."""
    verdicts: Counter[str] = Counter()
    lock, stop = threading.Lock(), threading.Event()

    def work(worker: int) -> None:
        drawn = random.Random(seed + worker)
        mine: Counter[str] = Counter()
        for _ in range(calls):
            shared, grad = drawn.choice(everything), drawn.random() < 0.5
            if drawn.random() < 0.2:  # OpenMP keeps the number of threads for each thread
                torch.set_num_threads(drawn.choice(COUNTS))
            try:
                found = verdict(shared.results(grad), shared.expected[grad])
            except Exception as error:
                found = f"wrong: {error!r}"
            mine[f"{found} ({shared.name})" if found.startswith("wrong") else found] += 1
        if not denormals_are_kept():
            mine["wrong: denormals are flushed afterwards"] += 1
        with lock:
            verdicts.update(mine)

    def change() -> None:
        for count in itertools.cycle(COUNTS):
            torch.set_num_threads(count)
            if stop.wait(0.002):
                return

    workers = [threading.Thread(target=work, args=(i,)) for i in range(WORKERS)]
    changer = threading.Thread(target=change)
    for thread in (changer, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    changer.join()
    return verdicts


def threads(scale: Scale) -> Row:
    """Runs inference and training in eight threads at once."""
    torch.manual_seed(scale.seed)
    everything = list(_shared())
    calls = scale.choose(2_000, 60)
    verdicts = together(everything, calls, scale.seed)
    kinds = ("same bits", "same but for rounding")
    return Row(
        f"{WORKERS} threads, {calls:,} calls each, of {len(everything)} shared modules",
        ", ".join(f"{verdicts[kind]:,} with the {kind}" for kind in kinds),
        [f"{n:,} times {what}" for what, n in verdicts.items() if what not in kinds],
    )


# The same bits, call after call


def _calls() -> Iterator[tuple[str, int, Call]]:
    for (name, case), dtype, count in itertools.product(CELLS.items(), DTYPES, (1, 2)):
        for sized in (masked(case), large(case)):
            changed_case = replace(sized, dtype=dtype)
            arguments = changed_case.tensors().to(dtype)
            what = f"{changed_case} ({name}, {count} threads)"
            yield what, count, functools.partial(results_of, changed_case, arguments)


def repetitions(what: str, call: Call, expected: dict[str, Tensor], times: int) -> list[str]:
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
