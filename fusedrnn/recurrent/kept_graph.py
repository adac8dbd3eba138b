"""A sequence whose graph is kept: autograd passes the steps backward, and takes none again."""

from __future__ import annotations

from .autograd import outputs_of
from .first import take_first_in_graph
from .runs import Run
from .trees import Leaves


def run_with_graph(
    run: Run, inputs: Leaves, state: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """All steps under autograd, with the random numbers that steps without a graph draw.

    Returns:
        Outputs, (seq_len, ...) each, or the last ones alone if the run says so; and the last state.
    """
    outputs: dict[int, Leaves] = {}
    for chunk in run.chunks():
        run.enter(chunk)
        steps = list(zip(chunk.times, chunk.steps(chunk.of(inputs)), strict=True))
        if chunk.start == 0:
            time, x = steps.pop(0)
            state, outputs[time] = take_first_in_graph(run, inputs, state, x, constants)
        with run.watched():
            for time, x in steps:
                state, outputs[time] = run.take(time, state, x, constants)
    # A step may return what it gets, and the same tensor twice: users may write to results.
    made = tuple(leaf.clone() for leaf in state)
    found = outputs_of(run, outputs)
    return found if run.returns_sequence else tuple(leaf.clone() for leaf in found), made
