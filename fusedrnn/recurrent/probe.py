"""Tries whether a step treats the rows of a batch one by one, and whether graphs can record it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import Chunk
from .gradients import Gradients, coarsest_eps, dense, gradients_of, is_close, rows_are_close
from .graphs import Unrecordable, waits_in_backward
from .reads import ClosedOver
from .runs import Run, as_leaf
from .trees import Leaves, differentiable

_STEPS = 3
_DRAWS = "the step draws random numbers that are not for one row each"

_DRAWS_OTHERWISE = "the step draws random numbers in a way that no graph can"


class Obstacle(NamedTuple):
    """Why something cannot be done."""

    reason: str
    """"" for nothing."""
    is_lasting: bool = True
    """Whether it is one of the step, and not of the moment, as when memory is short."""


@torch.no_grad()
def obstacle_to_parallel(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Obstacle:
    """Why steps cannot be taken at once, as rows of a larger batch.

    Takes the first steps one by one and then at once. All that they change is afterwards as before.
    """
    named = [*zip(run.names.state, state, strict=True)]
    named += [(name, x[0]) for name, x in zip(run.names.input, inputs, strict=True) if x.dim()]
    for name, leaf in named:
        if not leaf.dim() or leaf.shape[0] != run.rows:
            return Obstacle(f"{name} has no row for each row of the batch")
    steps = min(_STEPS, run.seq_len)
    if steps == 1 or run.rows == 0:
        return Obstacle("")
    inputs = tuple(leaf.detach()[:steps] for leaf in inputs)
    reason = ""
    for _ in range(2):
        trial = dataclasses.replace(run.for_trial(steps), backwards=False)
        try:
            reason = _difference(trial, inputs, state, constants)
        except Exception as error:
            return Obstacle(f"a step raises {type(error).__name__}: {error}", is_lasting=False)
        if reason != _DRAWS or not trial.noise.draws_by_rows:
            break
        # Once more, for another thread may have drawn from torch's generators.
    return Obstacle(reason)


def obstacle_to_graphs(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Obstacle:
    """Why steps cannot be recorded, nor their gradients if there can be any.

    Takes the first step. All that it changes is afterwards as before.
    """
    found = Obstacle("")
    for _ in range(2):  # as above
        found = _obstacle_to_graphs(run, inputs, state, constants)
        if found.reason != _DRAWS_OTHERWISE:
            break
    return found


def _obstacle_to_graphs(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Obstacle:
    run = dataclasses.replace(run.for_trial(1), draws=True)
    x = tuple(leaf.detach()[run.time(0)] for leaf in inputs)
    has_gradients = torch.is_grad_enabled()

    def look() -> Obstacle:
        mark = run.mark()
        run.enter(run.chunks()[0])
        shared, start, input = _Shared({}, constants, {}), state, x
        if has_gradients:
            shared, _ = _find_shared(run, x, state, constants)
            start, input = tuple(map(as_leaf, state)), tuple(map(as_leaf, x))
        watch = Unrecordable()

        def take() -> Obstacle:
            with watch, run.watched(shared.closed_over):
                new, y = run.take(run.time(0), start, input, shared.constants)
            results, leaves = [*new, *y], [*start, *input, *shared.leaves()]
            if node := waits_in_backward(results):
                return Obstacle(f"the step waits for the values of a tensor in backward, in {node}")
            ones = [torch.ones_like(leaf) if differentiable(leaf) else None for leaf in results]
            try:
                with watch, run.watched_backward():
                    gradients_of(results, ones, leaves)
            except Exception as error:
                reason = f"backward of the step raises {type(error).__name__}: {error}"
                return Obstacle(reason, is_lasting=False)
            return Obstacle(watch.reason and f"the step {watch.reason}")

        found = run.weights.call_with(shared.weights, take)
        if change := run.change(mark):
            return Obstacle(change)
        return Obstacle(_DRAWS_OTHERWISE) if run.has_drawn(mark) else found

    return run.aside(look)


class _Shared(NamedTuple):
    """What all steps get, as leaves of graphs of their own: so no hook of a user is called."""

    weights: dict[str, Tensor]
    constants: Leaves
    closed_over: dict[int, Tensor]
    """By the id of the tensor that the step reads."""

    def leaves(self) -> Leaves:
        return (*self.weights.values(), *self.constants, *self.closed_over.values())

    def names(self) -> list[str]:
        """In the order of the leaves."""
        return [
            *(f"the weight {name.removeprefix('used.0.')}" for name in self.weights),
            *(f"leaf {i} of what all steps get" for i in range(len(self.constants))),
            *("a tensor that the step closes over" for _ in self.closed_over),
        ]


def _find_shared(
    run: Run, x: Leaves, state: Leaves, constants: Leaves
) -> tuple[_Shared, ClosedOver]:
    """Takes the first step to see what it reads. The run must have entered its chunk."""
    found = ClosedOver(run.weights.tensors())
    given = [tuple(leaf.detach() for leaf in leaves) for leaves in (state, x, constants)]
    found.add_known(given)
    with torch.enable_grad(), run.watched(closed_over=found):
        run.take(run.time(0), *given)
    shared = _Shared(  # only now, for a lazy module had no weights before
        {name: as_leaf(weight) for name, weight in run.weights.trained().items()},
        tuple(map(as_leaf, constants)),
        {number: as_leaf(leaf) for number, leaf in found.with_gradient.items()},
    )
    found.add_known(shared.leaves())
    return shared, found


def _difference(run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> str:
    """Between steps taken one by one and taken at once, and what keeps them from being compared."""
    chunk = run.chunks()[0]

    def look() -> str:
        mark = run.mark()
        run.enter(chunk)
        shared, found = _find_shared(run, tuple(x[0] for x in inputs), state, constants)

        def one_by_one() -> list[_Taken]:
            taken: list[_Taken] = []
            for time, x in zip(chunk.times, chunk.steps(inputs), strict=True):
                run.noise.step(time)
                before = taken[-1].state if taken else tuple(leaf.detach() for leaf in state)
                taken.append(_take(run, found, shared, before, x, time, 1))
            return taken

        alone = run.weights.call_with(shared.weights, one_by_one)
        if change := run.change(mark):
            return change
        if run.has_drawn(mark) or not run.noise.draws_by_rows:
            return _DRAWS
        for leaf in [*found.with_gradient.values(), *found.others.values()]:
            if run.rows in leaf.shape:  # an index into it could be out of range
                return "the step reads a tensor of its own that may have rows of the batch"
        run.noise.all_steps()
        befores = [state, *(taken.state for taken in alone[:-1])]
        before = tuple(torch.cat(leaves).detach() for leaves in zip(*befores, strict=True))
        x = tuple(leaf.flatten(0, 1) for leaf in inputs)
        try:
            at_once = run.weights.call_with(
                shared.weights, lambda: _take(run, found, shared, before, x, 0, run.seq_len)
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"steps taken at once raise {type(error).__name__}: {error}"
        given = [*inputs, *state, *constants, *run.weights.tensors()]
        eps = coarsest_eps(run.autocast, given)
        differences = _differences(run, chunk, shared, alone, at_once, eps)
        return next((f"with steps taken at once, {what}" for what in differences), "")

    return run.aside(look)


def _differences(
    run: Run, chunk: Chunk, shared: _Shared, alone: list[_Taken], at_once: _Taken, eps: float
) -> Iterator[str]:
    names = [
        *run.names.state,
        *(f"output leaf {i}" for i in range(len(at_once.output))),
        *(f"the gradient of {name}" for name in (*run.names.state, *run.names.input)),
    ]
    steps = zip(*(taken.rows() for taken in alone), strict=True)
    for name, new, old in zip(names, at_once.rows(), steps, strict=True):
        if new is None or old[0] is None:
            continue  # it has no gradient, being of integers
        expected = torch.stack([leaf for leaf in old if leaf is not None])
        if new.shape != (run.rows * run.seq_len, *expected.shape[2:]):
            yield f"{name} has shape {tuple(new.shape)}"
            continue
        same = rows_are_close(new.view(expected.shape), expected, eps).tolist()
        if not all(same):
            time = chunk.times[same.index(False)]
            yield f"{name} differs at time {time}, so the rows are not independent"
    sums = zip(*(taken.shared for taken in alone), strict=True)
    for name, total, parts in zip(shared.names(), at_once.shared, sums, strict=True):
        each = [part for part in parts if part is not None]
        if total is not None and not is_close(total, torch.stack(each).sum(0), each, eps):
            yield f"the gradient of {name} differs, so the rows are not independent"


class _Taken(NamedTuple):
    """A step, or some at once, and its vector-Jacobian product."""

    state: Leaves
    output: Leaves
    own: Gradients
    """Gradients of the state before it and of its input."""
    shared: Gradients
    """Of what all steps get."""

    def rows(self) -> list[Tensor | None]:
        return [*self.state, *self.output, *self.own]


def _take(
    run: Run, found: ClosedOver, shared: _Shared, state: Leaves, x: Leaves, first: int, steps: int
) -> _Taken:
    """Takes as many steps at once, from the time ``first`` on; the run's noise knows which."""
    before, input = (tuple(map(as_leaf, leaves)) for leaves in (state, x))
    found.add_known([before, input])
    with torch.enable_grad(), run.watched(shared.closed_over, found):
        new, y = run.step(before, input, shared.constants)
    results, leaves = [*new, *y], [*before, *input, *shared.leaves()]
    vectors = [_vector(leaf, first, steps) for leaf in results]
    gradients = [
        gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        for gradient in dense(gradients_of(results, vectors, leaves), leaves)
    ]
    own = len(before) + len(input)
    return _Taken(
        tuple(leaf.detach() for leaf in new),
        tuple(leaf.detach() for leaf in y),
        gradients[:own],
        gradients[own:],
    )


def _vector(leaf: Tensor, first: int, steps: int) -> Tensor | None:
    """Some gradient of a leaf, another one for each step: else a mean over them would be right."""
    if not differentiable(leaf):
        return None
    start = first * (leaf.numel() // steps) + 1
    numbers = torch.arange(start, start + leaf.numel(), device=leaf.device).cos()
    return numbers.to(leaf.dtype).view(leaf.shape)
