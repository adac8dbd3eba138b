"""Gradients that may be missing, and values that may be rounded in another way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from .trees import differentiable

Gradients = list[Tensor | None]
Steps = Sequence[Tensor]
"""A leaf at some steps."""


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
    # As torch.autograd.grad does, but a TorchFunctionMode stays on for what runs within.
    found = iter(
        _engine_run_backward(
            tuple(root for root, _ in pairs),
            tuple(gradient for _, gradient in pairs),
            create_graph,  # whether to keep the graph, too
            create_graph,
            tuple(needed),
            allow_unreachable=True,
            accumulate_grad=False,
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


def sums_of(leaves: Sequence[Steps]) -> Tensor:
    """Of the absolute values and of the values of each leaf, (leaves, 2)."""
    joined = (steps[0] if len(steps) == 1 else torch.stack([*steps]) for steps in leaves)
    return torch.stack([_sums(leaf.detach()) for leaf in joined])


def _sums(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        values = values.double()
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(values, 1, dtype=kind)
    return torch.stack([norm, values.sum(dtype=kind)]).double()


def sums_are_close(new: Tensor, old: Tensor, leaves: Sequence[Steps]) -> Tensor:
    """Whether only rounding tells apart the sums of all leaves, (1,)."""
    eps = [torch.finfo(_float(steps[0])).eps ** 0.5 for steps in leaves]
    allowed = torch.stack([row[:1] * e for row, e in zip(old, eps, strict=True)])
    same = (new == old) | ((new - old).abs() <= allowed) | (new.isnan() & old.isnan())
    return same.all()[None]


def _float(leaf: Tensor) -> torch.dtype:
    return leaf.dtype if differentiable(leaf) else torch.float32
