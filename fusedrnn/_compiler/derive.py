"""The two functions of a stage, from its inputs to its results and back, as graphs.

Backward is torch's own derivative of forward: a vector-Jacobian product that is traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._front.flat_step import joined, rounded, stop
from .._front.refusals import CannotCompile
from . import operations
from .columns import packet_of
from .decompositions import decompositions
from .expressions import Expression
from .make_graph import make_graph
from .operation_graph import Operations
from .program import Out, Program
from .step_plan import PlannedStage, PlannedValue, StepPlan

aten = torch.ops.aten


@dataclass
class Derived:
    """Graphs of numbers: of one column of a stage."""

    forward: Operations
    """Inputs to results; of a reduction what it is of."""
    backward: Operations
    """Inputs and the gradients of results to the gradients of inputs."""

    def is_in_double(self) -> bool:
        """Whether it computes in float64 what it reads and writes in float32."""
        return any(
            packet_of(node) is aten._to_copy and node.kwargs.get("dtype") == torch.float32
            for node in self.forward.graph.nodes
        )

    def has_choices(self) -> bool:
        """Whether a result or a derivative jumps where a number changes a little."""
        return any(
            operations.of(node.target).jumps
            for module in (self.forward, self.backward)
            for node in module.graph.nodes
        )


class DerivedPlan(NamedTuple):
    """The plan of a step, and its stages as forward and backward compute them."""

    plan: StepPlan
    stages: list[Derived]

    @staticmethod
    def of_record(plan: StepPlan, stages: list[Derived], program: Program) -> DerivedPlan:
        """
        Raises:
            ValueError: The record is of another plan.
        """
        if plan.program != program or len(stages) != len(plan.stages):
            raise ValueError("the graph of a record is not that of its program")
        return DerivedPlan(plan, stages)

    def has_choices(self) -> bool:
        """Whether a rounding may change results altogether."""
        outputs = [output for stage in self.plan.program.stages for output in stage.outputs]
        picks = any(output.kind in (Out.MAX, Out.ARG_MAX) for output in outputs)
        return picks or any(stage.has_choices() for stage in self.stages)


def derive(plan: StepPlan) -> DerivedPlan:
    """
    Raises:
        CannotCompile: torch has no derivative of an operation.
    """
    return DerivedPlan(plan, [derive_stage(stage) for stage in plan.stages])


def derive_stage(stage: PlannedStage) -> Derived:
    """
    Raises:
        CannotCompile: torch has no derivative of an operation.
    """

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        known = {_id(leaf): given for leaf, given in zip(stage.inputs, inputs, strict=True)}
        return tuple(_evaluated(v.expression, known) for v in stage.results)

    differentiable = [v.kind in ("column", "sum") for v in stage.results]

    def backward(inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        def of_results(*given: Tensor) -> tuple[Tensor, ...]:
            made = forward(*given)
            return tuple(y for y, d in zip(made, differentiable, strict=True) if d)

        if not any(differentiable):
            return tuple(torch.zeros_like(x) for x in inputs)
        made: Any = torch.func.vjp(of_results, *inputs)
        given = [g for g, d in zip(gradients, differentiable, strict=True) if d]
        gradients_of: Any = made[1]
        return tuple(gradients_of(tuple(given)))

    numbers = [torch.full((), 0.5, dtype=torch.float64) for _ in stage.inputs]
    gradients = [torch.full((), 0.5, dtype=torch.float64) for _ in stage.results]
    table = decompositions()
    with torch.enable_grad():
        made = make_graph(forward, *numbers, decompositions=table)
        try:
            back = make_graph(backward, numbers, gradients, decompositions=table)
        except RuntimeError as error:  # torch has no derivative of an operation
            raise CannotCompile(f"torch says: {str(error).splitlines()[0]}") from error
    return Derived(_simplified(made), _simplified(back))


def _id(leaf: Expression | PlannedValue) -> int:
    return id(leaf.expression) if isinstance(leaf, PlannedValue) else id(leaf)


def _evaluated(root: Expression, known: dict[int, Any]) -> Any:
    """An expression of the numbers of its leaves."""
    left = [root]
    while left:
        e = left[-1]
        if id(e) in known:
            left.pop()
            continue
        missing = [a for a in e.operands if id(a) not in known]
        if missing:
            left += reversed(missing)
            continue
        left.pop()
        known[id(e)] = _operation(e, known)
    return known[id(root)]


def _operation(e: Expression, known: dict[int, Any]) -> Any:
    if e.kind == "constant":
        number = e.at[2]
        dtype = torch.bool if isinstance(number, bool) else torch.float64
        return torch.full((), number, dtype=dtype)
    args = [known[id(a)] if isinstance(a, Expression) else a for a in e.args]
    if e.packet is stop:
        return args[0].detach()
    if e.packet is rounded:
        return _Rounded.apply(*args)
    if e.packet is joined:
        return _Joined.apply(*args)
    if e.packet is aten.clone:
        return args[0].clone()
    return e.target(*args, **dict(e.kwargs))


class _Rounded(torch.autograd.Function):
    """A number in float32, whose gradient is not rounded."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.float().double()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Joined(torch.autograd.Function):
    """A sum whose gradient is in two parts, as its operands are."""

    @staticmethod
    def forward(high: Tensor, low: Tensor) -> Tensor:
        return high + low

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        high = gradient.float().double()
        return high, gradient - high


def _simplified(module: fx.GraphModule) -> Operations:
    """Without what is computed twice, and without shapes, which single numbers do not have."""
    from torch._functorch.compile_utils import fx_graph_cse

    for node in list(module.graph.nodes):
        if packet_of(node) in operations.SHAPES:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    graph = fx_graph_cse(module.graph)
    graph.eliminate_dead_code()
    return Operations.of(module, graph)
