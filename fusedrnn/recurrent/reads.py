"""What a step reads besides its state and its input: weights, buffers and closed-over tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .draws import DRAWS
from .noise import Source


class Watch(TorchFunctionMode):
    """Sees the functions of torch that a step calls.

    It hands out random numbers, hands ``replacements`` to functions in place of the tensors with
    these ids, and with ``closed_over`` looks for tensors that nobody has passed to the step.
    """

    def __init__(
        self,
        noise: Source | None = None,
        replacements: dict[int, Tensor] | None = None,
        closed_over: ClosedOver | None = None,
    ) -> None:
        super().__init__()
        self._noise, self._replacements, self._closed_over = noise, replacements, closed_over

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._closed_over is not None:
            self._closed_over.look(function, args, kwargs)
        if self._replacements:
            args = [self._replaced(value) for value in args]
            kwargs = {name: self._replaced(value) for name, value in kwargs.items()}
        draw = None if self._noise is None else DRAWS.get(function)
        if draw is None:
            result = function(*args, **kwargs)
        else:
            if kwargs.pop("generator", None) is not None:
                raise ValueError(_GENERATOR)
            result = draw(self._noise, *args, **kwargs)
        if self._closed_over is not None:
            self._closed_over.add_known(result)
        return result

    def _replaced(self, value: Any) -> Any:
        assert self._replacements is not None
        if type(value) in (list, tuple):  # functions of torch nest tensors no other way
            return type(value)(self._replaced(one) for one in value)
        return self._replacements.get(id(value), value) if isinstance(value, Tensor) else value


_GENERATOR = (
    "fusedrnn: a step must not draw from a generator of its own, whose numbers cannot be drawn "
    "again; draw without one, and pass generator= to the call of the whole sequence"
)


class ClosedOver:
    """Finds the tensors that a step reads though nobody has passed them to it."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in known}  # kept, and so are their ids
        self.with_gradient: dict[int, Tensor] = {}
        self.others: dict[int, Tensor] = {}
        """Those with dimensions but without gradient."""

    def look(self, function: Any, args: Any, kwargs: Any) -> None:
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise ValueError(_GENERATOR)
        if getattr(function, "__name__", "") == "__get__":
            return  # tensor.shape, tensor.device
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._known:
                if leaf.requires_grad:
                    self.with_gradient[id(leaf)] = leaf
                elif leaf.dim():
                    self.others[id(leaf)] = leaf

    def add_known(self, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.with_gradient:
                self._known[id(leaf)] = leaf


class Weights(nn.Module):
    """The modules of a step: their parameters with gradient, and the buffers that it changes."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.used = nn.ModuleList(modules)

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()

    def trained(self) -> dict[str, Tensor]:
        """By name; a parameter with several names has the first one here."""
        return {name: p for name, p in self.used.named_parameters("used") if p.requires_grad}

    def buffer_versions(self) -> dict[str, tuple[int, int]]:
        """What differs once a buffer has been written or replaced."""
        return {
            name: (id(buffer), -1 if buffer.is_inference() else buffer._version)
            for name, buffer in self.used.named_buffers("used")
        }

    def changed(self, before: dict[str, tuple[int, int]], values: dict[str, Tensor]) -> list[str]:
        """Buffers that were written or replaced since. ``values``: copies of that time.

        Versions alone do not tell: batch norm writes its statistics without a new one.
        """
        now, buffers = self.buffer_versions(), dict(self.used.named_buffers("used"))
        return [
            name
            for name, version in now.items()
            if version != before.get(name)
            or (name in values and not torch.equal(values[name], buffers[name]))
        ]

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of these buffers now."""
        buffers = dict(self.used.named_buffers("used"))
        return {name: buffers[name].detach().clone() for name in names}

    def call_with(self, values: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        """``function()`` while parameters and buffers of these names have other values."""
        if not values:
            return function()
        return torch.func.functional_call(self, values, (function,))
