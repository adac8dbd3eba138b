"""Graphs of operations, and as JSON, in which another process can read them.

There are operators of torch in them and getitem, and no other code.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

_MOST_NUMBERS = 1 << 18
"""Of a constant tensor."""
_OPS = ("placeholder", "get_attr", "call_function", "output")
_GETITEM = "getitem"
_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""Types whose values are attributes of torch."""


class CannotStore(Exception):
    """A graph has something of another kind in it."""


class Operations(nn.Module):
    """A graph with its constant tensors.

    A torch.fx.GraphModule writes Python of the graph and compiles it, which takes longer than all
    runs of a first use.
    """

    def __init__(self, graph: fx.Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @staticmethod
    def of(module: nn.Module, graph: fx.Graph) -> Operations:
        """A graph whose tensors a module has."""
        names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        return Operations(graph, {name: getattr(module, name) for name in names})

    def forward(self, *given: Tensor) -> Any:
        """The results."""
        values = self.values_of(*given)
        return next(values[node] for node in reversed(self.graph.nodes) if node.op == "output")

    def values_of(self, *given: Tensor) -> dict[fx.Node, Any]:
        """What each node is."""
        left, found = iter(given), dict[fx.Node, Any]()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                found[node] = next(left)
            elif node.op == "get_attr":
                found[node] = getattr(self, node.target)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = args[0] if node.op == "output" else node.target(*args, **kwargs)
        return found


def to_json(module: Operations) -> dict[str, Any]:
    """What json.dumps takes.

    Raises:
        CannotStore: The graph cannot be stored.
    """
    numbers: dict[fx.Node, int] = {}
    nodes, tensors = [], {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensors[node.target] = _of_tensor(getattr(module, node.target))
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": _of_target(node),
                "args": _of_value(node.args, numbers),
                "kwargs": _of_value(node.kwargs, numbers),
                "line": node.meta.get("stack_trace"),
            }
        )
        numbers[node] = len(numbers)
    return {"nodes": nodes, "tensors": tensors}


def from_json(stored: dict[str, Any]) -> Operations:
    """
    Raises:
        LookupError, TypeError, ValueError, AttributeError: It is no graph as :func:`to_json` has
            them.
    """
    graph, nodes = fx.Graph(), list[fx.Node]()
    for one in stored["nodes"]:
        args, kwargs = _to_value(one["args"], nodes), _to_value(one["kwargs"], nodes)
        target = _to_target(one["op"], one["target"])
        node = graph.create_node(one["op"], target, args, kwargs, one["name"])
        if one["line"] is not None:
            node.meta["stack_trace"] = one["line"]
        nodes.append(node)
    tensors = {name: _to_tensor(given) for name, given in stored["tensors"].items()}
    return Operations(graph, tensors)


def _of_target(node: fx.Node) -> str:
    if node.op not in _OPS:
        raise CannotStore(f"a node of kind {node.op}")
    if node.op != "call_function":
        return str(node.target)
    if node.target is operator.getitem:
        return _GETITEM
    if not isinstance(node.target, torch._ops.OpOverload):
        raise CannotStore(f"{node.target} is no operator of torch")
    return str(node.target)


def _to_target(op: str, name: str) -> Any:
    if op not in _OPS:
        raise ValueError(f"a node of kind {op}")
    if op != "call_function":
        return name
    if name == _GETITEM:
        return operator.getitem
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _of_value(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """Plain values as they are, others as {kind: ...}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_of_value(part, numbers) for part in value]}
    if isinstance(value, dict):
        return {"dict": {name: _of_value(part, numbers) for name, part in value.items()}}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, its_type in _NAMED.items():
        if isinstance(value, its_type):
            return {name: str(value).removeprefix("torch.")}
    raise CannotStore(f"a value of type {type(value).__name__}")


def _to_value(stored: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(stored, dict):
        return stored
    ((kind, value),) = stored.items()
    if kind == "node":
        return nodes[value]
    if kind in ("list", "tuple"):
        parts = [_to_value(part, nodes) for part in value]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {name: _to_value(part, nodes) for name, part in value.items()}
    if kind == "device":
        return torch.device(value)
    return _named(kind, value)


def _named(kind: str, name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _NAMED[kind]):
        raise ValueError(f"torch.{name} is no {kind}")
    return value


def _of_tensor(tensor: Any) -> dict[str, Any]:
    if type(tensor) is not Tensor or tensor.is_complex() or tensor.numel() > _MOST_NUMBERS:
        raise CannotStore("a constant that is large, or of another type than most")
    dtype = str(tensor.dtype).removeprefix("torch.")
    # In its dtype: floating-point numbers of 16 and 32 bits are exact in float64, as JSON has them.
    numbers = tensor.reshape(-1).tolist()
    if len(set(map(repr, numbers))) == 1:  # repr tells zeros of two signs apart
        numbers = numbers[:1]
    return {"dtype": dtype, "shape": list(tensor.shape), "numbers": numbers}


def _to_tensor(stored: dict[str, Any]) -> Tensor:
    dtype = _named("dtype", stored["dtype"])
    flat, shape = torch.tensor(stored["numbers"], dtype=dtype), stored["shape"]
    return flat[0].expand(shape).clone() if flat.numel() == 1 else flat.reshape(shape)
