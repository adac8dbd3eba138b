"""Forward of a sequence without a graph: a loop that keeps the state before each chunk."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._step.sequence_call import SequenceCall, like_rows
from .._step.trees import Leaves
from .cuda_graphs import CannotRecord
from .first_step import take_first, take_looking
from .loop_run import Chunk, Mark, Run
from .state_comparison import sums_of


class Result(NamedTuple):
    outputs: Leaves
    """(seq_len, ...) each; without the first dimension if only the last ones are wanted."""
    state: Leaves
    starts: list[Leaves]
    """The state before each chunk, and after the last one."""


@torch.no_grad()
def forward(
    run: Run, inputs: Leaves, state: Leaves, constants: Leaves, for_backward: bool
) -> Result:
    """Takes all steps, and notes in ``run`` what they read, draw and change.

    Args:
        for_backward: Whether backward may follow.

    Raises:
        RuntimeError: Backward may follow, but could not take the steps again.
    """
    inputs, state, constants = (
        tuple(leaf.detach() for leaf in leaves) for leaves in (inputs, state, constants)
    )
    outputs = _Outputs(run.call)
    starts: list[Leaves] = []

    def note_start() -> None:
        if for_backward:
            starts.append(tuple(map(_without_rest, state)))
            run.befores.append(run.before())

    recorded = None
    for chunk in run.chunks():
        note_start()
        run.enter(chunk)
        if recorded is not None and chunk.start and run.is_whole(chunk):
            try:
                y, new = recorded(chunk, state, chunk.of(inputs), run.noise.numbers())
            except CannotRecord as error:
                run.give_up_graphs(error)
                recorded = None
                run.enter(chunk)
            else:
                state = tuple(leaf.clone() for leaf in new)
                outputs.add_chunk(chunk, y)
                run.sums.append(outputs.sums(chunk) if for_backward else _NO_SUMS)
                continue
        steps = list(zip(chunk.times, chunk.steps(chunk.of(inputs)), strict=True))
        if chunk.start == 0:
            time, x = steps.pop(0)
            state, y, mark = take_first(run, inputs, state, x, constants, for_backward)
            recorded = run.recorded("forward", functools.partial(_take_whole, run, constants))
            outputs.add(time, y)
        looks = chunk.stop == run.call.seq_len and len(steps) > 0
        with run.watched():
            for time, x in steps[: len(steps) - looks]:
                state, y = run.take(time, state, x, constants)
                outputs.add(time, y)
        if looks:
            time, x = steps[-1]
            # The last step may read what the first one has not.
            state, y = take_looking(run, time, inputs, state, x, constants)
            outputs.add(time, y)
        run.sums.append(outputs.sums(chunk) if for_backward else _NO_SUMS)
    if run.graphs is not None:
        run.graphs.note_end("forward")
    note_start()
    if for_backward:
        _note_late_changes(run, mark)
    return Result(tuple(outputs.leaves), tuple(leaf.clone() for leaf in state), starts)


def _note_late_changes(run: Run, mark: Mark) -> None:
    """Also what the first step has not changed is put back, but for buffers."""
    late = [
        n for n in run.weights.changed(mark.versions, mark.buffers) if n not in run.changed_buffers
    ]
    if late:
        raise RuntimeError(
            f"fusedrnn: the step changes the buffer {late[0].split('.', 2)[2]} in a later step, "
            "but not in the first, so backward cannot recompute the steps; change it from the "
            "first step on, or make it a part of the state"
        )
    run.check_written(mark)
    known = {*run.changed_variables}
    run.changed_variables = run.python.changed(mark.variables)
    others = [key for key in run.changed_variables if key not in known]
    # Later steps run without a graph, which does not tell what has a gradient in a loop.
    run.refused_variables += run.python.with_tensors(mark.variables, others, needs_gradient=False)


_NO_SUMS = torch.empty(0, dtype=torch.float64)


def _without_rest(leaf: Tensor) -> Tensor:
    """The same without the rest of a larger tensor, which would be kept with it."""
    return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf


def _take_whole(
    run: Run,
    constants: Leaves,
    chunk: Chunk,
    state: Leaves,
    parts: Leaves,
    numbers: Sequence[Tensor],
) -> tuple[Leaves, Leaves]:
    """All steps of a chunk: outputs, (steps, ...) each in the order of time, and the last state.

    Args:
        parts: Of the inputs.
        numbers: What the steps draw.
    """
    run.enter(chunk)
    run.noise.give(numbers)
    outputs = []
    with run.watched():
        for time, x in zip(chunk.times, chunk.steps(parts), strict=True):
            state, y = run.take(time, state, x, constants)
            outputs.append(y)
    in_time = zip(*chunk.in_time(outputs), strict=True)
    return tuple(map(torch.stack, in_time)), state


class _Outputs:
    """Outputs of all steps in one tensor for each leaf, or of the last ones."""

    def __init__(self, call: SequenceCall) -> None:
        self._call = call
        self.leaves: list[Tensor] = []

    def add(self, time: int, y: Leaves) -> None:
        call = self._call
        if call.returns_sequence:
            if not self.leaves:
                self.leaves = [leaf.new_empty((call.seq_len, *leaf.shape)) for leaf in y]
            for sequence, leaf in zip(self.leaves, y, strict=True):
                sequence[time] = leaf
        elif call.last is None:
            if time == call.time(call.seq_len - 1):
                self.leaves = [leaf.clone() for leaf in y]
        elif not self.leaves:
            self.leaves = [leaf.clone() for leaf in y]
        else:
            is_last = call.last[time]
            self.leaves = [
                torch.where(like_rows(is_last, leaf), leaf, old)
                for leaf, old in zip(y, self.leaves, strict=True)
            ]

    def sums(self, chunk: Chunk) -> Tensor:
        """What tells whether steps give the same again, when they are all taken; maybe nothing."""
        call = self._call
        if call.returns_sequence:
            return sums_of([[leaf[chunk.part]] for leaf in self.leaves])
        if call.last is None and chunk.stop == call.seq_len:
            return sums_of([[leaf] for leaf in self.leaves])
        return _NO_SUMS

    def add_chunk(self, chunk: Chunk, y: Leaves) -> None:
        """After at least one step. ``y``: (steps, ...) each."""
        call = self._call
        if call.returns_sequence:
            for sequence, leaf in zip(self.leaves, y, strict=True):
                sequence[chunk.part] = leaf
        elif call.last is None:
            if chunk.stop == call.seq_len:
                place = chunk.times[-1] - chunk.part.start
                self.leaves = [leaf[place].clone() for leaf in y]
        else:
            are_last = call.last[chunk.part]
            is_here, step = are_last.any(0), are_last.int().argmax(0)
            rows = torch.arange(len(step), device=step.device)
            self.leaves = [
                torch.where(like_rows(is_here, old), leaf[step, rows], old)
                for leaf, old in zip(y, self.leaves, strict=True)
            ]
