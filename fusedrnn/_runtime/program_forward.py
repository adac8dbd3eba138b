"""Forward of a program: a whole sequence at once, or part by part where its end alone is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .._step.noise import Seed
from .program_call import OperatorArguments, ProgramCall, ProgramValues
from .sequence_parts import SequencePart, with_last


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
