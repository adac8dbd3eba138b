"""Sequences cut where their rows start anew: pieces, each with a first state of its own.

The kernels can zero a state in the middle of a sequence, but put no other state in its place.
Pieces need neither: they are rows of a packed batch, of as many steps in all as the sequences have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pieces(NamedTuple):
    """The pieces of a batch of sequences for one direction, longest first. All int64.

    Tensors are on the device of ``reset`` but for ``batch_sizes``.
    """

    batch_sizes: Tensor
    """Pieces that take each of their steps, (longest,), on the CPU."""
    places: Tensor
    """Of each row of the packed data, where it is in the data of the sequences."""
    steps: Tensor
    """The same in a padded batch: t * batch + b."""
    number: Tensor
    """Of the piece and the step within it: step * pieces + piece."""
    starts: Tensor
    """Of each piece, where its first step is in a padded batch: t * batch + b."""
    is_reset: Tensor
    """Of each piece, bool: whether it starts with a reset, not with its sequence."""
    last: Tensor
    """Of each sequence, its last piece."""


def pieces_of(
    reset: Tensor, lengths: Tensor | None, batch_sizes: Tensor | None, reverse: bool
) -> Pieces:
    """Cuts sequences before each step at which ``reset`` is set.

    Args:
        reset: (seq_len, batch), bool.
        lengths: Of the sequences of a padded batch, (batch,) on the CPU, or None if all are full.
        batch_sizes: Of a packed batch, (seq_len,) on the CPU, or None.
        reverse: Whether steps are taken from the last to the first.
    """
    device, flags = reset.device, reset.cpu()
    seq_len, batch = flags.shape
    taken, rows = (torch.arange(size, device="cpu") for size in (seq_len, batch))
    time = taken = taken[:, None]
    if batch_sizes is not None:
        lengths = (batch_sizes[:, None] > rows).sum(0)
        data_start = batch_sizes.cumsum(0) - batch_sizes
    else:
        data_start = time[:, 0] * batch
    if lengths is None:
        lengths = torch.full((batch,), seq_len, device="cpu")
    is_active = time < lengths
    is_first = time == (lengths - 1 if reverse else 0)
    is_start = (is_first | flags) & is_active
    if reverse:  # from here on, time is counted as steps are taken
        is_active, is_start, time = is_active.flip(0), is_start.flip(0), time.flip(0)
    start = torch.where(is_start, taken, -1).cummax(0).values
    cells = is_active.nonzero()  # in order of steps
    t, b = cells.unbind(1)
    piece_start = start[t, b]
    number = is_start.flatten().cumsum(0) - 1  # of the piece that starts there
    own = number[piece_start * batch + b]
    counts = torch.bincount(own)
    order = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device="cpu")
    piece, step = rank[own], t - piece_start
    sizes = torch.bincount(step)
    piece_at = torch.zeros_like(start)
    piece_at[t, b] = piece
    end = torch.full_like(lengths, seq_len - 1) if reverse else lengths - 1
    last = piece_at[end, rows]
    row = (sizes.cumsum(0) - sizes)[step] + piece
    real = time[t, 0]

    def by_row(values: Tensor) -> Tensor:
        ordered = torch.empty_like(values)
        ordered[row] = values
        return ordered

    places, steps = by_row(data_start[real] + b), by_row(real * batch + b)
    starts = steps[: len(order)]
    return Pieces(
        batch_sizes=sizes,
        places=places.to(device),
        steps=steps.to(device),
        number=by_row(step * len(order) + piece).to(device),
        starts=starts.to(device),
        is_reset=flags.flatten()[starts].to(device),
        last=last.to(device),
    )
