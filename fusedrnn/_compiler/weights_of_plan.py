"""From a plan to what its weights, vectors and inputs are made of.

These are the constants of a step, and what a graph of its own computes of these: the part of the
step's graph that depends on nothing else, as far as products, vectors and inputs read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .call_weights import CallWeights, Table
from .expressions import PlannedProduct, WeightBlock
from .operation_graph import Operations
from .step_plan import StepPlan
from .weight_recipes import ZEROS, Recipes, Side, Terms

aten = torch.ops.aten


def weights_of(plan: StepPlan) -> CallWeights:
    """What a plan's products, vectors and inputs are made of."""
    graph = _Constants(plan)
    recipes = Recipes(
        [product.terms for product in plan.products],
        [graph.weight(product) for product in plan.products],
        [graph.vector(item) for item in plan.vectors],
    )
    inputs = [graph.input(i) for i in plan.read_inputs]
    return CallWeights(graph.module(), graph.count, graph.constants, recipes, inputs)


class _Constants:
    """Makes that graph, node by node as they are asked for."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan, self._lowered = plan, plan.lowered
        self._places = {node: i for i, node in enumerate(plan.lowered.traced.constants)}
        self.count = len(self._places)
        """Of the step's constants."""
        self._graph = fx.Graph()
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._computed: dict[Any, tuple[int, fx.Node]] = {}
        """By what tells them apart: numbers, which are counted on from constants, and nodes."""
        self.constants: list[int] = []
        """Which constants of the step the placeholders are."""

    def module(self) -> Operations:
        """The graph with its results."""
        self._graph.output(tuple([node for _, node in self._computed.values()]))
        return Operations(self._graph, self._tensors)

    def weight(self, product: PlannedProduct) -> Terms:
        return [[self._side(part) for part in product.parts]]

    def _side(self, part: WeightBlock) -> Side:
        node, is_transposed = part.weight, part.is_transposed
        while _is_transpose(node):
            (node,) = node.all_input_nodes
            is_transposed = not is_transposed
        member = -1 if part.member is None else part.member
        return Side(self._number(node), member, is_transposed, part.first, part.columns)

    def vector(self, item: tuple[str, Any, Any]) -> Terms:
        kind, source, places = item
        if kind == "bias":
            return [
                [self._bias(part) for part in product.parts]
                for product in source.products
                if any(part.bias is not None for part in product.parts)
            ]
        return [[self._numbers(source, places)]]

    def _bias(self, part: WeightBlock) -> Side:
        if part.bias is None:
            return Side(ZEROS, -1, False, 0, part.columns)
        return self._numbers(part.bias, (0,) * part.columns if self._is_one(part.bias) else None)

    def _is_one(self, node: fx.Node) -> bool:
        return bool(self._lowered.value(node).numel() == 1)

    def _numbers(self, source: fx.Node, places: Sequence[int] | None) -> Side:
        """Those at some places of a tensor, which is read as if it had one dimension.

        Args:
            places: None for all.
        """
        size = self._lowered.value(source).numel()
        if places is None:
            return Side(self._number(source), -1, False, 0, size)
        first, width = places[0], len(places)
        if tuple(places) == tuple(range(first, first + width)):
            return Side(self._number(source), -1, False, first, width)

        def node() -> fx.Node:
            flat, add = self._copy(source), self._graph.call_function
            if any(place != first for place in places):
                flat = add(aten.reshape.default, (flat, [-1]))
                return add(aten.index_select.default, (flat, 0, self._own(torch.tensor(places))))
            if size > 1:
                flat = add(aten.reshape.default, (flat, [-1]))
                flat = add(aten.narrow.default, (flat, 0, first, 1))
            elif self._lowered.value(source).dim() > 1:
                flat = add(aten.reshape.default, (flat, [-1]))
            return add(aten.expand.default, (flat, [width]))

        return Side(self._add((source, tuple(places)), node), -1, False, 0, width)

    def input(self, number: int) -> int | Table:
        count = len(self._lowered.traced.inputs)
        if number < count:
            return number
        lookup = self._lowered.lookups[number - count]
        return Table(self._number(lookup.table), lookup.input, lookup.padding)

    def _number(self, node: fx.Node) -> int:
        """Of a constant, or of something that is computed."""
        if node in self._places:
            return self._places[node]
        return self._add(node, lambda: self._copy(node))

    def _add(self, key: Any, node: Callable[[], fx.Node]) -> int:
        if key not in self._computed:
            self._computed[key] = self.count + len(self._computed), node()
        return self._computed[key][0]

    def _copy(self, node: fx.Node) -> fx.Node:
        """A node of the step in the graph of constants, with all that it is made of."""
        left = [node]
        while left:
            one = left[-1]
            missing = [] if self._is_leaf(one) else one.all_input_nodes
            missing = [other for other in missing if other not in self._copies]
            if one in self._copies or not missing:
                left.pop()
                if one not in self._copies:
                    self._copies[one] = self._copied(one)
            else:
                left += missing
        return self._copies[node]

    def _is_leaf(self, node: fx.Node) -> bool:
        """Whether it is a constant of the step, or a tensor that depends on nothing."""
        is_number = self._lowered.kinds[node] == "number"
        return node in self._places or (is_number and isinstance(self._lowered.value(node), Tensor))

    def _copied(self, node: fx.Node) -> fx.Node:
        if node in self._places:
            self.constants.append(self._places[node])
            return self._graph.placeholder(node.name)
        if self._is_leaf(node):
            return self._own(self._lowered.value(node).contiguous())
        return self._graph.node_copy(node, self._copies.__getitem__)

    def _own(self, tensor: Tensor) -> fx.Node:
        name = f"number_{len(self._tensors)}"
        self._tensors[name] = tensor
        return self._graph.get_attr(name)


def _is_transpose(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2])  # type: ignore[arg-type]
    return node.target is aten.t.default
