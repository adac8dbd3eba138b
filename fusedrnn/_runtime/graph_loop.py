"""Steps of a graph one after the other, under autograd, which keeps all of them.

For derivatives of gradients, and for what a program's backward cannot do.
"""

from __future__ import annotations

from .._front.step_graph import Given, StepGraph
from .._step.leaf_step import with_masks
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .._step.watch import Watch
from .loop_autograd import outputs_of


def loop(graph: StepGraph, given: Given, call: SequenceCall) -> tuple[Leaves, Leaves]:
    """Outputs, and the last state."""

    def take(state: Leaves, x: Leaves, _: Leaves) -> tuple[Leaves, Leaves]:
        return graph.take(given, x, state, call.rows)

    step, call, constants = with_masks(take, call)
    noise = Noise(call.seed, call.layer)
    noise.chunk(0, call.seq_len, call.rows)
    state, outputs = call.state, dict[int, Leaves]()
    steps = [leaf.unbind(0) for leaf in call.inputs]
    with Watch(noise):
        for i in range(call.seq_len):
            time = call.time(i)
            noise.step(time)
            state, outputs[time] = step(state, tuple(leaf[time] for leaf in steps), constants)
    return outputs_of(call, outputs), state
