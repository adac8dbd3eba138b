"""Layers as autograd and torch.func see them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _onnx, _ops, _plain_layer, _plans, _vmap
from ._cells import CELLS
from ._ops import Cotangents, Gradients, LayerCall, LayerTensors, Saved
from ._tracers import is_alone, is_compiling, is_traced
from ._warnings import warn


def run_layer(call: LayerCall, tensors: LayerTensors) -> tuple[Tensor, Tensor, Tensor]:
    """One layer over a sequence -> output, h_n, and c_n, which is (0, B, H) without cell state."""
    flat = tensors.flat()
    is_differentiated = needs_grad(flat)
    # If nothing is differentiated there is no backward, and nothing is saved for it. One trace of
    # torch.jit is for calls with gradients and without; it compares both.
    save_gates = is_differentiated and not is_traced() and not recomputes(call, tensors)
    if not is_alone():
        if _onnx.is_exporting():
            return _onnx.run_layer(call, tensors)
        tensors = tensors._replace(flat_version=traceable(tensors.flat_version, tensors.input))
        results: Any = _ops.forward(call, tensors, save_gates=save_gates)
    elif is_differentiated:
        results = _apply_layer(call, save_gates, *flat)
    else:
        with below_autograd():
            results = _ops.forward(call, tensors, save_gates=False)
    return cast(tuple[Tensor, Tensor, Tensor], tuple(results[:3]))


def recomputes(call: LayerCall, tensors: LayerTensors) -> bool:
    """Whether backward of a call recomputes the pre-activations, which forward then does not save.

    ``recompute=None`` chooses by the sizes alone, so that the bits of gradients repeat.
    """
    if call.recompute is not None:
        return call.recompute
    steps = tensors.input if tensors.batch_sizes is None else tensors.batch_sizes
    _, batch, output_size = tensors.hx.shape
    hidden_size = output_size if tensors.cx is None else tensors.cx.shape[-1]
    features = tensors.input.shape[-1] + output_size
    return not _plans.are_cheap_to_save(
        steps.shape[0], batch, features, hidden_size, call.layer_directions
    )


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether backward is to come for any of these."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def traceable(version: Tensor | None, input: Tensor) -> Tensor | None:
    """``LayerTensors.flat_version`` for a graph, which would keep it as a constant if exported.

    A call of a graph that has none looks it up.
    """
    if version is None or is_traced() or (is_compiling() and torch.compiler.is_exporting()):
        return None
    return version if version.device == input.device else None


# A guard: with it, a call of an operator passes by the kernels that this module registers.
below_autograd = torch._C._AutoDispatchBelowAutograd


class Layer(torch.autograd.Function):
    """A layer that saves its tensors and its output; what else it needs, backward recomputes.

    Two exceptions: of a cell with a cell state c it saves c before each chunk, and ``save_gates``
    has it save all pre-activations.
    """

    @staticmethod
    def operator(call: LayerCall, save_gates: bool, *flat: Any) -> tuple[Tensor, ...]:
        return tuple(_ops.forward(call, LayerTensors.of(flat), save_gates=save_gates))

    @staticmethod
    def forward(call: LayerCall, save_gates: bool, *flat: Any) -> tuple[Tensor, ...]:
        tensors = LayerTensors.of(flat, has_version=False)  # autograd itself saves it
        with below_autograd():
            return tuple(_ops.forward(call, tensors, save_gates=save_gates))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.call, save_gates, *flat = inputs
        output, _, _, saved_gates, chunk_cell_states = results
        ctx.mark_non_differentiable(saved_gates, chunk_cell_states)
        ctx.set_materialize_grads(False)
        has_cell_state = CELLS[ctx.call.cell].has_cell_state
        saved = Saved(
            output,
            saved_gates if save_gates and saved_gates.numel() > 0 else None,
            chunk_cell_states if has_cell_state else None,
        )
        ctx.save_for_backward(*saved, *flat)
        if not is_alone():
            ctx.save_for_forward(*flat)

    @staticmethod
    def backward(ctx: Any, *grad_results: Tensor | None) -> tuple[Any, ...]:
        # Read once: torch.utils.checkpoint does not let saved tensors be read twice.
        output, saved_gates, chunk_cell_states, *flat = ctx.saved_tensors
        saved = Saved(output, saved_gates, chunk_cell_states)
        is_last = not torch.is_grad_enabled() and is_alone()  # nothing is saved for a backward
        tensors = LayerTensors.of(flat, has_version=not is_last)
        grads = Cotangents(*grad_results[:3])
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        needed = LayerTensors.of(ctx.needs_input_grad[2:])
        needs = _ops.needs_of(needed)
        arguments = (ctx.call, needs, grads, saved, tensors)
        if is_last:
            with below_autograd():
                found = _ops.backward(*arguments)
        else:
            found = _ops.backward(*arguments)
        return (None, None, *by_tensor(found, tensors, needed).flat())

    @staticmethod
    def jvp(ctx: Any, _call: None, _save_gates: None, *directions: Tensor | None) -> Any:
        with _for_outer_tangents():
            tensors = LayerTensors.of(_primals(ctx.saved_tensors))
            found = _plain_layer.tangents(ctx.call, tensors, LayerTensors.of(directions))
        return (*found, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _vmap.forward(Layer.operator, info, in_dims, *inputs)


class LayerGradient(torch.autograd.Function):
    """The gradients of a layer, which can be differentiated again.

    That goes through the layer in plain torch, part by part: the derivative of
    <grads, tangents of the results> is both what double backward asks for and what the gradients'
    tangents consist of, because second derivatives are symmetric.
    """

    @staticmethod
    def operator(call: LayerCall, needs: int, *flat: Any) -> tuple[Tensor, ...]:
        return tuple(_ops.backward(call, needs, *_gradient_tensors(flat)))

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return LayerGradient.operator(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.needs, *flat = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat)
        if not is_alone():
            ctx.save_for_forward(*flat)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Any, ...]:
        _warn_of_cost()
        second = functools.partial(_second_order, ctx.call, ctx.needs)
        inputs = (*directions, *ctx.saved_tensors)
        if _vmap.is_under_old_vmap(inputs):
            rule = functools.partial(_vmap.looped, second)
            return (None, None, *_vmap.for_old_vmap(rule, inputs))
        return (None, None, *second(*inputs))

    @staticmethod
    def jvp(ctx: Any, _call: None, _needs: None, *directions: Tensor | None) -> Any:
        grad_directions, _, along = _gradient_tensors(directions)
        _warn_of_cost()
        with _for_outer_tangents():
            grads, saved, tensors = _gradient_tensors(_primals(ctx.saved_tensors))
            _, second = _plain_layer.second_order(ctx.call, tensors, grads, along)
            found = _flat_gradients(cast(Any, second), tensors, ctx.needs)
            if any(g is not None for g in grad_directions):
                first = _ops.backward(ctx.call, ctx.needs, grad_directions, saved, tensors)
                found = Gradients(*[a + b for a, b in zip(found, first, strict=True)])
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _vmap.backward(LayerGradient.operator, info, in_dims, *inputs)


def _second_order(call: LayerCall, needs: int, *inputs: Any) -> tuple[Tensor | None, ...]:
    """Gradients of a layer's gradients with respect to the tensors of the operator ``backward``.

    Args:
        inputs: Cotangents of what that returns, and its tensors.
    """
    found, flat = Gradients(*inputs[:5]), inputs[5:]
    grads, _, tensors = _gradient_tensors(flat)
    if found.weights is not None:
        found = found._replace(weights=found.weights.contiguous())
    along = by_tensor(found, tensors, _ops.needed_of(needs, tensors))
    tangents, gradients = _plain_layer.second_order(call, tensors, grads, along)
    of_grads = [None if g is None else t for g, t in zip(grads, tangents, strict=True)]
    of_tensors: Any = LayerTensors(*gradients)  # type: ignore[arg-type]
    return (*of_grads, *[None] * len(Saved._fields), *of_tensors.flat())


def _for_outer_tangents() -> Any:
    """A context for ``jvp``, where torch turns off tangents: those of outer levels are wanted."""
    return forward_ad._set_fwd_grad_enabled(True)


def _primals(saved: Sequence[Any]) -> list[Any]:
    """Saved tensors without their tangents of the level that ``jvp`` is called for."""
    return [None if t is None else forward_ad.unpack_dual(t).primal for t in saved]


def plainly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for where torch.func is not active, in half the time."""
    apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return cast(Callable[..., Any], apply)


_apply_layer = plainly(Layer)


def _gradient_tensors(flat: Sequence[Any]) -> tuple[Cotangents, Saved, LayerTensors]:
    """The tensors of the operator ``backward``, from one after the other."""
    return Cotangents(*flat[:3]), Saved(*flat[3:6]), LayerTensors.of(flat[6:])


def by_tensor(found: Gradients, tensors: LayerTensors, needed: LayerTensors) -> LayerTensors:
    """The gradient of each tensor that needs one, or what is given in the place of gradients."""
    return LayerTensors(
        input=cast(Tensor, found.input if needed.input else None),
        hx=cast(Tensor, found.hx if needed.hx else None),
        cx=found.cx if needed.cx else None,
        eps=found.eps if needed.eps else None,
        weights=cast(Any, _parts(found.weights, tensors.weights, needed.weights)),
    )


def _parts(
    flat: Tensor | None, weights: Sequence[Tensor], needed: Sequence[Any]
) -> list[Tensor | None]:
    """The gradient of each weight that needs one, as a view of the flat buffer of gradients."""
    if flat is None:
        return [None] * len(weights)
    if type(flat) is not Tensor or not is_alone():  # sizes may be those of a tracer
        shaped = flat.split([w.numel() for w in weights]) if any(needed) else weights
        return [
            part.view(w.shape) if need else None
            for need, part, w in zip(needed, shaped, weights, strict=True)
        ]
    parts: list[Tensor | None] = []
    begin = int(flat.storage_offset())
    is_final = not (flat.requires_grad or _vmap.is_under_old_vmap((flat,)))
    for need, weight in zip(needed, weights, strict=True):
        shape = weight.shape
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        # One view instead of two, by split and view, takes half the time.
        part = flat.as_strided(shape, strides, begin) if need else None
        # By .data each has a version of its own, so that one may be changed in place while a graph
        # has saved another.
        parts.append(part.data if part is not None and is_final else part)
        begin += weight.numel()
    return parts


def _flat_gradients(by_tensor: LayerTensors, tensors: LayerTensors, needs: int) -> Gradients:
    """Gradients as the operator ``backward`` returns them: empty if they are not needed."""
    needed = _ops.needed_of(needs, tensors)
    none = tensors.input.new_zeros(0)
    weights = [
        (torch.zeros_like(weight) if grad is None or not need else grad).reshape(-1)
        for grad, weight, need in zip(
            by_tensor.weights, tensors.weights, needed.weights, strict=True
        )
    ]

    def of(name: str) -> Tensor:
        grad, tensor = getattr(by_tensor, name), getattr(tensors, name)
        if not getattr(needed, name):
            return none
        return torch.zeros_like(tensor) if grad is None else grad

    return Gradients(
        input=of("input"),
        hx=of("hx"),
        cx=of("cx"),
        eps=of("eps"),
        weights=torch.cat(weights) if any(needed.weights) else none,
    )


_has_warned = False


def _warn_of_cost() -> None:
    global _has_warned
    if _has_warned or is_compiling():
        return
    _has_warned = True
    warn(
        "fusedrnn: second derivatives run the layer step by step in plain torch, which takes more "
        "time than a loop written by hand, and memory for about the square root of the steps"
    )
