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


class DrawsRefused(NumberSource):
    """For backward, in which no step is being taken."""

    def _draw(
        self, distribution: int, device: torch.device, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        raise RuntimeError(
            "fusedrnn: the step draws random numbers in backward, as a part of it under "
            "torch.utils.checkpoint does; they would differ from forward's, so draw them outside "
            "the checkpointed part"
        )


class Seed:
    """The seed of all layers of a call, drawn when the first of their numbers is."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"fusedrnn: generator must be a torch.Generator, got {kind_of(generator)}"
            )
        self.generator = generator
        self._drawn: Tensor | None = None
        self._lent: Tensor | None = None
        """The state of torch's own generator that comes back at the end of the call."""

    @property
    def is_drawn(self) -> bool:
        return self._drawn is not None

    @property
    def is_from_torch(self) -> bool:
        """Whether it comes from one of the generators that torch.rand draws from."""
        return self.generator is None or self.generator in (
            torch.default_generator,
            *torch.cuda.default_generators,
        )

    def on(self, device: torch.device) -> Tensor:
        if self._drawn is None:
            self._drawn = _seeds.draw(self.generator, device)
        return self._drawn if self._drawn.device == device else self._drawn.to(device)

    def draw_again(self) -> None:
        assert self._drawn is not None
        self._drawn = _seeds.draw(self.generator, self._drawn.device)

    def misses(self, device: torch.device) -> bool:
        """Whether functions that draw on a device take their numbers from elsewhere."""
        if self.generator is None:
            return False
        own = _torchs_own(device)
        is_lent = self._lent is not None and own is _torchs_own(self.generator.device)
        return self.generator is not own and not is_lent

    def lend(self) -> None:
        """Has torch's own generator on the same device go on with the numbers of the given one."""
        assert self.generator is not None
        assert self._lent is None
        own = _torchs_own(self.generator.device)
        self._lent = own.get_state()
        own.set_state(self.generator.get_state())

    def give_back(self, has_drawn: bool = True) -> None:
        """Ends what :meth:`lend` began: torch's own generator is as it was.

        Args:
            has_drawn: Whether the given generator goes on after the numbers of that time.
        """
        if self._lent is not None:
            assert self.generator is not None
            own = _torchs_own(self.generator.device)
            if has_drawn:
                self.generator.set_state(own.get_state())
            own.set_state(self._lent)
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
        self.draws: list[Draw] = []
        """Of the first step."""
        self._rows = self._first = self._steps = self._place = self._next = 0
        self._drawn: dict[Draw, Tensor] = {}
        self.is_given = False
        """Whether the numbers come from :meth:`give`, as while a chunk is recorded."""

    @classmethod
    def for_trial(cls) -> Noise:
        """Of steps whose results nobody gets."""
        return cls(TrialSeed(), 0)

    def chunk(self, first: int, steps: int, rows: int) -> None:
        """The steps from ``first`` on come next, for a batch of ``rows``."""
        self._first, self._steps, self._rows = first, steps, rows
        self._drawn, self.is_given = {}, False

    def step(self, time: int) -> None:
        """One step of the chunk comes next."""
        self._place, self._next = time - self._first, 0

    def forget(self) -> None:
        """The first step comes once more, with another seed."""
        self._next, self.draws, self._drawn = 0, [], {}

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
        if len(self.draws) == number:
            self.draws.append(draw)
        if draw not in self._drawn:
            if self.is_given:
                raise RuntimeError(
                    "fusedrnn: each step must draw random numbers by the same functions, shapes "
                    "and dtypes as the first step"
                )
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

    def numbers(self) -> list[Tensor]:
        """All that steps like the first one draw in the chunk, for :meth:`give`."""
        return [self._numbers(draw) for draw in self.draws]

    def give(self, numbers: Sequence[Tensor]) -> None:
        """The steps of the chunk draw these."""
        self._drawn = dict(zip(self.draws, numbers, strict=True))
        self.is_given = True
