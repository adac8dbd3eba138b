"""Gradients, of which some may be missing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

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
