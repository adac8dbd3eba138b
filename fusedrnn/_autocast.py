"""Autocast: the dtype of a call, and its weights in that dtype.

torch keeps the copy of a weight that its own operators have asked for until the outermost
``autocast`` ends, so that a weight is converted once however often it is used. Only the operators
that torch's autocast knows can ask, so a product without columns is made to do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._autograd import is_alone

_DEVICES = ("cpu", "cuda")  # torch raises an error when asked about other devices, such as meta


def dtype_for(input: Any) -> torch.dtype | None:
    """The dtype of autocast, where it is on for this input."""
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
    if not is_alone() or not torch.is_autocast_cache_enabled():
        return [converted(weight, dtype) for weight in weights]
    with _Operands() as operands:
        return [
            operands.of(weight) if _is_kept(weight) else converted(weight, dtype)
            for weight in weights
        ]


def _is_kept(weight: Any) -> bool:
    """Whether torch keeps the copy, and whether it can be asked for by a product."""
    is_parameter = weight.requires_grad and weight.is_leaf and not weight._is_view()
    return bool(is_parameter and weight.dtype == torch.float32 and weight.dim() in (1, 2))


_aten = torch.ops.aten
# In inference mode a product is not taken apart before it gets here.
_PRODUCTS = (_aten.mm.default, _aten.mv.default, _aten.matmul.default)


class _Operands(TorchDispatchMode):
    """Catches the operand of a product as autocast has converted it."""

    def of(self, weight: Tensor) -> Tensor:
        self._place = 0 if weight.dim() == 2 else 1
        if weight.dim() == 2:
            torch.matmul(weight, weight.new_empty(weight.shape[1], 0))
        else:
            torch.matmul(weight.new_empty(0, weight.shape[0]), weight)
        return self._operand

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS:
            self._operand: Tensor = args[self._place]
        return func(*args, **(kwargs or {}))
