"""A user's step as torch.compile gets to see it: every result goes through an operator of ours.

So each result is an output of the graph, with its place, also where the step returns what it was
given; and an output without a place is something that the step keeps.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

STATE, OUTPUT = 0, 1
"""Kinds of results."""

_library = torch.library.Library("fusedrnn_front", "DEF")
_library.define("result(Tensor x, int kind, int place) -> Tensor")
_library.impl("result", lambda x, kind, place: x.clone(), "CompositeImplicitAutograd")
result = torch.ops.fusedrnn_front.result
"""The tensor, as result number ``place`` of a kind."""


def cell_step(cell: Any, x: Any, state: Any) -> tuple[Any, Any]:
    """One step of a cell that returns its state, or an output and its state; both marked."""
    made = cell(x, state)
    if _is_like(made, state):
        new = _in_order(made, state)
        y = pytree.tree_leaves(new)[0]
    else:
        y, new = _pair(made, "the cell must return its state, or (output, state)")
        new = _in_order(new, state)
    return _marked(y, OUTPUT), _marked(new, STATE)


def scan_step(step: Any, x: Any, state: Any) -> tuple[Any, Any]:
    """One step of a scan, which returns its state and an output."""
    new, y = _pair(step(state, x), "the step must return (state, y)")
    return _marked(y, OUTPUT), _marked(_in_order(new, state), STATE)


def scan_step_with(step: Any, x: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """The same with what all steps get."""
    new, y = _pair(step(state, x, params), "the step must return (state, y)")
    return _marked(y, OUTPUT), _marked(_in_order(new, state), STATE)


# Errors of these are never seen: the steps in Python say better what is wrong.


def _pair(made: Any, rule: str) -> Any:
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise ValueError(rule)
    return made


def _is_like(tree: Any, like: Any) -> bool:
    if isinstance(like, Tensor):
        return isinstance(tree, Tensor)
    if isinstance(like, dict):
        if type(tree) is not type(like) or set(tree) != set(like):
            return False
        return all([_is_like(tree[key], like[key]) for key in like])
    if isinstance(like, (tuple, list)):
        if type(tree) is not type(like) or len(tree) != len(like):
            return False
        return all([_is_like(a, b) for a, b in zip(tree, like, strict=True)])
    return type(tree) is type(like)


def _in_order(tree: Any, like: Any) -> Any:
    """A new state with the keys of dicts in the order of the old one's."""
    if type(like) in (dict, OrderedDict, defaultdict) and type(tree) is type(like):
        if set(tree) != set(like):
            raise ValueError("the step must return a state with the keys that it gets")
        new = {key: _in_order(tree[key], like[key]) for key in like}
        if type(like) is OrderedDict:
            return OrderedDict(new)
        return defaultdict(like.default_factory, new) if type(like) is defaultdict else new
    if isinstance(like, (tuple, list)) and type(tree) is type(like) and len(tree) == len(like):
        made = [_in_order(a, b) for a, b in zip(tree, like, strict=True)]
        return type(like)(*made) if hasattr(like, "_fields") else type(like)(made)
    if isinstance(tree, Tensor) and isinstance(like, Tensor):
        return tree
    if type(tree) is type(like) and pytree.tree_flatten(tree)[1] == pytree.tree_flatten(like)[1]:
        return tree
    raise ValueError("the step must return a state like the one that it gets")


def _marked(tree: Any, kind: int) -> Any:
    """The tree with its tensors marked."""
    return _marked_from(tree, kind, [0])


def _marked_from(tree: Any, kind: int, count: list[int]) -> Any:
    if isinstance(tree, Tensor):
        count[0] += 1
        return torch.ops.fusedrnn_front.result(tree, kind, count[0] - 1)
    if tree is None:
        return None
    if type(tree) in (tuple, list):
        return type(tree)([_marked_from(one, kind, count) for one in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_marked_from(one, kind, count) for one in tree])
    if type(tree) is dict:
        return {name: _marked_from(tree[name], kind, count) for name in tree}
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        raise TypeError("a result of the step must be a tensor")
    return pytree.tree_unflatten([_marked_from(one, kind, count) for one in leaves], spec)
