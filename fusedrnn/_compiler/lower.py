"""From a graph of operations to expressions over columns.

Asked from the results back: what makes columns [a, b) of this value? Operations that only move
numbers (chunk, cat, view, transposes, expand, ...) vanish: torch itself moves the numbers of the
elements instead, so that every element knows from which row and column of which computed value it
comes. What mixes the rows of a batch shows there, too.

Longer than 350 lines, because each kind of operation has two halves, rows and columns, that belong
together.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._front.flat_step import ROWS, draw, kept, stop
from .._front.refusals import CannotCompile
from .._step.sequence_call import Names
from . import operations
from .columns import (
    COLUMN,
    MOST_PIECES,
    NO_ROW,
    NODE,
    are_in_order,
    column_of,
    filled,
    name_of,
    node_of,
    packet_of,
    place_of,
    ranks,
    refusal,
    row_of,
    rows_in_order,
    spans_of,
)
from .expressions import Expression, Expressions, WeightBlock
from .operations import COMPARISONS, FILLED, MOVES, OWN, POINTWISE, REDUCTIONS
from .trace import Traced

aten = torch.ops.aten

_OPTIONS = {"alpha", "approximate"}
"""Of elementwise operations, by keyword."""


def _is_largest(e: Expression) -> bool:
    """Whether an expression is the largest of some numbers, or made of it by simple operations."""
    left, seen = [e], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen or one.is_mask:
            continue
        seen.add(id(one))
        if one.kind == "reduced":
            reduction = one.at[0]
            if reduction.kind == "max":
                return True
            # The first of the largest numbers is the sum of it and of zeros.
            source = reduction.source
            is_picked = source.packet is aten.where and any(
                a.kind == "index" for mask in source.operands for a in mask.operands
            )
            if reduction.kind == "sum" and is_picked:
                return True
        elif one.kind == "value":
            left.append(one.at[0])
        elif one.kind == "op" and not operations.of(one.target).costly:
            left += one.operands
    return False


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size:
    """As torch.broadcast_shapes, which imports torch's compiler."""
    numbers = torch.empty(())
    return torch.broadcast_tensors(*(numbers.expand(shape) for shape in shapes))[0].shape


def _name_arguments(what: str, nodes: Sequence[fx.Node], names: Sequence[str]) -> None:
    """Gives nodes of arguments the names that messages have."""
    for i, node in enumerate(nodes):
        number = f"{what} {i}" if len(nodes) > 1 else f"the {what}"
        node.meta["called"] = names[i] if i < len(names) else number


def _check_columns(node: fx.Node, codes: Tensor) -> None:
    if not codes.numel():
        raise refusal(node, "gets no columns")


class Lookup(NamedTuple):
    """Rows of a table of weights, which become an input of the program."""

    node: fx.Node
    table: fx.Node
    input: int
    """Which input has the numbers of the rows."""
    padding: int
    """Of the row that gets no gradient; negative if all do."""


class _Products(NamedTuple):
    """What a product of matrices reads."""

    weight: fx.Node
    is_transposed: bool
    stacks: list[int | None]
    """Of each row of the operand, which of a stack of weights it is multiplied by."""
    operands: Any
    """The codes of each row of the operand."""
    columns: int
    bias: Any
    """A node, or None."""


def lower(traced: Traced, names: Names | None = None) -> Lowered:
    """The expressions of a step's graph.

    Args:
        names: What messages call inputs and states; None for their numbers.

    Raises:
        CannotCompile: An operation is none that programs know.
    """
    _name_arguments("input", traced.inputs, [] if names is None else names.input)
    _name_arguments("state", traced.carries, [] if names is None else names.state)
    lowered = Lowered(traced)
    lowered._classify()
    lowered._make_expressions()
    return lowered


class Lowered:
    """The expressions of a step."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.draws = traced, traced.draws
        self._nodes = {node: i for i, node in enumerate(traced.module.graph.nodes)}
        self._list = list(self._nodes)
        self.kinds: dict[fx.Node, str] = {}
        """"number" for what depends on nothing, "weight", or "row" for what rows have."""
        self.lookups: list[Lookup] = []
        """They come behind the inputs of the step."""
        self._codes: dict[fx.Node, Any] = {}
        self._reads: dict[fx.Node, Any] = {}
        self.expressions = Expressions()
        self._found: dict[tuple[fx.Node, int, int], list[Expression]] = {}
        self.new_carries: list[list[Expression]] = []
        self.outputs: list[list[Expression]] = []

    def _make_expressions(self) -> None:
        self.expressions, self._found = Expressions(), {}
        self.new_carries = self._results(self.traced.new_carries, "state")
        self.outputs = self._results(self.traced.outputs, "output")
        self._refuse_equal_by_making()

    def again(self) -> Lowered:
        """The same with expressions of its own, which a plan or others may change."""
        made = copy.copy(self)
        made._make_expressions()
        return made

    # What depends on what

    def _classify(self) -> None:
        traced = self.traced
        for node in self._list:
            if node.op == "placeholder":
                self.kinds[node] = "weight" if node in traced.constants else "row"
            elif node.op == "get_attr":
                self.kinds[node] = "number"
            elif node.op == "call_function":
                if packet_of(node) is draw:
                    self.kinds[node] = "row"
                    continue
                tags = getattr(node.target, "tags", ())
                if torch.Tag.nondeterministic_seeded in tags:
                    raise refusal(node, "draws random numbers that backward cannot draw again")
                if packet_of(node) in FILLED:  # of an input they read only the shape
                    self.kinds[node] = "number"
                    continue
                kinds = {self.kinds[one] for one in node.all_input_nodes}
                self.kinds[node] = max(
                    kinds, key=("number", "weight", "row").index, default="number"
                )

    def _refuse_equal_by_making(self) -> None:
        """Refuses comparisons to a largest number, which is equal to one of those it is of: their
        roundings in backward, and in 16 bits in forward too, may be others."""
        for e in self.expressions:
            is_tie = id(e) in self.expressions.ties
            if is_tie or e.kind != "op" or e.packet not in COMPARISONS:
                continue
            if any(map(_is_largest, e.operands)):
                where = place_of(e.node) if e.node is not None else ""
                raise CannotCompile(f"the step compares a maximum to the numbers it is from{where}")

    def value(self, node: fx.Node) -> Any:
        return self.traced.values[node]

    # Elements

    def codes(self, node: fx.Node) -> Any:
        """Where each element of a node comes from, in the node's shape; lists for lists."""
        if node not in self._codes:
            is_move = node.op == "call_function" and (
                packet_of(node) in MOVES
                or (node.target is operator.getitem and packet_of(node.args[0]) in MOVES)
            )
            self._codes[node] = self._moved(node) if is_move else self._own(node)
        return self._codes[node]

    def _moved(self, node: fx.Node) -> Any:
        def codes(arg: Any, is_index: bool = False) -> Any:
            if isinstance(arg, fx.Node):
                if not is_index:
                    return self.codes(arg)
                if self.kinds[arg] != "number":  # an index that may be another one later
                    raise refusal(node, "uses an index that the step computes")
                return self.value(arg)
            if isinstance(arg, list | tuple) and not isinstance(arg, torch.Size):
                return type(arg)(codes(one, is_index) for one in arg)
            return arg

        indices = {aten.index: (1,), aten.index_put: (1,), aten.index_select: (2,)}
        places = indices.get(packet_of(node), ())
        args = [codes(arg, i in places) for i, arg in enumerate(node.args)]
        kwargs = {name: arg for name, arg in node.kwargs.items() if name != "memory_format"}
        try:
            if packet_of(node) in (aten.view, aten._unsafe_view):  # the codes have other strides
                return args[0].reshape(args[1])
            if packet_of(node) is aten.copy:
                if self.value(node).dtype != self.value(node.args[1]).dtype:  # type: ignore[arg-type]
                    raise refusal(node, "converts to another dtype")
                return args[1].expand(args[0].shape)
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except CannotCompile:
            raise
        except Exception as error:
            raise refusal(node, "cannot be followed") from error

    def _own(self, node: fx.Node) -> Any:
        value = self.value(node)
        if not isinstance(value, Tensor):
            raise refusal(node, "returns no tensor")
        base = self._nodes[node] * NODE
        if self.kinds[node] != "row":
            return (base + NO_ROW * COLUMN + torch.arange(value.numel())).reshape(value.shape)
        rows = self._rows(node, value)
        return base + rows * COLUMN + ranks(rows)

    def _rows(self, node: fx.Node, value: Tensor) -> Tensor:
        """To which row of the batch each element of a computed node belongs."""
        if packet_of(node) is draw:  # maybe several rows for each row of the batch
            numbers = torch.arange(value.numel()).reshape(value.shape)
            return numbers // (value.numel() // ROWS)
        if node.op == "placeholder":
            if not value.dim() or value.shape[0] != ROWS:
                raise refusal(node, "does not have the batch as its first dimension")
            return rows_in_order(value.shape).clone()
        if value.is_complex() or value.is_sparse or value.is_nested:
            raise refusal(node, f"makes a tensor of {value.dtype}")
        packet = packet_of(node)
        if packet in POINTWISE or packet in OWN or packet in (aten.detach, aten._to_copy):
            return self._pointwise(node, value)
        if node.target is operator.getitem:
            return self._reduction(node.args[0], value, node.args[1])  # type: ignore[arg-type]
        if packet in REDUCTIONS:
            return self._reduction(node, value, 0)
        if packet in (aten.mm, aten.addmm, aten.bmm):
            return self._product(node, value)
        if packet is aten.embedding:
            return self._lookup(node, value)
        raise refusal(
            node,
            "is neither linear, nor elementwise, nor a reduction over features, "
            "nor a choice of columns",
        )

    # What computed nodes read, as codes of row 0

    def _pointwise(self, node: fx.Node, value: Tensor) -> Tensor:
        for name, option in node.kwargs.items():
            is_known = name in _OPTIONS or packet_of(node) not in POINTWISE
            if not (option is None or is_known):
                raise refusal(node, f"is called with {name}={option!r}")
        shapes = [self.value(arg).shape for arg in node.args if isinstance(arg, fx.Node)]
        if _broadcast(shapes) != value.shape:  # as losses have it that are summed up
            raise refusal(node, "mixes the rows of the batch")
        given = [
            self.codes(arg).expand(value.shape) if isinstance(arg, fx.Node) else arg
            for arg in node.args
        ]
        rows = self._common_rows(node, [g for g in given if isinstance(g, Tensor)])
        self._reads[node] = [
            self._of_first_row(node, rows, g) if isinstance(g, Tensor) else g for g in given
        ]
        return rows

    def _common_rows(self, node: fx.Node, codes: Sequence[Tensor]) -> Tensor:
        """The rows of elements that are made of elements with these codes."""
        known = row_of(codes[0])
        for one in codes[1:]:
            rows = row_of(one)
            if rows.equal(known):
                continue
            clash = (known != NO_ROW) & (rows != NO_ROW) & (known != rows)
            if clash.any():
                raise refusal(node, "mixes the rows of the batch")
            known = torch.where(known == NO_ROW, rows, known)
        return filled(known)

    def _of_first_row(self, node: fx.Node, rows: Tensor, codes: Tensor) -> Any:
        """The codes of row 0 in the order of columns, if all rows read alike.

        ``codes``: of the elements of the node, maybe with further dimensions for what each reads.
        """
        if are_in_order(rows):
            by_row = codes.reshape(ROWS, rows[0].numel(), *codes.shape[rows.dim() :])
            first, found = by_row[0], row_of(by_row[0])
            own = found == 0
            if (own | (found == NO_ROW)).all() and all(
                by_row[row].equal(first + row * COLUMN * own) for row in range(1, ROWS)
            ):
                return first
        flat, rest = rows.reshape(-1), codes.shape[rows.dim() :]
        codes = codes.reshape(-1, *rest)
        first = codes[flat == 0]
        for row in range(1, ROWS):
            other = codes[flat == row]
            if other.shape != first.shape:
                raise refusal(node, "mixes the rows of the batch")
            same = torch.where(row_of(other) == row, other - row * COLUMN, other)
            differs = (same != first) | ((row_of(other) != row) & (row_of(other) != NO_ROW))
            if differs.any() and not self._are_alike(first[differs], other[differs]):
                raise refusal(node, "mixes the rows of the batch")
        return first

    def _are_alike(self, ones: Tensor, others: Tensor) -> bool:
        """Whether different elements of weights are equal numbers, as those of torch.zeros_like."""
        for a, b in zip(ones.reshape(-1).tolist(), others.reshape(-1).tolist(), strict=True):
            node_a, node_b = self._list[node_of(a)], self._list[node_of(b)]
            if node_a is not node_b or self.kinds[node_a] != "number":
                return False
            values = self.value(node_a).reshape(-1)
            if values[column_of(a)] != values[column_of(b)]:
                return False
        return True

    def _reduction(self, node: fx.Node, value: Tensor, which: int) -> Tensor:
        packet = packet_of(node)
        kind = REDUCTIONS.get(packet)
        source = node.args[0]
        if kind is None or not isinstance(source, fx.Node):
            raise refusal(node, "is not supported")
        codes = self.codes(source)
        if kind.endswith("with place") and len(node.args) < 2:
            raise refusal(node, "mixes the rows of the batch")
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if dims is None or dims == []:
            dims = list(range(codes.dim()))
        dims = dims if isinstance(dims, list | tuple) else [dims]
        dims = sorted(d % codes.dim() for d in dims)  # in the order of columns
        others = [d for d in range(codes.dim()) if d not in dims]
        moved = codes.permute(*others, *dims).reshape(*(codes.shape[d] for d in others), -1)
        rows = filled(row_of(moved))
        _check_columns(node, codes)
        if moved.dim() < 2 or not (rows == rows[..., :1]).all():
            raise refusal(node, "mixes the rows of the batch")
        rows = rows[..., 0]
        reads = self._of_first_row(node, rows, moved)
        kind = ("argmax" if "max" in kind else "argmin") if which == 1 else kind
        key = node if value is self.value(node) else self._part_of(node, which)
        self._reads[key] = (kind, reads)
        return rows.reshape(value.shape)

    def _part_of(self, node: fx.Node, which: int) -> fx.Node:
        return next(
            user for user in node.users if user.target is operator.getitem and user.args[1] == which
        )

    def _product(self, node: fx.Node, value: Tensor) -> Tensor:
        packet = packet_of(node)
        bias, left, right = node.args if packet is aten.addmm else (None, *node.args)
        if packet is aten.addmm and (
            node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1
        ):
            raise refusal(node, "is called with beta or alpha")
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        is_swapped = self.kinds[left] != "row"
        weight, operand = (left, right) if is_swapped else (right, left)
        if self.kinds[weight] == "row":
            raise refusal(node, "is a product of two activations")
        codes = self.codes(operand)
        if is_swapped:
            codes = codes.transpose(-1, -2)
        if codes.dim() == 2:
            codes = codes[None]
        _check_columns(node, codes)
        stacks, count, _ = codes.shape
        all_rows = row_of(codes)
        rows = filled(all_rows)
        if not (rows == rows[..., :1]).all():
            raise refusal(node, "mixes the rows of the batch")
        rows = rows[..., 0]
        reads = self._of_first_row(node, rows, codes)
        where = [(p, i) for p in range(stacks) for i in range(count) if rows[p, i] == 0]
        columns = value.shape[-2] if is_swapped else value.shape[-1]
        if is_swapped and len(where) > 1:  # results lie side by side only one by one
            raise refusal(node, "multiplies a matrix of activations by weights from the left")
        if isinstance(bias, fx.Node) and (self.kinds[bias] == "row" or is_swapped):
            raise refusal(
                node, "adds an activation to a product: write the sum as a line of its own"
            )
        blocks = [p if packet is aten.bmm else None for p, _ in where]
        self._reads[node] = _Products(weight, is_swapped, blocks, reads, columns, bias)
        rows = rows[..., None].expand(stacks, count, columns)
        if is_swapped:
            rows = rows.transpose(-1, -2)
        return rows.reshape(value.shape).clone()

    def _lookup(self, node: fx.Node, value: Tensor) -> Tensor:
        """Rows of a table by an input of integers, for all steps before the recurrence."""
        table, places = node.args[:2]
        assert isinstance(table, fx.Node) and isinstance(places, fx.Node)
        codes = self.codes(places)
        source = self._list[node_of(int(codes.reshape(-1)[0]))]
        if self.kinds[table] == "row" or source not in self.traced.inputs:
            raise refusal(node, "looks up numbers that the step computes")
        whole = self.codes(source)
        if codes.numel() != whole.numel() or not torch.equal(codes.reshape(-1), whole.reshape(-1)):
            raise refusal(node, f"looks up only a part of {name_of(source)}")
        if any(node.args[3:]) or any(node.kwargs.values()):
            raise refusal(node, "is called with options")
        padding: Any = node.args[2] if len(node.args) > 2 else -1
        self.lookups.append(Lookup(node, table, self.traced.inputs.index(source), padding))
        return row_of(codes)[..., None].expand(value.shape).clone()

    # Expressions

    def _results(self, nodes: Sequence[fx.Node], what: str) -> list[list[Expression]]:
        article = "an" if what == "output" else "a new"
        return [
            self._result(node, f"{what} {i}" if len(nodes) > 1 else f"{article} {what}")
            for i, node in enumerate(nodes)
        ]

    def _result(self, node: fx.Node, what: str) -> list[Expression]:
        """The expressions that make a result, side by side."""
        value = self.value(node)
        if not value.is_floating_point():
            raise CannotCompile(f"{what} of the step is {value.dtype}{place_of(node)}")
        if not value.dim() or value.shape[0] != ROWS:
            raise CannotCompile(
                f"{what} of the step does not have the batch as its first dimension{place_of(node)}"
            )
        if not value.numel():
            raise CannotCompile(f"{what} of the step has no columns{place_of(node)}")
        codes = self.codes(node)
        rows = rows_in_order(value.shape)
        own = row_of(codes)
        if ((own != rows) & (own != NO_ROW)).any():
            raise CannotCompile(f"{what} of the step mixes the rows of the batch{place_of(node)}")
        first = self._of_first_row(node, rows.contiguous(), codes)
        return self.pieces(first, node)

    def pieces(self, codes: Any, node: fx.Node) -> list[Expression]:
        """Expressions side by side whose columns are the elements with these codes."""
        found: list[Expression] = []
        for part in spans_of(codes, self._list, self.kinds, node):
            if part.kind == "weights":
                found.append(self._vector(part.source, part.columns))
                continue
            self._check_read(part.source, node)
            made = self.demand(part.source, part.first, part.count)
            if part.group > 1:
                made = [self.expressions.lift(e, part.group) for e in made]
            found += made
        if len(found) > MOST_PIECES:
            raise refusal(node, f"needs more than {MOST_PIECES} pieces of columns")
        return found

    def _vector(self, node: fx.Node, columns: tuple[int, ...]) -> Expression:
        width = len(columns)
        if self.kinds[node] == "number":
            numbers = self.value(node).reshape(-1)[list(columns)]
            if (numbers == numbers[0]).all():
                return self.expressions.constant(numbers[0].item(), width)
        leaf = self.expressions.make("vector", at=(node, columns), width=width, level=0)
        if self.value(node).dtype != torch.bool:
            return leaf
        return self.expressions.operation(aten.ne.Scalar, leaf, 0, width=width, is_mask=True)

    def demand(self, node: fx.Node, start: int, width: int) -> list[Expression]:
        """Columns [start, start + width) of a computed node."""
        key = (node, start, width)
        if key not in self._found:
            self._found[key] = self._demand(node, start, width)
        return self._found[key]

    def _demand(self, node: fx.Node, start: int, width: int) -> list[Expression]:
        make = self.expressions.make
        if node.op == "placeholder":
            for kind, nodes in (("input", self.traced.inputs), ("carry", self.traced.carries)):
                if node in nodes:
                    leaf = make(kind, at=(nodes.index(node), start), width=width, level=0)
                    return [self._as_read(leaf, self.value(node), node)]
        packet = packet_of(node)
        if packet is aten.embedding:
            self.codes(node)
            number = [lookup.node for lookup in self.lookups].index(node)
            place = len(self.traced.inputs) + number
            return [make("input", at=(place, start), width=width, level=0)]
        if packet is draw:
            return [make("draw", at=(node.args[1], start), width=width, level=0)]
        self.codes(node)  # fills in what it reads
        if packet in (aten.mm, aten.addmm, aten.bmm):
            return self._demand_product(node, start, width)
        if packet in REDUCTIONS or node.target is operator.getitem:
            return self._demand_reduced(node, start, width)
        return self._demand_pointwise(node, start, width)

    def _check_read(self, node: fx.Node, reader: fx.Node) -> None:
        """Refuses integers of an input or of the state that an operation computes with."""
        dtype = self.value(node).dtype
        if node.op == "placeholder" and not dtype.is_floating_point and dtype != torch.bool:
            raise CannotCompile(
                f"{name_of(node)} is {dtype} and used in arithmetic, by {name_of(reader)}"
                f"{place_of(reader)}"
            )

    def _as_read(self, leaf: Expression, value: Tensor, node: fx.Node) -> Expression:
        if value.dtype != torch.bool:
            return leaf
        return self.expressions.operation(
            aten.ne.Scalar, leaf, 0, width=leaf.width, is_mask=True, node=node
        )

    def _demand_pointwise(self, node: fx.Node, start: int, width: int) -> list[Expression]:
        operands = [
            self.pieces(read[start : start + width], node) if isinstance(read, Tensor) else read
            for read in self._reads[node]
        ]
        cuts = {0, width}
        for operand in operands:
            if isinstance(operand, list):
                at = 0
                for piece in operand:
                    at += piece.width
                    cuts.add(at)
        if len(cuts) > MOST_PIECES:
            raise refusal(node, f"needs more than {MOST_PIECES} pieces of columns")
        if len(cuts) > 2:  # ask for less, so that pieces match
            # Constants and vectors can be cut anywhere; others are asked for anew.
            ends = sorted(cuts)
            return [e for lo, hi in pairwise(ends) for e in self.demand(node, start + lo, hi - lo)]
        args = [operand[0] if isinstance(operand, list) else operand for operand in operands]
        return [self._operation(node, args, width)]

    def _operation(self, node: fx.Node, args: list[Any], width: int) -> Expression:
        operation, value = self.expressions.operation, self.value(node)
        packet, is_mask = packet_of(node), value.dtype == torch.bool
        if packet is aten._to_copy:
            return self._cast(node, args[0], value, width)
        if packet is kept:
            copy = operation(aten.clone.default, args[0], width=width, node=node)
            make = self.expressions.make
            return make("value", at=(copy, 0), width=width, level=copy.level + 1)
        kwargs = tuple(sorted((k, v) for k, v in node.kwargs.items() if v is not None))
        if any(isinstance(v, fx.Node) for v in node.kwargs.values()):
            raise refusal(node, "gets tensors as keyword arguments")
        return operation(node.target, *args, width=width, kwargs=kwargs, is_mask=is_mask, node=node)

    def _cast(self, node: fx.Node, e: Expression, value: Tensor, width: int) -> Expression:
        source = self.value(node.args[0])  # type: ignore[arg-type]
        operation = self.expressions.operation
        if value.dtype == source.dtype:
            return e
        if source.dtype == torch.bool:
            return self._number(e)
        if value.dtype == torch.bool:
            return operation(aten.ne.Scalar, e, 0, width=width, is_mask=True, node=node)
        own = self.dtype
        is_known = value.dtype == own or (own.itemsize == 2 and value.dtype == torch.float32)
        if source.is_floating_point() and not is_known:
            raise CannotCompile(
                f"the step casts from {source.dtype} to {value.dtype}{place_of(node)}"
            )
        return e  # places are counted in floating point here

    @property
    def dtype(self) -> torch.dtype:
        """Of the state."""
        return self.value(self.traced.carries[0]).dtype

    def _demand_reduced(self, node: fx.Node, start: int, width: int) -> list[Expression]:
        kind, reads = self._reads[node]
        codes = reads[start : start + width]
        pieces = self.pieces(codes.reshape(-1), node)
        size = codes.shape[1]
        if all(piece.width % size == 0 for piece in pieces):
            return [self._reduced(kind, piece, size, node) for piece in pieces]
        if width > 1:
            return [e for i in range(width) for e in self.demand(node, start + i, 1)]
        return [self._reduced_parts(kind, pieces, node)]

    def _reduced_parts(self, kind: str, pieces: list[Expression], node: fx.Node) -> Expression:
        """One number of several pieces."""
        size = sum(piece.width for piece in pieces)
        operation = self.expressions.operation
        if kind in ("sum", "mean"):
            total = self._reduced("sum", pieces[0], pieces[0].width, node)
            for piece in pieces[1:]:
                more = self._reduced("sum", piece, piece.width, node)
                total = operation(aten.add.Tensor, total, more, width=1, node=node)
            if kind == "mean":
                total = operation(aten.mul.Tensor, total, 1.0 / size, width=1, node=node)
            return total
        if kind in ("any", "all"):
            raise refusal(node, "reduces columns that different operations compute")
        if kind in ("max", "min"):
            if not self._has_no_derivative(node):
                raise CannotCompile(
                    f"{name_of(node)} splits its gradient between equal maxima, of columns that "
                    f"different operations compute{place_of(node)}; use torch.max(x, dim).values"
                )
            best = [self._reduced(kind, piece, piece.width, node) for piece in pieces]
            pick = aten.maximum.default if kind == "max" else aten.minimum.default
            found = best[0]
            for one in best[1:]:
                found = operation(pick, found, one, width=1, node=node)
            return found
        raise refusal(node, "reduces columns that different operations compute")

    def _reduced(self, kind: str, e: Expression, size: int, node: fx.Node) -> Expression:
        x, operation = self.expressions, self.expressions.operation
        e = self._number(e)
        width = e.width // size
        if kind in ("sum", "mean"):
            total = x.reduced("sum", e, size)
            if kind == "sum":
                return total
            return operation(aten.mul.Tensor, total, 1.0 / size, width=width, node=node)
        if kind in ("any", "all"):
            total = x.reduced("sum", e, size)
            least = 0.5 if kind == "any" else size - 0.5
            return operation(aten.gt.Scalar, total, least, width=width, is_mask=True, node=node)
        if kind.startswith(("min", "argmin")):
            e = operation(aten.neg.default, e, width=e.width, node=node)
            found = self._reduced(kind.replace("min", "max"), e, size, node)
            is_place = kind.startswith("arg")
            return found if is_place else operation(aten.neg.default, found, width=width, node=node)
        if kind == "argmax":
            return x.reduced("argmax", e, size)
        if kind == "max with place":  # the derivative is that of the first of the largest ones
            place = x.lift(x.reduced("argmax", e, size), size)
            here = operation(
                aten.eq.Tensor,
                self._places(e.width, size),
                place,
                width=e.width,
                is_mask=True,
                node=node,
            )
            zeros = x.constant(0.0, e.width)
            only = operation(aten.where.self, here, e, zeros, width=e.width, node=node)
            return x.reduced("sum", only, size)
        if self._has_no_derivative(node):
            return x.reduced("max", e, size)
        return self._largest(e, size, node)

    @staticmethod
    def _has_no_derivative(node: fx.Node) -> bool:
        return all(packet_of(user) is stop for user in node.users)

    def _largest(self, e: Expression, size: int, node: fx.Node) -> Expression:
        """That of each group, with a derivative that equal numbers share.

        Backward finds these by the number that it has made again itself. Where that is not in its
        group, because of another rounding, the first of the largest numbers has all.
        """
        x, operation = self.expressions, self.expressions.operation
        found = self._reduced("max with place", e, size, node)
        width, zeros = e.width, x.constant(0.0, e.width)
        place = x.lift(x.reduced("argmax", e, size), size)

        def equal(a: Expression, b: Expression) -> Expression:
            return operation(aten.eq.Tensor, a, b, width=width, is_mask=True, node=node)

        tie = equal(e, x.lift(found, size))
        x.ties.add(id(tie))
        ties = operation(
            aten.logical_or.default,
            equal(self._places(width, size), place),
            tie,
            width=width,
            is_mask=True,
            node=node,
        )
        count = x.reduced("sum", self._number(ties), size)
        equals = operation(aten.where.self, ties, e, zeros, width=width, node=node)
        # Its numbers are 0, and its derivatives are 1 each.
        nothing = operation(
            aten.sub.Tensor,
            equals,
            operation(stop.default, equals, width=width),
            width=width,
            node=node,
        )
        width //= size
        share = operation(
            aten.div.Tensor, x.reduced("sum", nothing, size), count, width=width, node=node
        )
        made = operation(
            aten.add.Tensor,
            operation(stop.default, found, width=width),
            share,
            width=width,
            node=node,
        )
        is_infinite = operation(aten.isinf.default, found, width=width, is_mask=True, node=node)
        return operation(aten.where.self, is_infinite, found, made, width=width, node=node)

    def _places(self, width: int, size: int) -> Expression:
        return self.expressions.make("index", at=(0,), width=width, group=size, level=0)

    def _demand_product(self, node: fx.Node, start: int, width: int) -> list[Expression]:
        columns = self._reads[node].columns
        found = []
        end = start + width
        while start < end:
            block, first = divmod(start, columns)
            count = min(columns - first, end - start)
            found.append(self._sum_of_products(node, block, first, count))
            start += count
        return found

    def _sum_of_products(self, node: fx.Node, block: int, first: int, count: int) -> Expression:
        """Columns of one row of the operand times a weight, a product for each of its pieces."""
        operation, read = self.expressions.operation, self._reads[node]
        total, done = None, 0
        for piece in self.pieces(read.operands[block], node):
            if piece.is_mask or piece.kind not in ("input", "carry", "op") or piece.group:
                piece = operation(
                    aten.clone.default, self._number(piece), width=piece.width, node=node
                )
            product = self.expressions.product(piece)
            part = WeightBlock(
                read.weight,
                read.stacks[block],
                read.is_transposed,
                done,
                read.columns,
                read.bias if total is None else None,
                product.array.columns,
            )
            known = [p for p in product.parts if p._replace(offset=part.offset) == part]
            if known:
                part = known[0]
            else:
                product.parts.append(part)
                product.array.columns += part.columns
            leaf = self.expressions.of_array(product, part.offset + first, count)
            if total is None:
                total = leaf
            else:
                total = operation(aten.add.Tensor, total, leaf, width=count, node=node)
            done += piece.width
        assert total is not None
        return total

    def _number(self, e: Expression) -> Expression:
        if not e.is_mask:
            return e
        ones, zeros = (
            self.expressions.constant(1.0, e.width),
            self.expressions.constant(0.0, e.width),
        )
        return self.expressions.operation(aten.where.self, e, ones, zeros, width=e.width)
