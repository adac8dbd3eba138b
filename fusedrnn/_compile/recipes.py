"""How weights and vectors of a program are made of a step's constants: mostly as these are.

Then neither they nor gradients of the constants need a graph of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Some columns of a weight, or some numbers of a vector: rows of a constant."""

    constant: int
    """Its number; negative for zeros."""
    is_transposed: bool
    """Whether it is the constant's transpose that has these rows, of a weight."""
    first: int
    """Of the rows."""
    columns: int


class Joined(NamedTuple):
    """A weight whose columns are those of constants, one after the other."""

    sides: list[Side]


class Sum(NamedTuple):
    """A vector that is a sum, of whose terms each consists of constants."""

    terms: list[list[Side]]


class Cut(NamedTuple):
    """A vector that is one of the parts that a constant consists of."""

    constant: int
    widths: tuple[int, ...]
    number: int


class Fixed(NamedTuple):
    """A vector that has no constant in it."""

    number: int


Recipe = Joined | Sum | Cut | Fixed
"""How most weights and vectors are made of constants, and gradients of these from theirs."""


class Recipes:
    """Those of a program, where all of its weights and vectors have one."""

    def __init__(
        self,
        terms: Sequence[int],
        recipes: Sequence[Recipe],
        fixed: Callable[[int, Tensor], Tensor],
    ) -> None:
        """
        Args:
            terms: Of each weight.
            recipes: Of weights, then of vectors.
            fixed: Gives a vector that has no constant in it, like a tensor.
        """
        self._terms, self._recipes, self._fixed = terms, recipes, fixed

    @staticmethod
    def of(
        weights: Sequence[Weight],
        vectors: Sequence[Bias | Columns],
        places: dict[fx.Node, int],
        fixed: Callable[[int, Tensor], Tensor],
    ) -> Recipes | None:
        """
        Args:
            places: The constants' numbers.
        """
        cuts = cuts_of(vectors)
        found = [_of_weight(weight, places) for weight in weights]
        found += [_of_vector(i, v, weights, places, cuts) for i, v in enumerate(vectors)]
        parts = [recipe for recipe in found if isinstance(recipe, Cut)]
        are_all_others = len({(part.constant, part.number) for part in parts}) == len(parts)
        known = [recipe for recipe in found if recipe is not None]
        if len(known) < len(found) or not are_all_others:
            return None
        return Recipes([weight.terms for weight in weights], known, fixed)

    def fit(self, constants: Sequence[Tensor]) -> bool:
        """Whether recipes are right for the shapes of constants."""
        for terms, recipe in zip(self._terms, self._recipes, strict=False):
            assert isinstance(recipe, Joined)
            for i, is_transposed, first, columns in recipe.sides:
                shape = tuple(constants[i].shape)[:: -1 if is_transposed else 1]
                if len(shape) != 2 or shape[1] != columns or shape[0] < first + terms:
                    return False
        for recipe in self._recipes[len(self._terms) :]:
            if isinstance(recipe, Cut):
                if tuple(constants[recipe.constant].shape) != (sum(recipe.widths),):
                    return False
            elif isinstance(recipe, Sum):
                sides = [side for term in recipe.terms for side in term if side.constant >= 0]
                if any(tuple(constants[i].shape) != (columns,) for i, _, _, columns in sides):
                    return False
        return True

    def made(self, constants: Sequence[Tensor], like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, (terms, columns) each, and vectors."""
        dtype = like.dtype
        constants = [c if c.dtype == dtype else c.to(dtype) for c in constants]
        made: list[Tensor] = []
        cuts: dict[int, Sequence[Tensor]] = {}
        for recipe in self._recipes:
            if isinstance(recipe, Joined):
                terms = self._terms[len(made)]
                sides = [constants[i].t() if t else constants[i] for i, t, _, _ in recipe.sides]
                for n, side in enumerate(sides):
                    if side.shape[0] != terms:
                        sides[n] = side.narrow(0, recipe.sides[n].first, terms)
                # Side by side in the way in which torch's linear layers have their weights.
                several = len(sides) > 1
                made.append(torch.cat([s.t() for s in sides]).t() if several else sides[0])
            elif isinstance(recipe, Sum):
                total: Tensor | None = None
                for term in recipe.terms:
                    sides = [
                        constants[i] if i >= 0 else like.new_zeros(columns)
                        for i, _, _, columns in term
                    ]
                    one = sides[0] if len(sides) == 1 else torch.cat(sides)
                    total = one if total is None else total + one
                assert total is not None
                made.append(total)
            elif isinstance(recipe, Cut):
                parts = cuts.get(recipe.constant)
                if parts is None:
                    parts = cuts[recipe.constant] = constants[recipe.constant].split(recipe.widths)
                made.append(parts[recipe.number])
            else:
                made.append(self._fixed(recipe.number, like))
        count = len(self._terms)
        return made[:count], made[count:]

    def memory(
        self, made: Sequence[Tensor], needs: Sequence[bool], sums: torch.dtype
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """For the gradients of weights and vectors; that of a weight lies as the weight does.

        And for those of constants that vectors are parts of, by their numbers, in one.

        Args:
            made: The weights and vectors.
            needs: Which constants need a gradient.
            sums: In which dtype gradients are added up.
        """
        found: list[Tensor] = []
        whole: dict[int, Tensor] = {}
        cuts: dict[int, Sequence[Tensor]] = {}
        for recipe, tensor in zip(self._recipes, made, strict=True):
            if not any([needs[i] for i in _constants_of(recipe)]):
                found.append(tensor.new_empty(0, dtype=sums))
            elif isinstance(recipe, Cut):
                if recipe.constant not in cuts:
                    memory = tensor.new_empty(sum(recipe.widths), dtype=sums)
                    whole[recipe.constant] = memory
                    cuts[recipe.constant] = memory.split(recipe.widths)
                found.append(cuts[recipe.constant][recipe.number])
            elif isinstance(recipe, Joined):
                terms, columns = tensor.shape
                found.append(tensor.new_empty((columns, terms), dtype=sums).t())
            else:
                found.append(tensor.new_empty(tensor.shape, dtype=sums))
        return found, whole

    def through(
        self,
        gradients: Sequence[Tensor],
        whole: dict[int, Tensor],
        needs: Sequence[bool],
        constants: Sequence[Tensor],
    ) -> dict[int, Tensor]:
        """Of constants, by their numbers, from those of weights and vectors.

        Args:
            gradients, whole: In memory that :meth:`memory` has given.
        """
        found: dict[int, list[_Piece]] = {}
        for recipe, gradient in zip(self._recipes, gradients, strict=True):
            if isinstance(recipe, Joined):
                terms, gradient = [recipe.sides], gradient.t()
            elif isinstance(recipe, Sum):
                terms = recipe.terms
            else:
                continue
            for sides in terms:
                place = 0
                for i, is_transposed, first, columns in sides:
                    if i >= 0 and needs[i]:
                        own = gradient if len(sides) == 1 else gradient.narrow(0, place, columns)
                        piece = _Piece(0, 0, own)
                        if own.dim() == 2:
                            piece = _Piece(1, first, own)
                            if not is_transposed:
                                piece = _Piece(0, first, own.t())
                        found.setdefault(i, []).append(piece)
                    place += columns
        totals = dict(whole)
        for i, pieces in found.items():
            total = _put_together(pieces, constants[i].shape)
            totals[i] = totals[i] + total if i in totals else total
        return totals


def _of_weight(weight: Weight, places: dict[fx.Node, int]) -> Recipe | None:
    sides = []
    for part in weight.parts:
        node, is_transposed = part.weight, part.is_transposed
        while _is_transpose(node):
            (node,) = node.all_input_nodes
            is_transposed = not is_transposed
        if part.member is not None or node not in places:
            return None
        sides.append(Side(places[node], is_transposed, part.first, part.columns))
    return Joined(sides)


def _of_vector(
    number: int,
    vector: Bias | Columns,
    weights: Sequence[Weight],
    places: dict[fx.Node, int],
    cuts: dict[fx.Node, dict[int, int]],
) -> Recipe | None:
    if isinstance(vector, Columns):
        if vector.source.op == "get_attr":
            return Fixed(number)
        widths = cuts.get(vector.source)
        if vector.step != 1 or vector.source not in places or not widths:
            return None
        number = list(widths).index(vector.first)
        return Cut(places[vector.source], tuple(widths.values()), number)
    terms = []
    for i in vector.products:
        sides = []
        for part in weights[i].parts:
            if part.bias is None:
                sides.append(Side(-1, False, 0, part.columns))
            elif part.bias in places:
                sides.append(Side(places[part.bias], False, 0, part.columns))
            else:
                return None
        terms.append(sides)
    return Sum(terms)


def _constants_of(recipe: Recipe) -> list[int]:
    if isinstance(recipe, Cut):
        return [recipe.constant]
    if isinstance(recipe, Fixed):
        return []
    terms = [recipe.sides] if isinstance(recipe, Joined) else recipe.terms
    return [side.constant for term in terms for side in term if side.constant >= 0]


class _Piece(NamedTuple):
    """A part of a constant's gradient: from a place in one dimension on, and all of others."""

    dim: int
    first: int
    gradient: Tensor


def _put_together(pieces: Sequence[_Piece], shape: torch.Size) -> Tensor:
    if len(pieces) == 1 and pieces[0].gradient.shape == shape:
        return pieces[0].gradient
    pieces = sorted(pieces, key=lambda piece: piece.first)
    dim, end = pieces[0].dim, 0
    for piece in pieces:
        if piece.dim != dim or piece.first != end:
            break
        end += piece.gradient.shape[dim]
    else:
        if end == shape[dim]:
            return torch.cat([piece.gradient for piece in pieces], dim)
    total = pieces[0].gradient.new_zeros(shape)
    for piece in pieces:
        size = piece.gradient.shape[piece.dim]
        total.narrow(piece.dim, piece.first, size).add_(piece.gradient)
    return total


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
