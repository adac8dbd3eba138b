"""A graph of torch.compile's as a function that a tracer of operations can follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .._step.user_lines import at, last_line, mark
from .refusals import CannotCompile


class WithLines(fx.Interpreter):
    """Runs a graph, while each operation is at its line of the user's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # reasons have the line, and nothing more of the graph

    def __call__(self, *given: Any) -> Any:
        return self.run(*given, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        where = last_line(n.meta.get("stack_trace") or "")
        try:
            with at(where):
                return super().run_node(n)
        except Exception as error:
            mark(error, where)
            raise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.autograd_function_apply:
            return _by_derivative(*args)
        if target is torch.cosine_similarity:
            return _cosine_similarity(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """torch raises norms to eps where autograd does not see it, so their derivatives stay."""
    if x1.dtype != x2.dtype or not x1.is_floating_point():
        return torch.cosine_similarity(x1, x2, dim, eps)
    parts = []
    for x in torch.broadcast_tensors(x1, x2):
        norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        parts.append(x / (norm + (norm.clamp_min(eps) - norm).detach()))
    return (parts[0] * parts[1]).sum(dim)


def _by_derivative(forward: Any, backward: Any, *given: Any) -> Any:
    """A torch.autograd.Function, of which torch.compile keeps forward and backward as graphs.

    Where backward is the gradient times k, element by element, as of the surrogates of spikes,
    y = f(x) is f(x) without derivative + (x - x without derivative) * k.
    """
    _check_linear(backward)
    with torch.no_grad():
        results, saved = WithLines(forward)(*given)
        is_one = isinstance(results, Tensor)
        ys = [results] if is_one else list(results)
        if len(ys) != 1:
            raise CannotCompile("the step has a torch.autograd.Function with several results")
        factors = WithLines(backward)(torch.ones_like(ys[0]), *saved)
    if isinstance(factors, Tensor):
        factors = [factors]
    y = ys[0].detach()
    for x, factor in zip(given, factors, strict=False):
        if isinstance(factor, Tensor) and isinstance(x, Tensor):
            y = y + (x - x.detach()) * factor.detach()
    return y if is_one else (y,)


_LINEAR = {"mul", "truediv", "div", "neg", "clone", "to", "type_as", "float", "double"}
_LINEAR |= {"contiguous", "detach"}
_IN_PLACE = {"imul": "mul", "itruediv": "truediv"}


def _check_linear(backward: fx.GraphModule) -> None:
    """Refuses a backward that is not the gradient times something, element by element.

    By its operations: numbers of a trial do not show what is done to large gradients alone.
    """
    places = [node for node in backward.graph.nodes if node.op == "placeholder"]
    of_gradient = {places[0]}
    for node in backward.graph.nodes:
        read = [one for one in node.all_input_nodes if one in of_gradient]
        if not read or node.op == "output":
            continue
        name = str(getattr(node.target, "__name__", node.target))
        name = _IN_PLACE.get(name.strip("_"), name.strip("_"))
        divides_by_it = name in ("truediv", "div") and node.args[0] is not read[0]
        if name not in _LINEAR or len(read) != 1 or divides_by_it:
            raise CannotCompile(
                "backward of a torch.autograd.Function may only multiply the gradient by "
                f"something, element by element, and the step has one that uses {name}"
            )
        of_gradient.add(node)
