"""Whether steps that backward takes again give what they gave in forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gradients import (
    Gradients,
    Steps,
    are_close,
    gradients_are_close,
    sums_are_close,
    sums_of,
)
from .trees import Leaves


def are_same(
    state: Leaves, expected: Leaves, outputs: Sequence[Steps], sums: Tensor, eps: float
) -> Tensor:
    """For each leaf of the state, and then for the outputs.

    Args:
        sums: Of the outputs in forward; empty if nothing is known of them.
        eps: That of what the steps are computed in, if it is coarser than their results'.
    """
    same = are_close(state, expected, eps)
    if not sums.numel():
        return torch.cat([same, same.new_ones(1)])
    return torch.cat([same, sums_are_close(sums_of(outputs), sums, outputs, eps)])


def with_gradients(
    same: Tensor, at_once: Gradients, by_step: Gradients, incoming: Gradients, eps: float
) -> Tensor:
    """After :func:`are_same`, for each leaf of the state whether its gradients are the same.

    Args:
        at_once: Of the state before each step, (steps · batch, ...) each.
        by_step: The same, (steps, batch, ...) each; None for a leaf that can have no gradient.
        incoming: Gradients from which these were computed.
    """
    sources = [gradient for gradient in incoming if gradient is not None]
    flags = []
    for new, old in zip(at_once, by_step, strict=True):
        if old is None:
            flags.append(same.new_ones(()))
            continue
        old = old.flatten(0, 1)
        new = torch.zeros_like(old) if new is None else new
        flags.append(gradients_are_close(new, old, sources, eps))
    return torch.cat([same, torch.stack(flags)])


def check_same(flags: Sequence[Tensor], names: Sequence[str]) -> None:
    """Once for all chunks, since it waits for the device.

    Args:
        flags: For each chunk, of :func:`are_same`, and in parallel mode then of
            :func:`with_gradients`.
        names: Of the leaves of the state.

    Raises:
        RuntimeError: Something is another one.
    """
    if flags[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a CUDA graph cannot ask
    same = torch.stack([*flags]).all(0).tolist()
    if all(same):
        return
    place = same.index(False)
    if place > len(names):
        raise RuntimeError(
            f"fusedrnn: the gradient of {names[place - len(names) - 1]} is another one for the "
            "steps of a chunk at once than step by step, so the rows of the batch are not "
            'independent; mode="replay" suits any step'
        )
    raise RuntimeError(
        f"fusedrnn: taken again for backward, the steps give another {[*names, 'output'][place]} "
        "than in forward; steps must depend only on their arguments, weights, buffers, attributes "
        "and random numbers, not on iterators or clocks, must draw from Python's or NumPy's "
        "generators in the first step if in any, and weights and closed-over tensors must not "
        "change before backward"
    )
