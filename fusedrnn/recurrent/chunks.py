"""Steps of a sequence in chunks, and what errors call its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .trees import Leaves

T = TypeVar("T")


@dataclass(frozen=True)
class Names:
    """What errors call the leaves."""

    state: Sequence[str]
    input: Sequence[str]


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

    def of(self, sequences: Leaves) -> Leaves:
        """This part of each."""
        return tuple(sequence[self.part] for sequence in sequences)

    def steps(self, parts: Leaves) -> list[Leaves]:
        """The leaves of each step, in the order of the steps. ``parts``: as :meth:`of` gives."""
        steps = [part.unbind(0) for part in parts]
        first = self.part.start
        return [tuple(step[time - first] for step in steps) for time in self.times]

    def in_time(self, steps: Sequence[T]) -> list[T]:
        """What steps have made, in the order of time."""
        return list(steps if self.times.step > 0 else reversed(steps))
