"""Steps of a graph one after the other, under autograd, which keeps all of them.

For derivatives of gradients, and for what a program's backward cannot do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .autograd import outputs_of
from .noise import Noise
from .reads import Watch
from .runs import FlatStep
from .sequence_call import SequenceCall
from .sequences import strides_to_longest
from .steps import with_masks
from .trees import Leaves

if TYPE_CHECKING:
    from .._front.graph import Given, StepGraph


def loop(graph: StepGraph, given: Given, call: SequenceCall) -> tuple[Leaves, Leaves]:
    """Outputs, and the last state."""
    inputs, rows = [*call.inputs], call.rows

    def take(state: Leaves, x: Leaves, _: Leaves) -> tuple[Leaves, Leaves]:
        return graph.take(given, x, state, rows)

    resets, step = call.resets, cast(FlatStep, take)
    constants: Leaves = ()
    if call.lengths is not None:
        inputs.append(strides_to_longest(call.lengths, call.seq_len, call.device))
    if resets is not None:
        assert call.reset is not None
        inputs += [call.reset, *(call.reset_to if resets.is_sequence else ())]
        constants = () if resets.is_sequence else call.reset_to
    if call.lengths is not None or resets is not None:
        step = with_masks(take, len(call.inputs), call.lengths is not None, resets)
    noise = Noise(call.seed, call.layer)
    noise.chunk(0, call.seq_len, rows)
    state, outputs = call.state, dict[int, Leaves]()
    steps = [leaf.unbind(0) for leaf in inputs]
    with Watch(noise):
        for i in range(call.seq_len):
            time = call.time(i)
            noise.step(time)
            state, outputs[time] = step(state, tuple(leaf[time] for leaf in steps), constants)
    return outputs_of(call, outputs), state
