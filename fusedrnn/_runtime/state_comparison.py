"""Whether states and outputs that backward makes again are those of forward, but for rounding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def are_close(new: Sequence[Tensor], old: Sequence[Tensor], eps: float) -> Tensor:
    """For each, whether only rounding tells them apart, in which kernels with and without a graph
    differ. Infinity is close to itself alone.

    Args:
        eps: That of what they are computed in, if it is coarser than their own.
    """
    pairs = zip(new, old, strict=True)
    return torch.stack([_is_close(a.detach(), b.detach(), eps) for a, b in pairs])


def _is_close(a: Tensor, b: Tensor, eps: float) -> Tensor:
    if not differentiable(a):
        return (a == b).all()
    tolerance = max(torch.finfo(a.dtype).eps, eps) ** 0.5
    size = b.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = (size.amax() if size.numel() else size.new_zeros(())).double()
    least = torch.finfo(a.dtype).tiny  # below it numbers are rounded to few bits, or to zero
    near = (a - b).abs() < tolerance * largest + least + tolerance * b.abs()
    return ((a == b) | near | (a.isnan() & b.isnan())).all()
