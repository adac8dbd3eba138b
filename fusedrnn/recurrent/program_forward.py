"""Forward of a program: a whole sequence at once, or part by part where its end alone is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .noise import Seed
from .program_call import Arguments, Call, PartCall
from .program_parts import Part, with_last


class Results(NamedTuple):
    outputs: list[Tensor]
    """What the user gets; each a tensor of its own."""
    last: list[Tensor]
    """The state after the last step, (batch, ...) each."""
    for_backward: list[Tensor]
    """Of a whole sequence :class:`Kept`; else the states between parts, (batch, width) each."""


class Kept(NamedTuple):
    """What the operator for backward needs of some steps."""

    sequences: Sequence[Tensor]
    carries: Sequence[Tensor]
    """Before each chunk."""
    sums: Sequence[Tensor]
    """Of products; or none."""

    @classmethod
    def of(cls, call: Call, tensors: Sequence[Tensor]) -> Kept:
        """From the tensors in a row."""
        form = call.program.form
        first = len(form.sequences)
        second = first + sum(carry.sequence < 0 for carry in form.carries)
        return cls(tensors[:first], tensors[first:second], tensors[second:])


def forward(call: Call, seed: Seed, tensors: Sequence[Tensor], for_backward: bool) -> Results:
    """
    Args:
        tensors: That the function of autograd gets.
        for_backward: Whether to keep what backward needs.
    """
    if whole := call.whole:
        keeps = (2 if call.saves_sums else 1) if for_backward else 0
        made = whole.forward(call, seed, tensors, keeps)
        first, end = whole.sequences, whole.sequences + call.counts[1]
        kept = [*made[:first], *made[end:]] if for_backward else []
        if whole.outputs is None:
            outputs = _outputs(call, made[:first])
        else:
            outputs = [made[i] for i in whole.outputs]
        return Results(outputs, made[first:end], kept)
    return _by_parts(Arguments.of(call, seed, tensors), for_backward)


def _by_parts(arguments: Arguments, for_backward: bool) -> Results:
    call, outside = arguments.call, arguments.call.program.printed.outside
    like, constants = arguments.state[0], arguments.values.constants
    weights, vectors = outside(constants, like)

    def call_of(part: Part, state: Sequence[Tensor]) -> PartCall:
        inputs = outside.inputs(constants, arguments.inputs(part), like)
        return arguments.of_part(part, inputs, state, weights, vectors)

    if call.is_whole:
        now = call_of(call.parts[0], arguments.state)
        kept, last = take(now, call.saves_sums, for_backward)
        outputs = _outputs(call, kept.sequences)
        return Results(outputs, last, [x for own in kept for x in own] if for_backward else [])
    outputs = list[Tensor]()
    state, between = arguments.state, list[Tensor]()
    for part in call.parts:
        now = call_of(part, state)
        sequences, last = now.new_sequences(), now.new_last()
        now.forward(sequences, last, [], [])
        outputs = _last_outputs(call, part, sequences, outputs)
        state = [leaf.view(leaf.shape[0], -1) for leaf in last]
        between += state
        del sequences, now  # before the next part has others
    return Results(outputs, last, between[: -len(state)])


def take(now: PartCall, saves_sums: bool, for_backward: bool = True) -> tuple[Kept, list[Tensor]]:
    """Takes some steps: what backward of them needs, and the state after them."""
    carries, sums = list[Tensor](), list[Tensor]()
    if for_backward:
        carries, sums = now.new_kept(), now.new_sums() if saves_sums else []
    kept = Kept(now.new_sequences(), carries, sums)
    last = now.new_last()
    now.forward(kept.sequences, last, kept.carries, kept.sums)
    return kept, last


def _outputs(call: Call, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Of a whole sequence."""
    whole, program = call.sequence, call.program
    if not whole.returns_sequence:
        return _last_outputs(call, call.parts[0], sequences, [])
    found, seen = [], set[int]()
    for number, shape in zip(program.printed.output_sequences, program.output_shapes, strict=True):
        sequence = sequences[number]
        is_taken = number in seen
        found.append(
            sequence.reshape(whole.seq_len, whole.rows, *shape).clone() if is_taken else sequence
        )
        seen.add(number)
    return found


def _last_outputs(
    call: Call, part: Part, sequences: Sequence[Tensor], so_far: Sequence[Tensor]
) -> list[Tensor]:
    """Up to a part; nothing as long as no row has made its last output."""
    whole, program = call.sequence, call.program
    places = zip(program.printed.output_sequences, program.output_shapes, strict=True)
    found = []
    for i, (number, shape) in enumerate(places):
        sequence = sequences[number].view(part.steps, whole.rows, *shape)
        output = with_last(whole, part, sequence, so_far[i] if so_far else None)
        if output is not None:
            found.append(output)
    return found
