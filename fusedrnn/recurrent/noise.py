"""Random numbers inside of steps: functions of the seed, step, row and draw, so never kept.

A step that draws by torch.randn_like, torch.distributions or dropout gets the numbers of this
package's Philox generator instead of those of torch's. So backward draws the same ones again, for
one step or for all steps of a chunk at once, and they do not depend on the size of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops, _seeds

MOST_DRAWS = 2**16
"""Of a step; the other bits of a stream's number are those of the layer."""


class NotRowWise(RuntimeError):
    """A step does not treat the rows of a batch one by one."""


class Draw(NamedTuple):
    """Numbers that a step has drawn."""

    distribution: int
    group: int
    """Rows of the numbers for a row of the batch; 0 if they do not belong to rows."""
    shape: tuple[int, ...]
    """Without the first dimension, if they belong to rows."""
    dtype: torch.dtype
    device: torch.device


class Source:
    """What gives a step its numbers."""

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        raise NotImplementedError

    def uniform(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """From 0 to 1, both excluded. ``like``: any tensor on the device."""
        return self._draw(_ops.UNIFORM, like.device, shape, dtype)

    def normal(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._draw(_ops.NORMAL, like.device, shape, dtype)

    def exponential(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.uniform(like, shape, dtype).log().neg()


class Tape(Source):
    """Numbers that are there already, in the order of the draws that they were made for."""

    def __init__(self, draws: Sequence[Draw], numbers: Sequence[Tensor]) -> None:
        self._draws, self._numbers, self._next = draws, numbers, 0

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        number, self._next = self._next, self._next + 1
        draw = self._draws[number]
        rest = tuple(shape[1:] if draw.group else shape)
        if (draw.distribution, draw.dtype, draw.shape) != (distribution, dtype, rest):
            raise RuntimeError("fusedrnn: the step draws other random numbers than in its trial")
        return self._numbers[number].reshape(shape)


class Seed:
    """The seed of all layers of a call, drawn when the first of their numbers is."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._drawn: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self._drawn is None:
            self._drawn = _seeds.draw(self._generator, device)
        return self._drawn.to(device)


class Noise(Source):
    """The numbers that the steps of one layer and direction draw."""

    def __init__(self, seed: Seed, layer: int) -> None:
        self._seed, self._layer = seed, layer
        self.draws: list[Draw] = []
        """Of the first step."""
        self.draws_by_rows = True
        """Whether all that was drawn had a row, or some rows, for each row of the batch."""
        self._rows = self._first = self._steps = self._place = self._next = 0
        self._at_once = False
        self._drawn: dict[Any, Tensor] = {}

    @classmethod
    def for_trial(cls) -> Noise:
        """Of steps whose results nobody gets; takes nothing from torch's generators."""
        return cls(Seed(torch.Generator().manual_seed(0)), 0)

    def chunk(self, first: int, steps: int, rows: int) -> None:
        """The steps from ``first`` on come next, for a batch of ``rows``."""
        self._first, self._steps, self._rows = first, steps, rows
        self._drawn.clear()

    def step(self, time: int) -> None:
        """One step of the chunk comes next."""
        self._place, self._next, self._at_once = time - self._first, 0, False

    def all_steps(self) -> None:
        """All steps of the chunk come next, at once: a batch with the rows of each."""
        self._next, self._at_once = 0, True

    def restart(self) -> None:
        """The same step or steps come once more."""
        self._next = 0

    def draw(self, draw: Draw) -> Tensor:
        """The numbers of the next draw, known from another step."""
        rows = self._rows * (self._steps if self._at_once else 1)
        shape = (rows * draw.group, *draw.shape) if draw.group else draw.shape
        return self._draw(draw.distribution, draw.device, shape, draw.dtype)

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        number, self._next = self._next, self._next + 1
        if number >= MOST_DRAWS:
            raise RuntimeError(f"fusedrnn: a step may draw {MOST_DRAWS} times, got more")
        if len(self.draws) == number:
            self.draws.append(self._description(distribution, device, shape, dtype))
        batch, width = self._batch_and_width(shape)
        key = (number, distribution, device, batch, width, dtype)
        if key not in self._drawn:
            self._drawn[key] = _ops.draw(
                self._seed.on(device),
                self._steps,
                batch,
                width,
                stream=self._layer + number * MOST_DRAWS,
                distribution=distribution,
                dtype=dtype,
                first_step=self._first,
            )
        drawn = self._drawn[key] if self._at_once else self._drawn[key][self._place]
        return drawn.clone().reshape(shape)  # a step may change its numbers in place

    def _description(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Draw:
        if shape and shape[0] % self._rows == 0:
            return Draw(distribution, shape[0] // self._rows, tuple(shape[1:]), dtype, device)
        return Draw(distribution, 0, tuple(shape), dtype, device)

    def _batch_and_width(self, shape: Sequence[int]) -> tuple[int, int]:
        """How numbers of this shape are counted: by rows of the batch if it has them."""
        size, rows = math.prod(shape), self._rows
        if self._at_once:
            if not shape or shape[0] % (self._steps * rows):
                raise NotRowWise(f"it draws numbers of shape {tuple(shape)}")
            return rows, size // (self._steps * rows)
        if shape and shape[0] % rows == 0:
            return rows, size // rows
        self.draws_by_rows = False
        return 1, size


Function = Callable[..., Tensor]


def _made(args: Any, kwargs: Any) -> tuple[Sequence[int], torch.dtype, Tensor]:
    """Shape, dtype and a tensor on the device of what torch.randn and others would make."""
    like = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    wanted = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
    if like is not None:
        empty = torch.empty_like(like, **wanted)
    else:
        size = kwargs.get("size", args)
        size = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        empty = torch.empty(tuple(size), **wanted)
    return empty.shape, empty.dtype, empty


def _maker(kind: str) -> Function:
    """randn, randn_like, rand, rand_like."""

    def drawn(noise: Source, *args: Any, **kwargs: Any) -> Tensor:
        shape, dtype, like = _made(args, kwargs)
        numbers: Tensor = getattr(noise, kind)(like, shape, dtype)
        if kwargs.get("out") is not None:
            return kwargs["out"].copy_(numbers)
        return numbers.requires_grad_() if kwargs.get("requires_grad") else numbers

    return drawn


def _normal(
    noise: Source,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    with torch.no_grad():
        given = [value for value in (mean, std) if isinstance(value, Tensor)]
        if given:
            shape = torch.broadcast_shapes(*(value.shape for value in given))
            like = given[0]
        else:
            wanted = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
            like = torch.empty(tuple(size or ()), **wanted)
            shape = like.shape
        numbers = noise.normal(like, shape, like.dtype) * std + mean
        return numbers if out is None else out.copy_(numbers)


def _in_place(numbers: Function) -> Function:
    """Methods that fill a tensor."""

    def drawn(noise: Source, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            made = numbers(noise, self, *args, **kwargs)
        return self.copy_(made)

    return drawn


def _float(like: Tensor) -> torch.dtype:
    """In which to draw what fills tensors of any dtype."""
    return like.dtype if like.is_floating_point() else torch.float32


def _fill_normal(noise: Source, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return noise.normal(like, like.shape, like.dtype) * std + mean


def _fill_uniform(
    noise: Source, like: Tensor, low: float = 0.0, high: float = 1.0, **named: Any
) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return noise.uniform(like, like.shape, like.dtype) * (high - low) + low


def _fill_exponential(noise: Source, like: Tensor, lambd: float = 1.0) -> Tensor:
    return noise.exponential(like, like.shape, like.dtype) / lambd


def _fill_bernoulli(noise: Source, like: Tensor, p: Any = 0.5) -> Tensor:
    return noise.uniform(like, like.shape, _float(like)) < p


def _bernoulli(noise: Source, input: Tensor, p: Any = None, *, out: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        if p is None:
            p = input
        numbers = (noise.uniform(input, input.shape, _float(input)) < p).to(input.dtype)
        return numbers if out is None else out.copy_(numbers)


def _multinomial(
    noise: Source,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """By a race of exponentials, whose winner is category i with a probability of input[i]."""
    with torch.no_grad():
        races = num_samples if replacement else 1
        shape = (*input.shape[:-1], races, input.shape[-1])
        arrivals = noise.exponential(input, shape, _float(input))
        order = input.unsqueeze(-2) / arrivals
        winners = order.argmax(-1)
        numbers = winners if replacement else order.squeeze(-2).topk(num_samples).indices
        return numbers if out is None else out.copy_(numbers)


def _dropout(
    noise: Source, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    kept = noise.uniform(input, input.shape, _float(input)) >= p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return input.mul_(kept * scale) if inplace else input * (kept * scale).to(input.dtype)


def _gumbel_softmax(
    noise: Source,
    logits: Tensor,
    tau: float = 1,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:
    """``eps``: ignored, as in torch."""
    gumbels = -noise.exponential(logits, logits.shape, logits.dtype).log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    winner = torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return winner - soft.detach() + soft


DRAWS: dict[Any, Function] = {
    torch.randn: _maker("normal"),
    torch.randn_like: _maker("normal"),
    torch.rand: _maker("uniform"),
    torch.rand_like: _maker("uniform"),
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    torch.dropout: lambda noise, input, p, train: _dropout(noise, input, p, train),
    torch.dropout_: lambda noise, input, p, train: _dropout(noise, input, p, train, True),
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.normal_: _in_place(_fill_normal),
    Tensor.uniform_: _in_place(_fill_uniform),
    Tensor.exponential_: _in_place(_fill_exponential),
    Tensor.bernoulli_: _in_place(_fill_bernoulli),
    F.dropout: _dropout,
    F.gumbel_softmax: _gumbel_softmax,
}
"""torch's functions whose numbers come from :class:`Noise`. Others, such as torch.randint and the
dropout inside of torch.nn.MultiheadAttention, draw from torch's generators."""
