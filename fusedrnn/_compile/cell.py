"""A step as a program that is compiled, verified and ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..recurrent.trees import Structure
from .build import Library
from .derive import Derived, derive
from .emit import source
from .interpret import Interpreter
from .lower import Lowered
from .outside import Outside
from .plan import Plan
from .program import Out


class Unread(NamedTuple):
    """What has no part in results with gradients."""

    weights: frozenset[str] = frozenset()
    inputs: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()


@dataclass
class Program:
    """What runs a step of one kind: structure, widths, dtype, and all that Python decided."""

    plan: Plan
    derived: list[Derived]
    outside: Outside
    text: str
    """Of its library."""
    names: list[str]
    """Of the weights and buffers that the step reads, in the order of its constants."""
    output: Structure
    output_shapes: list[torch.Size]
    """Without the batch."""
    state_shapes: list[torch.Size]
    dtype: torch.dtype
    log: str
    """Of the operations that the step does."""
    logs: dict[int, str] = field(default_factory=dict)
    """The same by batch size, where a step was found to be the same in a call of that size."""
    key: str = ""
    """Of the record that is to be stored when the library is verified."""
    number: int = -1
    """Of the operators."""
    library: Library | None = None
    unread: Unread = field(default_factory=Unread)
    without: dict[tuple[bool, ...], Program | None] = field(default_factory=dict)
    """Programs for backward where some results have no gradients, by which have one; None where
    there is none."""

    @property
    def interpreter(self) -> Interpreter:
        return Interpreter(self.plan, self.derived)

    def has_choices(self) -> bool:
        """Whether a rounding may change its results altogether."""
        places = {Out.MAX, Out.ARG_MAX}
        return any(one.has_choices() for one in self.derived) or any(
            output.kind in places for stage in self.plan.program.stages for output in stage.outputs
        )

    def summary(self) -> str:
        """For users: its size, what it keeps, and its library."""
        form, library = self.plan.program, self.library
        assert library is not None
        outputs = set(self.plan.output_sequences)
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
        form, plan = self.plan.program, self.plan
        outputs = set(plan.output_sequences) if returns_sequence else ()
        own = [w for i, w in enumerate(form.sequences) if i not in outputs]
        size = self.dtype.itemsize
        of_chunks = [c.width for c in form.carries if c.sequence < 0]
        sums = sum(array.columns for array in form.arrays) if saves_sums else 0
        wide = sums * max(size, 4) + -(-sum(of_chunks) * max(size, 4) // chunk)
        return rows * (sum(own) * size + wide)


def printed(
    lowered: Lowered,
    dtype: torch.dtype,
    kind: str,
    derived: list[Derived] | None = None,
) -> dict[str, Any]:
    """Fields of a program, for a "cpu" or a "cuda" library, from known derivatives if there are."""
    plan = Plan(lowered)
    if derived is None:
        derived = [derive(plan, stage) for stage in plan.stages]
    if len(derived) != len(plan.stages):
        raise ValueError(f"{len(derived)} derivatives of {len(plan.stages)} stages")
    text = source(plan, derived, dtype, kind)
    return {"plan": plan, "derived": derived, "outside": Outside(plan), "text": text}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
