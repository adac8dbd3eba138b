"""Nested containers of tensors: the inputs, states and outputs of steps that users write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._options import kind_of

Leaves = tuple[Tensor, ...]


class Structure(NamedTuple):
    """What is left of a tree when its tensors are taken out. A None in a tree stays a None."""

    spec: pytree.TreeSpec
    has_tensor: tuple[bool, ...]
    """For each leaf: True for a tensor, False for None."""

    def __str__(self) -> str:
        leaves = ["tensor" if t else "None" for t in self.has_tensor]
        return str(pytree.tree_unflatten(leaves, self.spec)).replace("'tensor'", "tensor")

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves in the places of its tensors."""
        if self is TENSOR:
            return leaves[0]
        if self is NOTHING:
            return ()
        rest = iter(leaves)
        return pytree.tree_unflatten(
            [next(rest) if t else None for t in self.has_tensor], self.spec
        )

    def leaves(self, tree: Any) -> Leaves | None:
        """Those of a tree like this one, whose dicts may have another order; else None."""
        try:
            leaves = self.spec.flatten_up_to(tree)
        except ValueError:
            return None
        kinds = zip(leaves, self.has_tensor, strict=True)
        if not all(isinstance(leaf, Tensor) if t else leaf is None for leaf, t in kinds):
            return None
        return tuple(leaf for leaf in leaves if leaf is not None)

    def names(self, name: str) -> list[str]:
        """How a user would write each leaf of a tree of this name."""
        tree = pytree.tree_unflatten(list(self.has_tensor), self.spec)
        paths = pytree.tree_flatten_with_path(tree)[0]
        return [name + pytree.keystr(path) for path, is_tensor in paths if is_tensor]


TENSOR = Structure(pytree.tree_flatten(0)[1], (True,))
NOTHING = Structure(pytree.tree_flatten(())[1], ())


def flatten(tree: Any, name: str) -> tuple[Leaves, Structure]:
    """The tensors of a tree, and its structure. ``name``: what errors call the tree.

    Raises:
        TypeError: A leaf is neither a tensor nor None.
    """
    if isinstance(tree, Tensor):
        return (tree,), TENSOR
    leaves, spec = pytree.tree_flatten(tree)
    has_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    if not all(has_tensor):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if not isinstance(leaf, Tensor | None):
                raise TypeError(
                    f"fusedrnn: {name}{pytree.keystr(path)} must be a tensor, got {kind_of(leaf)}; "
                    f"{_advice(leaf)}"
                )
    return tuple(leaf for leaf in leaves if leaf is not None), Structure(spec, has_tensor)


def _advice(leaf: Any) -> str:
    """What to do about a leaf that is no tensor."""
    if isinstance(leaf, torch.distributions.Distribution):
        return "return the distribution's parameters, and build the distribution outside the step"
    if isinstance(leaf, bool | int | float):
        return f"torch.full(size, {leaf}) makes it a tensor, with this number for each row"
    if dataclasses.is_dataclass(leaf):
        return (
            "make it a named tuple, or register its class by torch.utils._pytree.register_dataclass"
        )
    return "tensors may be nested in tuples, lists, dicts and named tuples"


def check_tensors(names: Iterable[str], leaves: Leaves, like: str, device: torch.device) -> None:
    """Each must have numbers, in one block of memory, on the device of another tensor.

    Args:
        like: What errors call that tensor.

    Raises:
        RuntimeError: A tensor is on another device, on no device, sparse or nested.
    """
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.device != device:
            raise RuntimeError(
                f"fusedrnn: {name} must be on {device} as {like} is, got {leaf.device}"
            )
        if leaf.layout != torch.strided or leaf.is_nested:
            layout = "nested" if leaf.is_nested else str(leaf.layout)
            raise RuntimeError(f"fusedrnn: {name} must be a dense tensor, got a {layout} one")
        if leaf.is_meta:
            raise RuntimeError(
                f"fusedrnn: {name} must have values, got a tensor on the device meta"
            )


def differentiable(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()
