"""Fails allocations one after the other, by a limit of memory that rises until a call works."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cases import MASKED, Arguments, Case
from torch import Tensor

import fusedrnn

from . import CELLS, Row, Scale
from .bits import changed, copied, denormals_are_kept

# Arrays are mapped one by one, and fail at the limit. Small allocations come from a heap that has
# room and is never given back: see make_room_for_small_things.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "PYTHONMALLOC": "malloc",
}
MIB = 2**20
SIZES: dict[str, Any] = {"seq_len": 40, "batch": 32, "input_size": 160, "hidden_size": 192}
SIZES |= {"latent_size": 160}
MOST = 512 * MIB  # more would mean that the experiment is wrong


def make_room_for_small_things() -> list[bytearray]:
    """Makes gaps in the heap that are too small for an array; they last as long as the result."""
    blocks = [bytearray(size) for size in (1_000, 30_000) for _ in range(2_000)]
    return blocks[::2]


@contextlib.contextmanager
def limit(more: int) -> Iterator[None]:
    """Limits the addresses of the process to so many more bytes than now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    present = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (present + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def kind_of(error: BaseException) -> str:
    """Who raised an error of memory, or what is wrong with the error."""
    text = str(error)
    if isinstance(error, MemoryError):
        return "of Python"
    if isinstance(error, RuntimeError) and "fusedrnn: out of memory: " in text:
        is_first = text.startswith("fusedrnn: ")
        return "of fusedrnn" if is_first else "of fusedrnn, behind a place in its source"
    if isinstance(error, RuntimeError) and "can't allocate memory" in text:
        return "of torch's allocator"
    return f"wrong: {type(error).__name__}: {text[:300]}"


def named(name: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """A call of the list, by its number."""
    return {f"{name} {i}": t for i, t in enumerate(tensors)}


@dataclass
class Call:
    """Forward or backward of a case; a seed is drawn if the cell needs one."""

    case: Case
    arguments: Arguments
    is_backward: bool

    def forward(self) -> tuple[Tensor, ...]:
        return self.arguments.call(fusedrnn, **self.case.options)

    def backward(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        wanted = self.arguments.differentiable()
        cotangents = self.arguments.cotangents()
        return list(torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True))

    def whole(self) -> dict[str, Tensor]:
        """All results, with the same seed each time."""
        torch.manual_seed(1)
        outputs = self.forward()
        return named("output", outputs) | named("gradient", self.backward(outputs))

    def prepare(self) -> Callable[[], Any]:
        """Runs the pass that is to run out of memory."""
        torch.manual_seed(1)
        if not self.is_backward:
            return self.forward
        outputs = self.forward()
        return lambda: self.backward(outputs)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a failing call must not change."""
        cotangents = named("cotangent", self.arguments.cotangents())
        return copied(self.arguments.named() | cotangents)


def failures(call: Call, step: int) -> Iterator[str]:
    """Kinds of failures at limits ``step`` bytes apart; findings begin with a fixed word."""
    expected, tensors = copied(call.whole()), call.tensors()
    gradients = {name: t for name, t in expected.items() if name.startswith("gradient")}
    for more in range(0, MOST, step):
        function = call.prepare()
        state = torch.get_rng_state()
        kind = ""
        with limit(more):
            try:
                function()
            except BaseException as error:
                # The error is dropped, because its traceback holds what the call had allocated.
                kind = kind_of(error)
        if not kind:
            return
        yield kind
        if not torch.equal(state, torch.get_rng_state()):
            yield "generator advanced"
        # The graph can be used again.
        if call.is_backward and (wrong := changed(named("gradient", function()), gradients)):
            yield f"wrong: the graph's gradients {wrong} are others after {more} bytes"
        del function
        if wrong := changed(call.tensors(), tensors):
            yield f"wrong: {wrong} changed with {more} bytes"
        if wrong := changed(call.whole(), expected):
            yield f"wrong: results {wrong} are others after {more} bytes"
        if not denormals_are_kept():
            yield f"wrong: denormals are flushed after {more} bytes"
    yield f"wrong: fails with {MOST} bytes"


def _cases(scale: Scale) -> Iterator[Case]:
    """Two calls for every cell, or one of the two by turns."""
    for number, case in enumerate(CELLS.values()):
        sized = replace(case, **SIZES, proj_size=128 if case.proj_size else 0, noise="drawn")
        if not scale.short or number % 2 == 0:
            yield sized
        options = {**MASKED, "recompute": number < 2, "num_layers": 2}
        if not scale.short or number % 2 == 1:
            yield replace(sized, **options, dtype=torch.bfloat16)


def no_memory(scale: Scale) -> Row:
    """Tries every cell, forward and backward, at every limit."""
    torch.set_num_threads(1)
    torch.manual_seed(scale.seed)
    kept = make_room_for_small_things()
    kinds: Counter[str] = Counter()
    step = scale.choose(MIB // 2, 2 * MIB)
    every = list(_cases(scale))
    for case, is_backward in itertools.product(every, (False, True)):
        call = Call(case, case.tensors().to(case.dtype), is_backward)
        place = f" ({case}, {'backward' if is_backward else 'forward'})"
        for kind in failures(call, step):
            kinds[kind + place if kind.startswith("wrong") else kind] += 1
    if not any(kind.startswith("of fusedrnn") for kind in kinds):
        kinds["wrong: no allocation of fusedrnn failed"] += 1
    del kept
    advanced = kinds.pop("generator advanced", 0)
    right = {kind: n for kind, n in kinds.items() if not kind.startswith("wrong")}
    return Row(
        f"limits {step / MIB:g} MiB apart, for forward and backward of {len(every)} calls",
        ", ".join(f"{n:,} errors {kind}" for kind, n in right.items())
        + f"; the generator had drawn a seed before {advanced:,} of them",
        [f"{n:,} times {kind}" for kind, n in kinds.items() if kind.startswith("wrong")][:20],
    )
