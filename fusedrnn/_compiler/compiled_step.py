"""A step that is compiled, verified and ready to run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import program as numbers
from . import program_operators
from .build import Library
from .call_weights import CallWeights
from .derive import DerivedPlan

_MOST_CHUNKS = 256
"""Kinds of calls whose chunks are known."""


class Unread(NamedTuple):
    """What has no part in results with gradients."""

    constants: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()

    def without(self, needs: Sequence[bool], counts: tuple[int, int, int]) -> list[bool]:
        """Which of a call's tensors get a gradient, of those that need one.

        Args:
            counts: As :class:`.._runtime.program_call.ProgramCall` has them.
        """
        found = list(needs)
        if any(self):
            places = [*self.inputs, *(counts[0] + j for j in self.state)]
            for i in (*places, *(sum(counts) + i for i in self.constants)):
                found[i] = False
        return found


class Generated(NamedTuple):
    """What runs a program, as records have it, too."""

    form: numbers.Program
    output_sequences: list[int]
    """Which sequence each output is."""
    call_weights: CallWeights
    text: str
    """Of the library."""
    has_choices: bool
    """Whether a rounding may change results altogether."""

    def places(self) -> object:
        """Where forward keeps what backward and the user read; equal for two programs or not."""
        form = self.form
        products = [(p.array, p.offset, p.terms, p.columns) for p in form.products]
        return form.sequences, self.output_sequences, form.carries, products


@dataclass
class CompiledStep:
    """What runs a step of one graph, widths and dtype."""

    generated: Generated
    derived: Callable[[], DerivedPlan]
    """What it was made by, which is made again if it comes from a record."""
    names: list[str]
    """Of the step's constants, in their order."""
    output_shapes: list[torch.Size]
    """Without the batch."""
    state_shapes: list[torch.Size]
    dtype: torch.dtype
    key: str
    """Of its record; "" if it has none."""
    number: int = -1
    """Of the operators."""
    library: Library | None = None
    unread: Unread = field(default_factory=Unread)
    without: dict[tuple[bool, ...], CompiledStep | None] = field(default_factory=dict)
    """Programs for backward where some results have no gradients, by which have one; None where
    there is none."""

    chunks: dict[tuple[int, ...], tuple[int, int, int]] = field(default_factory=dict)

    @property
    def form(self) -> numbers.Program:
        return self.generated.form

    @functools.cached_property
    def sequence_shapes(self) -> list[Sequence[int]]:
        """Of sequences at a step, without the batch: as the first output has it that is a sequence.

        What the user gets must be no view, which autograd would not let them change in place.
        """
        shapes: list[Sequence[int]] = [(width,) for width in self.form.sequences]
        pairs = zip(self.generated.output_sequences, self.output_shapes, strict=True)
        for number, shape in reversed(list(pairs)):
            shapes[number] = shape
        return shapes

    def chunk(
        self, steps: int, rows: int, chunk_size: int, workspace_bytes: int
    ) -> tuple[int, int, int]:
        """The steps of a chunk, and the bytes of the workspaces of forward and backward.

        Raises:
            RuntimeError: Even one step takes more than ``workspace_bytes``.
        """
        key = steps, rows, chunk_size, workspace_bytes
        found = self.chunks.get(key)
        if found is None:
            if len(self.chunks) >= _MOST_CHUNKS:
                self.chunks.clear()
            found = program_operators.chunk(self.number, steps, rows, self.dtype, *key[2:])
            self.chunks[key] = found
        return found

    def summary(self) -> str:
        """For users: its size, what it keeps, and its library."""
        form, library = self.form, self.library
        assert library is not None
        outputs = set(self.generated.output_sequences)
        kept = [
            f"state {j} "
            + (
                "before each chunk"
                if carry.sequence < 0
                else "in the output"
                if carry.sequence in outputs
                else "of each step"
            )
            for j, carry in enumerate(form.carries)
        ]
        origin = "cached" if library.is_cached else f"built in {library.seconds:.1f} s"
        return (
            f"{_count(len(form.stages), 'stage')}, {_count(len(form.products), 'product')}, "
            f"kept: {', '.join(kept)}; library of {library.bytes / 1e3:.0f} kB, {origin}"
        )

    def kept_bytes_per_step(
        self, rows: int, chunk: int, *, returns_sequence: bool = True, saves_sums: bool = False
    ) -> int:
        """Of a whole sequence besides outputs, on average over the steps of a chunk."""
        form = self.form
        outputs = set(self.generated.output_sequences) if returns_sequence else ()
        own = [w for i, w in enumerate(form.sequences) if i not in outputs]
        size = self.dtype.itemsize
        of_chunks = [c.width for c in form.carries if c.sequence < 0]
        sums = sum(array.columns for array in form.arrays) if saves_sums else 0
        wide = sums * max(size, 4) + -(-sum(of_chunks) * max(size, 4) // chunk)
        return rows * (sum(own) * size + wide)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
