"""What is computed outside of the recurrence: the weights of products, and vectors of stages.

They are functions of weights alone, which torch computes under its autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .expressions import Array, Part, Product
from .plan import Plan

aten = torch.ops.aten


class Outside:
    """Computes weights and vectors of a plan from a step's constants."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._traced = plan.lowered.traced

    def __call__(
        self, constants: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, (terms, columns) each, and vectors, (width,) each."""
        evaluate = self._evaluation(constants, dtype)
        weights = [self._weight(product, evaluate) for product in self._plan.products]
        vectors = [self._vector(item, evaluate) for item in self._plan.vectors]
        return weights, vectors

    def inputs(
        self, constants: Sequence[Tensor], inputs: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """The inputs that a program reads, (seq_len, batch, width) each."""
        count, found = len(inputs), []
        evaluate = self._evaluation(constants, dtype)
        for i in self._plan.read_inputs:
            if i < count:
                made = inputs[i]
            else:
                lookup = self._plan.lowered.lookups[i - count]
                padding = lookup.padding if lookup.padding >= 0 else None
                made = F.embedding(inputs[lookup.input], evaluate(lookup.table), padding)
            made = made.to(dtype)
            found.append(made if made.dim() == 3 else made.reshape(*made.shape[:2], -1))
        return found

    def _evaluation(self, constants: Sequence[Tensor], dtype: torch.dtype) -> _Evaluation:
        known: dict[fx.Node, Any] = {
            node: constant.to(dtype) if constant.is_floating_point() else constant
            for node, constant in zip(self._traced.constants, constants, strict=True)
        }
        device = constants[0].device if constants else torch.device("cpu")
        for node, kind in self._plan.lowered.kinds.items():
            value = self._traced.values.get(node)
            if kind == "number" and isinstance(value, Tensor):
                value = value.to(device)
                known[node] = value.to(dtype) if value.is_floating_point() else value
        return _Evaluation(known, dtype, device)

    def _weight(self, product: Product, evaluate: _Evaluation) -> Tensor:
        parts = [self._part(part, product.terms, evaluate) for part in product.parts]
        # Side by side in the way in which torch's linear layers have their weights.
        return parts[0] if len(parts) == 1 else torch.cat([part.t() for part in parts]).t()

    def _part(self, part: Part, terms: int, evaluate: _Evaluation) -> Tensor:
        weight: Tensor = evaluate(part.weight)
        if part.index is not None:
            weight = weight[part.index]
        if part.is_transposed:
            weight = weight.t()
        weight = weight.to(evaluate.dtype)
        return weight if weight.shape[0] == terms else weight.narrow(0, part.first, terms)

    def _vector(self, item: tuple[str, Any, Any], evaluate: _Evaluation) -> Tensor:
        kind, source, places = item
        if kind == "bias":
            return self._bias(source, evaluate)
        flat = evaluate(source).reshape(-1).to(evaluate.dtype)
        first, count = places[0], len(places)
        if places == tuple(range(first, first + count)):
            return flat if count == flat.numel() else flat.narrow(0, first, count)
        if all(place == first for place in places):
            return flat.narrow(0, first, 1).expand(count)
        return flat.index_select(0, torch.tensor(places, device=flat.device))

    def _bias(self, array: Array, evaluate: _Evaluation) -> Tensor:
        total: Tensor | None = None
        for product in array.products:
            if all(part.bias is None for part in product.parts):
                continue
            parts = [
                evaluate(part.bias).to(evaluate.dtype).reshape(-1).expand(part.columns)
                if part.bias is not None
                else torch.zeros(part.columns, dtype=evaluate.dtype, device=evaluate.device)
                for part in product.parts
            ]
            bias = parts[0] if len(parts) == 1 else torch.cat(parts)
            total = bias if total is None else total + bias
        assert total is not None
        return total


class _Evaluation:
    """Values of nodes that depend on constants alone."""

    def __init__(self, known: dict[fx.Node, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._known = known
        self.dtype, self.device = dtype, device

    def __call__(self, node: fx.Node) -> Any:
        left = [node]
        while left:
            one = left[-1]
            missing = [a for a in one.all_input_nodes if a not in self._known]
            if one in self._known or not missing:
                left.pop()
                if one not in self._known:
                    self._known[one] = self._value(one)
            else:
                left += missing
        return self._known[node]

    def _value(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(node.args, lambda n: self._known[n])
        kwargs: dict[str, Any] = dict(fx.map_arg(node.kwargs, lambda n: self._known[n]))
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = self.dtype
        if kwargs.get("device") is not None:
            kwargs["device"] = self.device
        kwargs.pop("pin_memory", None)
        target: Any = node.target
        if getattr(target, "overloadpacket", None) is torch.ops.fusedrnn_step.stop:
            return args[0].detach()
        return target(*args, **kwargs)
