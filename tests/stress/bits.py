"""Comparisons of results by bits, or up to rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from cases import relative_errors
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Relative to the norm, between different orders of summation.
ROUNDING = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, also of NaN and of the sign of zero."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = _INTEGERS[a.itemsize]
    a, b = (t.detach().contiguous().view(integers) for t in (a, b))
    return torch.equal(a, b)


def changed(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of results whose bits differ, or that are missing on one side."""
    different = results.keys() ^ expected.keys()
    both = results.keys() & expected.keys()
    return sorted(different | {n for n in both if not same_bits(results[n], expected[n])})


def beyond_rounding(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of results whose errors are larger than rounding explains."""
    errors = relative_errors(dict(results), {n: t.double() for n, t in expected.items()})
    return sorted(n for n, e in errors.items() if not e <= ROUNDING[expected[n].dtype])


def copied(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors in memory of their own."""
    return {name: tensor.detach().clone() for name, tensor in results.items()}


def denormals_are_kept() -> bool:
    """Has this thread and its pool keep denormals, torch's default; the operators flush them."""
    return bool((torch.full((200_000,), 1e-40) * 1.0 != 0).all())
