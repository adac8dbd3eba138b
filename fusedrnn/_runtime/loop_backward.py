"""Backward of a sequence, from the last chunk to the first, each with a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._step.gradients import Gradients, dense, gradients_of
from .._step.sequence_call import LoopValues
from .._step.trees import Leaves
from .cuda_graphs import CannotRecord, Recorded
from .loop_run import Chunk, Run, as_leaf
from .missed_leaves import check_nothing_missed
from .state_comparison import are_close, coarsest_eps, sums_are_close, sums_of


class ChunkGiven(NamedTuple):
    """What backward of a chunk gets besides what all chunks share."""

    before: Leaves
    """The state before the chunk."""
    after: Leaves
    """The state after it."""
    inputs: Leaves
    """(steps, ...) each, like the gradients of the outputs."""
    state_gradients: Gradients
    """Of the state after the chunk."""
    output_gradients: Gradients
    sums: Tensor
    """Of the outputs."""


class ChunkGradients(NamedTuple):
    """What backward of a chunk gives."""

    state_gradients: Gradients
    """Of the state before the chunk."""
    inputs: Gradients
    shared: Gradients
    """Of constants, weights and closed-over tensors, from this chunk alone."""
    same: Tensor
    """For each leaf of the state, and then for the outputs, whether the steps give it again."""


@dataclass
class Backward:
    """The backward pass of one call, and the gradients that it has so far."""

    run: Run
    values: LoopValues
    starts: Sequence[Leaves]
    needs: Sequence[bool]
    """Which of ``values.leaves()`` need a gradient."""
    output_gradients: Gradients
    state_gradients: Gradients
    """Of the state after the steps that are still to be passed."""

    def __post_init__(self) -> None:
        values, needs = self.values, self.needs
        self.input_gradients: Gradients = [
            torch.empty_like(leaf, memory_format=torch.contiguous_format) if need else None
            for leaf, need in zip(values.inputs, needs, strict=False)
        ]
        first = len(values.inputs) + len(values.state)
        shared = values.leaves()[first:]
        needed = zip(shared, needs[first:], strict=True)
        self.shared_leaves = [as_leaf(leaf, need) for leaf, need in needed]
        self.shared: Gradients = [None] * len(shared)
        """Gradients of constants, weights and closed-over tensors."""
        self._owns = [False] * len(shared)
        self._same: list[Tensor] = []
        self._eps = coarsest_eps(self.run.autocast, [*values.leaves(), *self.run.frozen.values()])

    def gradients(self) -> Gradients:
        """Of ``values.leaves()``."""
        weights, chunks = self.run.weights, self.run.chunks()
        # Nothing here refers to itself: saved tensors and graphs are to end with the call.
        recorded = self.run.recorded("backward", self._pass_whole)
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
            self.run.graphs.note_end("backward")
        _check_same(self._same, self.run.call.names.state)
        firsts = [
            gradient if need else None
            for gradient, need in zip(
                self.state_gradients, self.needs[len(self.values.inputs) :], strict=False
            )
        ]
        return [*self.input_gradients, *firsts, *self.shared]

    def _given(self, index: int, chunk: Chunk) -> ChunkGiven:
        return ChunkGiven(
            self.starts[index],
            self.starts[index + 1],
            chunk.of(self.values.inputs),
            self.state_gradients,
            self._output_gradients_of(chunk),
            self.run.sums[index],
        )

    # By a graph

    def _repeated(
        self, recorded: Recorded[ChunkGradients], chunk: Chunk, given: ChunkGiven
    ) -> ChunkGradients:
        """The same by what was recorded of a chunk."""
        given = given._replace(  # each chunk must have the same kinds of tensors
            sums=given.sums if self.run.call.returns_sequence else given.sums.new_empty(0),
            state_gradients=dense(given.state_gradients, given.after),
            output_gradients=[
                whole.new_zeros(len(chunk.times), *whole.shape)
                if whole is not None and part is None
                else part
                for whole, part in zip(self.output_gradients, given.output_gradients, strict=True)
            ],
        )
        found = recorded(chunk, given, self.run.noise.numbers())
        return ChunkGradients(
            [None if g is None else g.clone() for g in found.state_gradients],
            found.inputs,  # copied to their place at once
            [
                gradient.clone() if gradient is not None and kept is None else gradient
                for gradient, kept in zip(found.shared, self.shared, strict=True)
            ],
            found.same.clone(),
        )

    def _pass_whole(
        self, chunk: Chunk, given: ChunkGiven, numbers: Sequence[Tensor]
    ) -> ChunkGradients:
        """What is recorded. ``numbers``: what the steps draw."""
        # A leaf stays with the stream that used it first, and this stream is another one.
        self.shared_leaves = [as_leaf(leaf, leaf.requires_grad) for leaf in self.shared_leaves]
        self.run.enter(chunk)
        self.run.noise.give(numbers)
        found = self._pass(chunk, given, {})
        return found._replace(state_gradients=dense(found.state_gradients, given.before))

    # Step by step

    def _pass(self, chunk: Chunk, given: ChunkGiven, buffers: dict[str, Tensor]) -> ChunkGradients:
        """Takes the steps of a chunk again, with a graph of all of them."""
        run, known = self.run, self.values
        values: LoopValues = pytree.tree_unflatten(
            [*known.inputs, *known.state, *self.shared_leaves],
            pytree.tree_structure(known),
        )
        start = tuple(map(as_leaf, given.before))
        needed = zip(given.inputs, self.needs, strict=False)
        inputs = tuple(as_leaf(leaf, need) for leaf, need in needed)
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
        same = self._are_same(chunk, state, outputs, given)
        roots, gradients = [*state], [*given.state_gradients]
        for time, y in zip(chunk.times, outputs, strict=True):
            roots += y
            place = time - chunk.part.start
            gradients += [None if g is None else g[place] for g in given.output_gradients]
        with run.watched_backward():
            found = iter(gradients_of(roots, gradients, leaves))
        return ChunkGradients(
            [next(found) for _ in start], [next(found) for _ in inputs], [*found], same
        )

    def _are_same(
        self, chunk: Chunk, state: Leaves, outputs: Sequence[Leaves], given: ChunkGiven
    ) -> Tensor:
        """As ``Found.same``, of the steps of a chunk that were taken again."""
        same = are_close(state, given.after, self._eps)
        if not given.sums.numel():  # nothing is known of the outputs in forward
            return torch.cat([same, same.new_ones(1)])
        compared = chunk.in_time(outputs) if self.run.call.returns_sequence else outputs[-1:]
        leaves = [*zip(*compared, strict=True)]
        return torch.cat([same, sums_are_close(sums_of(leaves), given.sums, leaves, self._eps)])

    def _output_gradients_of(self, chunk: Chunk) -> Gradients:
        """Of all steps of a chunk, in the order of time; None where no step has one."""
        call, part = self.run.call, chunk.part
        if call.returns_sequence:
            return [None if g is None else g[part] for g in self.output_gradients]
        made: Gradients = []
        for g in self.output_gradients:
            if g is None or (call.last is None and chunk.stop != call.seq_len):
                made.append(None)
            elif call.last is None:
                whole = g.new_zeros(len(chunk.times), *g.shape)
                whole[chunk.times[-1] - part.start] = g
                made.append(whole)
            else:
                flags = call.last[part]
                made.append(torch.where(flags.reshape(*flags.shape, *(1,) * (g.dim() - 1)), g, 0))
        return made

    def _keep(self, chunk: Chunk, found: ChunkGradients) -> None:
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


def _check_same(flags: Sequence[Tensor], names: Sequence[str]) -> None:
    """Once for all chunks, since it waits for the device.

    Args:
        flags: ``Found.same`` of each chunk.
        names: Of the leaves of the state.

    Raises:
        RuntimeError: Something is another one.
    """
    if flags[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a CUDA graph cannot ask
    same = torch.stack([*flags]).all(0).tolist()
    if not all(same):
        raise RuntimeError(
            "fusedrnn: the step is not deterministic: recomputing it in backward gave a different "
            f"{[*names, 'output'][same.index(False)]}. A step may depend only on its arguments, "
            "weights, buffers, attributes and random numbers, not on iterators or clocks; if any "
            "step draws from Python's or NumPy's generators, the first one must; and weights and "
            "closed-over tensors must not change between forward and backward"
        )
