"""The steps of one layer and direction in Python, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .._step.generators import Generators
from .._step.leaf_step import StepFunction
from .._step.noise import Noise
from .._step.sequence_call import SequenceCall, like_rows
from .._step.trees import Leaves
from .._step.watch import Watch
from .python_variables import Variables, versions_of

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Some steps in a row, counted in the order in which they are taken."""

    start: int
    stop: int
    times: range
    """The place in the sequence of each step."""

    @property
    def part(self) -> slice:
        """Of the sequence, in which time always rises."""
        return slice(min(self.times), max(self.times) + 1)

    def in_order(self, steps: Sequence[T]) -> list[T]:
        """From the order of time to that of the steps, or back."""
        return list(steps if self.times.step > 0 else reversed(steps))


class Taken(NamedTuple):
    """What the steps of a chunk make."""

    state: Leaves
    outputs: Leaves
    """(steps, ...) each. Without the sequence: the last ones of the rows that have ended."""
    last_outputs: Leaves
    """Of the last step."""


class Returned(NamedTuple):
    """Outputs of a step, which no later one may write: they have not been copied yet."""

    stop: int
    """How many steps there were up to this one."""
    time: int
    outputs: Leaves
    versions: tuple[int, ...]


@dataclass
class PythonSteps:
    """The steps of one layer and direction of a call."""

    call: SequenceCall
    """Without its tensors, which only autograd may keep."""
    step: StepFunction
    variables: Variables
    """That the step may change."""
    generators: Generators
    draws: bool = False
    """Whether each step draws from the call's seed. The first step of a call may."""
    returned: Returned | None = None
    """By the last step of the chunk before."""

    def chunks(self, size: int) -> Iterator[Chunk]:
        call = self.call
        way = -1 if call.backwards else 1
        for start in range(0, call.seq_len, size):
            stop = min(start + size, call.seq_len)
            yield Chunk(start, stop, range(call.time(start), call.time(stop - 1) + way, way))

    def take(
        self,
        chunk: Chunk,
        state: Leaves,
        parts: Leaves,
        constants: Leaves,
        last: Leaves,
        noise: Noise,
    ) -> Taken:
        """The steps of a chunk.

        Args:
            parts: Of the inputs.
            last: As :attr:`Taken.outputs`, before the chunk.
        """
        call = self.call
        noise.chunk(chunk.part.start, len(chunk.times), call.rows)
        steps = [chunk.in_order(part.unbind(0)) for part in parts]
        outputs: list[Leaves] = []
        before = self.returned
        returned = [before] if before is not None and before.stop == chunk.start else []

        def take(i: int, state: Leaves) -> Leaves:
            x = tuple([step[i] for step in steps])
            time = chunk.times[i]
            state, y = take_step(self.step, call, noise, time, state, x, constants)
            outputs.append(y)
            if call.returns_sequence or call.last is not None:
                returned.append(Returned(chunk.start + i + 1, time, y, versions_of(y)))
            return state

        first = 0
        if chunk.start == 0 and not self.draws:
            with Watch(noise):
                state = take(0, state)
            # What the first step does not draw, others draw from torch's generators.
            self.draws, first = noise.has_drawn, 1
        with Watch(noise) if self.draws else nullcontext():
            for i in range(first, len(chunk.times)):
                state = take(i, state)
        for one in returned:
            if versions_of(one.outputs) != one.versions:
                raise RuntimeError(
                    "fusedrnn: a step changes in place an output that the step at time "
                    f"{one.time}{call.place} has returned; return a copy, made by .clone()"
                )
        if returned:  # not their graph, which would keep this object
            detached = tuple([leaf.detach() for leaf in returned[-1].outputs])
            self.returned = returned[-1]._replace(outputs=detached)
        kept = tuple(map(_without_rest, state))
        by_id = dict(zip(map(id, state), kept, strict=True))
        ends = tuple([by_id.get(id(leaf), leaf) for leaf in outputs[-1]])
        if call.returns_sequence:
            stacked = tuple(map(torch.stack, zip(*chunk.in_order(outputs), strict=True)))
            return Taken(kept, stacked, ends)
        if call.last is None:
            return Taken(kept, ends if chunk.stop == call.seq_len else (), ends)
        for time, y in zip(chunk.times, outputs, strict=True):
            last = chosen(call.last[time], y, last) if last else y
        return Taken(kept, last, ends)


def take_step(
    step: StepFunction,
    call: SequenceCall,
    noise: Noise,
    time: int,
    state: Leaves,
    x: Leaves,
    constants: Leaves,
) -> tuple[Leaves, Leaves]:
    """One step, whose errors name it: the new state and the output."""
    noise.step(time)
    place = f"at time {time}{call.place}"
    versions = versions_of((*state, *x))
    try:
        new, y = step(state, x, constants)
    except Exception as error:
        is_view = "modified inplace" in str(error)  # as each step of a sequence is
        note = _IN_PLACE.format(place, "a view") if is_view else f"fusedrnn: in the step {place}"
        add_note(error, note)
        raise
    now = versions_of((*state, *x))
    if now != versions:
        number = [a == b for a, b in zip(now, versions, strict=True)].index(False)
        name = [*call.names.state, *call.names.input][number]
        raise RuntimeError(_IN_PLACE.format(place, name))
    return new, y


_IN_PLACE = (
    "fusedrnn: the step {} changes {} in place, where a step may be taken again from the old "
    "values; change a copy instead, made by .clone()"
)


def _without_rest(leaf: Tensor) -> Tensor:
    """The same without the rest of a larger tensor, which would be kept with it."""
    try:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    except (NotImplementedError, RuntimeError):  # it has no memory that it could show
        return leaf


def chosen(flags: Tensor, new: Leaves, old: Leaves) -> Leaves:
    """The new ones of rows with a flag, the old ones of the others."""
    both = zip(new, old, strict=True)
    return tuple([torch.where(like_rows(flags, a), a, b) for a, b in both])


def add_note(error: Exception, note: str) -> None:
    """A line below the error's message, for which Python 3.10 has no place of its own."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)
