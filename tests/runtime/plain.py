"""Plain Python loops over cells, with everything that a call of Recurrent may ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedrnn._runtime.program_call import KEEP, SEQUENCE, ZERO
from fusedrnn._step.noise import Noise, Seed
from fusedrnn._step.watch import Watch


class RoundedNoise(Noise):
    """Draws in one dtype what a step asks for in another."""

    def __init__(self, seed: Seed, layer: int, drawn_in: torch.dtype) -> None:
        super().__init__(seed, layer)
        self._drawn_in = drawn_in

    def _draw(
        self,
        distribution: int,
        device: torch.device,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        return super()._draw(distribution, device, shape, self._drawn_in).to(dtype)


@dataclass(frozen=True)
class Masks:
    """Which rows take a step, and what becomes of a state before it."""

    lengths: Sequence[int] | None = None
    reset: Tensor | None = None
    """(seq_len, batch)."""
    reset_to: Any = None
    has_steps: bool = False
    """Whether ``reset_to`` is a sequence of states."""

    def active(self, time: int, batch: int) -> Tensor:
        lengths = self.lengths or [time + 1] * batch
        return torch.tensor([time < n for n in lengths], dtype=torch.bool)

    def started(self, state: Any, time: int) -> Any:
        """A state with its rows reset; ``reset_to`` may have some keys only."""
        if self.reset is None:
            return state
        to = pytree.tree_map(torch.zeros_like, state)
        if self.reset_to is not None:
            given = at(self.reset_to, time) if self.has_steps else self.reset_to
            to = {**state, **given} if isinstance(given, dict) else given
        return chosen(self.reset[time], to, state)


def at(tree: Any, time: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[time], tree)


def stacked(trees: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def rows(flags: Tensor, leaf: Tensor) -> Tensor:
    return flags.reshape(-1, *(1,) * (leaf.dim() - 1))


def masked(tree: Any, active: Tensor) -> Any:
    return pytree.tree_map(lambda leaf: leaf.masked_fill(~rows(active, leaf), 0), tree)


def chosen(flags: Tensor, a: Any, b: Any) -> Any:
    return pytree.tree_map(lambda x, y: torch.where(rows(flags, y), x, y), a, b)


def row_of(tree: Any, row: int) -> Any:
    """One row for all, without gradient."""
    return pytree.tree_map(lambda leaf: leaf.detach()[row : row + 1], tree)


def taken(cell: Callable[[Any, Any], Any], x: Any, state: Any) -> tuple[Any, Any]:
    """Output and new state; the output of a cell that returns its state alone is its first leaf."""
    result = cell(x, state)
    if pytree.tree_structure(result) == pytree.tree_structure(state):
        return pytree.tree_leaves(result)[0], result
    return result


def one_loop(
    cell: Callable[[Any, Any], Any],
    input: Any,
    state: Any,
    noise: Noise,
    masks: Masks,
    is_reverse: bool = False,
    returns_sequence: bool = True,
) -> tuple[Any, Any]:
    """One cell in one direction."""
    seq_len, batch = pytree.tree_leaves(input)[0].shape[:2]
    noise.chunk(0, seq_len, batch)
    outputs, last = {}, None
    longest = max(range(batch), key=lambda row: masks.lengths[row]) if masks.lengths else 0
    steps = masks.lengths[longest] if masks.lengths else seq_len
    with Watch(noise):
        for time in range(steps)[:: -1 if is_reverse else 1]:
            noise.step(time)
            active = masks.active(time, batch)
            x, old = at(input, time), masks.started(state, time)
            if masks.lengths:  # rows that have ended take some step that has a derivative
                x, old = (chosen(active, tree, row_of(tree, longest)) for tree in (x, old))
            y, new = taken(cell, x, old)
            state = chosen(active, new, state)
            last = y if last is None else chosen(active, y, last)
            outputs[time] = masked(y, active)
    if not returns_sequence:
        return last, state
    nothing = pytree.tree_map(torch.zeros_like, outputs[0])
    return stacked([outputs.get(time, nothing) for time in range(seq_len)]), state


def loss_of(*trees: Any) -> Tensor:
    """Depends on every number of floating point, each with a weight of its own."""
    total: Any = 0.0
    for leaf in pytree.tree_leaves(trees):
        if leaf.is_floating_point():
            weight = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).view(leaf.shape)
            leaf = leaf.double()
            total = total + (leaf * leaf * weight).sum() + (leaf * weight).sum()
    return total  # type: ignore[no-any-return]


def operators_loop(
    step: Callable[[int, list[Tensor], list[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]],
    steps: int,
    inputs: Sequence[Tensor],
    carries: Sequence[Tensor],
    reset_to: Sequence[Tensor],
    kinds: Sequence[int],
    *,
    lengths: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """All sequences and the last carries, from arguments as the operators of programs have them.

    Args:
        step: New carries and columns of each sequence, from a time, inputs and carries.
    """
    ends = torch.full((carries[0].shape[0],), steps) if lengths is None else lengths
    longest, state, made = int(ends.argmax()), list(carries), {}
    for t in range(steps)[:: -1 if reverse else 1]:
        active = ends[:, None] > t
        if reset is not None:
            flags = reset[t][:, None] & active
            for j, kind in enumerate(kinds or [ZERO] * len(state)):
                if kind != KEEP:
                    value = reset_to[j] if kind != ZERO else torch.zeros(())
                    value = value[t] if kind == SEQUENCE else value
                    state[j] = torch.where(flags, value, state[j])
        # Rows that have ended take some step that has a derivative.
        x, old = (
            [torch.where(active, leaf, leaf[longest].detach()) for leaf in leaves]
            for leaves in ([one[t] for one in inputs], state)
        )
        new, columns = step(t, x, old)
        made[t] = [torch.where(active, y, 0) for y in columns]
        state = [torch.where(active, a, b) for a, b in zip(new, state, strict=True)]
    return [torch.stack(y) for y in zip(*(made[t] for t in range(steps)), strict=True)], state


def loop(
    cells: nn.Module | Sequence[nn.Module],
    input: Any,
    state: Any,
    masks: Masks | None = None,
    *,
    is_bidirectional: bool = False,
    returns_sequence: bool = True,
    seed: int | Seed = 0,
    drawn_in: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Output and state of all layers and directions, as Recurrent has them.

    Args:
        masks: Those of one cell; for several cells none has a ``reset_to``.
        drawn_in: The dtype of random numbers; that which the cell asks for, if None.
    """
    masks = masks or Masks()
    seeds = Seed(torch.Generator().manual_seed(seed)) if isinstance(seed, int) else seed
    is_one, directions = isinstance(cells, nn.Module), 2 if is_bidirectional else 1
    layers, states = [cells] if is_one else list(cells), [state] if is_one else state
    last = []
    for i in range(0, len(layers), directions):
        made = []
        for j in range(i, i + directions):
            rounded = None if drawn_in is None else RoundedNoise(seeds, j, drawn_in)
            is_sequence = returns_sequence or i + directions < len(layers)
            noise, is_reverse = rounded or Noise(seeds, j), j > i
            y, end = one_loop(layers[j], input, states[j], noise, masks, is_reverse, is_sequence)
            made.append(y)
            last.append(end)
        input = pytree.tree_map(lambda *y: torch.cat(y, -1), *made) if len(made) > 1 else made[0]
    return input, last[0] if is_one else tuple(last)
