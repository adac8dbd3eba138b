"""The parts of a sequence whose last output alone is wanted, and where that is in them.

Forward keeps the state before each part, and backward makes the sequences of one part at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._step.sequence_call import SequenceCall, like_rows

_LEAST_STEPS, _LEAST_ROWS = 16, 256
"""Shorter parts would save little and cost time: a chunk on a CPU has about as many rows."""


class SequencePart(NamedTuple):
    """Some steps of a sequence."""

    begin: int
    """Its first step in memory, whatever the direction."""
    steps: int

    @property
    def slice(self) -> slice:
        return slice(self.begin, self.begin + self.steps)


def parts_of(call: SequenceCall, keeps_sequences: bool) -> list[SequencePart]:
    """In the order of work; the whole sequence as one part where all of it is kept.

    The states before all parts and the sequences of one part take least memory together if there
    are about as many parts as each has steps.
    """
    steps = call.seq_len
    if not keeps_sequences:
        least = max(_LEAST_STEPS, -(-_LEAST_ROWS // call.rows), math.isqrt(call.seq_len - 1) + 1)
        steps = -(-steps // -(-steps // least))
    found = [
        SequencePart(begin, min(steps, call.seq_len - begin))
        for begin in range(0, call.seq_len, steps)
    ]
    return found[::-1] if call.backwards else found


def with_last(
    call: SequenceCall, part: SequencePart, sequence: Tensor, so_far: Tensor | None
) -> Tensor | None:
    """The last output of each row, of the parts up to this one; None as long as no row has one.

    Args:
        sequence: Of the part, (steps, batch, ...).
        so_far: The same of the parts before it.
    """
    if call.last is None:
        place = call.time(call.seq_len - 1) - part.begin
        return sequence[place].clone() if 0 <= place < part.steps else so_far
    flags, rows = call.last[part.slice], torch.arange(call.rows, device=sequence.device)
    picked = sequence[flags.int().argmax(0), rows]
    others = torch.zeros_like(picked) if so_far is None else so_far
    return torch.where(like_rows(flags.any(0), picked), picked, others)


def gradient_in(call: SequenceCall, part: SequencePart, gradient: Tensor) -> Tensor | None:
    """The gradient of a part's sequence, (steps, batch, width), from that of the last output.

    Args:
        gradient: (batch, ...).

    Returns:
        None if no row has its last output in this part.
    """
    rows = gradient.reshape(call.rows, -1)
    whole = rows.new_zeros(part.steps, *rows.shape)
    if call.last is None:
        place = call.time(call.seq_len - 1) - part.begin
        if not 0 <= place < part.steps:
            return None
        whole[place] = rows
        return whole
    flags = call.last[part.slice]
    here = torch.where(flags.any(0)[:, None], rows, 0)
    whole[flags.int().argmax(0), torch.arange(call.rows, device=rows.device)] = here
    return whole
