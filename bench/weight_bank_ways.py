"""Ways to train one of many tasks: with all on the device, with copies, and with a bank.

The rows ``LSTM``, ``heads`` and ``adam`` of ``bench.weight_bank --device cuda``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import AdamW

from .clock import cuda_enqueue_ms
from .weight_bank_cases import (
    BANK,
    FLAT,
    HOST_ALL,
    NO_BANK,
    ON_DEVICE,
    PER_TENSOR,
    PREFETCHING,
    SAMPLES,
    STEP_THERE,
    STEPS,
    Calls,
    Size,
    bank_of,
    copies_of,
    input_of,
    loss_of,
    lstms,
    registered,
    times,
    train,
    train_alone,
)
from .worker import Notes


def contenders(
    kind: str, size: Size, device: torch.device, names: Sequence[str], notes: Notes
) -> None:
    """Measures training steps of many LSTMs, or of many small heads."""
    if kind == "LSTM":
        tasks, x, make = size.tasks, input_of(size, device), lstms(size)
    else:
        tasks, x = size.heads, torch.randn(256, size.head, device=device)
        make = copies_of(nn.Sequential(nn.Linear(size.head, 64), nn.Tanh(), nn.Linear(64, 16)))
    rows: dict[str, dict[str, Any]] = {}
    calls: Calls = {}
    for name in names:
        with notes.on(name):
            torch.cuda.synchronize()
            begin_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            forward, step = WAYS[name](make, tasks, device, x)
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_allocated() - begin_bytes
            host_ms = median(cuda_enqueue_ms(torch.no_grad()(forward)) for _ in range(SAMPLES))
            rows[name] = {"tasks": tasks, "device_bytes": peak_bytes, "host_us": 1e3 * host_ms}
            calls[name] = step
    for name, times_ms in times(calls, size, STEPS, notes).items():
        notes.row(name, rows[name] | {"step_ms": times_ms})


Way = tuple[Callable[[], Any], Callable[[], None]]
"""A forward call and a training step, each of the next task. The step brings gradients to where the
weights are, and has no optimizer."""


def _all_on_device(make: Any, tasks: int, device: torch.device, x: Tensor) -> Way:
    modules = nn.ModuleList(make() for _ in range(tasks)).to(device)
    turns = itertools.cycle(modules)
    return lambda: next(turns)(x), lambda: train_alone(next(turns), x)


def _per_tensor(make: Any, tasks: int, device: torch.device, x: Tensor) -> Way:
    modules = [make() for _ in range(tasks)]
    turns = itertools.cycle(modules)

    def call(module: nn.Module) -> Any:
        there = {name: tensor.to(device) for name, tensor in module.named_parameters()}
        return functional_call(module, there, (x,))

    def step() -> None:
        module = next(turns)
        loss_of(call(module)).backward()
        module.zero_grad()

    return lambda: call(next(turns)), step


def _flat(make: Any, tasks: int, device: torch.device, x: Tensor) -> Way:
    """All weights of a task in one pinned tensor; the host waits for each copy."""
    module = make().to(device)
    named = list(module.named_parameters())
    counts = [tensor.numel() for _, tensor in named]
    memory = registered(4 * sum(counts) * (tasks + 1), device).view(torch.float32)
    *homes, home = memory.view(tasks + 1, -1)
    for weights in homes:
        weights.fill_(0.01)
    turns = itertools.cycle(homes)

    def call(there: Tensor) -> Any:
        parts = zip(named, there.split(counts), strict=True)
        return functional_call(module, {n: part.view_as(t) for (n, t), part in parts}, (x,))

    def bring() -> Tensor:
        there = next(turns).to(device, non_blocking=True, copy=True)
        torch.cuda.current_stream().synchronize()
        return there

    def step() -> None:
        there = bring().requires_grad_()
        loss_of(call(there)).backward()
        home.copy_(there.grad, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return lambda: call(bring()), step


def _through_bank(make: Any, tasks: int, device: torch.device, x: Tensor) -> Way:
    bank = bank_of(make, tasks, device)
    turns = itertools.cycle(range(tasks))
    return lambda: bank(next(turns), x), lambda: train(bank, next(turns), x)


def _prefetching(make: Any, tasks: int, device: torch.device, x: Tensor) -> Way:
    bank = bank_of(make, tasks, device)
    turns = bank.prefetching((turn, None) for turn in itertools.cycle(range(tasks)))
    return lambda: bank(next(turns)[0], x), lambda: train(bank, next(turns)[0], x)


WAYS = {
    ON_DEVICE: _all_on_device,
    PER_TENSOR: _per_tensor,
    FLAT: _flat,
    BANK: _through_bank,
    PREFETCHING: _prefetching,
}


def adam(size: Size, device: torch.device, names: Sequence[str], notes: Notes) -> None:
    """Measures steps of AdamW on the host, on the device, and of a module without a bank."""
    few, x = torch.get_num_threads(), input_of(size, device)
    rows: dict[str, dict[str, Any]] = {}
    calls: Calls = {}
    for name in names:
        with notes.on(name):
            threads = (os.cpu_count() or 1) if name == HOST_ALL else few
            optimizer, moved_bytes = _optimizer(name, size, device, x)
            calls[name] = _with_threads(threads, optimizer.step)
            calls[name]()
            rows[name] = {"threads": threads, "moved_bytes": moved_bytes}
    for name, times_ms in times(calls, size, 1, notes).items():
        notes.row(name, rows[name] | {"step_ms": times_ms})
    torch.set_num_threads(few)


def _optimizer(
    name: str, size: Size, device: torch.device, x: Tensor
) -> tuple[torch.optim.Optimizer, int]:
    """One whose parameters have gradients, and the bytes that its step moves."""
    if name == NO_BANK:
        module = lstms(size)().to(device)
        loss_of(module(x)).backward()
        return AdamW(module.parameters(), fused=True), 0
    step_on = "device" if name == STEP_THERE else "host"
    bank = bank_of(lstms(size), 1, device, step_on=step_on)
    loss_of(bank(0, x)).backward()
    # Gradient and two moments in, weights and moments out; the weights are in a slot already.
    moved_bytes = 6 * bank.plan().bytes_to_host if step_on == "device" else 0
    return bank.optimizer(AdamW, fused=True), moved_bytes


def _with_threads(threads: int, call: Callable[[], object]) -> Callable[[], object]:
    def with_threads() -> None:
        torch.set_num_threads(threads)
        call()

    return with_threads
