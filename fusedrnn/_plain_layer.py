"""One layer as the operator runs it, in plain torch operators, and its derivatives.

Derivatives of the operator beyond the first come from here. Their memory is bounded as the
operator's is: a part of about the square root of T steps at a time has a graph.

Longer than 350 lines, because the layer and its derivatives share each way to slice a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from ._duals import Dual, dual, parts_of
from ._ops import LayerCall, LayerTensors
from ._philox import CELL_ZONEOUT, DROPOUT, ZONEOUT, mask_of, philox_normal

Results = tuple[Tensor, Tensor, Tensor]  # of output, h_n and c_n


class Variables(NamedTuple):
    """One tensor, such as a tangent or a gradient, for each one that a layer is differentiated by.

    Shapes and dtypes are those of :class:`LayerTensors`; None is zero.
    """

    input: Tensor | None
    hx: Tensor | None
    weights: Sequence[Tensor | None]
    cx: Tensor | None = None
    eps: Tensor | None = None


def layer(call: LayerCall, tensors: LayerTensors) -> Results:
    """What the operator ``forward`` computes -> output, h_n, and c_n or an empty (0, B, H)."""
    outputs, last = [], []
    for row in _rows_of(call, tensors):
        span = (0, row.seq_len)
        output, states = row.run(span, *row.leaves(tensors, span), row.initial(tensors))
        outputs.append(output)
        last.append(states)
    return _joined(tensors, outputs, last)


def tangents(
    call: LayerCall, tensors: LayerTensors, directions: Variables | LayerTensors
) -> Results:
    """The directional derivative of :func:`layer`, with respect to all of ``directions``.

    Returns:
        The tangents of output, h_n and c_n, in their shapes and in the dtype of ``tensors``.
    """
    outputs, last = [], []
    for row in _rows_of(call, tensors):
        output, states, _ = row.run_duals(tensors, directions)
        outputs.append(output)
        last.append(states)
    return _joined(tensors, outputs, last)


def second_order(
    call: LayerCall,
    tensors: LayerTensors,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    directions: Variables | LayerTensors,
) -> tuple[Results, Variables]:
    """The directional derivative of :func:`layer`, and the gradient of its product with ``grads``.

    By the symmetry of second derivatives that is the directional derivative of the layer's
    gradients, too. It is reverse mode through a recurrence of states and their tangents. In grad
    mode the results are differentiable, and memory grows with T.

    Args:
        grads: Of output, h_n and c_n; None is zero.

    Returns:
        d_output, d_h_n, d_c_n: As :func:`tangents`.
        gradients: Of <grads[0], d_output> + <grads[1], d_h_n> + <grads[2], d_c_n> with respect to
        input, hx, weights, cx and eps of ``tensors``, in their shapes and dtypes; None for cx and
        eps that are not there.
    """
    spans = _spans(tensors)
    grad_inputs: list[Tensor | None] = [None] * len(spans)
    outputs, last = [], []
    grad_states, grad_weights, grad_eps = [], [], []
    for row in _rows_of(call, tensors):
        output, d_states, before = row.run_duals(tensors, directions)
        outputs.append(output)
        last.append(d_states)

        # Of the values of states, then of their tangents; products with grads are of tangents.
        cotangents = [torch.zeros_like(s) for s in d_states]
        cotangents += [
            torch.zeros_like(s) if grad is None else _wide(grad[row.index])
            for s, grad in zip(d_states, grads[1:], strict=False)
        ]
        weights_of_row: list[Tensor] = []
        eps_of_parts: list[Tensor] = []
        for i, span in reversed(list(row.in_order(spans))):
            if grads[0] is None:
                grad = torch.zeros_like(row.part(output, span))
            else:
                grad = _wide(row.columns(row.part(grads[0], span), output.shape[-1]))
            found = row.pull(tensors, directions, span, before[i], [grad, *cotangents])
            grad_input, grad_of_eps, grad_of_weights, cotangents = found
            so_far = grad_inputs[i]
            grad_inputs[i] = grad_input if so_far is None else so_far + grad_input
            weights_of_row = (
                grad_of_weights
                if not weights_of_row
                else [a + b for a, b in zip(weights_of_row, grad_of_weights, strict=True)]
            )
            eps_of_parts += [] if grad_of_eps is None else [grad_of_eps]
        if eps_of_parts:
            grad_eps.append(torch.cat(eps_of_parts if row.backwards else eps_of_parts[::-1]))
        grad_states.append(cotangents[: len(d_states)])
        grad_weights += weights_of_row

    dtype = tensors.input.dtype
    grad_hx, *grad_cx = (torch.stack(s).to(dtype) for s in zip(*grad_states, strict=True))
    gradients = Variables(
        input=torch.cat([part for part in grad_inputs if part is not None]).to(dtype),
        hx=grad_hx,
        weights=[w.to(dtype) for w in grad_weights],
        cx=grad_cx[0] if grad_cx else None,
        eps=torch.stack(grad_eps).to(dtype) if grad_eps else None,
    )
    return _joined(tensors, outputs, last), gradients


Span = tuple[int, int]  # steps [begin, end)


def _spans(tensors: LayerTensors) -> list[Span]:
    """Parts of about the square root of T steps."""
    seq_len = _seq_len(tensors)
    steps = max(1, math.isqrt(seq_len))
    return [(begin, min(begin + steps, seq_len)) for begin in range(0, seq_len, steps)]


def _seq_len(tensors: LayerTensors) -> int:
    return len(tensors.input if tensors.batch_sizes is None else tensors.batch_sizes)


def _wide(tensor: Tensor) -> Tensor:
    """In the dtype that is computed in."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_half else tensor


def _joined(tensors: LayerTensors, outputs: list[Tensor], last: list[Any]) -> Results:
    """Results from the outputs and the last states of directions."""
    h_n, *c_n = (torch.stack(s) for s in zip(*last, strict=True))
    empty = tensors.hx.new_empty(0, *tensors.hx.shape[1:])
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    results = whole, h_n, c_n[0] if c_n else empty
    output, h, c = (result.to(tensors.input.dtype) for result in results)
    return output, h, c


def _rows_of(call: LayerCall, tensors: LayerTensors) -> list[_Row]:
    return [_Row(call, tensors, index) for index in range(tensors.hx.shape[0])]


class _Row:
    """One direction of a layer. Sequences are those of the caller, of one part, maybe packed."""

    def __init__(self, call: LayerCall, tensors: LayerTensors, index: int) -> None:
        self.call, self.index = call, index
        self.backwards = call.reverse or index == 1
        self.seq_len, self.batch = _seq_len(tensors), tensors.hx.shape[1]
        self.directions = tensors.hx.shape[0]
        self.batch_sizes, self.reset = tensors.batch_sizes, tensors.reset
        self.seed, self.mask_seed = tensors.seed, tensors.mask_seed
        self.stream = call.noise_stream + index
        self.device = tensors.input.device
        self.lengths = tensors.lengths
        if self.batch_sizes is not None:
            rows = torch.arange(self.batch, device="cpu")[:, None]
            self.lengths = (self.batch_sizes > rows).sum(1)

    def in_order(self, spans: list[Span]) -> list[tuple[int, Span]]:
        """Parts with their numbers, in the order of work."""
        numbered = list(enumerate(spans))
        return numbered[::-1] if self.backwards else numbered

    def part(self, sequence: Tensor, span: Span) -> Tensor:
        """Some steps of a sequence."""
        if self.batch_sizes is None:
            return sequence[span[0] : span[1]]
        first, last = (int(self.batch_sizes[:step].sum()) for step in span)
        return sequence[first:last]

    def columns(self, output: Tensor, width: int) -> Tensor:
        """The columns of this direction in the output of all."""
        return output[..., self.index * width : (self.index + 1) * width]

    def leaves(self, tensors: Variables | LayerTensors, span: Span) -> tuple[Any, Any, list[Any]]:
        """Input and eps of a part, and the weights."""
        of_each = len(tensors.weights) // self.directions
        weights = tensors.weights[self.index * of_each : (self.index + 1) * of_each]
        input, eps = tensors.input, tensors.eps
        return (
            None if input is None else _wide(self.part(input, span)),
            None if eps is None else _wide(eps[self.index, span[0] : span[1]]),
            [None if w is None else _wide(w) for w in weights],
        )

    def initial(self, tensors: LayerTensors) -> list[Any]:
        return [_wide(s[self.index]) for s in (tensors.hx, tensors.cx) if s is not None]

    def initial_duals(
        self, tensors: LayerTensors, directions: Variables | LayerTensors
    ) -> list[Dual]:
        tangents = [
            None if s is None else _wide(s[self.index]) for s in (directions.hx, directions.cx)
        ]
        return [
            Dual(value, torch.zeros_like(value) if tangent is None else tangent)
            for value, tangent in zip(self.initial(tensors), tangents, strict=False)
        ]

    def dual_leaves(
        self, tensors: LayerTensors, directions: Variables | LayerTensors, span: Span
    ) -> tuple[Any, Any, list[Any]]:
        """As :meth:`leaves`, with tangents."""
        x, eps, weights = self.leaves(tensors, span)
        dx, deps, dweights = self.leaves(directions, span)
        dweights = dweights or [None] * len(weights)
        return (
            dual(x, dx),
            None if eps is None else dual(eps, deps),
            [dual(w, dw) for w, dw in zip(weights, dweights, strict=True)],
        )

    def run_duals(
        self, tensors: LayerTensors, directions: Variables | LayerTensors
    ) -> tuple[Tensor, list[Tensor], list[list[Dual]]]:
        """-> tangents of output and last states; states before each part, first steps first."""
        states, outputs, before = self.initial_duals(tensors, directions), [], []
        for _, span in self.in_order(_spans(tensors)):
            before.append(states)
            output, states = self.run(span, *self.dual_leaves(tensors, directions, span), states)
            outputs.append(parts_of(output)[1])
        if self.backwards:
            outputs, before = outputs[::-1], before[::-1]
        return torch.cat(outputs), [s.tangent for s in states], before

    def pull(
        self,
        tensors: LayerTensors,
        directions: Variables | LayerTensors,
        span: Span,
        states: list[Dual],
        cotangents: list[Tensor],
    ) -> tuple[Tensor, Tensor | None, list[Tensor], list[Tensor]]:
        """Reverse mode of the tangents of a part.

        Args:
            cotangents: Of the output's tangent, the states, and the states' tangents.

        Returns:
            Gradients of input, eps, weights; and of the states and their tangents before the part.
        """
        x, eps, weights = self.leaves(tensors, span)
        dx, deps, dweights = self.leaves(directions, span)
        dweights = dweights or [None] * len(weights)
        noise = [] if eps is None else [eps]
        count, first_state = len(states), 1 + len(noise) + len(weights)

        def run(*flat: Tensor) -> tuple[Tensor, ...]:
            noise = dual(flat[1], deps) if eps is not None else None
            matrices = flat[first_state - len(weights) : first_state]
            values, tangents = flat[first_state:][:count], flat[first_state:][count:]
            output, after = self.run(
                span,
                dual(flat[0], dx),
                noise,
                [dual(w, dw) for w, dw in zip(matrices, dweights, strict=True)],
                [Dual(value, tangent) for value, tangent in zip(values, tangents, strict=True)],
            )
            return (
                parts_of(output)[1],
                *(s.value for s in after),
                *(s.tangent for s in after),
            )

        flat = [x, *noise, *weights, *(s.value for s in states), *(s.tangent for s in states)]
        _, vjp, *_ = torch.func.vjp(run, *flat)
        found = list(vjp(tuple(cotangents)))
        of_eps = found[1] if eps is not None else None
        of_weights = found[first_state - len(weights) : first_state]
        return found[0], of_eps, of_weights, found[first_state:]

    def run(
        self, span: Span, x: Any, eps: Any, weights: Sequence[Any], states: list[Any]
    ) -> tuple[Any, list[Any]]:
        """A part -> output, states after it. Tensors may be duals."""
        begin, end = span
        active = self._active(begin, end)
        if self.batch_sizes is not None:
            x = F.pad(x, (0, 0, 0, 1))[self._padding(begin, end)]
        if active is not None:
            x = x.masked_fill(~active, 0)
        call, mask_seed = self.call, self.mask_seed
        if call.dropout > 0 and mask_seed is not None:
            p, stream = call.dropout, call.noise_stream - (1 if call.reverse else 0)
            dropped = self._mask(p, stream | DROPOUT, span, x.shape[-1])
            x = (0.0 if p == 1 else 1 / (1 - p)) * x
            x = x.masked_fill(dropped, 0)
        eps = self._noise(eps, span, weights, x)
        if eps is not None and active is not None:
            eps = eps.masked_fill(~active, 0)
        chances = ((call.zoneout, ZONEOUT), (call.cell_zoneout, CELL_ZONEOUT))
        kept = [
            self._mask(p, self.stream | bits, span, state.shape[-1])
            if p > 0 and mask_seed is not None
            else p
            for (p, bits), state in zip(chances, states, strict=False)
        ]
        anew = self._anew(active, begin, end)

        outputs = [states[0]] * (end - begin)
        for t in reversed(range(end - begin)) if self.backwards else range(end - begin):
            old = states if anew is None else [s.masked_fill(anew[t], 0) for s in states]
            new = self._step(x[t], old, weights, None if eps is None else eps[t])
            new = [
                reference.zoned(k[t] if isinstance(k, Tensor) else k, a, b)
                for k, a, b in zip(kept, old, new, strict=True)
            ]
            outputs[t] = new[0]
            if active is not None:
                outputs[t] = new[0].masked_fill(~active[t], 0)
                new = [torch.where(active[t], b, a) for a, b in zip(states, new, strict=True)]
            states = new
        output: Any = torch.stack(outputs)
        if self.batch_sizes is not None:
            output = output.flatten(0, 1)[self._existing(begin, end)]
        return output, states

    def _step(self, x: Any, states: list[Any], w: Sequence[Any], eps: Any) -> list[Any]:
        cell = self.call.cell
        if cell == "stochastic_gru":
            return [reference.stochastic_gru_step(x, *states, *w, eps=eps)]  # type: ignore[misc]
        if cell == "gru":
            return [reference.gru_step(x, *states, *w)]
        if cell == "lstm":
            return [*reference.lstm_step(x, *states, *w)]
        *others, weight_hr = w
        h, c = reference.lstm_step(x, *states, *others, weight_hr=weight_hr)  # type: ignore[misc]
        return [h, c]

    def _noise(self, eps: Any, span: Span, weights: Sequence[Any], x: Any) -> Any:
        if eps is not None or self.seed is None:
            return eps
        begin, end = span
        dtype = parts_of(x)[0].dtype
        latent_size = weights[1].shape[1]
        first_step = self.call.first_step + begin
        return philox_normal(
            self.seed, end - begin, self.batch, latent_size, self.stream, dtype, first_step
        )

    def _mask(self, probability: float, stream: int, span: Span, width: int) -> Tensor:
        assert self.mask_seed is not None
        begin, end = span
        first_step = self.call.first_step + begin
        return mask_of(
            probability, self.mask_seed, end - begin, self.batch, width, stream, first_step
        )

    def _active(self, begin: int, end: int) -> Tensor | None:
        """Whether rows take steps: bool (steps, B, 1), or None if all do."""
        if self.lengths is None:
            return None
        steps = torch.arange(begin, end, device=self.lengths.device)[:, None]
        return (steps < self.lengths)[..., None].to(self.device)

    def _anew(self, active: Tensor | None, begin: int, end: int) -> Tensor | None:
        """Where a step does not read the state before it: bool (steps, B, 1), or None.

        A finished row is not computed with, or it could get 0 * inf as a gradient.
        """
        if self.reset is None:
            return None if active is None else ~active
        is_reset = self.reset[begin:end, :, None]
        return is_reset if active is None else is_reset | ~active

    def _padding(self, begin: int, end: int) -> Tensor:
        """Which row of a packed part is that of a step and a sequence; one too many for none."""
        assert self.batch_sizes is not None
        sizes = self.batch_sizes[begin:end, None]
        starts = sizes.cumsum(0) - sizes
        rows = torch.arange(self.batch, device="cpu")
        return torch.where(rows < sizes, starts + rows, sizes.sum()).to(self.device)

    def _existing(self, begin: int, end: int) -> Tensor:
        """Which rows of a padded part, step by step, are those of the packed one."""
        assert self.batch_sizes is not None
        exists = torch.arange(self.batch, device="cpu") < self.batch_sizes[begin:end, None]
        return exists.flatten().nonzero()[:, 0].to(self.device)
