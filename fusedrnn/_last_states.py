"""The last states alone of layers of one direction, as autograd and torch.func see them.

The operators ``last_states`` and ``last_states_backward`` need memory for about the square root of
T steps, and have first derivatives. Whatever else is asked of them (second derivatives, forward
mode, a transform of torch.func) goes layer by layer over the whole sequence, by the operators
``forward`` and ``backward``, which have all of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _ops
from ._autograd import below_autograd, by_tensor, needs_grad, plainly, traceable
from ._ops import Cotangents, ForwardResults, Gradients, LastStates, LayerCall, LayerTensors, Saved
from ._tracers import is_alone


def run_last_states(
    call: LayerCall, inner_dropout: float, tensors: LayerTensors
) -> tuple[Tensor, Tensor]:
    """All layers over a sequence -> h_n, and c_n, which is (0, B, H) without a cell state.

    Arguments are those of :func:`_ops.last_states`.
    """
    if not is_alone():
        tensors = tensors._replace(flat_version=traceable(tensors.flat_version, tensors.input))
        results: Any = _ops.last_states(call, inner_dropout, tensors)
    elif needs_grad(tensors.flat()):
        results = _apply(call, inner_dropout, *tensors.flat())
    else:
        with below_autograd():
            results = _ops.last_states(call, inner_dropout, tensors)
    return results[0], results[1]


class LayersForLastStates(torch.autograd.Function):
    """Layers that save their tensors, and the states before each part of the sequence."""

    @staticmethod
    def forward(call: LayerCall, inner_dropout: float, *flat: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return tuple(_ops.last_states(call, inner_dropout, LayerTensors.of(flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.inner_dropout, *flat = inputs
        parts = results[2:]
        ctx.mark_non_differentiable(*parts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*parts, *flat)

    @staticmethod
    def backward(ctx: Any, *grad_results: Tensor | None) -> tuple[Any, ...]:
        # Read once: torch.utils.checkpoint does not let saved tensors be read twice.
        part_h, part_c, *flat = ctx.saved_tensors
        tensors = LayerTensors.of(flat)
        grad_h_n, grad_c_n, *_ = grad_results
        if grad_h_n is None and grad_c_n is None:
            return (None,) * len(ctx.needs_input_grad)
        needed = LayerTensors.of(ctx.needs_input_grad[2:])
        arguments = (ctx.call, ctx.inner_dropout, needed, (grad_h_n, grad_c_n), (part_h, part_c))
        if torch.is_grad_enabled() or not is_alone():
            found = _ops.last_states_backward(*arguments, tensors)
        else:
            with below_autograd():
                found = _ops.last_states_backward(*arguments, tensors)
        return (None, None, *by_tensor(found, tensors, needed).flat())


_apply = plainly(LayersForLastStates)


def layer_by_layer(call: LayerCall, inner_dropout: float, tensors: LayerTensors) -> LastStates:
    """What the operator ``last_states`` computes, without the states before parts."""
    results = [layer.results for layer in _run(call, inner_dropout, tensors)]
    none = tensors.hx.new_empty(0)
    h_n, c_n = (torch.cat([getattr(r, name) for r in results]) for name in ("h_n", "c_n"))
    return LastStates(h_n, c_n, none, none)


def gradients_layer_by_layer(
    call: LayerCall,
    inner_dropout: float,
    needed: LayerTensors,
    grads: tuple[Tensor | None, Tensor | None],
    tensors: LayerTensors,
) -> Gradients:
    """What the operator ``last_states_backward`` computes."""
    layers = [*_run(call, inner_dropout, tensors)]
    needs_weights = any(needed.weights)
    of_each = len(tensors.weights) // len(layers)
    found: list[Gradients] = []
    grad_output: Tensor | None = None
    for i, layer in reversed([*enumerate(layers)]):
        grad_h_n, grad_c_n = (None if grad is None else grad[i : i + 1] for grad in grads)
        weights = needed.weights[i * of_each : (i + 1) * of_each]
        needs: Any = needed._replace(weights=weights)
        needs = needs._replace(input=i > 0 or needed.input)
        saved = Saved(
            layer.results.output,
            None,
            None if tensors.cx is None else layer.results.chunk_cell_states,
        )
        gradients = _ops.backward(
            layer.call,
            _ops.needs_of(needs),
            Cotangents(grad_output, grad_h_n, grad_c_n),
            saved,
            layer.tensors,
        )
        if needs_weights and not any(weights):
            zeros = sum(w.numel() for w in layer.tensors.weights)
            gradients = gradients._replace(weights=tensors.input.new_zeros(zeros))
        grad_output = gradients.input
        found.insert(0, gradients)
    others = [torch.cat([getattr(g, name) for g in found]) for name in Gradients._fields[1:]]
    return Gradients(found[0].input, *others)


class _LayerResults(NamedTuple):
    """One layer after its forward pass over the whole sequence."""

    call: LayerCall
    tensors: LayerTensors
    results: ForwardResults


def _run(call: LayerCall, inner_dropout: float, tensors: LayerTensors) -> Iterator[_LayerResults]:
    count, sequence = tensors.hx.shape[0], tensors.input
    if count == 0:
        raise RuntimeError(f"fusedrnn: hx must have a layer or more, got {tuple(tensors.hx.shape)}")
    of_each = len(tensors.weights) // count
    for i in range(count):
        here, dropout = slice(i, i + 1), call.dropout if i == 0 else inner_dropout
        of_layer = replace(call, noise_stream=call.noise_stream + i, dropout=dropout)
        layer = tensors._replace(
            input=sequence,
            hx=tensors.hx[here],
            cx=None if tensors.cx is None else tensors.cx[here],
            eps=None if tensors.eps is None else tensors.eps[here],
            weights=tensors.weights[i * of_each : (i + 1) * of_each],
        )
        results = _ops.forward(of_layer, layer, save_gates=False)
        sequence = results.output
        yield _LayerResults(of_layer, layer, results)
