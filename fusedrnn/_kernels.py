"""The operators' kernels for autograd and for torch.func.

They make the operators themselves differentiable: a call that a tracer has recorded, or that is
made without a module, has the derivatives of a module's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _last_states, _library, _ops, _vmap
from ._autograd import Layer, LayerGradient, below_autograd, by_tensor, needs_grad, plainly
from ._buffers import version_of
from ._cells import CELL_NAMES, CELLS
from ._ops import Cotangents, LayerCall, LayerTensors, Saved


def _step_as_layer(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The operator ``step``, by a layer with one step."""
    call, tensors = _layer_of_step(*arguments, **named)
    _, h_n, c_n, _, _ = _ops.forward(call, tensors, save_gates=False)
    input: Tensor = arguments[1]
    shape = (*input.shape[:-1], h_n.shape[-1])
    return h_n.reshape(shape), c_n.reshape(shape) if tensors.cx is not None else c_n


def _step_backward_as_layer(
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    *arguments: Any,
    flat_version: Tensor | None = None,
    needs: int,
    **named: Any,
) -> list[Tensor]:
    """The operator ``step_backward``, by a layer with one step."""
    call, tensors = _layer_of_step(*arguments, **named)
    if flat_version is None and len(tensors.weights) > 0:
        flat_version = version_of(tensors.weights[0])
    tensors = tensors._replace(flat_version=flat_version)
    rows, c = (1, *tensors.hx.shape[1:]), tensors.cx
    if c is not None:  # as forward saves it
        wide = torch.promote_types(c.dtype, torch.float32)
        c = c.detach().to(wide).contiguous()[None]
    # No step reads the output of one before it.
    saved = Saved(tensors.hx.detach().contiguous(), None, c)
    grads = [None if g is None else g.reshape(rows) for g in (grad_h, grad_c)]
    if c is None:
        grads[1] = None
    found = _ops.backward(call, needs, Cotangents(None, *grads), saved, tensors)
    needed = _ops.needed_of(needs, tensors)
    parts = by_tensor(found, tensors, needed)
    _, *given, weights = arguments
    of_step = (parts.input, parts.hx, parts.cx, parts.eps, *parts.weights)
    pairs = zip(of_step, (*given, named.get("eps"), *weights), strict=True)
    return [g.reshape(t.shape) for g, t in pairs if g is not None and t is not None]


def _layer_of_step(
    cell: int,
    input: Tensor,
    hx: Tensor | None,
    cx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    tuning: int = 0,
) -> tuple[LayerCall, LayerTensors]:
    """A step's call as that of a layer."""
    name = _ops.name_at(CELL_NAMES, cell, "cell")
    facts = CELLS[name]
    batch = (None,) if input.dim() == 1 else ()
    matrices = [w for w in weights if w.dim() == 2]
    widths = {size: w.shape[1] for (_, size), w in zip(facts.weights, matrices, strict=False)}
    if "hidden" not in widths:
        raise RuntimeError(f"fusedrnn: weights must be those of a {name}, got {len(weights)}")
    zeros = input.new_zeros(1, *input[batch].shape[:-1], widths["hidden"])
    h = zeros if hx is None else hx[None][batch]
    c = None
    if facts.has_cell_state:
        c = zeros if cx is None else cx[None][batch]
    noise = None if eps is None else eps[None, None][batch]
    call = LayerCall(cell=name, tuning=tuning)
    return call, LayerTensors(input[None][batch], h, weights, c, noise, seed)


def _read(*arguments: Any, **named: Any) -> tuple[LayerCall, LayerTensors, dict[str, Any]]:
    """A call that a graph has recorded may lack the version of the weights' buffer."""
    call, tensors, others = _ops.read(*arguments, **named)
    if tensors.flat_version is None and len(tensors.weights) > 0:
        tensors = tensors._replace(flat_version=version_of(tensors.weights[0]))
    return call, tensors, others


def _read_forward(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    call, tensors, others = _read(*arguments, **named)
    return call, others.get("save_gates", False), *tensors.flat()


def _read_backward(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    call, tensors, others = _ops.read(*arguments[3:], **named)
    saved = Saved(*[cast(Any, others.get(name)) for name in Saved._fields])
    return call, others["needs"], *arguments[:3], *saved, *tensors.flat()


class _Kernels:
    """The kernels of an operator for autograd and for torch.func."""

    def __init__(
        self,
        operator: Any,
        function: type[torch.autograd.Function],
        read: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]],
    ) -> None:
        self._operator, self._function, self._read = operator, function, read
        self._apply_plainly = plainly(function)

    def for_autograd(self, *arguments: Any, **named: Any) -> Any:
        inputs = self._read(arguments, named)
        if needs_grad(inputs[2:]) or forward_ad._current_level >= 0:
            return self._apply_plainly(*inputs)
        with below_autograd():
            return self._operator(*arguments, **named)

    def for_transforms(self, *arguments: Any, **named: Any) -> Any:
        """Under torch.func, whose innermost transform may be functionalize."""
        interpreter = _vmap.current_interpreter()
        if _vmap.is_functionalize(interpreter):
            return _vmap.functionalized(interpreter, self._operator, arguments, named)
        inputs = self._read(arguments, named)
        if _vmap.has_functionalize() and not _vmap.is_vmap(interpreter):
            return _vmap.applied_at_one_level(interpreter, self._function, inputs)
        return self._function.apply(*inputs)

    def for_old_vmap(self, *arguments: Any, **named: Any) -> Any:
        """Under the vmap of ``torch.autograd.grad(is_grads_batched=True)``."""
        return _vmap.for_old_vmap(self._function.vmap, self._read(arguments, named))


def _by_layers_or(operator: Any, by_layers: Callable[..., Any]) -> Callable[..., Any]:
    """For autograd: ``by_layers`` where it needs derivatives, else the operator itself."""

    def for_autograd(*arguments: Any, **named: Any) -> Any:
        *grads, _, input, hx, cx, weights = arguments
        tensors = (*grads, input, hx, cx, *weights, named.get("eps"))
        if needs_grad(tensors) or forward_ad._current_level >= 0:
            return by_layers(*arguments, **named)
        with below_autograd():
            return operator(*arguments, **named)

    return for_autograd


_layers_for_last_states = plainly(_last_states.LayersForLastStates)


def _last_states_by_layers(*arguments: Any, **named: Any) -> Any:
    call, tensors, others = _ops.read(*arguments, **named)
    return tuple(_last_states.layer_by_layer(call, others.get("inner_dropout", 0.0), tensors))


def _last_states_for_autograd(*arguments: Any, **named: Any) -> Any:
    if forward_ad._current_level >= 0:
        return _last_states_by_layers(*arguments, **named)
    call, tensors, others = _read(*arguments, **named)
    if needs_grad(tensors.flat()):
        inner_dropout = others.get("inner_dropout", 0.0)
        return _layers_for_last_states(call, inner_dropout, *tensors.flat())
    with below_autograd():
        return _library.operators.last_states(*arguments, **named)


def _last_states_backward_by_layers(*arguments: Any, **named: Any) -> Any:
    call, tensors, others = _ops.read(*arguments[2:], **named)
    input, hx, cx, eps, *weights = others["needs"]
    needed = LayerTensors(input, hx, weights, cx, eps)
    inner_dropout, grads = others.get("inner_dropout", 0.0), arguments[:2]
    return tuple(_last_states.gradients_layer_by_layer(call, inner_dropout, needed, grads, tensors))


def _register(library: torch.library.Library) -> None:
    for name, function, read in (
        ("forward", Layer, _read_forward),
        ("backward", LayerGradient, _read_backward),
    ):
        kernels = _Kernels(getattr(_library.operators, name).default, function, read)
        library.impl(name, kernels.for_autograd, "Autograd")
        library.impl(name, kernels.for_transforms, "FuncTorchDynamicLayerFrontMode")
        library.impl(name, kernels.for_old_vmap, "Batched")
    for name, by_layers in (
        ("step", _step_as_layer),
        ("step_backward", _step_backward_as_layer),
        ("last_states", _last_states_by_layers),
        ("last_states_backward", _last_states_backward_by_layers),
    ):
        for_autograd = _by_layers_or(getattr(_library.operators, name), by_layers)
        if name == "last_states":  # which has a first derivative of its own
            for_autograd = _last_states_for_autograd
        library.impl(name, for_autograd, "Autograd")
        for key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
            library.impl(name, by_layers, key)


_library_of_kernels = torch.library.Library("fusedrnn", "IMPL")
_register(_library_of_kernels)
