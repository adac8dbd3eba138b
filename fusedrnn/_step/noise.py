"""Random numbers inside of steps: functions of the seed, step, row and draw, so never kept.

A step that draws by torch.randn_like, torch.distributions or dropout gets the numbers of this
package's Philox generator instead of those of torch's. So backward draws the same ones again, and
they do not depend on the size of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops, _seeds
from .._options import kind_of
from .generators import RandomStates

MOST_DRAWS = 2**16
"""Of a step; the other bits of a stream's number are those of the layer."""


class Draw(NamedTuple):
    """Numbers that a step draws."""

    number: int
    """In the order of the step."""
    distribution: int
    device: torch.device
    batch: int
    """The rows of the batch; 1 if the numbers do not belong to rows."""
    width: int
    dtype: torch.dtype


class NumberSource:
    """What gives a step its numbers."""

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        raise NotImplementedError

    def uniform(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """From 0 to 1, both excluded. ``like``: any tensor on the device."""
        if dtype.is_complex:
            parts = self.uniform(like, (*shape, 2), dtype.to_real())
            return torch.view_as_complex(parts)
        return self._draw(_ops.UNIFORM, like.device, shape, dtype)

    def normal(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_complex:  # of variance 1, half of it in each part
            parts = self.normal(like, (*shape, 2), dtype.to_real()) * 0.5**0.5
            return torch.view_as_complex(parts)
        return self._draw(_ops.NORMAL, like.device, shape, dtype)

    def exponential(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.uniform(like, shape, dtype).log().neg()


class Seed:
    """The seed of all layers of a call, drawn when the first of their numbers is."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"fusedrnn: generator must be a torch.Generator, got {kind_of(generator)}"
            )
        self.generator = generator
        self._drawn: Tensor | None = None
        self._source: torch.Generator | None = None
        """From which it has been drawn; None for torch's own."""
        self._lent: tuple[Tensor, Tensor] | None = None
        """States of torch's own generator, which comes back at the end of the call, and of the
        given one, when :meth:`lend` has been called."""

    @property
    def is_drawn(self) -> bool:
        return self._drawn is not None

    @property
    def is_lent(self) -> bool:
        return self._lent is not None

    @property
    def is_from_torch(self) -> bool:
        """Whether it has been drawn from one of the generators that torch.rand draws from."""
        torchs = None, torch.default_generator, *torch.cuda.default_generators
        return self.is_drawn and self._source in torchs

    def on(self, device: torch.device) -> Tensor:
        if self._drawn is None:
            self._source = None if self.is_lent else self.generator
            self._drawn = _seeds.draw(self._source, device)
        return self._drawn if self._drawn.device == device else self._drawn.to(device)

    def draw_again(self, device: torch.device) -> None:
        """Takes from torch's generator what the seed has taken."""
        _seeds.draw(self._source, device)

    def misses(self, device: torch.device) -> bool:
        """Whether functions that draw on a device take their numbers from elsewhere."""
        if self.generator is None:
            return False
        own = _torchs_own(device)
        is_lent = self.is_lent and own is _torchs_own(self.generator.device)
        return self.generator is not own and not is_lent

    def can_lend(self, device: torch.device) -> bool:
        """Whether torch's functions on a device could draw what the given generator has."""
        return self.generator is not None and self.generator.device.type == device.type

    def lend(self) -> None:
        """Has torch's own generator on the same device go on with the numbers of the given one."""
        assert self.generator is not None and self._lent is None
        own = _torchs_own(self.generator.device)
        self._lent = own.get_state(), self.generator.get_state()
        own.set_state(self._lent[1])

    def lent_states(self, states: RandomStates) -> RandomStates:
        """The same with the numbers that torch's own generator has been lent."""
        assert self.generator is not None and self._lent is not None
        of_torch = list(states.torch)
        if of_torch:
            of_torch[self.generator.device.type == "cuda"] = self._lent[1]
        return states._replace(torch=tuple(of_torch))

    def give_back(self) -> None:
        """Ends what :meth:`lend` began: torch's own generator is as it was."""
        if self._lent is not None:
            assert self.generator is not None
            own = _torchs_own(self.generator.device)
            self.generator.set_state(own.get_state())
            own.set_state(self._lent[0])
            self._lent = None


def _torchs_own(device: torch.device) -> torch.Generator:
    """Which functions of torch draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    own: torch.Generator = torch.cuda.default_generators[index]
    return own


class TrialSeed(Seed):
    """Of steps whose results nobody gets; takes nothing from torch's generators."""

    def __init__(self) -> None:
        super().__init__(torch.Generator().manual_seed(0))

    def misses(self, device: torch.device) -> bool:
        return False


class Noise(NumberSource):
    """The numbers that the steps of one layer and direction draw."""

    def __init__(self, seed: Seed, layer: int) -> None:
        self.seed, self.layer = seed, layer
        self._rows = self._first = self._steps = self._place = self._next = 0
        self._drawn: dict[Draw, Tensor] = {}
        self.draws_seed_again = False
        """Whether the steps once have drawn the seed, which the next draw is to do again."""

    @classmethod
    def for_trial(cls) -> Noise:
        """Of steps whose results nobody gets."""
        return cls(TrialSeed(), 0)

    @property
    def has_drawn(self) -> bool:
        return bool(self._drawn)

    def chunk(self, first: int, steps: int, rows: int) -> None:
        """The steps from ``first`` on come next, for a batch of ``rows``."""
        self._first, self._steps, self._rows = first, steps, rows
        self._drawn = {}

    def step(self, time: int) -> None:
        """One step of the chunk comes next."""
        self._place, self._next = time - self._first, 0

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        number, self._next = self._next, self._next + 1
        if number >= MOST_DRAWS:
            raise RuntimeError(
                f"fusedrnn: a step may draw random numbers at most {MOST_DRAWS} times, got more"
            )
        rows = self._rows
        batch = rows if shape and rows and shape[0] % rows == 0 else 1
        draw = Draw(number, distribution, device, batch, math.prod(shape) // batch, dtype)
        if draw not in self._drawn:
            if self.draws_seed_again:
                self.seed.draw_again(device)
                self.draws_seed_again = False
            self._drawn[draw] = self._numbers(draw)
        # A step may change its numbers in place.
        return self._drawn[draw][self._place].clone().reshape(shape)

    def _numbers(self, draw: Draw) -> Tensor:
        """Of all steps of the chunk, (steps, batch, width)."""
        return _ops.draw(
            self.seed.on(draw.device),
            self._steps,
            draw.batch,
            draw.width,
            stream=self.layer + draw.number * MOST_DRAWS,
            distribution=draw.distribution,
            dtype=draw.dtype,
            first_step=self._first,
        )
