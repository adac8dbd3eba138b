"""How weights and vectors of a program are made of tensors: mostly as these are.

csrc/ops/made_of_constants.h makes them in calls, with gradients, and :meth:`Recipes.made` where
that is not to be relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ZEROS = -1


class Side(NamedTuple):
    """Some columns of a weight, or some numbers of a vector: rows of a tensor, or some of its
    numbers."""

    tensor: int
    """Its number, or ``ZEROS``."""
    member: int
    """Of a stack of matrices, or -1."""
    is_transposed: bool
    """Whether it is the tensor's transpose that has these rows, of a weight."""
    first: int
    """Of the rows or numbers."""
    columns: int


Terms = list[list[Side]]
"""A sum of terms, each of which consists of sides. A weight has one term."""


class Recipes(NamedTuple):
    """Those of a program."""

    rows: list[int]
    """Of each weight."""
    weights: list[Terms]
    vectors: list[Terms]

    @staticmethod
    def of_json(stored: list[Any]) -> Recipes:
        """From a list of lists."""
        rows, weights, vectors = stored
        read = [
            [[[Side(*side) for side in sides] for sides in terms] for terms in every]
            for every in (weights, vectors)
        ]
        return Recipes(rows, *read)

    def made(self, tensors: Sequence[Tensor], like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, (terms, columns) each, and vectors, (width,) each, by torch.

        Args:
            like: Of their dtype and device.
        """
        weights = [
            _side_by_side(
                [_rows(tensors[side.tensor].to(like.dtype), side, rows) for side in sides]
            )
            for rows, (sides,) in zip(self.rows, self.weights, strict=True)
        ]
        return weights, [_sum(terms, tensors, like) for terms in self.vectors]


def _rows(tensor: Tensor, side: Side, rows: int) -> Tensor:
    matrix = tensor if side.member < 0 else tensor[side.member]
    return (matrix.t() if side.is_transposed else matrix).narrow(0, side.first, rows)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    # In the way in which torch's linear layers have their weights.
    return parts[0] if len(parts) == 1 else torch.cat([part.t() for part in parts]).t()


def _sum(terms: Terms, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    def numbers(side: Side) -> Tensor:
        if side.tensor == ZEROS:
            return like.new_zeros(side.columns)
        flat = tensors[side.tensor].reshape(-1)
        return flat.narrow(0, side.first, side.columns).to(like.dtype)

    total: Tensor | None = None
    for sides in terms:
        term = torch.cat([numbers(side) for side in sides])
        total = term if total is None else total + term
    assert total is not None
    return total
