"""Whether states and outputs that backward makes again are those of forward, but for rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .._step.trees import differentiable


def coarsest_eps(autocast: tuple[bool, torch.dtype], leaves: Iterable[Tensor]) -> float:
    """Of what steps may compute in, whatever they return: as autocast says, or as what they get.

    Nothing computes in a dtype of eight bits.
    """
    dtypes = {leaf.dtype for leaf in leaves if differentiable(leaf) and leaf.itemsize > 1}
    is_on, dtype = autocast
    return max((torch.finfo(d).eps for d in dtypes | ({dtype} if is_on else set())), default=0.0)


def is_close(new: Tensor, old: Tensor, eps: float) -> bool:
    """Whether only rounding tells them apart, in which kernels with and without a graph differ.

    Args:
        eps: That of what they are computed in, if it is coarser than their own.
    """
    if not differentiable(new):
        return torch.equal(new, old)
    tolerance = max(torch.finfo(new.dtype).eps, eps) ** 0.5
    size = old.abs().nan_to_num(0.0, 0.0, 0.0)
    least = torch.finfo(new.dtype).tiny  # below it numbers are rounded to few bits, or to zero
    largest = tolerance * float(size.max()) + least if size.numel() else least
    return torch.allclose(new, old, tolerance, largest, equal_nan=True)
