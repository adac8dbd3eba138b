"""Draws that torch refuses are refused where fusedrnn gives the numbers, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedrnn

T, B, H = 6, 3, 4
X = torch.randn(T, B, H)
START = torch.zeros(B, H)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: torch.multinomial(torch.ones(B, H), 0), "at least 1 and at most 4, got 0"),
        (lambda: torch.ones(H).multinomial(H + 1), "at least 1 and at most 4, got 5"),
        (lambda: torch.multinomial(torch.ones(B, H), -1, True), "any number, got -1"),
        (lambda: torch.multinomial(torch.ones(B, H).long(), 1), "floats, got torch.int64"),
        (lambda: torch.multinomial(torch.ones(B, H, 2), 1), r"1 or 2 dim.*\(3, 4, 2\)"),
        (lambda: torch.multinomial(torch.ones(()), 1), r"1 or 2 dimensions, got shape \(\)"),
        (lambda: torch.bernoulli(torch.ones(B, H).long()), "floats, got torch.int64"),
        (lambda: torch.ones(B, H).bool().bernoulli(), "floats, got torch.bool"),
        (lambda: torch.empty(B, H).bernoulli_(torch.ones(B, H).int()), "floats, got torch.int32"),
    ],
)
def test_draws_that_torch_refuses(draw: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(RuntimeError):
        draw()
    with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}"):
        fusedrnn.scan(lambda h, x: (h + x, draw()), START, X)


def test_probabilities_of_other_types() -> None:
    """A number may fill tensors of any dtype, as in torch."""
    _, ones = fusedrnn.scan(
        lambda h, x: (h, torch.bernoulli(torch.zeros(B, H).long(), 1.0)), START, X
    )
    assert ones.dtype == torch.int64
    assert ones.all()
