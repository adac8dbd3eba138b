"""How many steps a chunk has, and what autograd keeps of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._front.step_graph import Given, StepGraph
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .._step.unusual_tensors import memory_of
from .._step.watch import Watch
from .loop_run import Run, as_leaf


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


def measure_step(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> int:
    """What autograd keeps of the first step, in bytes; weights and arguments do not count.

    Takes the step once. Buffers and torch's generators are afterwards as before.
    """
    run = run.for_trial(1)
    weights = {name: as_leaf(weight) for name, weight in run.weights.trained().items()}
    start = tuple(as_leaf(leaf) for leaf in state)
    x = tuple(as_leaf(leaf[run.call.time(0)]) for leaf in inputs)

    def take() -> tuple[Leaves, Leaves]:
        run.enter(run.chunks()[0])
        with run.watched():
            return run.take(run.call.time(0), start, x, constants)

    given = [*weights.values(), *run.weights.buffers(), *start, *x, *constants]
    return _measured(lambda: run.aside(take, weights), given)


def measure_graph(graph: StepGraph, given: Given, call: SequenceCall) -> int:
    """The same of a step that has a graph."""
    constants = tuple(as_leaf(c, c.requires_grad) for c in given.constants)
    start = tuple(as_leaf(leaf) for leaf in call.state)
    x = tuple(as_leaf(leaf[call.time(0)]) for leaf in call.inputs)
    noise = Noise.for_trial()
    noise.chunk(call.time(0), 1, call.rows)

    def take() -> tuple[Leaves, Leaves]:
        noise.step(call.time(0))
        with Watch(noise):
            return graph.take(given._replace(constants=constants), x, start, call.rows)

    return _measured(take, [*constants, *start, *x])


def _measured(take: Callable[[], tuple[Leaves, Leaves]], given: Sequence[Tensor]) -> int:
    """Bytes that autograd keeps of ``take()`` besides what is given."""
    excluded = {address for tensor in given for address in memory_of(tensor)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.update(memory_of(tensor))
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        new, y = take()
    for leaf in (*new, *y):
        keep(leaf)
    return sum(size for place, size in kept.items() if place not in excluded)
