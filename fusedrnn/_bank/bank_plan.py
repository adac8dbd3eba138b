"""What a bank takes, and from how many rows on its copies cost no time."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn

from .block_layout import aligned
from .file_tasks import FileTasks
from .host_tasks import HostTasks

FLOPS_PER_ROW = 6
"""Of a training step, for each weight and row: two products' worth in forward, four in backward."""


@dataclass(frozen=True, kw_only=True)
class BankPlan:
    """Bytes and times of a bank; print it. Bytes on the device do not depend on ``tasks``."""

    tasks: int
    task_bytes: int
    """Weights and buffers of the largest task."""
    slot_count: int
    device_weight_bytes: int
    """``slot_count`` times the largest task. A CPU takes none of this, nor of the next two."""
    device_gradient_bytes: int
    """Two blocks with the gradients of a task. Under autocast each call that waits for backward
    also has a copy of the weights in 16 bits."""
    device_step_bytes: int
    """With ``step_on="device"``, of one task while it takes a step: weights, gradient and, as Adam
    has, two numbers per weight."""
    all_tasks_bytes: int
    """What weights of all tasks take that are on the device, without gradients."""
    host_weight_bytes: int
    host_gradient_bytes_per_task: int
    """Of each task that has a gradient."""
    host_adam_bytes: int
    """Of all tasks, once Adam has taken a step of each."""
    bytes_to_device: int
    """Of a call of a task whose weights are not there."""
    bytes_to_host: int
    """Of a backward pass."""
    milliseconds: tuple[tuple[float, float], ...]
    """For rates in GB/s, the milliseconds of ``bytes_to_device``."""
    hidden_from: tuple[tuple[float, tuple[float, ...]], ...]
    """For reached TFLOP/s, at each of these rates, the rows (steps x batch) of a training step from
    which copies cost no time if they are announced by ``prefetch``. A step of a row takes six
    floating-point operations for each weight, so it does not depend on the number of weights."""

    def __str__(self) -> str:
        lines = [
            f"{self.tasks:,} tasks, of which the largest has {self.task_bytes:,} bytes",
            "on an accelerator",
            f"  weights, {self.slot_count} slots           {self.device_weight_bytes:>18,} bytes",
            f"  gradients, 2 blocks        {self.device_gradient_bytes:>18,} bytes",
            f"  weights of all tasks would {self.all_tasks_bytes:>18,} bytes",
            "on the host",
            f"  weights of all tasks       {self.host_weight_bytes:>18,} bytes",
            f"  gradients, of a task in use{self.host_gradient_bytes_per_task:>18,} bytes",
            f"  Adam, once all took a step {self.host_adam_bytes:>18,} bytes",
            "between them",
            f"  to the device, for a call  {self.bytes_to_device:>18,} bytes",
            f"  to the host, for backward  {self.bytes_to_host:>18,} bytes",
        ]
        if self.device_step_bytes:
            lines.insert(4, f"  a step there, of one task  {self.device_step_bytes:>18,} bytes")
        at = ", ".join(f"{ms:.2f} ms at {rate:g} GB/s" for rate, ms in self.milliseconds)
        lines.append(f"a copy to the device takes {at}")
        for tflops, rows in self.hidden_from:
            rates = (rate for rate, _ in self.milliseconds)
            at = ", ".join(
                f"{n:,.0f} at {rate:g} GB/s" for rate, n in zip(rates, rows, strict=True)
            )
            lines.append(f"rows (steps x batch) that hide it at {tflops:g} TFLOP/s: {at}")
        return "\n".join(lines)


def plan_of(
    tasks: HostTasks | FileTasks,
    slot_count: int,
    step_on: str,
    gb_per_s: Sequence[float],
    tflops: Sequence[float],
) -> BankPlan:
    """What a bank of these tasks takes."""
    gb_per_s, tflops = _rates("gb_per_s", gb_per_s), _rates("tflops", tflops)
    hosted = [] if isinstance(tasks, FileTasks) else list(tasks.values())
    most, total = tasks.nbytes_of_largest(), sum(task.nbytes for task in hosted)
    trained = [sum(task.tensors[i].nbytes for i in task.trained()) for task in hosted]
    of_first = [t for t in hosted[0].tensors if isinstance(t, nn.Parameter)] if hosted else []
    numbers = sum(tensor.numel() for tensor in of_first)
    width = sum(tensor.nbytes for tensor in of_first) / numbers if numbers else 4.0
    gradient = max(trained, default=0)
    return BankPlan(
        tasks=len(tasks),
        task_bytes=most,
        slot_count=slot_count,
        device_weight_bytes=slot_count * aligned(most),
        device_gradient_bytes=2 * aligned(gradient),
        device_step_bytes=4 * gradient if step_on == "device" else 0,
        all_tasks_bytes=most * len(tasks) if not hosted else total,
        host_weight_bytes=total,
        host_gradient_bytes_per_task=gradient,
        host_adam_bytes=2 * sum(trained),
        bytes_to_device=most,
        bytes_to_host=gradient,
        milliseconds=tuple((rate, most / rate / 1e6) for rate in gb_per_s),
        hidden_from=break_even(width, gb_per_s, tflops),
    )


def _rates(name: str, values: Any) -> tuple[float, ...]:
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else ()
    if not found or not all(isinstance(value, Real) and float(value) > 0 for value in found):
        raise ValueError(
            f"fusedrnn: {name} must be a list of numbers above 0, got {reprlib.repr(values)}"
        )
    return found


def break_even(
    bytes_per_weight: float, gb_per_s: Sequence[float], tflops: Sequence[float]
) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """``BankPlan.hidden_from``."""
    return tuple(
        (
            reached,
            tuple(
                bytes_per_weight / (rate * 1e9) * reached * 1e12 / FLOPS_PER_ROW
                for rate in gb_per_s
            ),
        )
        for reached in tflops
    )
