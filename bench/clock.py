"""Timers and memory meters, for the CPU and for a GPU: every number comes from here."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, profiler
from torch.autograd import DeviceType
from torch.autograd.profiler import profile

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Ratio:
    """The ratio of two calls' times: the median over rounds, the least and the most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} {self.spread}"

    @property
    def spread(self) -> str:
        """The least and the most ratio, as text."""
        return f"({self.least:.2f}–{self.most:.2f})"


def time_ms(call: Callable[[], object]) -> float:
    """Time of one call, in milliseconds, during which Python collects no garbage."""
    with _no_garbage_collection():
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
    return 1e3 * (end - begin)


def cuda_time_ms(call: Callable[[], object]) -> float:
    """The same time between two CUDA events. The GPU is idle before, so launching counts too."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with _no_garbage_collection():
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
    return begin.elapsed_time(end)


def cuda_enqueue_ms(call: Callable[[], object]) -> float:
    """Time of the CPU to enqueue a call, without waiting for the GPU."""
    torch.cuda.synchronize()  # with a full queue the CPU would wait
    return time_ms(call)


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or preset of memory that ran on a GPU, and when, in microseconds."""

    name: str
    begin_us: float
    end_us: float


def cuda_kernels(call: Callable[[], object], calls: int = 1) -> list[Kernel]:
    """What some calls ran on the GPU, by torch's profiler."""
    torch.cuda.synchronize()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    ]


def busy_us(kernels: Iterable[Kernel]) -> float:
    """The time during which any of the kernels ran."""
    total, until = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin_us):
        total += max(0.0, kernel.end_us - max(until, kernel.begin_us))
        until = max(until, kernel.end_us)
    return total


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved_ms(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    budget_s: float,
    before: Callable[[str], object] = lambda name: None,
    timer: Callable[[Callable[[], object]], float] = time_ms,
) -> dict[str, list[float]]:
    """Times of each call in milliseconds, one per round; the caller warms up.

    A round runs every call once: if something slows the machine for a while, it slows all calls,
    and ratios within a round stay fair. Ends after ``rounds``, or earlier, but not before
    ``LEAST_ROUNDS``, when ``budget_s`` seconds are over.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    gc.collect()
    gc.freeze()  # so that collections in later rounds skip the objects that exist now
    try:
        for done in range(rounds):
            gc.collect()
            if done >= LEAST_ROUNDS and time.perf_counter() - begin > budget_s:
                break
            for name, call in calls.items():
                before(name)
                times_ms[name].append(timer(call))
    finally:
        gc.unfreeze()
    return times_ms


def several(call: Callable[[], object], count: int) -> Callable[[], None]:
    """``count`` calls in one, where a single one is too short to be measured."""

    def calls() -> None:
        for _ in range(count):
            call()

    return calls


def ratio(times_ms: Iterable[float], other_ms: Iterable[float]) -> Ratio:
    """The ratio of one call's time to another's, from times of the same rounds."""
    ratios = [a / b for a, b in zip(times_ms, other_ms, strict=True)]
    return Ratio(median(ratios), min(ratios), max(ratios))


def ratio_of_medians(times_ms: Sequence[float], other_ms: Sequence[float]) -> Ratio:
    """The ratio from times of different processes, which share no rounds.

    A temporary slowdown of one process shows in the least and the most, the extremes that the times
    allow, and hardly in the ratio of medians.
    """
    return Ratio(
        median(times_ms) / median(other_ms),
        min(times_ms) / max(other_ms),
        max(times_ms) / min(other_ms),
    )


@dataclass(frozen=True)
class Memory:
    """Memory that a call takes from torch's allocator: the peak in bytes, and the allocations."""

    peak_bytes: int
    allocations: int


def measure_memory(call: Callable[[], object]) -> Memory:
    """Runs a call under the profiler, which sees temporaries inside of operators too."""
    # Not torch.profiler's, which builds a tree of all events, in several times a call's own time.
    with profile(profile_memory=True, use_kineto=True) as profiled:
        call()
    events = profiled.kineto_results.events()
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    sizes.sort(key=lambda event: event[0])  # stable: events of one nanosecond keep their order
    now_bytes = peak_bytes = 0
    for _, size_bytes in sizes:
        now_bytes += size_bytes
        peak_bytes = max(peak_bytes, now_bytes)
    return Memory(peak_bytes, sum(size_bytes > 0 for _, size_bytes in sizes))


def saved_sizes_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> list[int]:
    """Sizes of the memory blocks that a forward pass keeps for backward, largest first.

    A block counts once, and as a whole, however many views of it are saved. The blocks of ``known``
    tensors (parameters and input) do not count, since they live anyway.
    """
    known_blocks = {tensor.untyped_storage().data_ptr() for tensor in known}
    blocks: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known_blocks:
            blocks[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward()  # held until the end, so that no block is freed and used again
    del output
    return sorted(blocks.values(), reverse=True)


def cuda_peak_bytes(call: Callable[[], object]) -> int:
    """Peak memory of the GPU during a call, above the memory in use before it."""
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before_bytes


def cuda_saved_bytes(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes that forward leaves for backward, with the output: on the GPU, and in pinned memory.

    The allocators count them, because hooks on saved tensors do not see what checkpointing keeps.
    """
    before_bytes = torch.cuda.memory_allocated(), _pinned_bytes()
    output = forward()
    torch.cuda.synchronize()
    after_bytes = torch.cuda.memory_allocated(), _pinned_bytes()
    del output
    return after_bytes[0] - before_bytes[0], after_bytes[1] - before_bytes[1]


def _pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))
