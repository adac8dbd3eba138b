"""The steps of a sequence as a loop takes them, whose graph keeps all of them.

For torch.func and tracing, and for what a program's backward cannot do.
"""

from __future__ import annotations

import torch

from .._front.step_graph import Given, StepGraph
from .._step.leaf_step import StepFunction, with_masks
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .._step.watch import Watch
from .._warnings import warn
from .python_steps import chosen, take_step


def plain_loop(
    step: StepFunction, call: SequenceCall, inputs: Leaves, state: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """Outputs and the last state. ``call``: its own tensors do not count."""
    noise = Noise(call.seed, call.layer)
    noise.chunk(0, call.seq_len, call.rows)
    outputs: dict[int, Leaves] = {}
    # Not chunk by chunk: a trace of slices would leave out the steps of a longer sequence.
    steps = [leaf.unbind(0) for leaf in inputs]
    with Watch(noise):
        for time in range(call.seq_len)[:: -1 if call.backwards else 1]:
            x = tuple([leaf[time] for leaf in steps])
            state, outputs[time] = take_step(step, call, noise, time, state, x, constants)
    times = [outputs[time] for time in range(call.seq_len)]
    if call.returns_sequence:
        return tuple(map(torch.stack, zip(*times, strict=True))), state
    if call.last is None:
        return times[0 if call.backwards else -1], state
    last = times[0]
    for y, flags in zip(times[1:], call.last[1:], strict=True):
        last = chosen(flags, y, last)
    return last, state


def loop_of_graph(graph: StepGraph, given: Given, call: SequenceCall) -> tuple[Leaves, Leaves]:
    """The same of steps that have a graph."""

    def take(state: Leaves, x: Leaves, _: Leaves) -> tuple[Leaves, Leaves]:
        return graph.take(given, x, state, call.rows)

    step, call, constants = with_masks(take, call)
    return plain_loop(step, call, call.inputs, call.state, constants)


def warn_of_loop(what: str) -> None:
    warn(
        f"fusedrnn: {what} run as a plain loop over the steps, which saves the intermediates of "
        "every step"
    )
