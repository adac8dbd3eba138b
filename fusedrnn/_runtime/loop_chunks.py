"""Which chunk a call takes, and what a call says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._front.step_graph import Given, StepGraph
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .._step.unusual_tensors import memory_of
from .._step.watch import Watch
from .loop_run import Run, as_leaf


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How a call would run; print it."""

    is_compiled: bool
    """Whether this package has compiled the cell, which then runs as a program of its kernels."""
    program: str
    """What the program is, and its library; or why steps are taken in Python."""
    is_recorded: bool
    """Whether whole chunks run as CUDA graphs, from the second call on."""
    record_reason: str
    """Why they do not."""
    chunk_steps: int
    """Steps of a chunk."""
    chunk_reason: str
    step_bytes: int
    """What autograd keeps of one step of one layer and direction, measured."""
    kept_bytes_per_step: int
    """What is kept from forward to backward besides arguments and outputs, on average over the
    steps, in all layers and directions."""
    workspace_bytes: int
    """Temporary memory of backward, about: what autograd keeps of a chunk."""
    faster: tuple[str, ...]
    """What would make it faster."""
    traces: int = 0
    """How often torch.compile has traced steps of this class or this function, of all modules."""

    def __str__(self) -> str:
        in_python = f"steps in Python, because {self.program}"
        first = f"compiled: {self.program}" if self.is_compiled else in_python
        recorded = "yes" if self.is_recorded else f"no, {self.record_reason}"
        lines = [first, f"chunks of {self.chunk_steps:,} steps: {self.chunk_reason}"]
        if self.is_compiled:
            lines.append(f"traced {self.traces} time{'s' * (self.traces != 1)} by torch.compile")
        else:
            lines.append(f"CUDA graphs: {recorded}")
        lines += [
            f"  {'a plain loop keeps, per step':36} {self.step_bytes:>16,} bytes",
            f"  {'kept until backward, per step':36} {self.kept_bytes_per_step:>16,} bytes",
            f"  {'workspace of backward':36} {self.workspace_bytes:>16,} bytes",
        ]
        return "\n".join([*lines, *(f"faster: {advice}" for advice in self.faster)])


def chunk_steps(
    seq_len: int, chunk_size: int | None, workspace_bytes: int | None, step_bytes: int
) -> tuple[int, str]:
    """Steps of a chunk, and why.

    Raises:
        RuntimeError: ``workspace_bytes`` is less than one step takes.
    """
    if chunk_size is not None:
        return min(chunk_size, seq_len), "chunk_size says so"
    if workspace_bytes is None:
        least = math.isqrt(seq_len - 1) + 1
        return least, f"the root of {seq_len:,}: as many states are kept as a chunk has steps"
    if workspace_bytes < step_bytes:
        raise RuntimeError(
            f"fusedrnn: workspace_bytes must be at least {step_bytes:,}, which autograd keeps of "
            f"one step, got {workspace_bytes:,}"
        )
    fit = min(seq_len, workspace_bytes // max(step_bytes, 1))
    return fit, f"so many of {step_bytes:,} bytes fit into workspace_bytes"


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
