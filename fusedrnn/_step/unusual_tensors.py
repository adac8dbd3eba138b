"""Tensors that are no plain arrays: sparse, nested, quantized and fake ones, and other classes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of tensors that torch's own operations take as they are."""
_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def unusual(tensor: Tensor) -> str:
    """What a tensor is that is no plain array, as in "the weight is sparse"; nothing for others."""
    if type(tensor) not in PLAIN:
        return f"a {type(tensor).__name__}"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        name = str(tensor.layout)
        return f"sparse ({name})" if "sparse" in name else f"in the layout {name}"
    return "quantized" if tensor.is_quantized else "on the device meta" if tensor.is_meta else ""


def memory_of(tensor: Tensor) -> dict[int, int]:
    """The addresses of the memory that holds a tensor's numbers, and the bytes there."""
    found = {}
    for part in _parts_of(tensor):
        try:
            storage = part.untyped_storage()
            if storage.device.type != "meta":
                found[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # it has none, or does not show it
            pass
    return found


def _parts_of(tensor: Tensor) -> Iterable[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return [tensor]
