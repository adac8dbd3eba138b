"""Derivatives of a layer that its kernels do not have, by the layer in plain torch.

Both functions go through the layer step by step, as a loop written by hand does, and keep what such
a loop keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import reference
from ._ops import Cotangents, LayerCall, LayerTensors

_DIFFERENTIABLE = ("input", "hx", "cx", "eps")


def layer(call: LayerCall, tensors: LayerTensors) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator ``forward`` computes -> output, h_n, and c_n or (0, B, H).

    Raises:
        RuntimeError: The call has dropout, zoneout, packed rows, or is a part of a sequence.
    """
    _refuse(call, tensors)
    input, hx, weights, cx, eps, seed, lengths, _, reset, _, _ = tensors
    directions = hx.shape[0]
    has_bias = any(weight.dim() == 1 for weight in weights)
    options: dict[str, Any] = {"bias": has_bias, "bidirectional": directions == 2}
    options |= {"lengths": lengths, "reset": reset}
    if call.cell == "stochastic_gru":
        if seed is not None:
            seq_len, batch, _ = input.shape
            streams = range(call.noise_stream, call.noise_stream + directions)
            sizes = (seq_len, batch, weights[1].shape[1])
            drawn = [
                reference.philox_normal(seed, *sizes, stream, input.dtype) for stream in streams
            ]
            eps = torch.stack(drawn)
        is_noisy = eps is not None
        output, h_n = reference.stochastic_gru(
            input, weights, hx, eps=eps, sample=is_noisy, **options
        )
        return output, h_n, input.new_zeros(0, *h_n.shape[1:])
    if call.cell == "gru":
        output, h_n = reference.gru(input, weights, hx, **options)
        return output, h_n, input.new_zeros(0, *h_n.shape[1:])
    assert cx is not None
    proj_size = hx.shape[2] if call.cell == "projected_lstm" else 0
    output, (h_n, c_n) = reference.lstm(input, weights, (hx, cx), proj_size=proj_size, **options)
    return output, h_n, c_n


def _refuse(call: LayerCall, tensors: LayerTensors) -> None:
    is_regularized = call.dropout > 0 or call.zoneout > 0 or call.cell_zoneout > 0
    is_part = call.first_step > 0 or call.reverse or tensors.batch_sizes is not None
    if is_regularized or is_part:
        raise RuntimeError(
            "fusedrnn: second derivatives and forward mode are not implemented for dropout, "
            "zoneout, a PackedSequence, or return_sequence=False"
        )


def tangents(call: LayerCall, tensors: LayerTensors, directions: LayerTensors) -> Any:
    """Derivatives of output, h_n and c_n along ``directions``, which has None where it is zero."""
    primals = _differentiable(tensors)

    def pulled_back(*cotangents: Tensor) -> Any:
        return torch.func.vjp(_of(call, tensors), *primals)[1](cotangents)

    # Forward mode does not nest in itself, but the gradient of a gradient, which is linear in the
    # cotangents, is the derivative forward.
    zeros = [torch.zeros_like(result) for result in layer(call, tensors)]
    push: Any = torch.func.vjp(pulled_back, *zeros)[1]
    return push(_given(directions, tensors))


def second_order(
    call: LayerCall, tensors: LayerTensors, grads: Cotangents, directions: LayerTensors
) -> tuple[Any, LayerTensors]:
    """The tangents, and the gradients of their product with ``grads``."""
    primals = _differentiable(tensors)
    results = layer(call, tensors)
    cotangents = [
        torch.zeros_like(result) if grad is None else grad
        for grad, result in zip(grads, results, strict=True)
    ]

    def gradients(cotangents: Sequence[Tensor], *primals: Tensor) -> Any:
        return torch.func.vjp(_of(call, tensors), *primals)[1](tuple(cotangents))

    pull: Any = torch.func.vjp(gradients, tuple(cotangents), *primals)[1]
    of_results, *of_primals = pull(_given(directions, tensors))
    return of_results, _by_name(tensors, of_primals)


def _of(call: LayerCall, tensors: LayerTensors) -> Any:
    """The layer as a function of those of its tensors that have derivatives."""
    return lambda *primals: layer(call, _by_name(tensors, primals, rest=tensors))


def _differentiable(tensors: LayerTensors) -> list[Tensor]:
    named = [getattr(tensors, name) for name in _DIFFERENTIABLE]
    return [tensor for tensor in named if tensor is not None] + list(tensors.weights)


def _given(directions: LayerTensors, tensors: LayerTensors) -> tuple[Tensor, ...]:
    pairs = [(getattr(directions, n), getattr(tensors, n)) for n in _DIFFERENTIABLE]
    pairs += zip(directions.weights, tensors.weights, strict=True)
    return tuple(
        torch.zeros_like(tensor) if direction is None else direction
        for direction, tensor in pairs
        if tensor is not None
    )


def _by_name(
    tensors: LayerTensors, values: Sequence[Tensor], rest: LayerTensors | None = None
) -> LayerTensors:
    """What ``_differentiable`` has as a list, by name again. ``rest``: of the other tensors."""
    remaining = iter(values)
    named: dict[str, Any] = {
        name: None if getattr(tensors, name) is None else next(remaining)
        for name in _DIFFERENTIABLE
    }
    weights = list(remaining)
    if rest is None:
        return LayerTensors(weights=cast(Any, weights), **named)
    return rest._replace(weights=weights, **named)
