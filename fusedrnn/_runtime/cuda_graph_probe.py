"""Tries whether CUDA graphs can record a step and its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._step.gradients import gradients_of
from .._step.sequence_call import LoopValues
from .._step.trees import Leaves, differentiable
from .._step.watch import ClosedOver
from .cuda_graphs import Unrecordable, waits_in_backward
from .loop_run import Run, as_leaf

_DRAWS = "the step draws random numbers that a CUDA graph cannot draw"


class Obstacle(NamedTuple):
    """Why something cannot be done."""

    reason: str
    """"" for nothing."""
    is_lasting: bool = True
    """Whether it is one of the step, and not of the moment, as when memory is short."""


def obstacle_to_graphs(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Obstacle:
    """Why steps cannot be recorded, nor their gradients if there can be any.

    Takes the first step. All that it changes is afterwards as before.
    """
    found = Obstacle("")
    for _ in range(2):  # once more, for another thread may have drawn from torch's generators
        found = _obstacle_to_graphs(run, inputs, state, constants)
        if found.reason != _DRAWS:
            break
    return found


def _obstacle_to_graphs(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Obstacle:
    run = run.for_trial(1)
    x = tuple(leaf.detach()[run.call.time(0)] for leaf in inputs)
    has_gradients = torch.is_grad_enabled()

    def look() -> Obstacle:
        mark = run.mark()
        run.enter(run.chunks()[0])
        given, watch = LoopValues(x, state, constants, {}, {}), Unrecordable()
        if has_gradients:
            given = _as_leaves(run, given)

        def take() -> Obstacle:
            with watch, run.watched(given.closed_over):
                new, y = run.take(run.call.time(0), given.state, given.inputs, given.constants)
            results = [*new, *y]
            if node := waits_in_backward(results):
                return Obstacle(f"backward of the step waits for the values of a tensor, in {node}")
            ones = [torch.ones_like(leaf) if differentiable(leaf) else None for leaf in results]
            try:
                with watch, run.watched_backward():
                    gradients_of(results, ones, given.leaves())
            except Exception as error:
                reason = f"backward of the step raises {type(error).__name__}: {error}"
                return Obstacle(reason, is_lasting=False)
            return Obstacle(watch.reason and f"the step {watch.reason}")

        found = run.weights.call_with(given.weights, take)
        if change := run.change(mark):
            return Obstacle(change)
        return Obstacle(_DRAWS) if run.has_drawn(mark) else found

    return run.aside(look)


def _as_leaves(run: Run, given: LoopValues) -> LoopValues:
    """Leaves of graphs of their own, so that no hook of a user is called; and what a step reads.

    Takes the first step to see it. The run must have entered its chunk.
    """
    found = ClosedOver(run.weights.tensors())
    detached = [
        tuple(leaf.detach() for leaf in leaves)
        for leaves in (given.state, given.inputs, given.constants)
    ]
    found.add_known(detached)
    with torch.enable_grad(), run.watched(closed_over=found):
        run.take(run.call.time(0), *detached)
    return LoopValues(
        tuple(map(as_leaf, given.inputs)),
        tuple(map(as_leaf, given.state)),
        tuple(map(as_leaf, given.constants)),
        # Only now, for a lazy module had no weights before.
        {name: as_leaf(weight) for name, weight in run.weights.trained().items()},
        {number: as_leaf(leaf) for number, leaf in found.with_gradient.items()},
    )
