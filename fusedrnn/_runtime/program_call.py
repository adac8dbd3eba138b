"""A call of a program: its tensors, what the operators get, and forward.

Forward takes the whole sequence at once, or part by part where its end alone is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compiler import program_operators
from .._compiler.compiled_step import CompiledStep
from .._front.step_graph import StepGraph
from .._step.noise import Seed
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .sequence_parts import SequencePart, with_last

ZERO, STATE, SEQUENCE, KEEP = range(4)
"""What a carry becomes at a reset: zero, a state, that of a sequence of states, what it is."""


class OperatorArguments(NamedTuple):
    """What the operators get besides tensors of steps, in the order of their schemas."""

    program: int
    first_state: int
    """The number of inputs."""
    seq_len: int
    options: tuple[Any, ...]
    """From ``chunk`` to ``first_step``."""
    masks: tuple[Any, ...]
    """Lengths and resets."""
    kinds: list[int]
    """What each carry becomes at a reset; none without resets."""
    sequences: int
    """Their number."""

    def forward(
        self, tensors: Sequence[Tensor], reset_to: list[Tensor], seed: Tensor | None, keeps: int
    ) -> list[Tensor]:
        """Sequences, the last state, and what is kept for backward.

        Args:
            tensors: Inputs, states, and what weights are made of.
            reset_to: Of each carry, or none.
            keeps: 0 for nothing, 1 for what backward needs, 2 for the sums of products, too.
        """
        return program_operators.call(
            self.program,
            list(tensors),
            self.first_state,
            self.seq_len,
            keeps,
            reset_to,
            self.kinds,
            *self.options,
            seed,
            *self.masks,
        )

    def backward(
        self,
        tensors: Sequence[Tensor],
        reset_to: list[Tensor],
        seed: Tensor | None,
        kept: list[Tensor],
        gradients: list[Tensor],
        needs: list[bool],
        is_part: bool,
    ) -> list[Tensor]:
        """Gradients of the tensors and of what resets set, empty ones where there is none.

        Args:
            kept: By forward, without the last state.
            gradients: Of sequences and of the last state.
            needs: Which tensors need a gradient; and which of ``reset_to``.
            is_part: Whether gradients of constants are to be added to others.
        """
        return program_operators.call_backward(
            self.program,
            list(tensors),
            self.first_state,
            self.seq_len,
            kept,
            gradients,
            needs,
            is_part,
            reset_to,
            self.kinds,
            *self.options,
            seed,
            *self.masks,
        )


@dataclass
class ProgramCall:
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
    program: CompiledStep
    origin: CompiledStep
    """The program of forward, by which chunks are chosen in backward too."""
    chunk: int
    """The most steps of a chunk."""
    parts: Sequence[SequencePart]
    """In the order of work. If there are several, their sequences are made again in backward."""
    saves_sums: bool
    """Whether forward saves the sums of products, which backward then need not multiply again."""
    steps: OperatorArguments | None = None
    """All of them, where the program reads the step's inputs."""
    outputs: Sequence[int] | None = None
    """Which sequence each output is, if each is another one."""
    draws: bool = True
    """Whether the program draws random numbers."""

    def with_program(self, program: CompiledStep) -> ProgramCall:
        """The same of a program, which may be another one for backward."""
        made = replace(self, program=program, steps=None, outputs=None)
        made.draws = bool(program.form.streams)
        call_weights, outputs = program.generated.call_weights, program.generated.output_sequences
        if self.is_whole and not call_weights.makes_inputs:
            made.steps = made.arguments(self.parts[0])
        if self.sequence.returns_sequence and len(set(outputs)) == len(outputs):
            made.outputs = outputs
        return made

    def arguments(self, part: SequencePart) -> OperatorArguments:
        """What operators get for a part of the sequence."""
        sequence, program, chunk = self.sequence, self.program, self.chunk
        lengths, reset = sequence.lengths, sequence.reset
        if not self.is_whole:
            chunk, _, _ = self.origin.chunk(part.steps, sequence.rows, chunk, 0)
            if lengths is not None:
                lengths = (lengths - part.begin).clamp(0, part.steps)
        if reset is not None:
            reset = reset[part.slice].contiguous()
        makes_inputs = program.generated.call_weights.makes_inputs
        return OperatorArguments(
            program.number,
            len(program.form.inputs) if makes_inputs else self.counts[0],
            part.steps,
            (chunk, sequence.backwards, sequence.layer, part.begin),
            (lengths, reset),
            self._kinds_of_resets(),
            len(program.form.sequences),
        )

    def _kinds_of_resets(self) -> list[int]:
        resets = self.sequence.resets
        if resets is None:
            return []
        kinds, kind = [KEEP] * self.counts[1], ZERO
        if resets.has_values:
            kind = SEQUENCE if resets.is_sequence else STATE
        for i in resets.leaves:
            kinds[i] = kind
        return kinds

    @property
    def is_whole(self) -> bool:
        """Whether sequences of all steps are kept for backward."""
        return len(self.parts) == 1

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which gradients of all steps are added up."""
        return torch.float64 if self.program.dtype == torch.float64 else torch.float32


class ProgramValues(NamedTuple):
    """What the function of autograd gets or gives, by what it is to the step."""

    inputs: Sequence[Any]
    state: Sequence[Any]
    reset_to: Sequence[Any]
    constants: Sequence[Any]

    @classmethod
    def of(cls, call: ProgramCall, given: Sequence[Any]) -> ProgramValues:
        inputs, states, resets = call.counts
        a, b, c = inputs, inputs + states, inputs + states + resets
        return cls(given[:a], given[a:b], given[b:c], given[c:])

    def inputs_of(self, call: ProgramCall, part: SequencePart) -> Leaves:
        """Those of the step itself."""
        if call.is_whole:
            return tuple(self.inputs)
        return tuple([leaf[part.slice] for leaf in self.inputs])

    def resets(self, call: ProgramCall, part: SequencePart, nothing: Any) -> list[Any]:
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


class Results(NamedTuple):
    outputs: list[Tensor]
    """What the user gets; each a tensor of its own."""
    last: list[Tensor]
    """The state after the last step, (batch, ...) each."""
    for_backward: list[Tensor]
    """Of a whole sequence what its steps have kept; else the states between parts."""


def forward(
    call: ProgramCall, seed: Seed, tensors: Sequence[Tensor], for_backward: bool
) -> Results:
    """
    Args:
        tensors: That the function of autograd gets.
        for_backward: Whether to keep what backward needs.
    """
    keeps = 1 + call.saves_sums if for_backward and call.is_whole else 0
    drawn = seed.on(call.sequence.device) if call.draws else None
    call_weights, like = call.program.generated.call_weights, tensors[call.counts[0]]
    if (steps := call.steps) and not call.counts[2]:
        if call_weights.computes:
            first = sum(call.counts)
            tensors = [*tensors[:first], *call_weights.tensors(tensors[first:], like)]
        return _whole(call, steps, steps.forward(tensors, [], drawn, keeps))
    values = ProgramValues.of(call, tensors)
    constants = call_weights.tensors(values.constants, like)
    if steps:
        given = [*values.inputs, *values.state, *constants]
        reset_to = values.resets(call, call.parts[0], like.new_empty(0))
        return _whole(call, steps, steps.forward(given, reset_to, drawn, keeps))
    state, outputs, between = list(values.state), list[Tensor](), list[Tensor]()
    for part in call.parts:
        steps = call.arguments(part)
        inputs: Sequence[Tensor] = values.inputs_of(call, part)
        if call_weights.makes_inputs:
            inputs = call_weights.inputs(constants, inputs, like)
        given = [*inputs, *state, *constants]
        reset_to = values.resets(call, part, like.new_empty(0))
        made = steps.forward(given, reset_to, drawn, keeps)
        if call.is_whole:
            return _whole(call, steps, made)
        sequences, state = made[: steps.sequences], made[steps.sequences :]
        outputs = _last_outputs(call, part, sequences, outputs)
        between += state
        del sequences, made  # before the next part has others
    return Results(outputs, state, between[: -len(state)])


def _whole(call: ProgramCall, steps: OperatorArguments, made: list[Tensor]) -> Results:
    first, end = steps.sequences, steps.sequences + call.counts[1]
    if call.outputs is None:
        outputs = _outputs(call, made[:first])
    else:
        outputs = [made[i] for i in call.outputs]
    return Results(outputs, made[first:end], [*made[:first], *made[end:]])


def _outputs(call: ProgramCall, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Of a whole sequence, where some are no sequences or the same one."""
    whole, program = call.sequence, call.program
    if not whole.returns_sequence:
        return _last_outputs(call, call.parts[0], sequences, [])
    found, seen = [], set[int]()
    for number, shape in zip(
        program.generated.output_sequences, program.output_shapes, strict=True
    ):
        sequence = sequences[number]
        is_taken = number in seen
        found.append(
            sequence.reshape(whole.seq_len, whole.rows, *shape).clone() if is_taken else sequence
        )
        seen.add(number)
    return found


def _last_outputs(
    call: ProgramCall, part: SequencePart, sequences: Sequence[Tensor], so_far: Sequence[Tensor]
) -> list[Tensor]:
    """Up to a part; nothing as long as no row has made its last output."""
    whole, program = call.sequence, call.program
    places = zip(program.generated.output_sequences, program.output_shapes, strict=True)
    found = []
    for i, (number, shape) in enumerate(places):
        sequence = sequences[number].view(part.steps, whole.rows, *shape)
        output = with_last(whole, part, sequence, so_far[i] if so_far else None)
        if output is not None:
            found.append(output)
    return found
