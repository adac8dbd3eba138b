"""Cumulative sums and products, and products, made of operations that programs know."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._front.flat_step import joined, kept, rounded, stop
from .._front.refusals import CannotCompile
from .._step.user_lines import line
from .columns import MOST_PIECES

_AT_ONCE = 8
"""Numbers that one stage adds up or multiplies."""
_LARGEST = torch.finfo(torch.float32).max
_MOST = MOST_PIECES - 1
"""Of results that are columns apart."""


def cumsum(x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    """Of the last dimension as a product by ones, whose result is one piece of columns."""
    dim = dim % max(x.dim(), 1)
    if dim == 0 or not x.is_floating_point() or dtype not in (None, x.dtype):
        return NotImplemented
    count = x.shape[dim]
    if dim < x.dim() - 1 and count <= _MOST:
        return _running(operator.add, x, dim)
    x = x.transpose(dim, -1)
    ones = torch.ones(count, count, dtype=x.dtype, device=x.device).triu()
    if x.dtype == torch.float32:
        high = _high_part(x)
        return (high @ ones + kept((x - high) @ ones)).transpose(dim, -1)
    return (x @ ones).transpose(dim, -1)


def _high_part(x: Tensor) -> Tensor:
    """A number near each one, so that any sums of a row of these are exact in float32.

    They are multiples of one number that is so large that a sum of all has no more than 24 bits.
    What is left of each, which has its derivative, is so small that roundings of its sums do not
    count.
    """
    scale = 2.0 ** -math.ceil(math.log2(8 * x.shape[-1]))  # or else large numbers would overflow
    unit = stop(x.abs().amax(-1, keepdim=True)) * (4 * x.shape[-1] * scale)
    high: Tensor = stop(((x * scale + unit) - unit) / scale)
    return high


def cumprod(x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    """Without a quotient, so its derivative is right where numbers are 0."""
    dim = dim % max(x.dim(), 1)
    if dim == 0 or not x.is_floating_point() or dtype not in (None, x.dtype):
        return NotImplemented
    if x.shape[dim] > _MOST:
        raise CannotCompile(
            f"aten.cumprod is of {x.shape[dim]} numbers{line()}; one of up to {_MOST}, or "
            "torch.exp(torch.cumsum(logarithms, dim)), compiles"
        )
    return _running(operator.mul, x, dim)


def _running(operation: Callable[[Tensor, Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """One number after the other; in float32 as torch does it on a CPU, which is in float64."""
    is_float = x.dtype == torch.float32
    first, *rest = x.split(1, dim)
    found, last = [first], first
    for i, one in enumerate(rest, 1):
        last = operation(last, one)
        found.append(rounded(last) if is_float else last)
        if i % _AT_ONCE == _AT_ONCE - 1:
            whole, last = last, kept(found[-1])
            if is_float:
                # Of an infinite number nothing is lost: inf - inf would be NaN.
                lost = whole - stop(found[-1].clamp(-_LARGEST, _LARGEST))
                last = joined(last, kept(lost))
    return torch.cat(found, dim)


def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """In halves, and without a quotient, so its derivative is right where numbers are 0."""
    if dim is None or not x.is_floating_point() or dtype not in (None, x.dtype):
        return NotImplemented
    dim = dim % max(x.dim(), 1)
    if dim == 0:
        return NotImplemented
    if not x.shape[dim]:
        return torch.ones_like(x.sum(dim, keepdim=keepdim))
    rest = list[Tensor]()
    while x.shape[dim] >= _AT_ONCE:
        size = x.shape[dim] // _AT_ONCE
        *parts, left = x.split([size] * _AT_ONCE + [x.shape[dim] - size * _AT_ONCE], dim)
        rest += left.split(1, dim)[: left.shape[dim]]
        x = kept(_product(parts))
    found = _product([*x.split(1, dim), *rest])
    return found if keepdim else found.squeeze(dim)


def _product(parts: Sequence[Tensor]) -> Tensor:
    while len(parts) > 1:
        pairs = [a * b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]
