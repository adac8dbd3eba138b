"""Codes: from which row and column of which computed value an element comes.

Operations that only move numbers move codes in the same way, so torch itself follows them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._front.flat_step import ROWS
from .._front.refusals import CannotCompile
from .._step.user_lines import line_of

_COLUMN_BITS, _ROW_BITS = 32, ROWS.bit_length()
COLUMN = 1 << _COLUMN_BITS
NODE = COLUMN << _ROW_BITS
"""A code is NODE * node + COLUMN * row + column."""
NO_ROW = ROWS
"""In the place of a row: an element of weights, which all rows read."""

MOST_PIECES = 64
"""Of neighbouring columns that a value may be cut into."""


class Span(NamedTuple):
    """Neighbouring columns that come from one node in a regular order."""

    kind: str
    source: fx.Node
    first: int
    count: int  # type: ignore[assignment]  # tuples have a method of this name
    group: int
    columns: tuple[int, ...] = ()


def spans_of(
    codes: Any, nodes: list[fx.Node], kinds: dict[fx.Node, str], node: fx.Node
) -> list[Span]:
    """Codes of one row as runs: of weights, or of columns one after the other, maybe repeated."""
    found: list[Span] = []
    i, n = 0, len(codes)
    if n and torch.equal(codes, codes[0] + torch.arange(n)):
        first = int(codes[0])
        if kinds[nodes[node_of(first)]] == "row":
            return [Span("columns", nodes[node_of(first)], column_of(first), n, 1)]
    numbers = node_of(codes).tolist()
    while i < n:
        source = nodes[int(numbers[i])]
        end = i + 1
        while end < n and numbers[end] == numbers[i]:
            end += 1
        if kinds[source] != "row":
            columns = tuple(column_of(codes[i:end]).tolist())
            found.append(Span("weights", source, 0, end - i, 1, columns))
            i = end
            continue
        columns_here = column_of(codes[i:end])
        j = 0
        while j < len(columns_here):
            first = int(columns_here[j])
            rest = columns_here[j:] - first
            repeat = _length(rest, torch.zeros_like(rest))
            run = _length(rest, torch.arange(len(rest)))
            group = 1
            length = run
            if repeat > 1:
                grouped = _length(rest, torch.arange(len(rest)) // repeat)
                group, length = repeat, grouped // repeat * repeat
            found.append(Span("columns", source, first, length // group, group))
            j += length
            if len(found) > 4 * MOST_PIECES:
                raise refusal(node, f"needs more than {MOST_PIECES} pieces of columns")
        i = end
    return found


def _length(ones: Any, others: Any) -> int:
    """How many elements two arrays have in common from their start on."""
    differ = (ones != others).nonzero()
    return int(differ[0]) if len(differ) else len(ones)


def node_of(codes: Any) -> Any:
    """Which node of the graph elements come from. ``codes``: a tensor, or one as an int."""
    return codes >> _COLUMN_BITS + _ROW_BITS


def row_of(codes: Any) -> Any:
    return codes >> _COLUMN_BITS & (1 << _ROW_BITS) - 1


def column_of(codes: Any) -> Any:
    return codes & COLUMN - 1


def rows_in_order(shape: Sequence[int]) -> Tensor:
    """The rows of elements of a value whose first dimension is the batch."""
    return torch.arange(ROWS).reshape(ROWS, *(1,) * (len(shape) - 1)).expand(*shape)


def are_in_order(rows: Tensor) -> bool:
    return rows.dim() > 0 and rows.shape[0] == ROWS and rows.equal(rows_in_order(rows.shape))


def filled(rows: Tensor) -> Tensor:
    """Rows of elements, of which some are of weights: those take the rows of their neighbours."""
    if not (rows == NO_ROW).any():
        return rows
    for d in range(rows.dim()):
        if rows.shape[d] % ROWS:
            continue
        shape = [1] * rows.dim()
        shape[d] = rows.shape[d]
        for along in (
            torch.arange(rows.shape[d]) // (rows.shape[d] // ROWS),
            torch.arange(rows.shape[d]) % ROWS,
        ):
            full = along.reshape(shape).expand(rows.shape)
            if ((rows == full) | (rows == NO_ROW)).all():
                return full.clone()
    return rows


def ranks(rows: Tensor) -> Tensor:
    """The number of each element among those of its row."""
    if are_in_order(rows):
        return torch.arange(rows.numel() // ROWS).reshape(rows.shape[1:]).expand(rows.shape)
    flat = rows.reshape(-1)
    found = torch.zeros_like(flat)
    for row in range(ROWS + 1):
        here = flat == row
        found[here] = torch.arange(int(here.sum()))
    return found.reshape(rows.shape)


def packet_of(node: Any) -> Any:
    return (
        getattr(node.target, "overloadpacket", node.target) if isinstance(node, fx.Node) else None
    )


def name_of(node: fx.Node) -> str:
    """What messages call an operation, or a tensor that ``lower()`` has named."""
    if node.op != "call_function":
        return str(node.meta.get("called", node.name))
    source = node.args[0] if node.target is operator.getitem else node
    return str(packet_of(source if isinstance(source, fx.Node) else node))


def place_of(node: fx.Node) -> str:
    """The user's line of an operation, or of the first one that reads a tensor; or nothing."""
    return next(filter(None, map(line_of, (node, *node.users))), "")


def refusal(node: fx.Node, what: str) -> CannotCompile:
    """Says what an operation does that no program can."""
    return CannotCompile(f"{name_of(node)} {what}{place_of(node)}")


def packets(names: str) -> frozenset[Any]:
    """Operators of ATen by name, as far as this version of torch has them."""
    aten = torch.ops.aten
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))
