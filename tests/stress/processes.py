"""Modules in other processes, forked or spawned after several threads were at work here."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are shared between processes
from cases import Arguments, Case
from torch import Tensor, nn

from . import CELLS, Row, Scale, large, masked, module_of, module_results
from .bits import changed, copied
from .isolation import Broken, isolated

Results = dict[str, dict[str, Tensor]]
HANGS = 60.0  # seconds, ten times what anything here takes
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


@dataclass
class Work:
    """A module and a call of it, as plain data that can go to another process."""

    name: str
    rnn: nn.Module
    arguments: Arguments

    @classmethod
    def of(cls, case: Case) -> Work:
        arguments = case.tensors()
        return cls(str(case), module_of(case), arguments)

    def results(self, threads: int) -> dict[str, Tensor]:
        torch.set_num_threads(threads)
        leaves = self.arguments.to(self.arguments.input.dtype)
        return copied(module_results(self.rnn, leaves))


def _every() -> Iterator[Work]:
    for case in CELLS.values():
        for sized in (masked(case), large(case)):
            for dtype in (torch.float32, torch.bfloat16):
                yield Work.of(replace(sized, dtype=dtype, noise="eps"))


def results_of(every: list[Work], threads: int) -> Results:
    """Results by name, as numbers that any process can read."""
    return {work.name: work.results(threads) for work in every}


def _in_child(every: list[Work], threads: int) -> bytes:
    # Pickled here, because sending tensors would need this process to stay.
    return pickle.dumps(results_of(every, threads))


def _from_pickle(pickled: bytes, threads: int) -> bytes:
    return _in_child(pickle.loads(pickled), threads)


def _from_shared(every: list[Work], threads: int) -> bytes:
    """Runs the call, and then halves the weights, which is exact."""
    answer = _in_child(every, threads)
    with torch.no_grad():
        for work in every:
            for weight in work.rnn.parameters():
                weight.mul_(0.5)
    return answer


def _product_of_torch(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.randn(400, 400) @ torch.randn(400, 400)
    torch.randn(1_000_000).mul(2.0).sum()


def differences(results: Results, expected: Results) -> list[str]:
    """Names of calls whose bits differ."""
    return [f"other bits: {n}" for n in expected if changed(results.get(n, {}), expected[n])]


@contextlib.contextmanager
def _noting(wrong: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Broken as broken:
        wrong.append(f"{what}: {broken}")


def forked(scale: Scale) -> Row:
    """Forks processes with one thread, as a DataLoader's workers; each may fork again."""
    torch.manual_seed(scale.seed)
    every = list(_every())
    expected = {threads: results_of(every, threads) for threads in (4, 1)}
    rounds, wrong, measured = scale.choose(20, 2), list[str](), list[str]()
    limits: dict[str, Any] = {"method": "fork", "seconds": HANGS}
    for number in range(rounds):
        results_of(every, 4)
        with _noting(wrong, f"child {number}"):
            answer = pickle.loads(isolated(_in_child, every, 1, **limits))
            wrong += differences(answer, expected[1])
    # With several threads, GNU's OpenMP in a child waits for threads that only its parent has.
    try:
        isolated(_product_of_torch, 4, method="fork", seconds=3)
    except Broken as broken:
        measured.append(f"with 4 threads torch's own product {str(broken).split(':')[0]}")
    else:
        with _noting(wrong, "a child with 4 threads, which torch's product can have"):
            answer = pickle.loads(isolated(_in_child, every, 4, **limits))
            wrong += differences(answer, expected[4])
        measured.append("4 threads work in children as well")
    wrong += [f"afterwards: {d}" for d in differences(results_of(every, 4), expected[4])]
    done = f"{rounds} forked processes with {len(every)} calls each, after 4 threads"
    return Row(done, f"children had the same bits; {measured[0]}", wrong)


def spawned(scale: Scale) -> Row:
    """Spawns processes with pickled or shared modules; changes of shared weights are seen here."""
    torch.manual_seed(scale.seed)
    every = list(_every())
    expected = {threads: results_of(every, threads) for threads in (4, 1)}
    rounds, wrong = scale.choose(4, 1), list[str]()
    for number in range(rounds):
        for threads in (1, 4) if number else (4,):
            with _noting(wrong, "pickled"):
                pickled = pickle.dumps(every)
                answer = isolated(_from_pickle, pickled, threads, seconds=HANGS)
                wrong += differences(pickle.loads(answer), expected[threads])
    for work in every:
        work.rnn.share_memory()
    with _noting(wrong, "shared"):
        answer = isolated(_from_shared, every, 4, seconds=HANGS)
        wrong += differences(pickle.loads(answer), expected[4])
    with torch.no_grad():
        for work in every:
            for weight in work.rnn.parameters():
                weight.mul_(2.0)
    wrong += [
        f"after a child's change: {d}" for d in differences(results_of(every, 4), expected[4])
    ]
    done = f"{2 * rounds} spawned processes with {len(every)} calls each, by pickle and shared"
    return Row(done, "children had the same bits, and changed shared weights", wrong)
