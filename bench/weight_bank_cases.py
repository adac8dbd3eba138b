"""Names, sizes and helpers of the rows that ``bench.weight_bank`` measures on a GPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn import WeightBank
from fusedrnn._bank.engines import Engine, Immediate, engine_of
from fusedrnn._bank.host_memory import allocate

from .clock import cuda_time_ms, interleaved_ms, several
from .worker import Notes

REGISTERED, PAGEABLE, BY_TORCH = "the bank's, registered", "pageable", "torch's pin_memory"
FEW, ALL, ACTIVATIONS = "few tasks", "all tasks", "many activations"
FACTORS = (0.5, 1.0, 2.0, 4.0)
ON_DEVICE, PER_TENSOR, FLAT = "all on the device", ".to() per tensor", "one flat copy, waited for"
BANK, PREFETCHING = "bank", "bank, prefetching"
CONTENDERS = (ON_DEVICE, PER_TENSOR, FLAT, BANK, PREFETCHING)
HOST_FEW, HOST_ALL = "on the host, few threads", "on the host, all threads"
STEP_THERE, NO_BANK = 'step_on="device"', "a module on the device"


def calls_in_flight(count: int) -> str:
    """The name of a row of ``autocast``."""
    return f"{count} call{'s' * (count > 1)} before backward"


# What decides about the design comes first.
GROUPS: dict[str, tuple[str, ...]] = {
    "copies": (REGISTERED, BY_TORCH, PAGEABLE),
    "memory": (FEW, ALL, ACTIVATIONS),
    "overlap": tuple(f"{factor:g} of the break-even" for factor in FACTORS),
    "LSTM": CONTENDERS,
    "adam": (HOST_FEW, HOST_ALL, STEP_THERE, NO_BANK),
    "heads": CONTENDERS,
    "autocast": tuple(map(calls_in_flight, (1, 2, 3))),
}
WITH_TARGETS = ("copies", "memory", "overlap", "autocast")
TITLES = {
    "copies": "Copies of the weights of one task",
    "memory": "Memory of training steps through a bank",
    "overlap": "Steps whose next task is prefetched / the longer of compute and copy",
    "LSTM": "Training steps of LSTMs, another task each step, without an optimizer",
    "adam": "A step of AdamW, fused, of one task",
    "heads": "Training steps of small heads, another task each step, without an optimizer",
    "autocast": "Saved for backward under autocast, another task in each call",
}
COPIES, STEPS, SAMPLES = 10, 8, 20
BUDGET_S = 8.0


@dataclass(frozen=True)
class Size:
    """How much is measured: an LSTM of ``width``, and heads of ``head`` inputs."""

    tasks: int = 64
    few: int = 4
    width: int = 1024
    seq_len: int = 64
    batch: int = 32
    heads: int = 1024
    head: int = 256
    activations: int = 10_000
    rounds: int = 12


QUICK = Size(4, 2, 16, 8, 2, 8, 8, 20, 3)

Calls = dict[str, Callable[[], object]]


def input_of(size: Size, device: torch.device, seq_len: int | None = None) -> Tensor:
    """A batch for the LSTM."""
    return torch.randn(seq_len or size.seq_len, size.batch, size.width, device=device)


def lstms(size: Size) -> Callable[[], nn.Module]:
    """Makes LSTMs, all with the same values, since drawing them takes longer than copying."""
    return copies_of(fusedrnn.LSTM(size.width, size.width))


def copies_of(module: nn.Module) -> Callable[[], nn.Module]:
    """Makes copies of a module."""
    return lambda: copy.deepcopy(module)


def bank_of(
    make: Callable[[], nn.Module], tasks: int, device: torch.device, **options: Any
) -> WeightBank:
    """A bank with slots, also on a CPU."""
    bank = WeightBank((make() for _ in range(tasks)), device=device, **options)
    return with_slots(bank) if device.type == "cpu" else bank


def with_slots(bank: WeightBank) -> WeightBank:
    """Gives a bank on a CPU the slots that it does not need, in host memory."""
    bank._use_engine(Immediate())
    return bank


def registered(nbytes: int, device: torch.device) -> Tensor:
    """Host memory as a bank has it."""
    memory = allocate(nbytes)
    engine: Engine = engine_of(device) or Immediate()
    engine.pin(memory)
    return memory


def loss_of(output: Any) -> Tensor:
    """The sum of an output."""
    return (output[0] if isinstance(output, tuple) else output).sum()


def train(bank: WeightBank, task: int, x: Tensor) -> None:
    """A training step through a bank, without an optimizer."""
    loss_of(bank(task, x)).backward()
    bank[task].zero_grad()  # at once, so that the next task finds a free block for its gradient


def train_alone(module: nn.Module, x: Tensor) -> None:
    """A training step of a module, without an optimizer."""
    loss_of(module(x)).backward()
    module.zero_grad()


def times(
    calls: Calls, size: Size, steps: int, notes: Notes | None = None
) -> dict[str, list[float]]:
    """Milliseconds of one step, from samples of several."""
    before: Callable[[str], object] = lambda name: None  # noqa: E731
    samples = {name: several(call, steps) for name, call in calls.items()}
    for name, call in samples.items():
        if notes is not None:
            before = notes.begin
            notes.begin(name)
        call()
    found = interleaved_ms(
        samples, rounds=size.rounds, budget_s=BUDGET_S, before=before, timer=cuda_time_ms
    )
    return {name: [ms / steps for ms in times_ms] for name, times_ms in found.items()}


def rss_bytes() -> int:
    """Memory of the host that the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pinned_by_torch() -> int:
    """Memory of the host that torch's allocator has pinned."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
