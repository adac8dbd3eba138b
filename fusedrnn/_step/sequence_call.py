"""One layer and direction of a call, as programs and graphs of steps take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import Seed
from .trees import Leaves

_NO_SEED = Seed()


@dataclass(frozen=True)
class Names:
    """What errors call the leaves."""

    state: Sequence[str]
    input: Sequence[str]


class Resets(NamedTuple):
    """What a state becomes before steps at which a row starts anew."""

    leaves: Sequence[int]
    """Which leaves of the state are set."""
    has_values: bool
    """False if they are set to zero."""
    is_sequence: bool
    """Whether each step has values of its own, among its inputs; else they are constants."""


class SequenceCall(NamedTuple):
    inputs: Leaves
    """(seq_len, batch, ...) each."""
    state: Leaves
    """Before the first step, (batch, ...) each."""
    names: Names
    """Of these."""
    seq_len: int
    rows: int
    """Of the batch."""
    device: torch.device
    seed: Seed
    layer: int = 0
    """By which layers and directions draw other numbers."""
    backwards: bool = False
    """Whether the steps are taken from the last to the first."""
    returns_sequence: bool = True
    last: Tensor | None = None
    """Without the sequence: where a row takes its last step, (seq_len, batch); None: all at once
    take the last of all."""
    lengths: Tensor | None = None
    """int64 on the CPU."""
    reset: Tensor | None = None
    """(seq_len, batch)."""
    resets: Resets | None = None
    """Which leaves of the state are set at resets."""
    reset_to: Leaves = ()
    """To what: a state each, or a sequence of states."""
    place: str = ""
    """Of which layer and direction, if there are several; for errors."""

    def time(self, i: int) -> int:
        """The place in the sequence of the step that is taken after i others."""
        return self.seq_len - 1 - i if self.backwards else i

    def without_values(self) -> SequenceCall:
        """What calls of one kind share; and autograd is to keep tensors itself."""
        return self._replace(inputs=(), state=(), reset_to=(), seed=_NO_SEED)

    def with_values(
        self, inputs: Leaves, state: Leaves, reset_to: Leaves, seed: Seed
    ) -> SequenceCall:
        return self._replace(inputs=inputs, state=state, reset_to=reset_to, seed=seed)

    def of_first_steps(self, count: int, seed: Seed) -> SequenceCall:
        """The same of a few steps of whole rows."""
        return self._replace(
            inputs=tuple([leaf[:count] for leaf in self.inputs]),
            seq_len=min(count, self.seq_len),
            seed=seed,
            returns_sequence=True,
            last=None,
            lengths=None,
            reset=None,
            resets=None,
            reset_to=(),
        )

    def within_ends(self) -> Leaves:
        """Inputs with 0 for integers behind the ends of rows, where there may be anything."""
        if self.lengths is None:
            return self.inputs
        made = list(self.inputs)
        for i, leaf in enumerate(made):
            if not leaf.is_floating_point() and leaf.dtype != torch.bool:
                times = torch.arange(leaf.shape[0], device=leaf.device)[:, None]
                ended = times >= self.lengths.to(leaf.device)
                made[i] = leaf.masked_fill(ended.view(*ended.shape, *(1,) * (leaf.dim() - 2)), 0)
        return tuple(made)


def like_rows(flags: Tensor, leaf: Tensor) -> Tensor:
    """Flags of rows, (batch,), in a shape that goes with a leaf of (batch, ...)."""
    return flags.reshape(-1, *(1,) * (leaf.dim() - 1))
