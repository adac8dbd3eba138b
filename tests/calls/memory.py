"""Copies of tensors in any layout of memory that a user may pass, with (nearly) the same values."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor


def transposed(values: Tensor, rng: random.Random) -> Tensor:
    """A dense copy with its dimensions in another order."""
    order = rng.sample(range(values.dim()), values.dim())
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def with_gaps(values: Tensor, rng: random.Random) -> Tensor:
    """A copy in a larger tensor with gaps of NaN in some dimensions."""
    steps = [rng.choice([1, 1, 2, 3]) for _ in values.shape]
    if values.dtype == torch.bool:
        wide = torch.ones([n * s for n, s in zip(values.shape, steps, strict=True)]).bool()
    else:
        shape = [n * s for n, s in zip(values.shape, steps, strict=True)]
        wide = values.new_full(shape, torch.nan)
    part = wide[tuple(slice(None, None, step) for step in steps)]
    part.copy_(values)
    return part


def shifted(values: Tensor, rng: random.Random) -> Tensor:
    """A dense copy at an address that is not a multiple of 16."""
    offset = rng.randint(1, 3)
    memory = values.new_zeros(values.numel() + offset)
    memory[offset:] = values.flatten()
    return memory[offset:].view(values.shape)


def negated(values: Tensor, rng: random.Random) -> Tensor:
    """A copy whose memory holds negated numbers (torch's negative bit)."""
    return values if values.dtype == torch.bool else torch._neg_view(-values)


def expanded(values: Tensor, rng: random.Random) -> Tensor:
    """A copy that repeats the first slice of a dimension, with a stride of 0."""
    dim = rng.randrange(values.dim())
    return values.narrow(dim, 0, min(1, values.shape[dim])).expand(values.shape)


Layout = Callable[[Tensor, random.Random], Tensor]
LAYOUTS: list[Layout] = [transposed, with_gaps, shifted, negated, expanded]


def any_memory(values: Tensor, rng: random.Random) -> Tensor:
    """A copy in a random layout, mostly the plain one."""
    if values.dim() == 0 or rng.random() < 0.6:
        return values
    return rng.choice(LAYOUTS)(values, rng)
