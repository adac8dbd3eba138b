"""Gradients that may be missing, and values that may be rounded in another way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .trees import differentiable

Gradients = list[Tensor | None]


def gradients_of(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    create_graph: bool = False,
) -> Gradients:
    """Of the leaves, None for those that need none or that no root depends on."""
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root.requires_grad and gradient is not None
    ]
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not needed:
        return [None] * len(leaves)
    found = iter(
        torch.autograd.grad(
            [root for root, _ in pairs],
            needed,
            [gradient for _, gradient in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def at(sequences: Gradients, place: int) -> Gradients:
    """Of one step."""
    return [None if sequence is None else sequence[place] for sequence in sequences]


def dense(gradients: Gradients, leaves: Sequence[Tensor]) -> Gradients:
    """With zeros where there is no gradient though there could be one."""
    return [
        torch.zeros_like(leaf) if gradient is None and differentiable(leaf) else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    ]


def are_close(new: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
    """For each, whether only rounding tells them apart."""
    return torch.stack([is_close(a, b) for a, b in zip(new, old, strict=True)])


def is_close(a: Tensor, b: Tensor) -> Tensor:
    """Whether only rounding tells them apart, in which kernels with and without a graph differ."""
    same = a == b
    if differentiable(a):
        a, b = a.detach(), b.detach()
        scale = b.abs().nan_to_num(0.0, 0.0, 0.0).amax() if b.numel() else 0.0
        tolerance = torch.finfo(a.dtype).eps ** 0.5
        same = same | ((a - b).abs() <= tolerance * (scale + b.abs())) | (a.isnan() & b.isnan())
    return same.all()
