"""Layers on top of each other, once every argument is known to be right.

They run over the whole sequence at once, each layer on the output of the layer below; or, for the
last states alone, part by part, so that no layer's output exists as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from ._autograd import needs_grad, run_layer
from ._ops import LayerCall, LayerTensors
from .batch import Mask

LEAST_PART = 16  # steps; shorter ones would save little and cost time


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


class _Watch:
    """Tensors that backward reads again, and their versions in forward."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = []
        if not is_compiling():
            self._tensors = [t for t in tensors if t is not None and not t.is_inference()]
        self._versions = [t._version for t in self._tensors]
        self._checked_in = -1

    def check(self) -> None:
        """Refuses to go on if a tensor has changed since."""
        if self._versions != [t._version for t in self._tensors]:
            raise RuntimeError(
                "fusedrnn: one of the variables needed for gradient computation has been "
                "modified by an inplace operation"
            )

    def check_once_in_a_backward(self) -> None:
        """Checks when a backward pass begins: within it, an optimizer may change weights.

        A write through ``flat_weight`` counts as a change of the first weight alone, so a part that
        reads other weights has to look at all of them.
        """
        if is_compiling():
            return
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._checked_in):
            self.check()
            self._checked_in = backward


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

        Only the states between parts of the sequence are saved; backward goes through each part
        again. A layer that reads the layer below in both directions needs all of its output, so
        with two directions only the last layer is run in parts.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self.run(sequence, states)[1]  # a trace would keep this number of parts
        whole = _Watch((*self.weights, self.flat_version))
        if self.directions == 1:
            return self._in_parts(slice(0, self.num_layers), sequence, states, whole)
        last = []
        for layer in range(self.num_layers - 1):
            here = slice(2 * layer, 2 * layer + 2)
            sequence, state = self._run_layer(here, sequence, states.of(here))
            last.append(state)
        for row in (2 * self.num_layers - 2, 2 * self.num_layers - 1):
            here = slice(row, row + 1)
            last.append(self._in_parts(here, sequence, states.of(here), whole))
        return _joined(last)

    def _run_layer(self, here: slice, sequence: Tensor, states: States) -> tuple[Tensor, States]:
        """One layer: both its directions, or one of them. ``here`` counts layer_directions."""
        layer = here.start // self.directions
        reverse = here.stop - here.start < self.directions and here.start % 2 == 1
        h, c = states
        if self.mask.reset is not None:
            h = _reset_first(h, self.mask, reverse)
            c = None if c is None else _reset_first(c, self.mask, reverse)
        call = self.call
        if here.start > 0 or call.dropout > 0:  # the first layer's call is the one given
            dropout = call.dropout if layer > 0 else 0.0
            call = replace(call, noise_stream=here.start, reverse=reverse, dropout=dropout)
        output, h_n, c_n = run_layer(
            call,
            LayerTensors(
                input=sequence,
                hx=h,
                cx=c,
                weights=self._weights_of(here),
                eps=None if self.eps is None else self.eps[here],
                seed=self.seed,
                lengths=self.mask.lengths,
                batch_sizes=self.mask.batch_sizes,
                reset=self.mask.reset,
                mask_seed=self.mask_seed,
                flat_version=self.flat_version,
            ),
        )
        return output, States(h_n, None if c is None else c_n)

    def _in_parts(self, here: slice, sequence: Tensor, states: States, whole: _Watch) -> States:
        """All layers in one direction, or one direction of the last layer.

        Args:
            whole: Of all weights of the stack.
        """
        seq_len = self._steps(sequence)
        steps = max(LEAST_PART, math.isqrt(seq_len))
        begins = range(0, seq_len, steps)
        backwards = self.directions == 2 and here.start % 2 == 1
        tensors = (sequence, *states, self.eps, *self._weights_of(here))
        is_differentiated = needs_grad(tensors)
        # A checkpoint does not notice changes between its two runs.
        watch = _Watch((*tensors, self.seed, self.mask.reset)) if is_differentiated else None

        def last_states(part: Stack, *arguments: Any) -> tuple[Tensor, Tensor | None]:
            if watch is not None:
                watch.check()
                whole.check_once_in_a_backward()
            return part._last_states(*arguments)

        for begin in reversed(begins) if backwards else begins:
            end = min(begin + steps, seq_len)
            part = self._part(begin, end)
            arguments = (part, here, self._rows(sequence, begin, end), *states)
            if is_differentiated:
                # All randomness here comes from seeds, which are tensors.
                h, c = checkpoint(
                    last_states, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                h, c = last_states(*arguments)
            states = States(h, c)
        return states

    def _last_states(
        self, here: slice, sequence: Tensor, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        states = States(h, c)
        if self.directions == 2:
            return self._run_layer(here, sequence, states)[1]
        return self.run(sequence, states)[1]

    def _weights_of(self, here: slice) -> Sequence[Tensor]:
        of_each = len(self.weights) // (self.num_layers * self.directions)
        return self.weights[here.start * of_each : here.stop * of_each]

    def _steps(self, sequence: Tensor) -> int:
        batch_sizes = self.mask.batch_sizes
        return len(sequence if batch_sizes is None else batch_sizes)

    def _rows(self, sequence: Tensor, begin: int, end: int) -> Tensor:
        """The rows of steps [begin, end)."""
        batch_sizes = self.mask.batch_sizes
        if batch_sizes is None:
            return sequence[begin:end]
        first, last = (int(batch_sizes[:step].sum()) for step in (begin, end))
        return sequence[first:last]

    def _part(self, begin: int, end: int) -> Stack:
        """The same over steps [begin, end) of the sequence."""
        lengths, batch_sizes, reset = self.mask
        return self._replace(
            mask=Mask(
                None if lengths is None else (lengths - begin).clamp(0, end - begin),
                None if batch_sizes is None else batch_sizes[begin:end].clone(),
                None if reset is None else reset[begin:end],
            ),
            eps=None if self.eps is None else self.eps[:, begin:end],
            call=replace(self.call, first_step=self.call.first_step + begin),
        )


def _reset_first(state: Tensor, mask: Mask, reverse: bool) -> Tensor:
    """The initial state (D, B, features), zero where the first step of a row is a reset.

    ``reverse``: the one direction there is runs backwards, from the end of each row.
    """
    assert mask.reset is not None
    first, last = mask.reset[0], mask.reset[-1]
    lengths = mask.lengths
    if mask.batch_sizes is not None:
        rows = torch.arange(state.shape[1], device="cpu").unsqueeze(1)
        lengths = (mask.batch_sizes > rows).sum(1)
    if lengths is not None:
        lengths = lengths.to(state.device, non_blocking=True)
        some = lengths > 0
        at = (lengths - 1).clamp(min=0).unsqueeze(0)
        first, last = first & some, mask.reset.gather(0, at).squeeze(0) & some
    zeroed = [last] if reverse else [first, last][: state.shape[0]]
    return state.masked_fill(torch.stack(zeroed).unsqueeze(-1), 0)
