"""How many steps a chunk of steps in Python has, and what autograd keeps of one step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._front.step_graph import Given, StepGraph
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves, differentiable
from .._step.unusual_tensors import memory_of
from .._step.watch import Watch
from .python_steps import PythonSteps, take_step
from .step_changes import aside


def chunk_steps(
    seq_len: int, chunk_size: int | None, workspace_bytes: int | None, step_bytes: int
) -> tuple[int, str]:
    """Steps of a chunk, and why.

    Raises:
        RuntimeError: ``workspace_bytes`` is less than one step takes.
    """
    if chunk_size is not None:
        return min(chunk_size, seq_len), "set by chunk_size"
    if workspace_bytes is None:
        least = math.isqrt(seq_len - 1) + 1
        return least, f"sqrt({seq_len:,}), which balances saved states and workspace"
    if workspace_bytes < step_bytes:
        raise RuntimeError(
            f"fusedrnn: workspace_bytes must be at least {step_bytes:,}, the bytes that autograd "
            f"saves of one step, got {workspace_bytes:,}"
        )
    fit = min(seq_len, workspace_bytes // max(step_bytes, 1))
    return fit, f"the most that fit into workspace_bytes, at {step_bytes:,} bytes each"


def measure_step(steps: PythonSteps, inputs: Leaves, state: Leaves, constants: Leaves) -> int:
    """What autograd keeps of the first step, in bytes; weights and arguments do not count.

    All that the step changes is afterwards as before.
    """
    call, random = steps.call, steps.generators.states()
    start = tuple(map(_as_leaf, state))

    def take(noise: Noise) -> tuple[Leaves, Leaves]:
        time = call.time(0)
        x = tuple([_as_leaf(leaf[time]) for leaf in inputs])
        return take_step(steps.step, call, noise, time, start, x, constants)

    with aside(steps.variables):
        try:
            return _measured(take, call, (*inputs, *state, *constants))
        finally:
            steps.generators.put_back(random)


def measure_graph(graph: StepGraph, given: Given, call: SequenceCall) -> int:
    """The same of a step that has a graph."""
    start = tuple(map(_as_leaf, call.state))

    def take(noise: Noise) -> tuple[Leaves, Leaves]:
        x = tuple([_as_leaf(leaf[call.time(0)]) for leaf in call.inputs])
        return graph.take(given, x, start, call.rows)

    return _measured(take, call, (*given.constants, *call.inputs, *call.state))


def _measured(
    take: Callable[[Noise], tuple[Leaves, Leaves]], call: SequenceCall, given: Leaves
) -> int:
    """Bytes that autograd keeps of a step besides what is given, and what each step keeps again."""
    excluded = {address for tensor in given for address in memory_of(tensor)}
    kept: list[dict[int, int]] = []
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept[-1].update(memory_of(tensor))
        alive.append(tensor)
        return tensor

    noise = Noise.for_trial()
    for _ in range(2):
        kept.append({})
        noise.chunk(call.time(0), 1, call.rows)
        noise.step(call.time(0))
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.enable_grad(), hooks, Watch(noise):
            new, y = take(noise)
        for leaf in (*new, *y):
            keep(leaf)
    first, second = kept
    return sum(
        size for place, size in first.items() if place not in excluded and place not in second
    )


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(differentiable(tensor))
