"""The expressions that a step consists of, column by column.

An expression has ``width`` columns. Its leaves are columns of inputs, carries, products, drawn
numbers, vectors of weights, and results of reductions. Equal expressions are one object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(eq=False)
class Expression:
    kind: str
    """"op", "constant", or a leaf: "input", "carry", "array", "draw", "vector", "value",
    "reduced"."""
    at: tuple[Any, ...]
    """Of a leaf: what it reads, and from which column on. Of a constant its number."""
    target: Any
    """Of an operation: an overload of ATen."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    width: int
    group: int
    """Of a leaf: each number is read by as many neighbouring columns; 0 for one each."""
    level: int
    """How many products and reductions come one after the other before it."""
    number: float
    """In the order in which expressions are made: operands come first."""
    is_mask: bool = False
    node: fx.Node | None = None
    """For errors."""

    @property
    def operands(self) -> list[Expression]:
        return [a for a in self.args if isinstance(a, Expression)]

    @property
    def packet(self) -> Any:
        return getattr(self.target, "overloadpacket", self.target)

    def become(self, other: Expression) -> None:
        """This expression is read as another one from now on."""
        self.kind, self.at, self.target = other.kind, other.at, other.target
        self.args, self.kwargs, self.group = other.args, other.kwargs, other.group


@dataclass(eq=False)
class ProductSum:
    """Where products add up."""

    columns: int
    products: list[PlannedProduct] = field(default_factory=list)


class WeightBlock(NamedTuple):
    """Some columns of a product's weight: some rows of a matrix of weights."""

    weight: fx.Node
    member: int | None
    """Of a stack of weights."""
    is_transposed: bool
    first: int
    columns: int
    bias: fx.Node | None
    offset: int
    """Of its first column in the product."""


@dataclass(eq=False)
class PlannedProduct:
    """One operand times some weights, side by side."""

    operand: Expression
    terms: int
    array: ProductSum
    parts: list[WeightBlock] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return sum(part.columns for part in self.parts)

    @property
    def level(self) -> int:
        return self.operand.level + (0 if self.operand.kind == "input" else 1)


@dataclass(eq=False)
class Reduction:
    """One number of each group of columns: "sum", "max" or "argmax"."""

    kind: str
    source: Expression
    group: int


def below(e: Expression) -> list[Expression]:
    """What an expression is made of, also by products and reductions."""
    if e.kind == "array":
        return [product.operand for product in e.at[0].products]
    if e.kind == "reduced":
        return [e.at[0].source]
    if e.kind == "value":
        return [e.at[0]]
    return e.operands


def within(e: Expression) -> list[Expression]:
    """The operations that an expression consists of, without those of other stages."""
    found: dict[int, Expression] = {}
    left = [e]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left += one.operands
    return list(found.values())


class Expressions:
    """Makes expressions, each once."""

    def __init__(self) -> None:
        self._known: dict[Any, Expression] = {}
        self.products: dict[Any, PlannedProduct] = {}
        self.reductions: dict[Any, Reduction] = {}
        self.ties: set[int] = set()
        """Comparisons, by id, of which either result is right."""

    def __iter__(self) -> Iterator[Expression]:
        return iter(self._known.values())

    def make(
        self,
        kind: str,
        *,
        width: int,
        at: tuple[Any, ...] = (),
        target: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: tuple[tuple[str, Any], ...] = (),
        group: int = 0,
        level: int | None = None,
        is_mask: bool = False,
        node: fx.Node | None = None,
    ) -> Expression:
        key = (kind, at, target, tuple(map(_key, args)), kwargs, width, group)
        found = self._known.get(key)
        if found is None:
            if level is None:
                operands = [a for a in args if isinstance(a, Expression)]
                level = max((a.level for a in operands), default=0)
            found = self._known[key] = Expression(
                kind, at, target, args, kwargs, width, group, level, len(self._known), is_mask, node
            )
        return found

    def constant(self, number: float | bool, width: int) -> Expression:
        return self.make(
            "constant",
            at=(type(number).__name__, repr(number), number),
            width=width,
            is_mask=isinstance(number, bool),
        )

    def operation(
        self,
        target: Any,
        *args: Any,
        width: int,
        kwargs: tuple[tuple[str, Any], ...] = (),
        is_mask: bool = False,
        node: fx.Node | None = None,
    ) -> Expression:
        return self.make(
            "op", target=target, args=args, kwargs=kwargs, width=width, is_mask=is_mask, node=node
        )

    def product(self, operand: Expression) -> PlannedProduct:
        key = id(operand)
        if key not in self.products:
            self.products[key] = PlannedProduct(operand, operand.width, ProductSum(0))
        return self.products[key]

    def of_array(self, product: PlannedProduct, first: int, width: int) -> Expression:
        return self.make("array", at=(product.array, first), width=width, level=product.level)

    def reduced(self, kind: str, source: Expression, group: int) -> Expression:
        """The numbers of all groups of an expression's columns."""
        key = (kind, id(source), group)
        if key not in self.reductions:
            self.reductions[key] = Reduction(kind, source, group)
        return self.make(
            "reduced",
            at=(self.reductions[key], 0),
            width=source.width // group,
            level=source.level + 1,
        )

    def lift(self, e: Expression, group: int) -> Expression:
        """Each column of an expression for ``group`` neighbouring columns."""
        if group == 1:
            return e
        width = e.width * group
        if e.kind == "constant":
            return self.constant(e.at[2], width)
        if e.kind == "vector":
            node, places = e.at
            many = tuple(place for place in places for _ in range(group))
            return self.make("vector", at=(node, many), width=width, level=0)
        if e.kind == "draw":  # an earlier stage draws it, each number for a group of columns
            copy = self.operation(aten.clone.default, e, width=e.width)
            return self.make("value", at=(copy, 0), width=width, group=group, level=copy.level + 1)
        if e.kind == "op":
            args = tuple(self.lift(a, group) if isinstance(a, Expression) else a for a in e.args)
            return self.operation(
                e.target, *args, width=width, kwargs=e.kwargs, is_mask=e.is_mask, node=e.node
            )
        return self.make(e.kind, at=e.at, width=width, group=max(e.group, 1) * group, level=e.level)


def _key(arg: Any) -> Any:
    return id(arg) if isinstance(arg, Expression) else (type(arg).__name__, repr(arg))
