"""From a plan to what is computed outside of the recurrence.

That is the part of a step's graph which depends on constants alone, as far as products, vectors and
inputs read it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .expressions import Product
from .graphs import Operations
from .outside import Outside, Table
from .plan import Plan
from .recipes import Bias, Columns, Weight


def outside_of(plan: Plan) -> Outside:
    """What a plan's products, vectors and inputs are made of."""
    graph = _Constants(plan)
    weights = [graph.weight(product) for product in plan.products]
    vectors = [graph.vector(item) for item in plan.vectors]
    inputs = [graph.input(i) for i in plan.read_inputs]
    return Outside(graph.module(), graph.constants, weights, vectors, inputs)


class _Constants:
    """Makes that graph, node by node as they are asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._lowered = plan, plan.lowered
        self._places = {node: i for i, node in enumerate(plan.lowered.traced.constants)}
        self._graph = fx.Graph()
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self.constants: list[int] = []
        """Which constants of the step the placeholders are."""

    def module(self) -> Operations:
        self._graph.output(())
        return Operations(self._graph, self._tensors)

    def weight(self, product: Product) -> Weight:
        return Weight(
            product.terms,
            [
                part._replace(
                    weight=self._copy(part.weight),
                    bias=None if part.bias is None else self._copy(part.bias),
                )
                for part in product.parts
            ],
        )

    def vector(self, item: tuple[str, Any, Any]) -> Bias | Columns:
        kind, source, places = item
        if kind == "bias":
            products = [p for p in source.products if any(q.bias is not None for q in p.parts)]
            return Bias([self._plan.products.index(p) for p in products])
        first, count = places[0], len(places)
        step = (
            1
            if places == tuple(range(first, first + count))
            else 0
            if all(place == first for place in places)
            else -1
        )
        return Columns(self._copy(source), first, count, step, list(places) if step < 0 else [])

    def input(self, number: int) -> int | Table:
        count = len(self._lowered.traced.inputs)
        if number < count:
            return number
        lookup = self._lowered.lookups[number - count]
        return Table(self._copy(lookup.table), lookup.input, lookup.padding)

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
            name = f"number_{len(self._tensors)}"
            self._tensors[name] = self._lowered.value(node).contiguous()
            return self._graph.get_attr(name)
        return self._graph.node_copy(node, self._copies.__getitem__)
