"""Layers on top of each other, once every argument is known to be right.

They run over the whole sequence at once, each layer on the output of the layer below; or, for the
last states alone, by one operator for all layers, in which no layer's output exists as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import _onnx
from ._autograd import run_layer
from ._batch_forms import Mask
from ._last_states import run_last_states
from ._ops import LayerCall, LayerTensors
from ._philox import DROPOUT, mask_of
from ._pieces import Pieces, pieces_of
from ._tracers import is_recorded, is_traced, never_in_graphs


class States(NamedTuple):
    """The states of all layers and directions, layers first; c is None without a cell state.

    h is (L * D, B, P) and c (L * D, B, H), with P = H unless h is projected.
    """

    h: Tensor
    c: Tensor | None

    def of(self, layer_directions: slice) -> States:
        """The states of some layers or directions."""
        c = None if self.c is None else self.c[layer_directions]
        return States(self.h[layer_directions], c)


def _joined(states: Sequence[States]) -> States:
    if len(states) == 1:
        return states[0]
    cells = [s.c for s in states if s.c is not None]
    return States(torch.cat([s.h for s in states]), torch.cat(cells) if cells else None)


def _starts(pieces: Pieces, old: Tensor, to: Tensor, batch: int) -> Tensor:
    """The first states of pieces, (1, pieces, features).

    Args:
        old: Of the sequences, (1, batch, features).
        to: What they become at resets, (batch or 1, features) or (seq_len, batch, features).
    """
    row = pieces.starts % batch
    if to.dim() == 3:
        values = to.flatten(0, 1).index_select(0, pieces.starts)
    else:
        values = to.index_select(0, row) if len(to) == batch else to.expand(len(row), -1)
    return torch.where(pieces.is_reset[:, None], values, old[0].index_select(0, row))[None]


class Stack(NamedTuple):
    """Layers of a cell, one on top of the other, with everything they need but input and states.

    With ``mask.batch_sizes`` sequences are packed: (rows of all steps, features).
    """

    call: LayerCall
    """Of the first layer. Its dropout is that of the inputs of all other layers."""
    num_layers: int
    directions: int
    weights: Sequence[Tensor]
    """Of all layers and directions, one after the other."""
    mask: Mask
    eps: Tensor | None
    """(L * D, T, B, Z)."""
    seed: Tensor | None
    mask_seed: Tensor | None
    flat_version: Tensor | None = None
    reset_to: States | None = None
    """What states become at resets, (L * D, B or 1, ...) or (L * D, T, B, ...); zeros if None."""

    def run(self, sequence: Tensor, states: States) -> tuple[Tensor, States]:
        """sequence (T, B, I) -> output (T, B, D * P) of the last layer, last states of all."""
        if self.num_layers == 1:
            return self._run_layer(slice(0, self.directions), sequence, states)
        last = []
        for layer in range(self.num_layers):
            here = slice(layer * self.directions, (layer + 1) * self.directions)
            sequence, state = self._run_layer(here, sequence, states.of(here))
            last.append(state)
        return sequence, _joined(last)

    def run_for_last_states(self, sequence: Tensor, states: States) -> States:
        """The last states of all layers, in memory for about the square root of T steps.

        A layer that reads the layer below in both directions needs all of its output, so with two
        directions only the last layer is run in parts.
        """
        if _onnx.is_exporting() or self.reset_to is not None:  # which run layer by layer
            return self.run(sequence, states)[1]
        if self.directions == 1:
            return self._run_in_parts(slice(0, self.num_layers), sequence, states)
        last = []
        for layer in range(self.num_layers - 1):
            here = slice(2 * layer, 2 * layer + 2)
            sequence, state = self._run_layer(here, sequence, states.of(here))
            last.append(state)
        for row in (2 * self.num_layers - 2, 2 * self.num_layers - 1):
            here = slice(row, row + 1)
            last.append(self._run_in_parts(here, sequence, states.of(here)))
        return _joined(last)

    def _run_layer(self, here: slice, sequence: Tensor, states: States) -> tuple[Tensor, States]:
        """One layer, with all its directions. ``here`` counts layer_directions."""
        if self.reset_to is not None:
            return self._run_pieces_of_layer(here, sequence, states)
        call, tensors = self._call_of(here), self._tensors_of(here, sequence, states)
        output, h_n, c_n = run_layer(call, tensors)
        return output, States(h_n, None if states.c is None else c_n)

    @never_in_graphs  # the pieces depend on values
    def _run_pieces_of_layer(
        self, here: slice, sequence: Tensor, states: States
    ) -> tuple[Tensor, States]:
        if is_traced() or is_recorded():
            raise RuntimeError(
                "fusedrnn: a call with reset_to cannot be traced, since values of reset decide "
                "where sequences are cut"
            )
        assert self.mask.reset is not None
        if not self.mask.reset.shape[1]:  # no rows, no pieces
            return self._replace(reset_to=None)._run_layer(here, sequence, states)
        if self.call.dropout > 0 and here.start > 0:  # one mask for both directions
            sequence = self._dropped(here.start, sequence)
        rows = range(here.start, here.stop)
        parts = [
            self._run_pieces(row, sequence, states.of(slice(i, i + 1)))
            for i, row in enumerate(rows)
        ]
        outputs = [output for output, _ in parts]  # cat() would copy a single one, too
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return output, _joined([s for _, s in parts])

    def _run_pieces(self, row: int, sequence: Tensor, states: States) -> tuple[Tensor, States]:
        """One direction of a layer, as a batch of the pieces between resets."""
        mask, here = self.mask, slice(row, row + 1)
        assert mask.reset is not None and self.reset_to is not None
        is_reverse = row % self.directions == 1
        pieces = pieces_of(mask.reset, mask.lengths, mask.batch_sizes, is_reverse)
        to, batch = self.reset_to, mask.reset.shape[1]
        starts = States(_starts(pieces, states.h, to.h[row], batch), None)
        if states.c is not None and to.c is not None:
            starts = starts._replace(c=_starts(pieces, states.c, to.c[row], batch))
        data = sequence.reshape(-1, sequence.shape[-1])
        tensors = self._tensors_of(here, data.index_select(0, pieces.places), starts)
        eps = self.eps
        if eps is not None:
            shape = (len(pieces.batch_sizes), len(pieces.starts), eps.shape[-1])
            own = eps[row].flatten(0, 1).index_select(0, pieces.steps)
            flat = eps.new_zeros((shape[0] * shape[1], shape[2]))
            eps = flat.index_copy(0, pieces.number, own).view(1, *shape)
        tensors = tensors._replace(
            eps=eps, lengths=None, batch_sizes=pieces.batch_sizes, reset=None
        )
        call = replace(self.call, noise_stream=row, reverse=False, dropout=0.0)
        output, h_n, c_n = run_layer(call, tensors)
        whole = output.new_zeros((data.shape[0], output.shape[-1]))
        whole = whole.index_copy(0, pieces.places, output)
        c = None if states.c is None else c_n.index_select(1, pieces.last)
        last = States(h_n.index_select(1, pieces.last), c)
        return whole.view(*sequence.shape[:-1], -1), last

    def _dropped(self, row: int, sequence: Tensor) -> Tensor:
        """A layer's input under dropout, by the mask that the kernels draw."""
        assert self.mask_seed is not None and self.mask.reset is not None
        p, (seq_len, batch) = self.call.dropout, self.mask.reset.shape
        is_zero = mask_of(p, self.mask_seed, seq_len, batch, sequence.shape[-1], row | DROPOUT)
        if self.mask.batch_sizes is not None:
            sizes = self.mask.batch_sizes.tolist()
            is_zero = torch.cat([step[:n] for step, n in zip(is_zero, sizes, strict=True)])
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return sequence.masked_fill(is_zero, 0) * scale

    def _run_in_parts(self, here: slice, sequence: Tensor, states: States) -> States:
        """All layers in one direction, or one direction of the last layer."""
        call, tensors = self._call_of(here), self._tensors_of(here, sequence, states)
        h_n, c_n = run_last_states(call, self.call.dropout, tensors)
        return States(h_n, None if states.c is None else c_n)

    def _call_of(self, here: slice) -> LayerCall:
        if here.start == 0 and self.call.dropout == 0:
            return self.call
        return replace(
            self.call,
            noise_stream=here.start,
            reverse=here.start % self.directions == 1 and here.stop - here.start == 1,
            dropout=self.call.dropout if here.start >= self.directions else 0.0,
        )

    def _tensors_of(self, here: slice, sequence: Tensor, states: States) -> LayerTensors:
        of_each = len(self.weights) // (self.num_layers * self.directions)
        return LayerTensors(
            input=sequence,
            hx=states.h,
            cx=states.c,
            weights=self.weights[here.start * of_each : here.stop * of_each],
            eps=None if self.eps is None else self.eps[here],
            seed=self.seed,
            lengths=self.mask.lengths,
            batch_sizes=self.mask.batch_sizes,
            reset=self.mask.reset,
            mask_seed=self.mask_seed,
            flat_version=self.flat_version,
        )
