"""A user's step in plain torch as a graph of operations of ATen.

The step runs once, on a few rows. Calls of modules, control flow in Python and changes in place are
then gone. What leaves nothing in such a graph becomes an operation of its own: ``detach`` and
``no_grad`` a :data:`.._front.flat_step.stop`, random numbers a :data:`.._front.flat_step.draw`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .._front.compile_lock import Busy
from .._front.flat_step import ROWS, DrawnNumbers, FlatStep
from .._front.refusals import CannotCompile
from .._step.user_lines import line_of, line_of_error
from .decompositions import in_traces
from .make_graph import make_graph
from .operation_graph import Operations

aten = torch.ops.aten


class Traced(NamedTuple):
    """The graph, and what its inputs and results are."""

    module: Operations
    constants: list[fx.Node]
    """The same in all steps and rows: weights, and what a scan's steps get as params."""
    inputs: list[fx.Node]
    carries: list[fx.Node]
    new_carries: list[fx.Node]
    outputs: list[fx.Node]
    draws: list[DrawnNumbers]
    values: dict[fx.Node, Any]
    """What each node is on the rows of the trace."""

    def forget_weights(self) -> None:
        """Keeps only shapes of weights and of what is made of them alone: where a program has been
        made, nobody reads these numbers, and they take as much memory as the weights."""
        of_weights = set(self.constants)
        for node in self.module.graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "call_function" and inputs and of_weights.issuperset(inputs):
                of_weights.add(node)
        for node in of_weights:
            self.values[node] = pytree.tree_map_only(
                Tensor, lambda t: t.detach().to("meta"), self.values[node]
            )


def trace(step: FlatStep) -> Traced:
    """The graph of a step.

    Raises:
        CannotCompile: The step cannot be traced.
    """

    try:
        with fx_traceback.preserve_node_meta():
            made = make_graph(step, *step.arguments, decompositions=in_traces())
    except (CannotCompile, Busy):
        raise
    except Exception as error:
        raise CannotCompile(_reason(error)) from error
    _check_nodes(made.graph)
    made.graph.eliminate_dead_code()
    (results,) = next(node for node in made.graph.nodes if node.op == "output").args
    if not all(isinstance(node, fx.Node) for node in results):
        raise CannotCompile("a result of the step is not a tensor")
    return of_graph(Operations.of(made, made.graph), step)


def _check_nodes(graph: fx.Graph) -> None:
    """Refuses what a program would have of the trace alone: sizes that numbers decide, branches."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CannotCompile(f"torch.{node.target.name()} is not supported{line_of(node)}")
        if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
            continue
        tensors = [n.meta["val"] for n in node.all_input_nodes if "val" in n.meta]
        is_index = node.target in (aten.index.Tensor, aten.index_put.default)
        if is_index and all(t.dtype not in (torch.bool, torch.uint8) for t in tensors[1:]):
            continue
        name = getattr(node.target, "overloadpacket", node.target)
        raise CannotCompile(f"values of tensors decide the size of {name}'s result{line_of(node)}")


def of_graph(module: Operations, step: FlatStep) -> Traced:
    """The graph of a step that has run, as it is used from here on."""
    nodes = list(module.graph.nodes)
    found = [node for node in nodes if node.op == "placeholder"]
    (results,) = next(node for node in nodes if node.op == "output").args
    first, second = step.ends
    arguments = [torch.zeros_like(t, device="cpu") if t.is_meta else t for t in step.arguments]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graph has its casts
        values = module.values_of(*arguments)
    return Traced(
        module,
        found[:first],
        found[first:second],
        found[second:],
        list(results[: step.count]),
        list(results[step.count :]),
        step.draws,
        values,
    )


def _reason(error: Exception) -> str:
    text = str(error).split("\n")[0]
    where = line_of_error(error)
    looks = (
        "value out of a tracing tensor",
        "data-dependent",
        "DataDependent",
        "Dynamo",
        "_local_scalar_dense",
    )
    if any(part in str(error) for part in looks) or "DataDependent" in type(error).__name__:
        return f"the step looks at values of tensors, by if, float() or .item(){where}"
    if operation := re.search(r"token for effect .* from the function (.+?)\.default", text):
        return f"{operation[1]} waits for values of tensors{where}"
    return f"with a batch of {ROWS} the step raises {type(error).__name__}: {text[:200]}{where}"
