"""Tries whether a step treats the rows of a batch one by one, and whether graphs can record it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .gradients import Gradients, gradients_of, is_close
from .graphs import Unrecordable
from .reads import ClosedOver
from .runs import Run, as_leaf
from .trees import Leaves, differentiable

_STEPS = 3


@torch.no_grad()
def obstacle_to_parallel(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> str:
    """Why steps cannot be taken at once, as rows of a larger batch; "" if nothing was found.

    Takes the first steps one by one and then at once. Buffers and torch's generators are afterwards
    as before.
    """
    named = [*zip(run.names.state, state, strict=True)]
    named += [(name, x[0]) for name, x in zip(run.names.input, inputs, strict=True) if x.dim()]
    for name, leaf in named:
        if not leaf.dim() or leaf.shape[0] != run.rows:
            return f"{name} has no row for each row of the batch"
    steps = min(_STEPS, run.seq_len)
    if steps == 1 or run.rows == 0:
        return ""
    run = dataclasses.replace(run.for_trial(steps), backwards=False, compiled=None)
    inputs = tuple(leaf.detach()[:steps] for leaf in inputs)
    try:
        return run.aside(lambda: _difference(run, inputs, state, constants))
    except Exception as error:
        return f"steps taken at once raise {type(error).__name__}: {error}"


@torch.no_grad()
def obstacle_to_graphs(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> str:
    """Why steps cannot be recorded; "" if nothing was found.

    Takes the first step. Buffers and torch's generators are afterwards as before.
    """
    run = dataclasses.replace(run.for_trial(1), draws=True, compiled=None)
    given = (state, tuple(leaf.detach()[run.time(0)] for leaf in inputs), constants)

    def look() -> str:
        versions, random_states = run.weights.buffer_versions(), run.random_states()
        buffers = run.weights.copies(versions)
        run.enter(run.chunks()[0])
        watch = Unrecordable()
        with run.watched(), watch:
            run.take(run.time(0), *given)
        if run.weights.changed(versions, buffers):
            return "the step changes a buffer"
        now = run.random_states()
        if not all(torch.equal(a, b) for a, b in zip(random_states, now, strict=True)):
            return "the step draws random numbers in a way that no graph can"
        return watch.reason and f"the step {watch.reason}"

    return run.aside(look)


def _difference(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> str:
    """Between steps taken one by one and taken at once."""
    state = tuple(leaf.detach() for leaf in state)
    constants = tuple(leaf.detach() for leaf in constants)
    found = ClosedOver([*run.weights.tensors(), *inputs, *state, *constants])
    versions, random_states = run.weights.buffer_versions(), run.random_states()
    buffers = run.weights.copies(versions)
    chunk = run.chunks()[0]
    run.enter(chunk)
    states, one_by_one = [state], []
    for time, x in zip(chunk.times, chunk.steps(chunk.of(inputs)), strict=True):
        run.noise.step(time)
        one_by_one.append(_take(run, found, state, x, constants, 1))
        state = one_by_one[-1].state
        states.append(state)
    if run.weights.changed(versions, buffers):
        return "the step changes a buffer"
    now = run.random_states()
    drawn_from_torch = not all(torch.equal(a, b) for a, b in zip(random_states, now, strict=True))
    if drawn_from_torch or not run.noise.draws_by_rows:
        return "the step draws random numbers that are not for one row each"
    for leaf in [*found.with_gradient.values(), *found.others.values()]:
        if run.rows in leaf.shape:  # an index into it could be out of range
            return "the step reads a tensor of its own that may have rows of the batch"
    run.noise.all_steps()
    before = tuple(torch.cat(leaves) for leaves in zip(*states[:-1], strict=True))
    x = tuple(leaf.flatten(0, 1) for leaf in inputs)
    at_once = _take(run, found, before, x, constants, run.seq_len)
    names = [
        *run.names.state,
        *(f"output leaf {i}" for i in range(len(at_once.output))),
        *(f"the gradient of {name}" for name in (*run.names.state, *run.names.input)),
    ]
    steps = zip(*(taken.all() for taken in one_by_one), strict=True)
    for name, new, old in zip(names, at_once.all(), steps, strict=True):
        if new is None or old[0] is None:
            if new is not None or any(leaf is not None for leaf in old):
                return f"with steps taken at once, {name} is another one"
            continue
        if new.shape[:1] != (run.rows * run.seq_len,):
            return f"{name} of steps taken at once has shape {tuple(new.shape)}"
        for time, own in zip(chunk.times, new.split(run.rows), strict=True):
            expected = old[time]
            if expected is None or not is_close(own, expected):
                return (
                    f"with steps taken at once, {name} differs at time {time}, so the rows are not "
                    "independent"
                )
    return ""


class _Taken(NamedTuple):
    """A step, or some at once, and its vector-Jacobian product."""

    state: Leaves
    output: Leaves
    gradients: Gradients
    """Of the state before it and of its input."""

    def all(self) -> list[Tensor | None]:
        return [*self.state, *self.output, *self.gradients]


def _take(
    run: Run, found: ClosedOver, state: Leaves, x: Leaves, constants: Leaves, steps: int
) -> _Taken:
    """Takes as many steps at once; the run's noise knows which."""
    before, input = (tuple(map(as_leaf, leaves)) for leaves in (state, x))
    found.add_known([before, input])
    with torch.enable_grad(), run.watched(closed_over=found):
        new, y = run.step(before, input, constants)
    results = [*new, *y]
    vectors = [_vector(leaf, steps) for leaf in results]
    gradients = gradients_of(results, vectors, [*before, *input])
    return _Taken(
        tuple(leaf.detach() for leaf in new), tuple(leaf.detach() for leaf in y), gradients
    )


def _vector(leaf: Tensor, steps: int) -> Tensor | None:
    """Some gradient of a leaf, the same for each of the steps."""
    if not differentiable(leaf) or not leaf.dim() or leaf.shape[0] % steps:
        return None
    numbers = torch.arange(1, leaf.numel() // steps + 1, device=leaf.device).cos()
    return numbers.to(leaf.dtype).repeat(steps).view(leaf.shape)
