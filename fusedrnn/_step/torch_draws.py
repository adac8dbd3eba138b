"""torch's functions that draw random numbers, by the numbers of a :class:`NumberSource`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .._tracers import is_compiling
from .generators import is_capturing
from .noise import NumberSource, Seed
from .user_lines import line

Function = Callable[..., Tensor]


def _check(is_right: Any, message: str) -> None:
    """As torch checks probabilities; on a GPU nobody waits for them, nor in a graph."""
    if isinstance(is_right, Tensor):
        if is_compiling() or is_right.device.type != "cpu":
            return
        if not all(isinstance(mode, Lending) for mode in _get_current_dispatch_mode_stack()):
            return
        is_right = is_right.all()
    if not is_right:
        raise RuntimeError(f"fusedrnn: {message}")


def _maker(kind: str, is_like: bool = False) -> Function:
    """randn and rand, or randn_like and rand_like."""

    def drawn(source: NumberSource, *args: Any, **kwargs: Any) -> Tensor:
        wanted = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
        if is_like:
            empty = torch.empty_like(args[0] if args else kwargs["input"], **wanted)
        else:
            size = kwargs.get("size", args)
            size = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
            empty = torch.empty(tuple(size), **wanted)
        numbers: Tensor = getattr(source, kind)(empty, empty.shape, empty.dtype)
        if kwargs.get("out") is not None:
            return kwargs["out"].copy_(numbers)
        return numbers.requires_grad_() if kwargs.get("requires_grad") else numbers

    return drawn


def _normal(
    source: NumberSource,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    with torch.no_grad():
        _check(_at_least(std, 0), "normal expects std >= 0")
        given = [value for value in (mean, std) if isinstance(value, Tensor)]
        if given:
            shape = torch.broadcast_shapes(*(value.shape for value in given))
            like = given[0]
        else:
            wanted = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
            like = torch.empty(tuple(size or ()), **wanted)
            shape = like.shape
        numbers = source.normal(like, shape, like.dtype) * std + mean
        return numbers if out is None else out.copy_(numbers)


def _at_least(value: Any, least: float) -> Any:
    """False for NaN."""
    return True if isinstance(value, Tensor) and value.is_complex() else value >= least


def _in_place(numbers: Function) -> Function:
    """Methods that fill a tensor."""

    def drawn(source: NumberSource, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            made = numbers(source, self, *args, **kwargs)
        return self.copy_(made)

    return drawn


def _float(like: Tensor) -> torch.dtype:
    """In which to draw what fills tensors of any dtype."""
    return like.dtype if like.is_floating_point() else torch.float32


def _fill_normal(source: NumberSource, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    _check(_at_least(std, 0), f"normal_ expects std >= 0, got {std}")
    return source.normal(like, like.shape, like.dtype) * std + mean


def _fill_uniform(
    source: NumberSource, like: Tensor, low: float = 0.0, high: float = 1.0, **named: Any
) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    _check(low <= high, f"uniform_ expects from <= to, got {low} and {high}")
    return source.uniform(like, like.shape, like.dtype) * (high - low) + low


def _fill_exponential(source: NumberSource, like: Tensor, lambd: float = 1.0) -> Tensor:
    _check(lambd > 0, f"exponential_ expects lambd > 0, got {lambd}")
    return source.exponential(like, like.shape, like.dtype) / lambd


def _fill_bernoulli(source: NumberSource, like: Tensor, p: Any = 0.5) -> Tensor:
    _check_probability(p)
    return source.uniform(like, like.shape, _float(like)) < p


def _check_probability(p: Any) -> None:
    if isinstance(p, Tensor):
        _check(p.is_floating_point(), f"bernoulli expects probabilities as floats, got {p.dtype}")
    is_one = (p >= 0) & (p <= 1)
    _check(is_one, "bernoulli expects probabilities from 0 to 1")


def _bernoulli(
    source: NumberSource, input: Tensor, p: Any = None, *, out: Tensor | None = None
) -> Tensor:
    with torch.no_grad():
        if p is None:
            p = input
        _check_probability(p)
        numbers = (source.uniform(input, input.shape, _float(input)) < p).to(input.dtype)
        return numbers if out is None else out.copy_(numbers)


def _multinomial(
    source: NumberSource,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """By a race of exponentials, whose winner is category i with a probability of input[i]."""
    with torch.no_grad():
        _check(input.is_floating_point(), f"multinomial expects floats, got {input.dtype}")
        _check(
            input.dim() in (1, 2),
            f"multinomial expects 1 or 2 dimensions, got shape {tuple(input.shape)}",
        )
        most = "any number" if replacement else input.shape[-1]
        _check(
            num_samples > 0 and (replacement or num_samples <= input.shape[-1]),
            f"multinomial expects to draw at least 1 and at most {most}, got {num_samples}",
        )
        is_right = (input >= 0) & (input < torch.inf)
        _check(is_right, "multinomial expects probabilities that are finite and not negative")
        _check(input.sum(-1) > 0, "multinomial expects probabilities whose sum is above 0")
        races = num_samples if replacement else 1
        shape = (*input.shape[:-1], races, input.shape[-1])
        arrivals = source.exponential(input, shape, _float(input))
        order = input.unsqueeze(-2) / arrivals
        winners = order.argmax(-1)
        numbers = winners if replacement else order.squeeze(-2).topk(num_samples).indices
        return numbers if out is None else out.copy_(numbers)


def _dropout(
    source: NumberSource,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or p == 0:
        return input
    if not 0 <= p <= 1:
        raise ValueError(f"fusedrnn: dropout expects a probability from 0 to 1, got {p}")
    kept = source.uniform(input, input.shape, _float(input)) >= p
    mask = kept.to(input.dtype) * (0.0 if p == 1 else 1 / (1 - p))
    return input.mul_(mask) if inplace else input * mask


def _gumbel_softmax(
    source: NumberSource,
    logits: Tensor,
    tau: float = 1,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:
    """``eps``: ignored, as in torch."""
    gumbels = -source.exponential(logits, logits.shape, logits.dtype).log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    winner = torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return winner - soft.detach() + soft


DRAWS: dict[Any, Function] = {
    torch.randn: _maker("normal"),
    torch.randn_like: _maker("normal", is_like=True),
    torch.rand: _maker("uniform"),
    torch.rand_like: _maker("uniform", is_like=True),
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    torch.dropout: lambda source, input, p, train: _dropout(source, input, p, train),
    torch.dropout_: lambda source, input, p, train: _dropout(source, input, p, train, True),
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.normal_: _in_place(_fill_normal),
    Tensor.uniform_: _in_place(_fill_uniform),
    Tensor.exponential_: _in_place(_fill_exponential),
    Tensor.bernoulli_: _in_place(_fill_bernoulli),
    F.dropout: _dropout,
    F.gumbel_softmax: _gumbel_softmax,
}
"""torch's functions whose numbers come from a :class:`NumberSource`. Others, such as torch.randint
and the dropout inside of torch.nn.MultiheadAttention, draw from torch's own generators."""

WAY_OUT = (
    "use torch.rand, torch.randn, dropout or another function that follows generator=, or pass no "
    "generator and call torch.manual_seed"
)


class Lending(TorchDispatchMode):
    """Within, functions that draw from torch's own generator get the numbers of the call's.

    That one's state is lent to torch's own at the first of them, also within functions that are no
    Python. Other threads should not draw from it until the call ends.
    """

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if torch.Tag.nondeterministic_seeded in function.tags and not any(
            isinstance(value, torch.Generator) for value in given
        ):
            self._lend(function, given)
        return function(*args, **kwargs)

    def _lend(self, function: Any, given: Sequence[Any]) -> None:
        devices = [v if isinstance(v, torch.device) else v.device for v in given if _has_device(v)]
        device = devices[-1] if devices else torch.device("cpu")
        seed = self._seed
        if not seed.misses(device):
            return
        if not seed.can_lend(device):
            raise RuntimeError(
                f"fusedrnn: {function.overloadpacket}{line()} draws on {device} from torch's "
                f"default generator, not from generator=; {WAY_OUT}"
            )
        if is_capturing(device):
            raise RuntimeError(
                f"fusedrnn: {function.overloadpacket}{line()} does not draw from generator= while "
                f"a CUDA graph is captured; {WAY_OUT}"
            )
        seed.lend()


def _has_device(value: Any) -> bool:
    return isinstance(value, Tensor | torch.device)
