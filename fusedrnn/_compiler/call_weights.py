"""What is computed outside of the recurrence: of a step's constants, for weights and vectors.

These are functions of weights alone, which torch computes under its autograd. A small graph of
its own says how, so a record can have that without the rest of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .operation_graph import Operations, from_json, to_json
from .program import numbers_of
from .weight_recipes import Recipes


class Table(NamedTuple):
    """An input that consists of rows of a table of weights."""

    table: int
    """The number of the tensor that it is."""
    input: int
    padding: int
    """Of the row that gets no gradient; negative if all do."""


class CallWeights:
    """Makes weights, vectors and inputs of a program from a step's constants and inputs.

    They are made of the constants and what is computed of these, which count on.
    """

    def __init__(
        self,
        module: Operations,
        count: int,
        constants: Sequence[int],
        recipes: Recipes,
        inputs: Sequence[int | Table],
    ) -> None:
        """
        Args:
            module: A graph of constants.
            count: Of the step's constants.
            constants: Which of them its placeholders are.
            recipes: How weights and vectors are made.
            inputs: Which inputs of the step the program reads, or tables of which rows.
        """
        self._module, self._count, self._constants = module, count, constants
        self.recipes, self._inputs = recipes, inputs
        self._known: dict[tuple[torch.device, torch.dtype], _Computation] = {}
        output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        self.computes = bool(output.args[0])
        """Whether there is more than the constants."""
        self.has_derived = bool(constants)
        """Whether that depends on constants, so that they get gradients by it."""
        self.tables = [one.table for one in inputs if isinstance(one, Table)]
        self.makes_inputs = bool(self.tables) or len(set(inputs)) < len(inputs)
        """Whether the program's inputs are others than the step's."""

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copies to a device what a program has of its own: numbers in the step, and places.

        A call could not: it would wait for the GPU, and no CUDA graph of it could be captured. They
        stay where they are for as long as the program lives, since a graph may read them.
        """
        if (device, dtype) not in self._known:
            with torch.inference_mode(False), torch.no_grad():  # a later call may train
                self._known[device, dtype] = _Computation(self._module, device, dtype)

    def tensors(self, constants: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The constants of a step, and behind them what is computed.

        Args:
            like: A tensor of the program's dtype on its device, such as a carry.
        """
        assert len(constants) == self._count, "a program is for steps with as many constants"
        if not self.computes:
            return list(constants)
        computation = self._known.get((like.device, like.dtype))
        if computation is None:
            self.prepare(like.device, like.dtype)
            computation = self._known[like.device, like.dtype]
        return [*constants, *computation([constants[i] for i in self._constants])]

    def numbers(self, sequences: Any, states: Any) -> list[int]:
        """All that csrc/ops/step_constants.h is to know.

        Args:
            sequences, states: Their shapes in one row.
        """
        shapes = list(map(list, sequences)), list(map(list, states))
        inputs = list(range(len(self._inputs))) if self.makes_inputs else list(self._inputs)
        return list(numbers_of((*shapes, inputs, self.recipes.weights, self.recipes.vectors)))

    def inputs(
        self, tensors: Sequence[Tensor], inputs: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """The inputs that a program reads, (seq_len, batch, width) each.

        Args:
            tensors: That :meth:`tensors` gives.
        """
        found = []
        for one in self._inputs:
            if isinstance(one, Table):
                padding = one.padding if one.padding >= 0 else None
                made = F.embedding(inputs[one.input], tensors[one.table], padding)
            else:
                made = inputs[one]
            if made.dtype != like.dtype:
                made = made.to(like.dtype)
            found.append(made if made.dim() == 3 else made.reshape(*made.shape[:2], -1))
        return found

    def to_json(self) -> dict[str, Any]:
        """What json.dumps takes.

        Raises:
            CannotStore: It has something that cannot be stored.
        """
        return {
            "module": to_json(self._module),
            "count": self._count,
            "constants": list(self._constants),
            "recipes": self.recipes,
            "inputs": list(self._inputs),
        }

    @staticmethod
    def from_json(stored: dict[str, Any]) -> CallWeights:
        """
        Raises:
            LookupError, TypeError, ValueError, AttributeError, RuntimeError: It is nothing that
                :meth:`to_json` makes.
        """
        inputs = [Table(*one) if isinstance(one, list) else one for one in stored["inputs"]]
        module, recipes = from_json(stored["module"]), Recipes.of_json(stored["recipes"])
        return CallWeights(module, stored["count"], stored["constants"], recipes, inputs)


class _Computation:
    """A graph of constants, on one device in one dtype."""

    def __init__(self, module: Operations, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._given: list[fx.Node] = []
        self._held: dict[fx.Node, Any] = {}
        """What depends on no constant."""
        self._steps: list[tuple[fx.Node, Any, Any, dict[str, Any]]] = []
        """Those that do, in order, each with its operator and arguments."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._given.append(node)
            elif node.op == "get_attr":
                self._held[node] = self._own(getattr(module, node.target).to(device))
            elif node.op == "output":
                self._results: Sequence[fx.Node] = node.args[0]
            else:
                step = node, _target(node), node.args, _options(node, device, dtype)
                if all(one in self._held for one in node.all_input_nodes):
                    self._run(step, self._held)
                else:
                    self._steps.append(step)
        self._fixed = [] if self._given else [self._held[node] for node in self._results]

    def __call__(self, constants: Sequence[Tensor]) -> list[Tensor]:
        if not self._given:
            return self._fixed
        values = dict(self._held)
        for node, constant in zip(self._given, constants, strict=True):
            values[node] = self._own(constant)
        for step in self._steps:
            self._run(step, values)
        return [values[node] for node in self._results]

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    @staticmethod
    def _run(step: tuple[fx.Node, Any, Any, dict[str, Any]], values: dict[fx.Node, Any]) -> None:
        node, target, args, options = step
        args, options = fx.map_arg((args, options), values.__getitem__)
        values[node] = target(*args, **options)


_UNDER_AUTOGRAD = {
    "fusedrnn_step.stop.default": torch.ops.aten.detach.default,
    "fusedrnn_step.kept.default": torch.ops.aten.clone.default,
    "fusedrnn_step.rounded.default": torch.ops.aten.clone.default,
    # The first operand: nothing is rounded here, so the second one is zero.
    "fusedrnn_step.joined.default": torch.ops.aten.expand_as.default,
}
"""What has the derivatives of operations that are only for steps."""


def _target(node: fx.Node) -> Any:
    return _UNDER_AUTOGRAD.get(str(node.target), node.target)


def _options(node: fx.Node, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = dict(node.kwargs)
    options.pop("pin_memory", None)
    if isinstance(options.get("dtype"), torch.dtype) and options["dtype"].is_floating_point:
        options["dtype"] = dtype
    if options.get("device") is not None:
        options["device"] = device
    return options
