"""Generators of random numbers from which a step may draw: torch's, Python's and NumPy's."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _kinds() -> tuple[type, ...]:
    """Those of NumPy only if somebody has imported them."""
    numpy = sys.modules.get("numpy.random")
    names = ("Generator", "RandomState", "BitGenerator")
    kinds = [getattr(numpy, name, None) for name in names]  # maybe it is being imported right now
    return (random.Random, *(kind for kind in kinds if kind is not None))


def is_generator(value: Any) -> bool:
    return isinstance(value, _kinds())


def global_generators() -> list[Any]:
    """Those from which ``random.random()`` and ``numpy.random.rand()`` draw."""
    numpy = sys.modules.get("numpy.random")
    functions: list[Any] = [random.getstate, getattr(numpy, "get_state", None)]
    return [function.__self__ for function in functions if function is not None]


class State(NamedTuple):
    """Of a generator at some time."""

    generator: Any
    state: Any
    """None if it cannot be put back, as that of the operating system's."""

    @staticmethod
    def of(generator: Any) -> State:
        if isinstance(generator, random.Random):
            try:
                return State(generator, generator.getstate())
            except NotImplementedError:
                return State(generator, None)
        if hasattr(generator, "get_state"):  # a RandomState, which keeps a normal number, too
            state = generator.get_state(legacy=False)
        else:
            state = getattr(generator, "bit_generator", generator).state
        return State(generator, pickle.dumps(state))  # arrays cannot be compared by ==

    def put_back(self) -> None:
        if self.state is None:
            return
        if isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        elif hasattr(self.generator, "set_state"):
            self.generator.set_state(pickle.loads(self.state))
        else:
            bits = getattr(self.generator, "bit_generator", self.generator)
            bits.state = pickle.loads(self.state)


def states_of(generators: Iterable[Any]) -> tuple[State, ...]:
    return tuple(map(State.of, generators))


def drawn_from(before: Iterable[State], now: Iterable[State]) -> Any:
    """The first generator whose state is another one; None if there is none. Those that are known
    at one time alone do not count: NumPy's may have been imported meanwhile."""
    states = {id(one.generator): one.state for one in now}
    for generator, state in before:
        if states.get(id(generator), state) != state:
            return generator
    return None


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nobody can ask for states or numbers."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class RandomStates(NamedTuple):
    """Of the generators that a step may draw from, at some time."""

    torch: tuple[Tensor, ...]
    """On the CPU, and on the GPU if there is one."""
    others: tuple[State, ...]

    def is_same(self, other: RandomStates) -> bool:
        pairs = zip(self.torch, other.torch, strict=True)
        is_same = all(a is b or torch.equal(a, b) for a, b in pairs)
        return is_same and drawn_from(self.others, other.others) is None


class Generators:
    """Those that a step may draw from."""

    def __init__(self, device: torch.device, held: Iterable[Any]) -> None:
        """``held``: generators of Python and NumPy that the step holds."""
        self._device, self._held = device, list(held)

    def states(self, last: RandomStates | None = None) -> RandomStates:
        """What they are now. ``last``: what they were, kept instead if it is the same."""
        others = states_of([*global_generators(), *self._held])
        now = RandomStates(self._states_of_torch(), others)
        return now if last is None or not now.is_same(last) else last

    def _states_of_torch(self) -> tuple[Tensor, ...]:
        if is_capturing(self._device):
            return ()
        if self._device.type == "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        return (torch.get_rng_state(),)

    def put_back(self, states: RandomStates) -> None:
        if states.torch:
            torch.set_rng_state(states.torch[0])
        if len(states.torch) > 1:
            torch.cuda.set_rng_state(states.torch[1], self._device)
        for state in states.others:
            state.put_back()

    @contextmanager
    def as_of(self, before: RandomStates, after: RandomStates | None) -> Iterator[None]:
        """Within, they have the states before something, if that has drawn from them.

        Args:
            after: After it; None if it has not ended.
        """
        if after is not None and before.is_same(after):
            yield
            return
        now = self.states()
        self.put_back(before)
        try:
            yield
        finally:
            self.put_back(now)
