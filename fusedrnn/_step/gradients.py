"""Gradients, of which some may be missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

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


def nodes_behind(nodes: Sequence[Any]) -> Iterator[Any]:
    """The other nodes of autograd's graph that these lead to, each once."""
    waiting, seen = [*nodes], {*nodes}
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                yield node


def dense(gradients: Gradients, leaves: Sequence[Tensor]) -> Gradients:
    """With zeros where there is no gradient though there could be one."""
    return [
        torch.zeros_like(leaf) if gradient is None and differentiable(leaf) else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    ]
