"""A call whose weights the operators make of the step's constants, and that they run at once.

Other calls are those that are run in parts, read rows of a table, or set states to values at
resets, and whose program computes something of the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _compile
from .program_parts import gradient_in

if TYPE_CHECKING:
    from .gradients import Gradients
    from .noise import Seed
    from .program_call import Call


class WholeCall(NamedTuple):
    """What the operators get besides the call's tensors and its seed."""

    fixed: list[Tensor]
    """What comes behind the tensors of the call."""
    options: tuple[Any, ...]
    """Steps of a chunk, whether the steps are taken backwards, and the first stream of draws."""
    masks: tuple[Any, ...]
    """Lengths, resets, and what becomes of each carry at these."""
    nothing: Tensor
    """Stands for a gradient that there is not."""
    sequences: int
    """Their number."""
    outputs: list[int] | None
    """Which sequences these are, if they are sequences, and each is another one."""

    @staticmethod
    def of(call: Call, constants: Sequence[Tensor]) -> WholeCall | None:
        program, sequence = call.program, call.sequence
        outside, resets = program.printed.outside, sequence.resets
        if not (call.is_whole and program.makes_weights) or (resets and resets.has_values):
            return None
        if not outside.fit(constants):
            return None
        reset, kinds = sequence.reset, call.kinds_of_resets()
        masks = sequence.lengths, None if reset is None else reset.contiguous(), kinds
        options = call.chunk, sequence.backwards, sequence.layer
        nothing = torch.empty(0, dtype=program.dtype, device=sequence.device)
        outputs = program.printed.output_sequences
        is_plain = sequence.returns_sequence and len(set(outputs)) == len(outputs)
        return WholeCall(
            outside.fixed(nothing),
            options,
            masks,
            nothing,
            len(program.form.sequences),
            outputs if is_plain else None,
        )

    def forward(
        self, call: Call, seed: Seed, tensors: Sequence[Tensor], keeps: int
    ) -> list[Tensor]:
        """Sequences, the last state, and what is kept for backward."""
        return _compile.operators.call(
            call.program.number,
            [*tensors, *self.fixed],
            call.counts[0],
            call.sequence.seq_len,
            keeps,
            *self.options,
            seed.on(call.sequence.device) if call.draws else None,
            *self.masks,
        )

    def backward(
        self,
        call: Call,
        seed: Seed,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Gradients:
        """Gradients of the tensors.

        Args:
            kept: By forward for backward.
            gradients: Of outputs and of the last state.
        """
        program = call.program
        found = _compile.operators.call_backward(
            program.number,
            [*tensors, *self.fixed],
            call.counts[0],
            call.sequence.seq_len,
            list(kept),
            self._gradients(call, gradients),
            program.unread.without(needs, call.counts),
            *self.options,
            seed.on(call.sequence.device) if call.draws else None,
            *self.masks,
        )
        count = len(tensors)
        return [gradient if gradient.numel() else None for gradient in found[:count]]

    def _gradients(self, call: Call, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Of sequences and of the last state."""
        nothing, program, sequence = self.nothing, call.program, call.sequence
        numbers = program.printed.output_sequences
        found = [nothing] * self.sequences
        for number, gradient in zip(numbers, given, strict=False):
            if gradient is not None and not sequence.returns_sequence:
                gradient = gradient_in(sequence, call.parts[0], gradient)
            if gradient is None:
                continue
            if found[number] is not nothing:  # two outputs are the same sequence
                sizes = sequence.seq_len, sequence.rows, -1
                gradient = found[number].reshape(sizes) + gradient.reshape(sizes)
            found[number] = gradient
        return found + [nothing if g is None else g for g in given[len(numbers) :]]
