"""A call of a program, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .operator_arguments import Steps
from .sequence_parts import Part

if TYPE_CHECKING:
    from .._compiler.compiled_step import Program
    from .._front.step_graph import StepGraph


@dataclass
class Call:
    """What the function of autograd gets besides tensors that autograd is to see, and the seed.

    Calls of one kind share it.
    """

    sequence: SequenceCall
    """Without its tensors, and without a seed of its own."""
    counts: tuple[int, int, int]
    """Of inputs, states, and what resets set these to; constants come behind them."""
    graph: StepGraph | None
    """For derivatives of gradients, of which a trial takes none."""
    numbers: tuple[Any, ...]
    """That the step gets besides tensors."""
    program: Program
    origin: Program
    """The program of forward, by which chunks are chosen in backward too."""
    chunk: int
    """The most steps of a chunk."""
    parts: Sequence[Part]
    """In the order of work. If there are several, their sequences are made again in backward."""
    saves_sums: bool
    """Whether forward saves the sums of products, which backward then need not multiply again."""
    steps: Steps | None = None
    """All of them, where the program reads the step's inputs."""
    outputs: Sequence[int] | None = None
    """Which sequence each output is, if each is another one."""
    draws: bool = True
    """Whether the program draws random numbers."""

    def with_program(self, program: Program) -> Call:
        """The same of a program, which may be another one for backward."""
        made = replace(self, program=program, steps=None, outputs=None)
        made.draws = bool(program.form.streams)
        outside, outputs = program.printed.outside, program.printed.output_sequences
        if self.is_whole and not outside.makes_inputs:
            made.steps = Steps.of(made, self.parts[0])
        if self.sequence.returns_sequence and len(set(outputs)) == len(outputs):
            made.outputs = outputs
        return made

    @property
    def is_whole(self) -> bool:
        """Whether sequences of all steps are kept for backward."""
        return len(self.parts) == 1

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which gradients of all steps are added up."""
        return torch.float64 if self.program.dtype == torch.float64 else torch.float32


class Values(NamedTuple):
    """What the function of autograd gets or gives, by what it is to the step."""

    inputs: Sequence[Any]
    state: Sequence[Any]
    reset_to: Sequence[Any]
    constants: Sequence[Any]

    @classmethod
    def of(cls, call: Call, given: Sequence[Any]) -> Values:
        inputs, states, resets = call.counts
        a, b, c = inputs, inputs + states, inputs + states + resets
        return cls(given[:a], given[a:b], given[b:c], given[c:])

    def inputs_of(self, call: Call, part: Part) -> Leaves:
        """Those of the step itself."""
        if call.is_whole:
            return tuple(self.inputs)
        return tuple([leaf[part.slice] for leaf in self.inputs])

    def resets(self, call: Call, part: Part, nothing: Any) -> list[Any]:
        """For each carry what it becomes at a reset, or ``nothing``; an empty list if no carry
        becomes what is given."""
        resets = call.sequence.resets
        if resets is None or not resets.has_values:
            return []
        found = [nothing] * len(self.state)
        for value, i in zip(self.reset_to, resets.leaves, strict=True):
            is_cut = resets.is_sequence and not call.is_whole and isinstance(value, Tensor)
            found[i] = value[part.slice] if is_cut else value
        return found
