"""How larger operations are made of those that programs know.

Derivatives of what stands here are taken through the parts, so a part that only shifts a result,
as the largest logit of a softmax does, is stopped: its derivative is zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cumulative
from .operations import WHOLE

aten = torch.ops.aten


def _stopped(x: Tensor) -> Tensor:
    made: Tensor = torch.ops.fusedrnn_step.stop(x)
    return made


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    centred = x - x.mean(dims, keepdim=True)
    var = (centred * centred).mean(dims, keepdim=True)
    # NaN where squares overflow, as torch has it where the width is a multiple of its vectors'; the
    # root alone would make all numbers 0.
    rstd = torch.rsqrt(var + eps) + _stopped(var * 0.0)
    y = centred * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y, centred, rstd


def _group_norm(
    x: Tensor, weight: Any, bias: Any, rows: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.reshape(x.shape[0], groups, -1)
    y, centred, rstd = _layer_norm(parts, parts.shape[2:], None, None, eps)
    y = y.reshape(x.shape)
    shape = (1, channels, *(1,) * (x.dim() - 2))
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y, centred, rstd


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    rstd = torch.rsqrt(
        (x * x).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
    )
    y = x * rstd
    return (y if weight is None else y * weight), rstd


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    shifted = x - _stopped(torch.amax(x, dim, keepdim=True))
    return shifted, torch.exp(shifted)


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    _, powers = _exponentials(x, dim)
    return powers / powers.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    shifted, powers = _exponentials(x, dim)
    return shifted - torch.log(powers.sum(dim, keepdim=True))


def _logsumexp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    largest = _stopped(torch.amax(x, dims, keepdim=True))
    largest = torch.where(torch.isinf(largest), 0.0, largest)  # inf - inf would be NaN
    found = torch.log(torch.exp(x - largest).sum(dims, keepdim=True)) + largest
    return found if keepdim else found.squeeze(tuple(dims))


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return -F.softplus(-x, 1.0, 40.0), x  # from 40 on, softplus(x) is x in float64, too


def _places(x: Tensor, dim: int) -> Tensor:
    """The number of each element along a dimension."""
    dim = dim % x.dim()
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return torch.arange(x.shape[dim], device=x.device).reshape(shape)


def _scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Any:
    if index.shape[dim] != 1:
        return NotImplemented
    return torch.where(_places(x, dim) == index, value, x)


def _gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Any:
    if index.shape[dim] != 1:
        return NotImplemented
    return torch.where(_places(x, dim) == index, x, 0.0).sum(dim, keepdim=True)


def _dims(x: Tensor, dim: Any) -> list[int]:
    return list(range(x.dim())) if dim is None else ([dim] if isinstance(dim, int) else list(dim))


def _mean_of_squares(x: Tensor, dims: list[int], correction: Any, keepdim: bool) -> Tensor:
    count = math.prod(x.shape[d] for d in dims)
    less = max(count - (1 if correction is None else correction), 0)
    if x.dtype == torch.float64:
        return (x * x).sum(dims, keepdim=keepdim) / less
    # torch adds up squares of narrower numbers in float64, where no sum overflows.
    return (x * (x * (1 / less if less else math.inf))).sum(dims, keepdim=keepdim)


def _var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    return _mean_of_squares(x - x.mean(dims, keepdim=True), dims, correction, keepdim)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    return _var(x, dims, correction=correction, keepdim=keepdim), x.mean(dims, keepdim=keepdim)


_SIXTH = 0.1666666716337204
"""As torch has it in every dtype: that of float32."""


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return gradient * (s * (1 + x * (1 - s)))


def _shrink_backward(gradient: Tensor, x: Tensor, limit: float) -> Tensor:
    return torch.where(torch.abs(x) <= limit, 0.0, gradient)


def _root(squares: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0, as norms and deviations have it."""
    is_zero = squares == 0.0
    return torch.where(is_zero, 0.0, torch.sqrt(torch.where(is_zero, 1.0, squares)))


def _std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    centred = x - x.mean(dims, keepdim=True)
    if x.dtype == torch.float64:
        return _root(_mean_of_squares(centred, dims, correction, keepdim))
    # In float64 no square of a narrower number overflows or vanishes. Here it is squared in units
    # of the largest one.
    largest = torch.amax(torch.abs(centred), dims, keepdim=True)
    unit = _stopped(largest) + torch.finfo(x.dtype).tiny  # never 0
    deviation = _root(_mean_of_squares(centred / unit, dims, correction, True)) * unit
    return deviation if keepdim else deviation.squeeze(tuple(dims))


def _std_mean(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    return _std(x, dims, correction=correction, keepdim=keepdim), x.mean(dims, keepdim=keepdim)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if dtype is not None:
        return NotImplemented
    dims, size = _dims(x, dim), torch.abs(x)
    if ord == 0:
        return (x != 0.0).to(x.dtype).sum(dims, keepdim=keepdim)
    if ord == 1:
        return size.sum(dims, keepdim=keepdim)
    if ord == 2:
        return _root((x * x).sum(dims, keepdim=keepdim))
    if math.isinf(ord):
        return (torch.amax if ord > 0 else torch.amin)(size, dims, keepdim=keepdim)
    if ord < 0:
        return NotImplemented
    # Where a number or all of them are 0, the derivative is 0.
    is_zero = size == 0.0
    powers = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, size) ** ord)
    total = powers.sum(dims, keepdim=keepdim)
    is_zero = total == 0.0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, total) ** (1 / ord))


def _remainder(x: Tensor, y: Any) -> Tensor:
    """With the sign of y."""
    rest = torch.fmod(x, y)
    return torch.where(_is_of_other_sign(rest, y), rest + y, rest)


def _is_of_other_sign(x: Tensor, y: Any) -> Tensor:
    """Than y, and not 0."""
    if isinstance(y, Tensor):
        return ((x > 0) & (y < 0)) | ((x < 0) & (y > 0))
    return x > 0 if y < 0 else x < 0


def _quotient(x: Tensor, y: Any, rounding_mode: str | None = None) -> Tensor:
    """As torch rounds it. It has no derivative, see :func:`in_traces`."""
    quotient = x / y
    if rounding_mode is None:
        return quotient
    if rounding_mode == "trunc":
        return torch.trunc(quotient)
    # By the remainder, as Python does: 1 // 0.1 is 9.
    rest = torch.fmod(x, y)
    exact = (x - rest) / y
    exact = torch.where(_is_of_other_sign(rest, y), exact - 1, exact)
    below = torch.floor(exact)
    found = torch.where(exact - below > 0.5, below + 1, below)
    found = torch.where(exact == 0, 0.0 * quotient, found)
    if isinstance(y, Tensor):
        return torch.where(y == 0, quotient, found)
    return quotient if y == 0 else found


def _round(x: Tensor, *, decimals: int) -> Tensor:
    scale = float(10 ** abs(decimals))
    return torch.round(x * scale) / scale if decimals >= 0 else torch.round(x / scale) * scale


def _padded(x: Tensor, pad: Sequence[int], value: float = 0.0) -> Tensor:
    """Pads come in pairs, those of the last dimension first; negative ones take away."""
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.dim() - 1 - i
        first, last = max(-before, 0), x.shape[dim] - max(-after, 0)
        x = x.narrow(dim, first, last - first)
        # As the rows of one number, of which any batch has as many as it needs.
        ends = [
            x.new_full([1] * x.dim(), value).expand([*x.shape[:dim], n, *x.shape[dim + 1 :]])
            for n in (max(before, 0), max(after, 0))
        ]
        x = torch.cat([ends[0], x, ends[1]], dim)
    return x


def in_traces() -> dict[Any, Callable[..., Any]]:
    """Those that a step is traced with."""
    table = {
        overload: function
        for overload, function in decompositions().items()
        if getattr(overload, "overloadpacket", None) not in WHOLE
    }
    for overload in (aten.div.Tensor_mode, aten.div.Scalar_mode):
        table[overload] = lambda x, y, rounding_mode=None: (
            _quotient(x, y) if rounding_mode is None else _stopped(_quotient(x, y, rounding_mode))
        )
    return table


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions, get_decompositions  # these take a while

    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table |= get_decompositions(
        [
            aten.addcmul,
            aten.addcdiv,
            aten.lerp,
            aten.linear,
            aten.baddbmm,
            aten.addmv,
            aten.mv,
            aten.dot,
            aten.rsub,
            aten.glu,
            aten.index_select,
            *(packet for packet in WHOLE),
            *(
                getattr(aten, f"{packet.__name__}_backward")
                for packet in WHOLE
                if hasattr(aten, f"{packet.__name__}_backward")
            ),
        ]
    )
    for name in ("sigmoid_backward", "tanh_backward"):  # known without cancellation
        table.pop(getattr(aten, name).default, None)
    for eye in (aten.eye.default, aten.eye.m):  # theirs asks for numbers in uint16
        table.pop(eye, None)
    own: dict[Any, Callable[..., Any]] = {
        aten.log_sigmoid_forward.default: _log_sigmoid,
        aten.native_layer_norm.default: _layer_norm,
        aten.native_group_norm.default: _group_norm,
        aten._softmax.default: _softmax,
        aten._log_softmax.default: _log_softmax,
        aten.logsumexp.default: _logsumexp,
        aten.scatter.value: _scatter_value,
        aten.gather.default: _gather,
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
        aten.mish.default: lambda x: x * torch.tanh(F.softplus(x)),
        aten.silu.default: lambda x: x * torch.sigmoid(x),
        aten.silu_backward.default: _silu_backward,
        aten.hardsigmoid_backward.default: lambda g, x: torch.where(
            torch.abs(x) < 3.0, g * _SIXTH, 0.0
        ),
        aten.softshrink_backward.default: _shrink_backward,
        aten.hardshrink_backward.default: _shrink_backward,
        aten.std.correction: _std,
        aten.std_mean.correction: _std_mean,
        aten.tan.default: lambda x: torch.sin(x) / torch.cos(x),
        aten.linalg_vector_norm.default: _vector_norm,
        aten.div.Tensor_mode: _quotient,
        aten.div.Scalar_mode: _quotient,
        aten.remainder.Tensor: _remainder,
        aten.remainder.Scalar: _remainder,
        aten.round.decimals: _round,
        aten.constant_pad_nd.default: _padded,
        aten.cumsum.default: cumulative.cumsum,
        aten.cumprod.default: cumulative.cumprod,
        aten.prod.default: cumulative.prod,
        aten.prod.dim_int: cumulative.prod,
    }
    if hasattr(aten, "_fused_rms_norm"):
        own[aten._fused_rms_norm.default] = _rms_norm
    if hasattr(aten, "rms_norm"):
        own[aten.rms_norm.default] = lambda *args: _rms_norm(*args)[0]
    return table | own
