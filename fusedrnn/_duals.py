"""Numbers with a tangent: forward-mode derivatives that need no level of torch's forward mode.

Levels of torch.func.jvp and of torch.autograd.forward_ad do not nest in every combination, and this
code runs inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Dual:
    """A tensor and its tangent, of the same shape and dtype.

    It has the operators that a layer's steps use. A plain tensor among duals is a constant.
    """

    def __init__(self, value: Tensor, tangent: Tensor) -> None:
        self.value, self.tangent = value, tangent

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = function.__name__.strip("_")
        if name in _RULES:
            return _RULES[name](*args, **(kwargs or {}))
        if name not in _LINEAR:
            raise NotImplementedError(f"fusedrnn: {name} has no rule for forward-mode derivatives")
        values = function(*_map(_value, args), **(kwargs or {}))
        tangents = function(*_map(_tangent, args), **(kwargs or {}))
        if isinstance(values, Tensor):
            return cls(values, tangents)
        return tuple(cls(value, tangent) for value, tangent in zip(values, tangents, strict=True))

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def __add__(self, other: Any) -> Any:
        return torch.add(self, other)  # type: ignore[call-overload]

    def __sub__(self, other: Any) -> Any:
        return torch.sub(self, other)  # type: ignore[call-overload]

    def __mul__(self, other: Any) -> Any:
        return _mul(self, other)

    def __rmul__(self, other: Any) -> Any:
        return _mul(other, self)

    def __getitem__(self, index: Any) -> Dual:
        return Dual(self.value[index], self.tangent[index])

    def chunk(self, chunks: int, dim: int) -> Any:
        return torch.chunk(self, chunks, dim)  # type: ignore[arg-type]

    def flatten(self, start: int, end: int) -> Any:
        return torch.flatten(self, start, end)  # type: ignore[arg-type]

    def masked_fill(self, mask: Tensor, value: float) -> Any:
        return torch.masked_fill(self, mask, value)  # type: ignore[call-overload]


def dual(value: Tensor, tangent: Tensor | None) -> Any:
    """A number with a tangent, or a constant if there is none."""
    return value if tangent is None else Dual(value, tangent)


def parts_of(number: Any) -> tuple[Tensor, Tensor]:
    """Value and tangent; the tangent of a constant is zero."""
    return _value(number), _tangent(number)


# All tensors among the arguments of these count, except those of bools and integers.
_LINEAR = {"add", "sub", "chunk", "where", "masked_fill", "stack", "cat", "pad", "flatten"}


def _value(number: Any) -> Any:
    return number.value if isinstance(number, Dual) else number


def _tangent(number: Any) -> Any:
    if isinstance(number, Dual):
        return number.tangent
    if isinstance(number, Tensor) and number.is_floating_point():
        return torch.zeros_like(number)
    return number


def _map(function: Callable[[Any], Any], args: Sequence[Any]) -> list[Any]:
    return [_map(function, a) if isinstance(a, list | tuple) else function(a) for a in args]


def _mul(a: Any, b: Any) -> Dual:
    value, tangents = _value(a) * _value(b), []
    if isinstance(a, Dual):
        tangents.append(a.tangent * _value(b))
    if isinstance(b, Dual):
        tangents.append(_value(a) * b.tangent)
    return Dual(value, sum(tangents[1:], tangents[0]))


def _linear(x: Any, weight: Any, bias: Any = None) -> Dual:
    value = F.linear(_value(x), _value(weight), _value(bias))
    bias_tangent = bias.tangent if isinstance(bias, Dual) else None
    tangents = []
    if isinstance(x, Dual):
        tangents.append(F.linear(x.tangent, _value(weight), bias_tangent))
    if isinstance(weight, Dual):
        with_bias = None if tangents else bias_tangent
        tangents.append(F.linear(_value(x), weight.tangent, with_bias))
    if not tangents:
        return Dual(value, bias_tangent.expand_as(value))  # type: ignore[union-attr]
    return Dual(value, sum(tangents[1:], tangents[0]))


def _sigmoid(x: Dual) -> Dual:
    y = torch.sigmoid(x.value)
    return Dual(y, x.tangent * (y * (1 - y)))


def _tanh(x: Dual) -> Dual:
    y = torch.tanh(x.value)
    return Dual(y, x.tangent * (1 - y * y))


def _exp(x: Dual) -> Dual:
    y = torch.exp(x.value)
    return Dual(y, x.tangent * y)


_RULES: dict[str, Callable[..., Dual]] = {
    "mul": _mul,
    "rmul": _mul,
    "linear": _linear,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "exp": _exp,
}
