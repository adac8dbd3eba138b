"""A user's step on copies of the tensors that it reads, which stay in their places.

Other threads may read and change weights at any time, so nothing is exchanged in a module. In one
thread, functions of torch get copies where the step gives them the originals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Copies(TorchFunctionMode):
    """Within, functions of torch compute with copies."""

    def __init__(self, constants: Sequence[Tensor], others: Mapping[str, Tensor]) -> None:
        """
        Args:
            constants: What the step's graph reads.
            others: What the step may read besides, by name.
        """
        super().__init__()
        self.originals = list(constants)
        self.constants = [_copy(tensor) for tensor in constants]
        known = set(map(id, constants))
        self._others = {name: (t, _copy(t)) for name, t in others.items() if id(t) not in known}
        pairs = [*zip(self.originals, self.constants, strict=True), *self._others.values()]
        self._copies = {id(original): copy for original, copy in pairs}

    def changed(self, names: Sequence[str]) -> str:
        """The name of what the step has changed; or nothing.

        Args:
            names: Of constants.
        """
        pairs = [*zip(names, self.constants, strict=False)]
        pairs += [(name, copy) for name, (_, copy) in self._others.items()]
        return next((name for name, copy in pairs if copy._version), "")

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        args, kwargs = pytree.tree_map_only(Tensor, self._own, given, is_leaf=_is_size)
        return function(*args, **kwargs)

    def _own(self, tensor: Tensor) -> Tensor:
        return self._copies.get(id(tensor), tensor)


def _is_size(value: Any) -> bool:
    """Which must not become a tuple: those are the numbers of ``tensor.new``, and no shape."""
    return isinstance(value, torch.Size)


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
