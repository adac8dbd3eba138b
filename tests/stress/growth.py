"""Whether memory grows over thousands of training steps, or of calls that fail."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cases import DTYPES

from fusedrnn import _call as call

from . import CELLS, Row, Scale, masked, module_of
from .wrong_calls import failure_of, wrong_calls

Step = Callable[[], Any]
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
WARM_UP = 1.0  # share of all steps, after which allocators and caches have settled


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True)
class Memory:
    """The memory that a process holds."""

    resident: int  # bytes that are not a file's
    allocated: int  # bytes that malloc gave out, or 0 if it cannot be asked
    tensors: int
    objects: int  # blocks of Python's allocator

    @classmethod
    def now(cls) -> Memory:
        """Measures after everything has been freed that can be."""
        call._remembered.clear()  # their number is bounded: see test_remembered.py
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        gc.collect()
        allocated = 0
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        if hasattr(libc, "mallinfo2"):
            libc.mallinfo2.restype = _Mallinfo2
            info = libc.mallinfo2()
            allocated = info.uordblks + info.hblkhd
        # Without pages of files: those of libraries go when the system wants memory, and come back.
        _, pages, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
        resident = (pages - of_files) * os.sysconf("SC_PAGE_SIZE")
        return cls(resident, allocated, tensors, sys.getallocatedblocks())

    def __sub__(self, other: Memory) -> Memory:
        mine, others = vars(self).values(), vars(other).values()
        return Memory(*(a - b for a, b in zip(mine, others, strict=True)))

    def __str__(self) -> str:
        return (
            f"resident {self.resident / 1024:+,.0f} KiB, malloc {self.allocated:+,} bytes, "
            f"tensors {self.tensors:+}, Python's blocks {self.objects:+}"
        )


# A leak of one object, or 16 bytes, in each of a thousand steps is more than these limits. Smaller
# growth is noise of the allocators, and the same after twenty times as many steps.
MOST = Memory(resident=2**20, allocated=2**15, tensors=0, objects=1_000)


def growth(step: Step, steps: int) -> Row:
    """The growth over ``steps`` steps after a warm-up."""
    for _ in range(round(WARM_UP * steps)):
        step()
    Memory.now()  # the measurement itself may fill caches
    for _ in range(3):  # what leaks does so each time; an allocator takes a page or an arena once
        before = Memory.now()
        for _ in range(steps):
            step()
        grown = Memory.now() - before
        wrong = [
            f"{name} grew by {value:,} over {steps:,} steps"
            for name, value in vars(grown).items()
            if value > vars(MOST)[name]
        ]
        if not wrong:
            break
    return Row(f"{steps:,} steps", str(grown), wrong)


def _trainings(seed: int) -> Iterator[Step]:
    """Training steps of every cell and dtype, plain and masked, with many lengths and chunks."""
    generator = torch.Generator().manual_seed(seed)
    for case, dtype, is_masked in itertools.product(CELLS.values(), DTYPES, (False, True)):
        case = replace(masked(case) if is_masked else case, dtype=dtype)
        rnn = module_of(case)
        optimizer = torch.optim.SGD(rnn.parameters(), lr=1e-3, momentum=0.9)

        def step(case: Any = case, rnn: Any = rnn, optimizer: Any = optimizer) -> None:
            seq_len, batch, chunk = torch.randint(1, 20, (3,), generator=generator).tolist()
            rnn.chunk_size = chunk if chunk % 2 else None
            input = torch.randn(seq_len, batch, case.input_size).to(case.dtype)
            options = {}
            if case.lengths:
                options["lengths"] = torch.randint(1, seq_len + 1, (batch,), generator=generator)
                options["reset"] = torch.rand(seq_len, batch) < 0.2
            optimizer.zero_grad()
            output, _ = rnn(input.requires_grad_(), **options)
            output.float().square().mean().backward()
            optimizer.step()

        yield step


def _in_turn(steps: Iterator[Step]) -> Step:
    turns = itertools.cycle(steps)
    return lambda: next(turns)()


def training(scale: Scale) -> Row:
    """Runs forward, backward and an optimizer's step, with other lengths and chunks each time."""
    torch.manual_seed(scale.seed)
    steps = scale.choose(5_000, 300) * len(CELLS)
    row = growth(_in_turn(_trainings(scale.seed)), steps)
    row.done = f"{steps:,} training steps, after {round(WARM_UP * steps):,} of warm-up"
    return row


def failing(scale: Scale) -> Row:
    """Makes calls that raise, one kind after the other."""
    named = [pair for case in CELLS.values() for pair in wrong_calls(case)]
    silent = [name for name, call in named if not failure_of(call)]
    calls = scale.choose(12_000, 1_500)
    row = growth(_in_turn(functools.partial(failure_of, call) for _, call in named), calls)
    row.done = f"{calls:,} calls that fail, of {len(named)} kinds"
    row.wrong += [f"no error: {name}" for name in silent]
    return row
