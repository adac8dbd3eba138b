"""How weights and vectors of a program are made of a step's constants: mostly as these are.

Then csrc/ops/made_of_constants.h makes them, and neither they nor gradients of the constants need a
graph of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from .expressions import Part


class Weight(NamedTuple):
    """The weight of a product: parts side by side."""

    terms: int
    parts: list[Part]


class Bias(NamedTuple):
    """A vector that is the sum of biases of products."""

    products: list[int]


class Columns(NamedTuple):
    """A vector of numbers of a tensor, which is read as if it had one dimension."""

    source: fx.Node
    first: int
    width: int
    step: int
    """0 or 1, or -1 if the numbers are at ``places``."""
    places: list[int]


class Side(NamedTuple):
    """Some columns of a weight, or some numbers of a vector: rows of a constant, or some of its
    numbers."""

    constant: int
    """Its number; -1 for zeros."""
    member: int
    """Of a stack of matrices, or -1."""
    is_transposed: bool
    """Whether it is the constant's transpose that has these rows, of a weight."""
    first: int
    """Of the rows or numbers."""
    columns: int


Terms = list[list[Side]]
"""A sum of terms, each of which consists of sides. A weight has one term."""


class Recipes(NamedTuple):
    """Those of a program, where all of its weights and vectors have one."""

    rows: list[int]
    """Of each weight."""
    weights: list[Terms]
    vectors: list[Terms]
    fixed: list[int]
    """Vectors that have no constant in them: a call gives these behind its constants, and their
    sides have numbers that are counted back from -2, which is the last one."""

    @staticmethod
    def of(
        weights: Sequence[Weight],
        vectors: Sequence[Bias | Columns],
        places: dict[fx.Node, int],
    ) -> Recipes | None:
        """
        Args:
            places: The constants' numbers.
        """
        fixed = [
            i
            for i, vector in enumerate(vectors)
            if isinstance(vector, Columns) and vector.source.op == "get_attr"
        ]
        made = [_of_weight(weight, places) for weight in weights]
        for i, vector in enumerate(vectors):
            if isinstance(vector, Bias):
                made.append(_of_bias(vector, weights, places))
            elif i in fixed:
                made.append([[Side(fixed.index(i) - len(fixed) - 1, -1, False, 0, vector.width)]])
            elif vector.step == 1 and vector.source in places:
                made.append([[Side(places[vector.source], -1, False, vector.first, vector.width)]])
            else:
                return None
        known = [terms for terms in made if terms is not None]
        if len(known) < len(made):
            return None
        count = len(weights)
        return Recipes([w.terms for w in weights], known[:count], known[count:], fixed)

    def fit(self, constants: Sequence[Tensor]) -> bool:
        """Whether recipes are right for the shapes of constants."""
        for rows, terms in zip(self.rows, self.weights, strict=True):
            for i, member, is_transposed, first, columns in terms[0]:
                shape = tuple(constants[i].shape)
                if member >= 0:
                    if len(shape) != 3 or member >= shape[0]:
                        return False
                    shape = shape[1:]
                shape = shape[:: -1 if is_transposed else 1]
                if len(shape) != 2 or shape[1] != columns or shape[0] < first + rows:
                    return False
        return all(
            constants[i].dim() > 0 and constants[i].numel() >= first + columns
            for terms in self.vectors
            for sides in terms
            for i, _, _, first, columns in sides
            if i >= 0
        )


def _of_weight(weight: Weight, places: dict[fx.Node, int]) -> Terms | None:
    sides = []
    for part in weight.parts:
        node, is_transposed = part.weight, part.is_transposed
        while _is_transpose(node):
            (node,) = node.all_input_nodes
            is_transposed = not is_transposed
        if node not in places:
            return None
        member = -1 if part.member is None else part.member
        sides.append(Side(places[node], member, is_transposed, part.first, part.columns))
    return [sides]


def _of_bias(vector: Bias, weights: Sequence[Weight], places: dict[fx.Node, int]) -> Terms | None:
    terms = []
    for i in vector.products:
        parts = weights[i].parts
        if any(part.bias is not None and part.bias not in places for part in parts):
            return None
        numbers = [-1 if part.bias is None else places[part.bias] for part in parts]
        terms.append(
            [Side(n, -1, False, 0, part.columns) for n, part in zip(numbers, parts, strict=True)]
        )
    return terms


def _is_transpose(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.permute.default:
        return list(node.args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2])  # type: ignore[arg-type]
    return node.target is torch.ops.aten.t.default


def cuts_of(vectors: Sequence[Bias | Columns]) -> dict[fx.Node, dict[int, int]]:
    """Of each tensor that vectors are parts of: where these begin, and how wide they are.

    Nothing where they are not side by side from the first number on.
    """
    parts: dict[fx.Node, set[tuple[int, int]]] = {}
    for vector in vectors:
        if isinstance(vector, Columns) and vector.step == 1:
            parts.setdefault(vector.source, set()).add((vector.first, vector.width))
    found: dict[fx.Node, dict[int, int]] = {}
    for source, pairs in parts.items():
        end, found[source] = 0, dict(sorted(pairs))
        for first, width in sorted(pairs):
            if first != end:
                found[source] = {}
                break
            end += width
    return found
