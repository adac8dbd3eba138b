"""Copies of tensors in memory that is laid out as a user's may be."""

import torch


def transposed(matrix):
    return matrix.t().contiguous().t()


def with_gaps(tensor):
    wide = tensor.new_full([*tensor.shape[:-1], 2 * tensor.shape[-1]], float("nan"))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def with_wide_rows(tensor):
    wide = tensor.new_full([*tensor.shape[:-1], tensor.shape[-1] + 3], float("nan"))
    wide[..., :-3] = tensor
    return wide[..., :-3]


def shifted(tensor):
    """A copy at an address from which a GPU can load only single numbers."""
    memory = tensor.new_full([tensor.numel() + 1], float("nan"))
    memory[1:] = tensor.flatten()
    return memory[1:].view_as(tensor)


def strided(tensor):
    """A copy with its dimensions in reverse order in memory, and gaps before all numbers."""
    filling = torch.nan if tensor.is_floating_point() else 1
    wide = tensor.new_full([2 * size for size in reversed(tensor.shape)], filling)
    view = wide[(slice(1, None, 2),) * tensor.dim()].permute(*reversed(range(tensor.dim())))
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
