"""Layers under the transforms of torch.func that need a rule: vmap, and functionalize.

Where weights are shared, the dimension of vmap becomes a part of the batch: one call for all.
Where each has weights of its own, or where random numbers are drawn (they depend on the seed and on
the place in the batch), a call is made for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from . import _library, _ops
from ._ops import (
    NEEDS_FIRST_WEIGHT,
    Cotangents,
    ForwardResults,
    Gradients,
    LayerCall,
    LayerTensors,
    Saved,
)

Apply = Callable[..., Any]
Dims = Any  # what stands in the place of a tensor, and says which of its dimensions is vmap's

_dispatch_keys = torch._C._dispatch_keys
_OLD_BATCHED = torch._C._dispatch_key_parse("Batched")
_OLD_VMAP = torch._C._dispatch_key_parse("VmapMode")

# Where the batch is among the dimensions of each tensor; the seeds have none.
_BATCH = {"input": 1, "hx": 1, "cx": 1, "eps": 2, "reset": 1}
_BATCH_OF_RESULTS = ForwardResults(1, 1, 1, None, 2)  # type: ignore[arg-type]


def forward(
    apply: Apply, info: Any, in_dims: tuple[Any, ...], call: LayerCall, save_gates: bool, *flat: Any
) -> tuple[Any, Any]:
    """The rule for a layer. ``apply``: that of its autograd function."""
    tensors, dims = LayerTensors.of(flat), LayerTensors.of(in_dims[2:])
    if not _can_fold(call, tensors, dims, info.batch_size):
        return looped(apply, info, in_dims, call, False, *flat)
    size = info.batch_size
    found = ForwardResults(*apply(call, False, *_folded(tensors, dims, size).flat()))
    return _unfolded(found, _BATCH_OF_RESULTS, size)


def backward(
    apply: Apply, info: Any, in_dims: tuple[Any, ...], call: LayerCall, needs: int, *flat: Any
) -> tuple[Any, Any]:
    """The rule for a layer's gradients, whose weights' gradients are one for each."""
    grads, saved, tensors = Cotangents(*flat[:3]), Saved(*flat[3:6]), LayerTensors.of(flat[6:])
    of_grads, of_saved, dims = in_dims[2:5], in_dims[5:8], LayerTensors.of(in_dims[8:])
    # Saved gates do not tell rows apart, and would have to be taken apart: they are recomputed.
    saved, run = saved._replace(saved_gates=None), apply
    if saved.chunk_cell_states is not None:
        run = functools.partial(_backward_of_other_batch, apply)
    size = info.batch_size
    if needs >= NEEDS_FIRST_WEIGHT or not _can_fold(call, tensors, dims, size):
        arguments = (*grads, *saved, *tensors.flat())
        return looped(run, info, in_dims, call, needs, *arguments)

    def fold(tensor: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        return None if tensor is None else _fold(tensor, dim, batch, size)

    folded = [fold(g, dim, 1) for g, dim in zip(grads, of_grads, strict=True)]
    folded += [fold(saved.output, of_saved[0], 1), None]
    folded += [fold(saved.chunk_cell_states, of_saved[2], 2)]
    found = Gradients(*run(call, needs, *folded, *_folded(tensors, dims, size).flat()))
    batch = [_BATCH[n] if getattr(found, n).dim() > 1 else None for n in Gradients._fields[:4]]
    return _unfolded(found, (*batch, None), size)


def _backward_of_other_batch(apply: Apply, call: LayerCall, needs: int, *flat: Any) -> Any:
    """``apply``, with the cell states before the chunks of this batch.

    How long chunks are follows from the batch, and forward may have run with another one: that of
    all calls, or that of a single one.
    """
    tensors = LayerTensors.of(flat[6:])
    results = _ops.forward(call, tensors, save_gates=False)
    saved = Saved(results.output, None, results.chunk_cell_states)
    return apply(call, needs, *flat[:3], *saved, *flat[6:])


def _can_fold(call: LayerCall, tensors: LayerTensors, dims: Dims, size: int) -> bool:
    """Whether all can be rows of one batch."""
    is_drawn = tensors.seed is not None or tensors.mask_seed is not None
    has_own_weights = any(dim is not None for dim in dims.weights)
    is_packed, is_limited = tensors.batch_sizes is not None, call.workspace_bytes > 0
    return size > 0 and not (is_drawn or has_own_weights or is_packed or is_limited)


def _folded(tensors: LayerTensors, dims: Dims, size: int) -> LayerTensors:
    found: dict[str, Any] = {}
    for name, batch in _BATCH.items():
        tensor = getattr(tensors, name)
        found[name] = None if tensor is None else _fold(tensor, getattr(dims, name), batch, size)
    lengths = tensors.lengths
    if lengths is not None and dims.lengths is None:
        lengths = lengths.repeat(size)
    elif lengths is not None:
        lengths = lengths.movedim(dims.lengths, 0).flatten()
    return tensors._replace(**found, lengths=lengths)


def _fold(tensor: Tensor, dim: int | None, batch: int, size: int) -> Tensor:
    """A tensor whose dimension ``batch`` has the rows of all ``size`` batches, one by one."""
    if dim is None:
        tensor = tensor.unsqueeze(batch).expand(*tensor.shape[:batch], size, *tensor.shape[batch:])
    else:
        tensor = tensor.movedim(dim, batch)
    # Kernels take rows in any strides, but some tensors must be contiguous.
    return tensor.flatten(batch, batch + 1).contiguous()


def _unfolded(found: Sequence[Tensor], batch: Sequence[Any], size: int) -> tuple[Any, Any]:
    """Results with a dimension for vmap of their own, and where it is."""
    results, dims = [], []
    for tensor, at in zip(found, batch, strict=True):
        has_rows = at is not None and tensor.dim() > at
        results.append(
            tensor.unflatten(at, (size, tensor.shape[at] // size)) if has_rows else tensor
        )
        dims.append(at if has_rows else None)
    return tuple(results), tuple(dims)


def looped(apply: Apply, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """The rule that makes a call for each. Results may be None."""
    if info.batch_size == 0:  # one call tells the shapes
        picked = [
            argument if dim is None else argument.new_ones(argument.movedim(dim, 0).shape[1:])
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        return _with_dims([r if r is None else r[None][:0] for r in apply(*picked)])
    calls = []
    for i in range(info.batch_size):
        picked = [
            argument if dim is None else argument.select(dim, i).contiguous()
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        calls.append(apply(*picked))
    every = zip(*calls, strict=True)
    return _with_dims([None if each[0] is None else torch.stack(each) for each in every])


def _with_dims(results: Sequence[Tensor | None]) -> tuple[Any, Any]:
    return tuple(results), tuple(None if result is None else 0 for result in results)


def _draw(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """The rule for random numbers by themselves: those of each seed."""

    def draw(*arguments: Any) -> tuple[Tensor]:
        return (_library.operators.draw(*arguments),)

    (drawn,), (dim,) = looped(draw, info, in_dims, *arguments)
    return drawn, dim


torch.library.register_vmap("fusedrnn::draw", _draw)


def current_interpreter() -> Any:
    """Of the innermost transform of torch.func."""
    return retrieve_current_functorch_interpreter()


def is_functionalize(interpreter: Any) -> bool:
    """Whether it belongs to ``torch.func.functionalize``."""
    return bool(interpreter.key() == TransformType.Functionalize)


def functionalized(
    interpreter: Any, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """An operator, which changes nothing in place, on the tensors below functionalize."""
    context = FunctorchFunctionalizeAPI(interpreter)
    unwrapped: Any = context.unwrap_tensors((arguments, named))  # type: ignore[arg-type]
    arguments, named = unwrapped
    with context.redispatch_to_next():
        results = operator(*arguments, **named)
    return context.wrap_tensors(results)


def is_vmap(interpreter: Any) -> bool:
    return bool(interpreter.key() == TransformType.Vmap)


def has_functionalize() -> bool:
    """Whether any of the transforms is ``torch.func.functionalize``."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == TransformType.Functionalize for level in levels)


def applied_at_one_level(interpreter: Any, function: Any, inputs: tuple[Any, ...]) -> Any:
    """``function.apply`` at the innermost transform, grad or jvp, and its operator at the next one.

    torch would pass the function itself on to the next one, and functionalize takes none.
    """
    level = interpreter.level()

    def forward(*operands: Any) -> tuple[Tensor, ...]:
        plain = [_unwrap_for_grad(t, level) if isinstance(t, Tensor) else t for t in operands]
        # torch has turned gradients off for the whole of forward; the next transform may be grad.
        with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
            results = function.operator(*plain)
        return tuple(_wrap_for_grad(result, level) for result in results)

    of_function = {name: staticmethod(getattr(function, name)) for name in _OF_FUNCTIONS}
    methods = {"forward": staticmethod(forward), **of_function}
    at_level: Any = type(function.__name__, (_SingleLevelFunction,), methods)
    with enable_single_level_autograd_function():
        return at_level.apply(*inputs)


_OF_FUNCTIONS = ("setup_context", "backward", "jvp")


class _Info:
    """What a rule is told of vmap."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size


def is_under_old_vmap(tensors: Sequence[Any]) -> bool:
    """Whether any of these is batched by the vmap of ``is_grads_batched=True``."""
    return any(isinstance(t, Tensor) and _dispatch_keys(t).has(_OLD_BATCHED) for t in tensors)


def for_old_vmap(rule: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """A rule for vmap, under the vmap that torch has kept for ``is_grads_batched=True``.

    Its tensors tell neither their level nor the number of batches; the level is that of the
    innermost vmap, because torch removes levels from the inside.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    is_batched = [is_under_old_vmap([t]) for t in inputs]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_OLD_VMAP)):
        plain = [
            torch._remove_batch_dim(t, level, 0, 0) if batched else t
            for t, batched in zip(inputs, is_batched, strict=True)
        ]
        size = next(t.shape[0] for t, batched in zip(plain, is_batched, strict=True) if batched)
        dims = tuple(0 if batched else None for batched in is_batched)
        results, out_dims = rule(_Info(size), dims, *plain)
        return tuple(
            t if dim is None else torch._add_batch_dim(t, dim, level)
            for t, dim in zip(results, out_dims, strict=True)
        )
