"""Autocast: the dtype of a call, and its weights in that dtype.

As with torch's own operators, a weight is converted once however often it is used, until the
outermost ``autocast`` ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._tracers import is_alone, is_compiling, is_recorded

_DEVICES = ("cpu", "cuda")  # torch raises an error when asked about other devices, such as meta


def dtype_for(input: Any) -> torch.dtype | None:
    """The dtype of autocast, where it is on for this input."""
    if not is_compiling() and not torch._C._is_any_autocast_enabled():  # the usual case
        return None
    device = input.device.type if isinstance(input, Tensor) else ""
    if device in _DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def converted(tensor: Any, dtype: torch.dtype) -> Any:
    """A tensor, if there is one, in the dtype of autocast, as torch's own operators convert it."""
    if tensor is None:
        return None
    # torch's autocast leaves float64 alone; tensors of other kinds are refused later.
    is_eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_eligible else tensor


def weights_in(dtype: torch.dtype, weights: Sequence[Any]) -> list[Any]:
    """Weights, each converted once as long as autocast is on."""
    if not (weights and _can_keep()):
        return [converted(weight, dtype) for weight in weights]
    copies, has_graph = _copies_on(weights[0].device), torch.is_grad_enabled()
    return [
        _kept(weight, dtype, copies, (id(weight), dtype, has_graph))
        if weight.requires_grad and weight.is_leaf
        else converted(weight, dtype)
        for weight in weights
    ]


def _can_keep() -> bool:
    """Whether torch keeps copies, and they are tensors with numbers."""
    if not (is_alone() and torch.is_autocast_cache_enabled()) or torch.is_inference_mode_enabled():
        return False
    return not is_recorded()


def _kept(weight: Tensor, dtype: torch.dtype, copies: dict[Any, Any], key: Any) -> Tensor:
    version, copy, _ = copies.get(key, (None, None, None))
    if copy is None or version != weight._version:
        copy = converted(weight, dtype)
        copies[key] = weight._version, copy, weight  # whose id is its own as long as it is here
    return copy


_witnesses: dict[torch.device, tuple[Tensor, weakref.ref[Tensor]]] = {}


def _copies_on(device: torch.device) -> dict[Any, Any]:
    """What lives until the outermost autocast ends.

    Nothing tells when that is, but then torch drops the copies of weights that it keeps itself. So
    it is given a weight of ours to copy, and this is an attribute of the copy.
    """
    weight, copy = _witnesses.get(device, (None, None))
    known: Any = None if copy is None else copy()
    if known is None:
        if weight is None:
            weight = torch.zeros(1, 1, dtype=torch.float32, device=device, requires_grad=True)
        nothing = weight.new_empty(1, 0)
        with torch.no_grad(), _Operand() as operand:
            torch.mm(weight, nothing)
        known = operand.found
        if known is weight:  # autocast's dtype is that of the weight
            return {}
        known.copies = {}
        _witnesses[device] = weight, weakref.ref(known)
    copies: dict[Any, Any] = known.copies
    return copies


class _Operand(TorchDispatchMode):
    """Catches the operand of a product as autocast has converted it."""

    found: Any

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call would import the compiler, which takes most of a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self.found = args[0]
        return func(*args, **(kwargs or {}))
