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


def sums_of(leaves: Sequence[Tensor]) -> Tensor:
    """What tells whether leaves are the same again, (leaves, 3).

    The norm; a sum in which each place has a weight of its own, so that it sees permutations; and
    how many rows have NaN or infinity, which that sum leaves out.
    """
    if not leaves:
        return torch.empty(0, 3, dtype=torch.float64)
    return torch.stack([_sums(leaf.detach()) for leaf in leaves])


def _sums(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    is_double = values.dtype == torch.float64 or not values.is_floating_point()
    values = values.to(torch.float64 if is_double else torch.float32)
    values = values.flatten(0, -2) if values.dim() > 1 else values.reshape(1, -1)
    rows, columns = values.shape
    weights = torch.arange(1, max(rows, columns) + 1, device=values.device).to(values.dtype).cos()
    with torch.autocast(values.device.type, enabled=False):
        by_row = values.mv(weights[:columns])
        is_finite = by_row.isfinite()
        by_place = by_row.where(is_finite, 0.0).dot(weights[:rows])
    norm = torch.linalg.vector_norm(values).nan_to_num(torch.inf, torch.inf)
    return torch.stack([norm.double(), by_place.double(), rows - is_finite.sum()])


def sums_are_close(new: Tensor, old: Tensor, leaves: Sequence[Tensor], eps: float) -> Tensor:
    """Whether only rounding tells apart the sums of all leaves, (1,). ``eps``: as above."""
    tolerances = [max(torch.finfo(_float(leaf)).eps, eps) ** 0.5 for leaf in leaves]
    allowed = torch.stack([row[:1] * t for row, t in zip(old, tolerances, strict=True)])
    near = (new - old).abs() <= allowed
    same = (new == old) | near
    return (same[:, :2].all() & (new[:, 2] == old[:, 2]).all())[None]


def _float(leaf: Tensor) -> torch.dtype:
    return leaf.dtype if differentiable(leaf) else torch.float32
