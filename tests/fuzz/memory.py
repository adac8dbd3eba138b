"""The same values, or nearly, in any memory that a user may hand over."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor


def transposed(values: Tensor, rng: random.Random) -> Tensor:
    """Dense, with the dimensions in another order."""
    order = rng.sample(range(values.dim()), values.dim())
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def with_gaps(values: Tensor, rng: random.Random) -> Tensor:
    """Every second or third of a larger tensor, in some dimensions, which has NaN between them."""
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
    """Dense, at an address that is no multiple of 16."""
    offset = rng.randint(1, 3)
    memory = values.new_zeros(values.numel() + offset)
    memory[offset:] = values.flatten()
    return memory[offset:].view(values.shape)


def negated(values: Tensor, rng: random.Random) -> Tensor:
    """Whose memory holds the numbers with the other sign."""
    return values if values.dtype == torch.bool else torch._neg_view(-values)


def expanded(values: Tensor, rng: random.Random) -> Tensor:
    """With the first of some dimension in the place of all."""
    dim = rng.randrange(values.dim())
    return values.narrow(dim, 0, min(1, values.shape[dim])).expand(values.shape)


Layout = Callable[[Tensor, random.Random], Tensor]
LAYOUTS: list[Layout] = [transposed, with_gaps, shifted, negated, expanded]


def any_memory(values: Tensor, rng: random.Random) -> Tensor:
    """Mostly as it is."""
    if values.dim() == 0 or rng.random() < 0.6:
        return values
    return rng.choice(LAYOUTS)(values, rng)
