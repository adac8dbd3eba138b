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
from ._last_states import run_last_states
from ._ops import LayerCall, LayerTensors
from .batch import Mask


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
        if _onnx.is_exporting():  # ONNX has no operator for several layers
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
        call, tensors = self._call_of(here), self._tensors_of(here, sequence, states)
        output, h_n, c_n = run_layer(call, tensors)
        return output, States(h_n, None if states.c is None else c_n)

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
