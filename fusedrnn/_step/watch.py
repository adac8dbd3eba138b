"""What a step reads besides its state and its input: weights, buffers and closed-over tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._tracers import is_compiling
from .noise import NumberSource
from .torch_draws import DRAWS


class Watch(TorchFunctionMode):
    """Sees the functions of torch that a step calls.

    It hands out random numbers, hands ``replacements`` to functions in place of the tensors with
    these ids, and with ``closed_over`` looks for tensors that nobody has passed to the step.
    """

    def __init__(
        self,
        noise: NumberSource | None = None,
        replacements: dict[int, Tensor] | None = None,
        closed_over: ClosedOver | None = None,
    ) -> None:
        super().__init__()
        self._noise, self._replacements, self._closed_over = noise, replacements, closed_over
        self._level = _level()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_getter = getattr(function, "__name__", "") == "__get__"
        if self._closed_over is not None and not is_getter and function is not Tensor.detach:
            self._closed_over.look(args, kwargs)
        if self._replacements:
            args = [self._replaced(value) for value in args]
            kwargs = {name: self._replaced(value) for name, value in kwargs.items()}
        draw = None if self._noise is None else DRAWS.get(function)
        # Within torch.func.vmap a step sees one of many shapes; torch draws for all of them.
        if draw is None or _level() != self._level:
            result = function(*args, **kwargs)
        else:
            if kwargs.pop("generator", None) is not None:
                raise ValueError(_GENERATOR)
            result = draw(self._noise, *args, **kwargs)
        if self._closed_over is not None:
            if is_getter and isinstance(result, Tensor) and function not in _WITHOUT_GRADIENT:
                self._closed_over.look(args, kwargs)  # tensor.T; not tensor.shape
            self._closed_over.add_known(result)
        return result

    def _replaced(self, value: Any) -> Any:
        assert self._replacements is not None
        if isinstance(value, torch.Size):  # not a tuple of numbers for tensor.new()
            return value
        if isinstance(value, list | tuple):  # functions of torch nest tensors no other way
            return (list if isinstance(value, list) else tuple)(map(self._replaced, value))
        return self._replacements.get(id(value), value) if isinstance(value, Tensor) else value


def _level() -> int:
    """How many transforms of torch.func are around."""
    if is_compiling() or not torch._C._are_functorch_transforms_active():
        return 0
    return torch._C._functorch.maybe_current_level() or 0


_WITHOUT_GRADIENT = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("data", "grad"))
_GENERATOR = (
    "fusedrnn: a step must not draw from a generator of its own, since backward cannot draw its "
    "numbers again; draw without one, and pass generator= to the call of the whole sequence"
)


class ClosedOver:
    """Finds the tensors that a step reads though nobody has passed them to it."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in known}  # kept, and so are their ids
        self.with_gradient: dict[int, Tensor] = {}

    def look(self, args: Any, kwargs: Any) -> None:
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise ValueError(_GENERATOR)
        for leaf in _tensors((*args, *kwargs.values())):
            if leaf.requires_grad and id(leaf) not in self._known:
                self.with_gradient[id(leaf)] = leaf

    def add_known(self, result: Any) -> None:
        for leaf in _tensors((result,)):
            if id(leaf) not in self.with_gradient:
                self._known[id(leaf)] = leaf


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All in these; most values of functions are tensors or plain, which a tree need not walk."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, _PLAIN):
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)
