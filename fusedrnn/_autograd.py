"""Layers and single steps as autograd, torch.func, tracers and torch.compile see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import _ops
from ._ops import LayerCall, LayerTensors
from .cells import CELLS


def run_layer(call: LayerCall, tensors: LayerTensors) -> tuple[Tensor, Tensor, Tensor]:
    """One layer over a sequence -> output, h_n, and c_n, which is (0, B, H) without cell state."""
    is_differentiated = needs_grad(tensors.flat())
    function = _function(is_differentiated)
    if function is None:
        output, h_n, c_n, _, _ = _ops.forward(call, tensors, save_gates=False)
    else:
        # If nothing is differentiated there is no backward, and nothing is saved for it.
        save_gates = is_differentiated and not call.recompute
        output, h_n, c_n, _, _ = function(call, save_gates, *tensors.flat())
    return output, h_n, c_n


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether backward is to come for any of these."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether an operator may be called without an autograd function around it."""
    return not is_compiling() and _function(needs_grad(tensors)) is None


def _function(is_differentiated: bool) -> Callable[..., tuple[Tensor, ...]] | None:
    """The cheapest autograd function that serves here; None: the operator by itself."""
    if is_compiling():
        return _Layer.apply if is_differentiated else None
    # torch.func works on a function with setup_context, an operator would lose a tangent, and a
    # trace is to have the function as one node.
    is_transformed = torch._C._are_functorch_transforms_active()
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_transformed or is_traced or forward_ad._current_level >= 0:
        return _Layer.apply
    return _EagerLayer.apply if is_differentiated else None


class _Layer(torch.autograd.Function):
    """A layer that saves its tensors and its output; what else it needs, backward recomputes.

    Two exceptions: of a cell with a cell state c it saves c before each chunk, and ``save_gates``
    has it save all pre-activations.
    """

    @staticmethod
    def forward(call: LayerCall, save_gates: bool, *flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(_ops.forward(call, LayerTensors.of(flat), save_gates=save_gates))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.call, save_gates, *flat = inputs
        output, _, _, saved_gates, chunk_cell_states = results
        has_cell_state = CELLS[ctx.call.cell].has_cell_state
        ctx.mark_non_differentiable(saved_gates, chunk_cell_states)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            output,
            saved_gates if save_gates else None,
            chunk_cell_states if has_cell_state else None,
            *flat,
        )

    @staticmethod
    def backward(ctx: Any, *grad_results: Tensor | None) -> tuple[Any, ...]:
        # Read once: torch.utils.checkpoint does not let saved tensors be read twice.
        output, saved_gates, chunk_cell_states, *flat = ctx.saved_tensors
        tensors = LayerTensors.of(flat)
        grad_output, grad_h_n, grad_c_n, _, _ = grad_results
        grads = (grad_output, grad_h_n, grad_c_n)
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        _, _, *flags = ctx.needs_input_grad
        needed = LayerTensors.of(flags)
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            found = _ops.backward(
                ctx.call,
                tensors,
                grads,
                output=output,
                saved_gates=saved_gates,
                chunk_cell_states=chunk_cell_states,
                needs=_ops.needs_of(needed),
            )
        if torch.is_grad_enabled():  # create_graph=True
            sources = (*grads, tensors.input, tensors.hx, tensors.cx, tensors.eps)
            given = [t for t in (*sources, *tensors.weights) if t is not None]
            found = _ops.Gradients(*_FirstOrder.apply(*found, *given))
        by_tensor = LayerTensors(
            input=cast(Tensor, found.input if needed.input else None),
            hx=cast(Tensor, found.hx if needed.hx else None),
            cx=found.cx if needed.cx else None,
            eps=found.eps if needed.eps else None,
            weights=cast(Any, _parts(found.weights, tensors.weights, needed.weights)),
        )
        return (None, None, *by_tensor.flat())


class _EagerLayer(torch.autograd.Function):
    """_Layer without ``setup_context``, for which torch inspects a signature in each call."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, save_gates: bool, *flat: Tensor) -> tuple[Tensor, ...]:
        output = _Layer.forward(call, save_gates, *flat)
        _Layer.setup_context(ctx, (call, save_gates, *flat), output)
        return output

    backward = _Layer.backward


def _parts(flat: Tensor, weights: Sequence[Tensor], needed: Sequence[Any]) -> list[Tensor | None]:
    """The gradient of each weight that needs one, as a view of the flat buffer of gradients."""
    if is_compiling():
        shaped = flat.split([w.numel() for w in weights]) if any(needed) else weights
        return [
            part.view(w.shape) if need else None
            for need, part, w in zip(needed, shaped, weights, strict=True)
        ]
    parts: list[Tensor | None] = []
    begin = int(flat.storage_offset())
    for need, weight in zip(needed, weights, strict=True):
        shape = weight.shape
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        # One view instead of two, by split and view, takes half the time.
        parts.append(flat.as_strided(shape, strides, begin) if need else None)
        begin += weight.numel()
    return parts


class _FirstOrder(torch.autograd.Function):
    """Gradients that depend on ``sources``: autograd must not take them for constants."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, *sources: Tensor) -> Any:
        return a.view_as(a), b.view_as(b), c.view_as(c), d.view_as(d), e.view_as(e)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "fusedrnn: second derivatives are not implemented; use fusedrnn.reference for them"
        )
