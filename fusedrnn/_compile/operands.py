"""Weights, vectors and inputs of a program, by what they are made of."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx


class Part(NamedTuple):
    """Some columns of a product's weight; as expressions.Part."""

    weight: fx.Node
    member: int | None
    """Of a stack of weights."""
    is_transposed: bool
    first: int
    columns: int
    bias: fx.Node | None


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


class Table(NamedTuple):
    """An input that consists of rows of a table of weights."""

    table: fx.Node
    input: int
    padding: int
    """Of the row that gets no gradient; negative if all do."""
