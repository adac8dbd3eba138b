"""Some steps of a call, or all of them, as the operators of programs take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._compiler import program_operators

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
