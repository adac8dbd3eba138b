"""What is computed outside of the recurrence: the weights of products, and vectors of stages.

They are functions of weights alone, which torch computes under its autograd. A small graph of
its own says how, so a record can have that without the rest of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .expressions import Part
from .graphs import Operations, from_json, to_json
from .program import numbers_of
from .recipes import Bias, Columns, Recipes, Weight, cuts_of


class Table(NamedTuple):
    """An input that consists of rows of a table of weights."""

    table: fx.Node
    input: int
    padding: int
    """Of the row that gets no gradient; negative if all do."""


class Outside:
    """Computes weights, vectors and inputs of a program from a step's constants and inputs."""

    def __init__(
        self,
        module: Operations,
        constants: Sequence[int],
        weights: Sequence[Weight],
        vectors: Sequence[Bias | Columns],
        inputs: Sequence[int | Table],
    ) -> None:
        """
        Args:
            module: A graph of constants, with no result of its own.
            constants: Which constants of the step its placeholders are.
            inputs: Which inputs of the step the program reads, or tables of which rows.
        """
        self._module, self._constants = module, constants
        self._weights, self._vectors, self._inputs = weights, vectors, inputs
        self._cuts = cuts_of(vectors)
        self.reads_tables = any(isinstance(one, Table) for one in inputs)
        places = dict(zip(module.graph.find_nodes(op="placeholder"), constants, strict=True))
        is_plain = len(set(inputs)) == len(inputs) and not self.reads_tables
        self._recipes = Recipes.of(weights, vectors, places) if is_plain else None
        self._fits: bool | None = None
        self._held: dict[tuple[str | int, torch.device], Tensor] = {}
        """What :meth:`hold_on` has copied, by name, or by the number of a vector."""
        self._known_fixed: dict[Any, Tensor] = {}

    def hold_on(self, device: torch.device) -> None:
        """Copies to a device what a program has of its own: numbers in the step, and places.

        A call could not: it would wait for the GPU, and no CUDA graph of it could be captured. They
        stay where they are for as long as the program lives, since a graph may read them.
        """
        with torch.inference_mode(False):  # a later call may train
            for node in self._module.graph.find_nodes(op="get_attr"):
                if (node.target, device) not in self._held:
                    number = getattr(self._module, node.target)
                    self._held[node.target, device] = number.to(device)
            for i, vector in enumerate(self._vectors):
                if isinstance(vector, Columns) and vector.places and (i, device) not in self._held:
                    self._held[i, device] = torch.tensor(vector.places, device=device)

    def __call__(
        self, constants: Sequence[Tensor], like: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, (terms, columns) each, and vectors, (width,) each.

        Args:
            like: A tensor of the program's dtype on its device, such as a carry.
        """
        evaluate = self._evaluation(constants, like)
        weights = [self._weight(weight, evaluate) for weight in self._weights]
        vectors = [
            self._bias(vector, evaluate)
            if isinstance(vector, Bias)
            else self._columns(i, vector, evaluate)
            for i, vector in enumerate(self._vectors)
        ]
        return weights, vectors

    @property
    def has_recipes(self) -> bool:
        """Whether operators can make weights and vectors, unless constants have odd shapes."""
        return self._recipes is not None

    def numbers(self, sequences: Any, states: Any) -> list[int]:
        """All that csrc/ops/step_constants.h is to know.

        Args:
            sequences, states: Their shapes in one row.
        """
        recipes = self._recipes
        found: list[Any] = [list(map(list, sequences)), list(map(list, states))]
        if recipes is not None:
            found += list(self._inputs), len(recipes.fixed), recipes.weights, recipes.vectors
        return list(numbers_of(tuple(found)))

    def fit(self, constants: Sequence[Tensor]) -> bool:
        """Whether weights can be made by what :meth:`numbers` says of constants, whose shapes never
        change."""
        if self._fits is None:
            self._fits = self._recipes is not None and self._recipes.fit(constants)
        return self._fits

    def fixed(self, like: Tensor) -> list[Tensor]:
        """Vectors that have no constant in them, for :meth:`numbers`."""
        return [self._fixed(i, like) for i in self._recipes.fixed] if self._recipes else []

    def _fixed(self, number: int, like: Tensor) -> Tensor:
        key = number, like.device, like.dtype
        found = self._known_fixed.get(key)
        if found is None:
            vector = self._vectors[number]
            assert isinstance(vector, Columns)
            with torch.inference_mode(False), torch.no_grad():
                found = self._columns(number, vector, self._evaluation(None, like))
            self._known_fixed[key] = found
        return found

    def inputs(
        self, constants: Sequence[Tensor], inputs: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """The inputs that a program reads, (seq_len, batch, width) each."""
        found = []
        evaluate = self._evaluation(constants, like) if self.reads_tables else None
        for one in self._inputs:
            if isinstance(one, Table):
                assert evaluate is not None
                padding = one.padding if one.padding >= 0 else None
                made = F.embedding(inputs[one.input], evaluate(one.table), padding)
            else:
                made = inputs[one]
            if made.dtype != like.dtype:
                made = made.to(like.dtype)
            found.append(made if made.dim() == 3 else made.reshape(*made.shape[:2], -1))
        return found

    def _evaluation(self, constants: Sequence[Tensor] | None, like: Tensor) -> _Evaluation:
        """Without constants, of what does not depend on them."""
        device = like.device
        held = {name: held for (name, on), held in self._held.items() if on == device}
        constants = [like if constants is None else constants[i] for i in self._constants]
        return _Evaluation(self._module, constants, held, like.dtype, device)

    def _weight(self, weight: Weight, evaluate: _Evaluation) -> Tensor:
        parts = [self._part(part, weight.terms, evaluate) for part in weight.parts]
        # Side by side in the way in which torch's linear layers have their weights.
        return parts[0] if len(parts) == 1 else torch.cat([part.t() for part in parts]).t()

    def _part(self, part: Part, terms: int, evaluate: _Evaluation) -> Tensor:
        weight: Tensor = evaluate(part.weight)
        if part.member is not None:
            weight = weight[part.member]
        if part.is_transposed:
            weight = weight.t()
        weight = weight.to(evaluate.dtype)
        return weight if weight.shape[0] == terms else weight.narrow(0, part.first, terms)

    def _columns(self, number: int, columns: Columns, evaluate: _Evaluation) -> Tensor:
        flat = evaluate(columns.source).reshape(-1).to(evaluate.dtype)
        first, count = columns.first, columns.width
        if columns.step == 1:
            return flat if count == flat.numel() else self._cut(columns, flat, evaluate)
        if columns.step == 0:
            return flat.narrow(0, first, 1).expand(count)
        places = evaluate.held.get(number)
        if places is None:
            places = torch.tensor(columns.places, device=flat.device)
        return flat.index_select(0, places)

    def _cut(self, columns: Columns, flat: Tensor, evaluate: _Evaluation) -> Tensor:
        widths = self._cuts[columns.source]
        if sum(widths.values()) != flat.numel():
            return flat.narrow(0, columns.first, columns.width)
        # At once: gradients of parts are put together at once, too, where each narrow() would add
        # one of the whole.
        parts = evaluate.parts.get(columns.source)
        if parts is None:
            parts = flat.split(list(widths.values()))
            evaluate.parts[columns.source] = parts
        return parts[list(widths).index(columns.first)]

    def _bias(self, vector: Bias, evaluate: _Evaluation) -> Tensor:
        total: Tensor | None = None
        for i in vector.products:
            parts = [
                evaluate(part.bias).to(evaluate.dtype).reshape(-1).expand(part.columns)
                if part.bias is not None
                else torch.zeros(part.columns, dtype=evaluate.dtype, device=evaluate.device)
                for part in self._weights[i].parts
            ]
            bias = parts[0] if len(parts) == 1 else torch.cat(parts)
            total = bias if total is None else total + bias
        assert total is not None
        return total

    # As JSON, in which nodes are their places in the graph.

    def to_json(self) -> dict[str, Any]:
        """What json.dumps takes.

        Raises:
            CannotStore: It has something that cannot be stored.
        """
        numbers = {node: i for i, node in enumerate(self._module.graph.nodes)}

        def stored(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return numbers[value]
            return list(map(stored, value)) if isinstance(value, list | tuple) else value

        return {
            "module": to_json(self._module),
            "constants": list(self._constants),
            "weights": stored(self._weights),
            "vectors": [
                {"bias": vector.products} if isinstance(vector, Bias) else stored(vector)
                for vector in self._vectors
            ],
            "inputs": stored(self._inputs),
        }

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Outside:
        """
        Raises:
            LookupError, TypeError, ValueError, AttributeError, RuntimeError: It is nothing that
                :meth:`to_json` makes.
        """
        module = from_json(stored["module"])
        nodes = list(module.graph.nodes)

        def part(fields: list[Any]) -> Part:
            weight, bias = nodes[fields[0]], fields[5]
            fields = [weight, *fields[1:5], None if bias is None else nodes[bias], fields[6]]
            return Part._make(fields)

        return Outside(
            module,
            stored["constants"],
            [Weight(terms, list(map(part, parts))) for terms, parts in stored["weights"]],
            [
                Bias(vector["bias"])
                if isinstance(vector, dict)
                else Columns(nodes[vector[0]], *vector[1:])
                for vector in stored["vectors"]
            ],
            [
                Table(nodes[one[0]], *one[1:]) if isinstance(one, list) else one
                for one in stored["inputs"]
            ],
        )


class _Evaluation:
    """Values of nodes of a graph of constants, each made when somebody asks."""

    def __init__(
        self,
        module: Operations,
        constants: Sequence[Tensor],
        held: Mapping[str | int, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            held: What is on the device already; see :meth:`Outside.hold_on`.
        """
        self.held, self.dtype, self.device = held, dtype, device
        self.parts: dict[fx.Node, tuple[Tensor, ...]] = {}
        """Of vectors that are parts of one tensor."""
        self._known: dict[fx.Node, Any] = {}
        left = iter(constants)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._known[node] = self._own(next(left))
            elif node.op == "get_attr":
                number = held.get(node.target)
                if number is None:
                    number = getattr(module, node.target).to(device)
                self._known[node] = self._own(number)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

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
