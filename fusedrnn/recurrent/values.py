"""All tensors of a call, by what they are to its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .trees import Leaves


class Values(NamedTuple):
    inputs: Leaves
    """(seq_len, ...) each."""
    state: Leaves
    """Before the first step."""
    constants: Leaves
    weights: dict[str, Tensor]
    """Parameters with gradient, by name."""
    closed_over: dict[int, Tensor]
    """By the id of the tensor that the step reads."""

    def leaves(self) -> Leaves:
        """In the order of the arguments of the autograd function."""
        named = (*self.weights.values(), *self.closed_over.values())
        return (*self.inputs, *self.state, *self.constants, *named)

    def layout(self) -> Layout:
        sizes = (len(self.inputs), len(self.state), len(self.constants))
        return Layout(*sizes, tuple(self.weights), tuple(self.closed_over))


class Layout(NamedTuple):
    """Values without their tensors."""

    inputs: int
    state: int
    constants: int
    weights: tuple[str, ...]
    closed_over: tuple[int, ...]

    def values(self, leaves: Sequence[Tensor]) -> Values:
        rest = iter(leaves)
        return Values(
            tuple(next(rest) for _ in range(self.inputs)),
            tuple(next(rest) for _ in range(self.state)),
            tuple(next(rest) for _ in range(self.constants)),
            {name: next(rest) for name in self.weights},
            {number: next(rest) for number in self.closed_over},
        )
