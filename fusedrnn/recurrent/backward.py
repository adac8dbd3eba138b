"""Backward of a sequence, from the last chunk to the first, each with a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import Chunk
from .gradients import Gradients, Steps, at, coarsest_eps, dense, gradients_of
from .graphs import CannotRecord, Recorded
from .reads import check_nothing_missed
from .runs import Run, as_leaf
from .same import are_same, check_same, with_gradients
from .trees import Leaves, differentiable
from .values import Values


class Given(NamedTuple):
    """What backward of a chunk gets besides what all chunks share."""

    before: Leaves
    """The state before the chunk; in parallel mode before each step, (steps, ...) each."""
    after: Leaves
    """The state after the chunk; in parallel mode after each step."""
    inputs: Leaves
    """(steps, ...) each, like the gradients of the outputs."""
    state_gradients: Gradients
    """Of the state after the chunk."""
    output_gradients: Gradients
    sums: Tensor
    """Of the outputs."""


class Found(NamedTuple):
    """What backward of a chunk gives."""

    state_gradients: Gradients
    """Of the state before the chunk."""
    inputs: Gradients
    shared: Gradients
    """Of constants, weights and closed-over tensors, from this chunk alone."""
    same: Tensor
    """For each leaf of the state, and then for the outputs, whether the steps give it again; in
    parallel mode then for each leaf of the state whether its gradients are those of step by step.
    """


@dataclass
class Backward:
    """The backward pass of one call, and the gradients that it has so far."""

    run: Run
    values: Values
    starts: Sequence[Leaves]
    states: Sequence[Tensor]
    """In parallel mode, each leaf of the state after the step at each time; else empty."""
    needs: Sequence[bool]
    """Which of ``values.leaves()`` need a gradient."""
    output_gradients: Gradients
    state_gradients: Gradients
    """Of the state after the steps that are still to be passed."""

    input_gradients: Gradients = field(init=False)
    shared: Gradients = field(init=False)
    """Gradients of constants, weights and closed-over tensors."""
    shared_leaves: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        values, needs = self.values, self.needs
        self.input_gradients = [
            torch.empty_like(leaf, memory_format=torch.contiguous_format) if need else None
            for leaf, need in zip(values.inputs, needs, strict=False)
        ]
        first = len(values.inputs) + len(values.state)
        shared = values.leaves()[first:]
        needed = zip(shared, needs[first:], strict=True)
        self.shared_leaves = [as_leaf(leaf, need) for leaf, need in needed]
        self.shared = [None] * len(shared)
        self._owns = [False] * len(shared)
        self._same: list[Tensor] = []
        self._eps = coarsest_eps(self.run.autocast, [*values.leaves(), *self.run.frozen.values()])

    def gradients(self) -> Gradients:
        """Of ``values.leaves()``."""
        weights, chunks = self.run.weights, self.run.chunks()
        name = "parallel" if self.states else "replay"
        # Nothing here refers to itself: saved tensors and graphs are to end with the call.
        recorded = self.run.recorded(name, self._pass_whole)
        with weights.locked(), weights.with_training_flags(self.run.training):
            self._moved = weights.moved(self.run.frozen)
            for index in reversed(range(len(chunks))):
                chunk = chunks[index]
                self.run.enter(chunk)
                given = self._given(index, chunk)
                found = None
                if recorded is not None and self.run.is_whole(chunk):
                    try:
                        found = self._repeated(recorded, chunk, given)
                    except CannotRecord as error:
                        self.run.give_up_graphs(error)
                        recorded = None
                        self.run.enter(chunk)
                if found is None:
                    with self.run.again(index) as buffers:
                        found = self._pass(chunk, given, buffers)
                self._keep(chunk, found)
        if self.run.graphs is not None:
            self.run.graphs.note_end(name)
        check_same(self._same, self.run.names.state)
        firsts = [
            gradient if need else None
            for gradient, need in zip(
                self.state_gradients, self.needs[len(self.values.inputs) :], strict=False
            )
        ]
        return [*self.input_gradients, *firsts, *self.shared]

    def _given(self, index: int, chunk: Chunk) -> Given:
        if self.states:
            before, after = self._states_before(chunk), chunk.of(tuple(self.states))
        else:
            before, after = self.starts[index], self.starts[index + 1]
        return Given(
            before,
            after,
            chunk.of(self.values.inputs),
            self.state_gradients,
            self._output_gradients_of(chunk),
            self.run.sums[index],
        )

    # By a graph

    def _repeated(self, recorded: Recorded[Found], chunk: Chunk, given: Given) -> Found:
        """The same by what was recorded of a chunk."""
        state = [leaf[0] if self.states else leaf for leaf in given.after]
        given = given._replace(  # each chunk must have the same kinds of tensors
            sums=given.sums if self.run.returns_sequence else given.sums.new_empty(0),
            state_gradients=dense(given.state_gradients, state),
            output_gradients=[
                whole.new_zeros(len(chunk.times), *whole.shape)
                if whole is not None and part is None
                else part
                for whole, part in zip(self.output_gradients, given.output_gradients, strict=True)
            ],
        )
        found = recorded(chunk, given, self.run.noise.numbers())
        return Found(
            [None if g is None else g.clone() for g in found.state_gradients],
            found.inputs,  # copied to their place at once
            [
                gradient.clone() if gradient is not None and kept is None else gradient
                for gradient, kept in zip(found.shared, self.shared, strict=True)
            ],
            found.same.clone(),
        )

    def _pass_whole(self, chunk: Chunk, given: Given, numbers: Sequence[Tensor]) -> Found:
        """What is recorded. ``numbers``: what the steps draw."""
        # A leaf stays with the stream that used it first, and this stream is another one.
        self.shared_leaves = [as_leaf(leaf, leaf.requires_grad) for leaf in self.shared_leaves]
        self.run.enter(chunk)
        self.run.noise.give(numbers)
        found = self._pass(chunk, given, {})
        state = [leaf[0] if self.states else leaf for leaf in given.before]
        return found._replace(state_gradients=dense(found.state_gradients, state))

    # The two modes

    def _pass(self, chunk: Chunk, given: Given, buffers: dict[str, Tensor]) -> Found:
        pass_chunk = self._pass_in_parallel if self.states else self._replay
        return pass_chunk(chunk, given, buffers)

    def _replay(self, chunk: Chunk, given: Given, buffers: dict[str, Tensor]) -> Found:
        """Takes the steps of a chunk again, with a graph of all of them."""
        run, values = self.run, self._with_shared(self.shared_leaves)
        start, inputs = self._leaves(given.before), self._input_leaves(given)
        leaves = [*start, *inputs, *self.shared_leaves]

        def take_steps() -> tuple[Leaves, list[Leaves]]:
            state, outputs = start, []
            with run.watched(values.closed_over):
                for time, x in zip(chunk.times, chunk.steps(inputs), strict=True):
                    state, y = run.take(time, state, x, values.constants)
                    outputs.append(y)
            return state, outputs

        with torch.enable_grad():
            state, outputs = run.weights.call_with(
                values.weights | self._moved | buffers,
                lambda: check_nothing_missed(take_steps, leaves, run.kept),
            )
        in_time = [*zip(*chunk.in_time(outputs), strict=True)]
        same = self._are_same(state, in_time, outputs[-1], given)
        roots, gradients = [*state], [*given.state_gradients]
        for time, y in zip(chunk.times, outputs, strict=True):
            roots += y
            gradients += at(given.output_gradients, time - chunk.part.start)
        with run.watched_backward():
            found = iter(gradients_of(roots, gradients, leaves))
        return Found([next(found) for _ in start], [next(found) for _ in inputs], [*found], same)

    def _pass_in_parallel(self, chunk: Chunk, given: Given, buffers: dict[str, Tensor]) -> Found:
        """The gradient of each state, step by step; then those of the rest, of all steps at once.

        The rows of a batch being independent, the steps of a chunk are one step of a larger batch.
        All at once give the gradients of the states as well, which shows whether rows are so.
        """
        run, before = self.run, given.before
        alone = self._with_shared([leaf.detach() for leaf in self.shared_leaves])
        steps = chunk.steps(given.inputs)
        adjoints = [torch.zeros_like(leaf) if differentiable(leaf) else None for leaf in before]
        state_gradients = given.state_gradients

        def pass_steps() -> None:
            nonlocal state_gradients
            with run.watched(alone.closed_over):
                for time, x in zip(reversed(chunk.times), reversed(steps), strict=True):
                    place = time - chunk.part.start
                    for adjoint, gradient in zip(adjoints, state_gradients, strict=True):
                        if adjoint is not None and gradient is not None:
                            adjoint[place] = gradient
                    start = self._leaves([leaf[place] for leaf in before])
                    state, y = run.take(time, start, x, alone.constants)
                    gradients = [*state_gradients, *at(given.output_gradients, place)]
                    with run.watched_backward():
                        state_gradients = gradients_of([*state, *y], gradients, start)

        starts = self._leaves([leaf.flatten(0, 1) for leaf in before])
        inputs = self._input_leaves(given)
        values = self._with_shared(self.shared_leaves)

        def take_at_once() -> tuple[Leaves, list[Leaves]]:
            run.noise.all_steps()
            with run.watched(values.closed_over):
                state, y = run.step(
                    starts,
                    tuple(leaf.flatten(0, 1) for leaf in inputs),
                    values.constants,
                )
            return state, [y]

        with torch.enable_grad():
            run.weights.call_with(alone.weights | self._moved | buffers, pass_steps)
            if not any(leaf.requires_grad for leaf in (*inputs, *self.shared_leaves)):
                same = torch.ones(2 * len(before) + 1, dtype=torch.bool, device=before[0].device)
                return Found(
                    state_gradients, [None] * len(inputs), [None] * len(self.shared_leaves), same
                )
            leaves = [*starts, *inputs, *self.shared_leaves]
            state, (y,) = run.weights.call_with(
                values.weights | self._moved | buffers,
                lambda: check_nothing_missed(take_at_once, leaves, run.kept),
            )
        after = given._replace(after=tuple(leaf.flatten(0, 1) for leaf in given.after))
        place = chunk.times[-1] - chunk.part.start
        by_steps = [leaf.unflatten(0, (len(chunk.times), -1)) for leaf in y]
        last = tuple(leaf[place] for leaf in by_steps)
        same = self._are_same(state, [[leaf] for leaf in by_steps], last, after)
        roots = [None if a is None else a.flatten(0, 1) for a in adjoints]
        roots += [None if g is None else g.flatten(0, 1) for g in given.output_gradients]
        with run.watched_backward():
            found = iter(gradients_of([*state, *y], roots, leaves))
        at_once = [next(found) for _ in starts]
        by_step = [
            None if a is None else self._shifted(a.new_zeros(a.shape[1:]) if g is None else g, a)
            for g, a in zip(state_gradients, adjoints, strict=True)
        ]
        incoming = [*adjoints, *given.output_gradients]
        same = with_gradients(same, at_once, by_step, incoming, self._eps)
        return Found(state_gradients, [next(found) for _ in inputs], [*found], same)

    # What both do

    def _are_same(
        self, state: Leaves, outputs: Sequence[Steps], last: Leaves, given: Given
    ) -> Tensor:
        """As ``Found.same``. ``last``: the output of the step that was taken last."""
        compared = outputs if self.run.returns_sequence else [[leaf] for leaf in last]
        return are_same(state, given.after, compared, given.sums, self._eps)

    def _with_shared(self, leaves: Sequence[Tensor]) -> Values:
        return self.values.layout().values([*self.values.inputs, *self.values.state, *leaves])

    def _leaves(self, state: Sequence[Tensor]) -> Leaves:
        return tuple(as_leaf(leaf) for leaf in state)

    def _input_leaves(self, given: Given) -> Leaves:
        needed = zip(given.inputs, self.needs, strict=False)
        return tuple(as_leaf(leaf, need) for leaf, need in needed)

    def _states_before(self, chunk: Chunk) -> Leaves:
        """The state before each step of a chunk, in the order of time."""
        part, way = chunk.part, -1 if self.run.backwards else 1
        if chunk.start:
            moved = slice(part.start - way, part.stop - way)
            return tuple(leaf[moved] for leaf in self.states)
        firsts = zip(self.values.state, self.states, strict=True)
        return tuple(self._shifted(first, leaf[part]) for first, leaf in firsts)

    def _shifted(self, first: Tensor, after: Tensor) -> Tensor:
        """What is so before each step, from what is so after each, in the order of time."""
        if self.run.backwards:
            return torch.cat([after[1:], first[None]])
        return torch.cat([first[None], after[:-1]])

    def _output_gradients_of(self, chunk: Chunk) -> Gradients:
        """Of all steps of a chunk, in the order of time; None where no step has one."""
        run, part = self.run, chunk.part
        if run.returns_sequence:
            return [None if g is None else g[part] for g in self.output_gradients]
        made: Gradients = []
        for g in self.output_gradients:
            if g is None or (run.last is None and chunk.stop != run.seq_len):
                made.append(None)
            elif run.last is None:
                whole = g.new_zeros(len(chunk.times), *g.shape)
                whole[chunk.times[-1] - part.start] = g
                made.append(whole)
            else:
                flags = run.last[part]
                made.append(torch.where(flags.reshape(*flags.shape, *(1,) * (g.dim() - 1)), g, 0))
        return made

    def _keep(self, chunk: Chunk, found: Found) -> None:
        self.state_gradients = found.state_gradients
        self._same.append(found.same)
        for whole, part in zip(self.input_gradients, found.inputs, strict=True):
            if whole is not None:
                whole[chunk.part] = 0 if part is None else part.view_as(whole[chunk.part])
        for i, gradient in enumerate(found.shared):
            kept = self.shared[i]
            if kept is None or gradient is None:
                self.shared[i] = gradient if kept is None else kept
            elif self._owns[i]:
                kept += gradient
            else:  # autograd may have given the same tensor for two leaves
                self.shared[i], self._owns[i] = kept + gradient, True
