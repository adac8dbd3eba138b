"""What a ``WeightBank`` costs the host, measured on a CPU: a part of ``bench.weight_bank``.

On a CPU a bank needs no slots. Two contenders get slots in host memory all the same, so that the
bank does in Python what it does for a GPU. Their copies are of tiny numbers. The time of large
copies to a device can only be measured on one.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import AdamW

import fusedrnn
from fusedrnn import WeightBank
from fusedrnn._bank import BankPlan

from .clock import interleaved_ms, several
from .weight_bank_cases import loss_of, with_slots

MODULE, PER_TENSOR, ON_CPU = "module alone", "copy per tensor", "bank on a CPU"
RESIDENT, OTHERS = "bank, task resident", "bank, another task each step"
CONTENDERS = (MODULE, PER_TENSOR, ON_CPU, RESIDENT, OTHERS)
ONE_TASK, OF_BANK, ALL_TASKS = (
    "AdamW of one task",
    "bank.optimizer(AdamW)",
    "AdamW(bank.parameters())",
)
COPY, FUSED, FOREACH, DEFAULT = "one copy", "AdamW, fused", "AdamW, foreach", "AdamW, by default"
FIRST, WARM_UP = "first", 3
ADAM_BYTES = 28  # per weight: reads weight, gradient and two moments, writes all but the gradient
COPY_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        tasks: Of the LSTM, for bytes.
        width: Of the LSTM, its input included.
        heads: Tasks of eight tensors, for optimizers.
        calls: Steps in a sample, since a single one is too short to be measured.
    """

    tasks: int = 64
    width: int = 1024
    heads: int = 1024
    calls: int = 20
    rounds: int = 60
    budget_s: float = 10.0


QUICK = Size(tasks=4, width=16, heads=8, calls=2, rounds=3)

Times = dict[str, list[float]]
"""Milliseconds of each contender, one per round."""


class Layers(nn.Module):
    """Some linear layers, one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Calls all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


# Numbers are so few that nothing but the host's work for each call and tensor counts.
MANY = "nn.Linear, many tasks"
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nn.Linear": (lambda: nn.Linear(8, 8), (2, 8)),
    MANY: (lambda: nn.Linear(8, 8), (2, 8)),
    "32 nn.Linear": (lambda: Layers(32), (2, 8)),
    "nn.LSTM": (lambda: nn.LSTM(8, 8), (4, 2, 8)),
    "fusedrnn.GRU": (lambda: fusedrnn.GRU(8, 8), (4, 2, 8)),
}


def step_times(name: str, size: Size) -> tuple[int, int, Times]:
    """Tasks, tensors of a task, and the times of training steps of it in all ways."""
    make, shape = MODULES[name]
    tasks = size.heads if name == MANY else 8
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    per_tensor = copy.deepcopy(module)
    names = [name for name, _ in module.named_parameters()]
    on_cpu = WeightBank(module, tasks, device="cpu")
    resident, others = (with_slots(WeightBank(module, tasks, device="cpu")) for _ in range(2))
    turns = itertools.cycle(range(tasks))

    def copies() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in per_tensor.named_parameters()}

    def another() -> None:
        task = next(turns)
        _train(others[task], lambda: others(task, x))

    calls = {
        MODULE: lambda: _train(module, lambda: module(x)),
        PER_TENSOR: lambda: _train(per_tensor, lambda: functional_call(per_tensor, copies(), (x,))),
        ON_CPU: lambda: _train(on_cpu[0], lambda: on_cpu(0, x)),
        RESIDENT: lambda: _train(resident[0], lambda: resident(0, x)),
        OTHERS: another,
    }
    return tasks, len(names), _times(calls, size)


def optimizer_times(size: Size) -> Times:
    """Of zero_grad() and step(), where one of many tasks has a gradient."""
    torch.manual_seed(0)
    one = Layers(4)
    banks = [WeightBank(one, size.heads, device="cpu") for _ in range(2)]
    all_tasks = AdamW(banks[1].parameters(), fused=True)
    calls = {
        ONE_TASK: _stepping(one, AdamW(one.parameters(), fused=True)),
        OF_BANK: _stepping(banks[0][0], banks[0].optimizer(AdamW, fused=True)),
        ALL_TASKS: _stepping(banks[1][0], all_tasks),
    }
    return _times(calls, dataclasses.replace(size, calls=min(size.calls, 2)))


def adam_times(size: Size) -> tuple[int, Times]:
    """Weights of an LSTM, and times of a step of AdamW of them on the host, and of a copy."""
    torch.manual_seed(0)
    width = size.width
    calls: dict[str, Callable[[], object]] = {}
    for name, options in (
        (FUSED, {"fused": True}),
        (FOREACH, {"foreach": True}),
        (DEFAULT, {}),
    ):
        module = nn.LSTM(width, width)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        calls[name] = AdamW(module.parameters(), **options).step
    count = sum(parameter.numel() for parameter in nn.LSTM(width, width).parameters())
    source, to = torch.zeros(count), torch.zeros(count)
    calls[COPY] = lambda: to.copy_(source)
    size = dataclasses.replace(size, calls=1, rounds=min(size.rounds, 15))
    return count, _times(calls, size)


def plan(size: Size) -> BankPlan:
    """The plan of a bank of LSTMs, whose values nobody needs."""
    modules = [nn.LSTM(size.width, size.width, device="meta") for _ in range(size.tasks)]
    for module in modules:
        module.to_empty(device="cpu")
    return WeightBank(modules, device="cpu").plan()


def _train(module: nn.Module, call: Callable[[], Any]) -> None:
    module.zero_grad()
    loss_of(call()).backward()


def _stepping(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    grads = [torch.ones_like(parameter) for parameter in module.parameters()]

    def call() -> None:
        optimizer.zero_grad()
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()

    return call


def _times(calls: dict[str, Callable[[], object]], size: Size) -> Times:
    """Of one call each, from samples of several."""
    # The first call of a round finds caches that the collection of garbage has filled.
    samples = {FIRST: several(next(iter(calls.values())), size.calls)}
    samples |= {name: several(call, size.calls) for name, call in calls.items()}
    for call in samples.values():  # allocates what is kept
        for _ in range(WARM_UP):
            call()
    found = interleaved_ms(samples, rounds=size.rounds, budget_s=size.budget_s, timer=processor_ms)
    del found[FIRST]
    return {name: [ms / size.calls for ms in times] for name, times in found.items()}


def processor_ms(call: Callable[[], object]) -> float:
    """Processor time of a call in milliseconds: other processes of a busy machine do not count."""
    gc.disable()
    try:
        begin = time.process_time()
        call()
        return 1e3 * (time.process_time() - begin)
    finally:
        gc.enable()


@contextmanager
def one_thread() -> Iterator[None]:
    """Processor time of several threads would add up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
