"""What a ``WeightBank`` takes on a GPU: the measured rows of ``bench.weight_bank --device cuda``.

Each group of rows is measured in a process of its own, and each row is stored when it is measured;
see worker.py. With ``device="cpu"`` everything can be tried out without a GPU.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fusedrnn import WeightBank
from fusedrnn._bank.host_memory import allocate

from . import weight_bank_ways as ways
from .clock import cuda_enqueue_ms, cuda_peak_bytes, cuda_saved_bytes, cuda_time_ms
from .report import set_up_torch
from .weight_bank_cases import (
    ACTIVATIONS,
    BY_TORCH,
    COPIES,
    FACTORS,
    FEW,
    GROUPS,
    PAGEABLE,
    REGISTERED,
    SAMPLES,
    STEPS,
    Calls,
    Size,
    bank_of,
    calls_in_flight,
    copies_of,
    input_of,
    lstms,
    pinned_by_torch,
    registered,
    rss_bytes,
    times,
    train,
    train_alone,
)
from .worker import Notes


def measure(job: dict[str, Any], names: Sequence[str], notes: Notes) -> None:
    """Measures rows of a group; see worker.py."""
    set_up_torch()
    torch.manual_seed(0)
    size, device = Size(**job["size"]), torch.device(job["device"])
    MEASURES[job["group"]](size, device, names, notes)


# --- copies, and memory --------------------------------------------------------------------------


def _copies(size: Size, device: torch.device, names: Sequence[str], notes: Notes) -> None:
    nbytes = sum(parameter.nbytes for parameter in lstms(size)().parameters())
    there, also_there = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    registered(1, device)  # what the first one loads is none of a block's own
    for name in names:
        with notes.on(name):
            gc.collect()
            notes.row(name, _copy_row(name, there, also_there))


def _copy_row(name: str, there: Tensor, also_there: Tensor) -> dict[str, Any]:
    nbytes, device = there.nbytes, there.device
    before = rss_bytes(), pinned_by_torch()
    source = HOST_MEMORY[name](nbytes, device).fill_(1)
    taken = rss_bytes() - before[0], pinned_by_torch() - before[1]
    home = HOST_MEMORY[name](nbytes, device).fill_(1)
    times_ms = [
        cuda_enqueue_ms(lambda: there.copy_(source, non_blocking=True)) for _ in range(SAMPLES)
    ]
    return {
        "nbytes": nbytes,
        "is_pinned": source.is_pinned(),
        "rss_bytes": taken[0],
        "torch_pinned_bytes": taken[1],
        "call_us": 1e3 * median(times_ms),
        "gb_per_s_in": _gb_per_s((there, source)),
        "gb_per_s_out": _gb_per_s((home, also_there)),
        "gb_per_s_both": _gb_per_s((there, source), (home, also_there)),
    }


HOST_MEMORY: dict[str, Callable[[int, torch.device], Tensor]] = {
    REGISTERED: registered,
    PAGEABLE: lambda nbytes, device: allocate(nbytes),
    BY_TORCH: lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
}


def _gb_per_s(*pairs: tuple[Tensor, Tensor]) -> float:
    """The rate of copies (to, source), each pair on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in pairs]

    def call() -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        for _ in range(COPIES):
            for stream, (to, source) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    to.copy_(source, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    call()
    ms = median(cuda_time_ms(call) for _ in range(5))
    return COPIES * sum(source.nbytes for _, source in pairs) / ms / 1e6


def _memory(size: Size, device: torch.device, names: Sequence[str], notes: Notes) -> None:
    for name in names:
        with notes.on(name):
            if name == ACTIVATIONS:
                notes.row(name, _growth(size, device))
            else:
                notes.row(name, _peak(size, device, size.few if name == FEW else size.tasks))


def _peak(size: Size, device: torch.device, tasks: int) -> dict[str, Any]:
    x, make = input_of(size, device), lstms(size)
    own_bytes = _own_bytes(make().to(device), x)
    gc.collect()
    plans = []

    def through_a_bank() -> None:
        bank = bank_of(make, tasks, device)
        for turn in range(8):
            train(bank, turn % tasks, x)
        plans.append(bank.plan())

    peak_bytes = cuda_peak_bytes(through_a_bank)
    (plan,) = plans
    return {
        "tasks": tasks,
        "own_bytes": own_bytes,
        "plan_bytes": plan.device_weight_bytes + plan.device_gradient_bytes,
        "all_tasks_bytes": plan.all_tasks_bytes,
        "peak_bytes": peak_bytes,
    }


def _own_bytes(module: nn.Module, x: Tensor) -> int:
    """What a training step of the module takes by itself, with gradients, without weights."""
    train_alone(module, x)  # loads kernels, and allocates the memory that libraries keep
    return cuda_peak_bytes(lambda: train_alone(module, x))


def _growth(size: Size, device: torch.device) -> dict[str, Any]:
    bank = bank_of(copies_of(nn.Linear(64, 64)), 8, device)
    x = torch.randn(4, 64, device=device)

    def steps(count: int) -> tuple[int, int]:
        for turn in range(count):
            train(bank, turn % 8, x)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), rss_bytes()

    before = steps(size.activations // 10)
    begin = time.perf_counter()
    after = steps(size.activations)
    return {
        "activations": size.activations,
        "device_growth_bytes": after[0] - before[0],
        "host_growth_bytes": after[1] - before[1],
        "seconds": time.perf_counter() - begin,
    }


# --- copies beside computation -------------------------------------------------------------------


def _overlap(size: Size, device: torch.device, names: Sequence[str], notes: Notes) -> None:
    notes.begin(names[0])
    module, bank = lstms(size)().to(device), bank_of(lstms(size), size.few, device)
    turns = bank.prefetching((turn, None) for turn in itertools.cycle(range(size.few)))
    nbytes = bank.plan().bytes_to_device
    source = registered(nbytes, device)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    copy_in_ms, copy_out_ms = (
        nbytes / _gb_per_s(pair) / 1e6 for pair in ((there, source), (source, there))
    )
    compute_ms = {}
    for seq_len in (size.seq_len // 4, size.seq_len):
        step = functools.partial(train_alone, module, input_of(size, device, seq_len))
        step()
        compute_ms[seq_len] = median(cuda_time_ms(step) for _ in range(5))
    (few, few_ms), (many, many_ms) = compute_ms.items()
    longest_ms = max(copy_in_ms, copy_out_ms)
    even = few + (longest_ms - few_ms) / max(many_ms - few_ms, 1e-6) * (many - few)
    even = min(max(even, 2.0), 16.0 * many)  # a call of few steps may take longer than the copy
    for name, factor in zip(GROUPS["overlap"], FACTORS, strict=True):
        if name not in names:
            continue
        with notes.on(name):
            x = input_of(size, device, max(1, round(factor * even)))
            calls: Calls = {
                "train_alone": lambda x=x: train_alone(module, x),
                "train": lambda x=x: train(bank, next(turns)[0], x),
                "forward_alone": torch.no_grad()(lambda x=x: module(x)),
                "forward": torch.no_grad()(lambda x=x: bank(next(turns)[0], x)),
            }
            row: dict[str, Any] = {"seq_len": len(x), "rows": x.shape[0] * x.shape[1]}
            row |= {"copy_in_ms": copy_in_ms, "copy_out_ms": copy_out_ms}
            row |= {f"{which}_ms": ms for which, ms in times(calls, size, STEPS).items()}
            notes.row(name, row | {"gap_us": _gap_us(module, bank, x)})


def _gap_us(module: nn.Module, bank: WeightBank, x: Tensor) -> float:
    """How much longer the host is in backward through a bank: it waits for the gradient's copy."""

    def backward_us(call: Callable[[], Any]) -> float:
        loss = call()[0].sum()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begin)

    more = []
    for _ in range(SAMPLES):
        alone = backward_us(lambda: module(x))
        more.append(backward_us(lambda: bank(0, x)) - alone)
        module.zero_grad()
        bank[0].zero_grad()
    return median(more)


# --- autocast -----------------------------------------------------------------------------------


def _autocast(size: Size, device: torch.device, names: Sequence[str], notes: Notes) -> None:
    x = torch.randn(8, 2 * size.width, device=device)
    square = nn.Linear(2 * size.width, 2 * size.width)
    bank = bank_of(copies_of(nn.Sequential(square, copy.deepcopy(square))), 3, device)
    copy_bytes = bank.plan().bytes_to_device // 2
    for count in (1, 2, 3):
        name = calls_in_flight(count)
        if name not in names:
            continue
        with notes.on(name):

            def forward(count: int = count) -> Tensor:
                with torch.autocast(device.type, torch.bfloat16):
                    return torch.stack([bank(task, x) for task in range(count)])

            for _ in range(2):
                forward().sum().backward()
            bank.zero_grad()
            row = {"saved_bytes": cuda_saved_bytes(forward)[0], "copy_bytes": copy_bytes}
            notes.row(name, row)


MEASURES = {
    "copies": _copies,
    "memory": _memory,
    "overlap": _overlap,
    "LSTM": functools.partial(ways.contenders, "LSTM"),
    "adam": ways.adam,
    "heads": functools.partial(ways.contenders, "heads"),
    "autocast": _autocast,
}
