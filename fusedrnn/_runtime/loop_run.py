"""One layer and direction of one call: its step, taken over all steps in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._step.generators import RandomStates, State, global_generators, states_of
from .._step.leaf_step import StepFunction
from .._step.noise import DrawsRefused, Noise
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves, differentiable
from .._step.watch import ClosedOver, Watch
from .cuda_graphs import CannotRecord, Graphs, Recorded
from .loop_weights import Weights
from .python_variables import (
    VariableKey,
    Variables,
    VariableState,
    VariableStates,
    tensors_of,
    versions_of,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Some steps in a row, counted in the order in which they are taken."""

    start: int
    stop: int
    times: range
    """The place in the sequence of each step."""

    @property
    def part(self) -> slice:
        """Of the sequence, in which time always rises."""
        return slice(min(self.times), max(self.times) + 1)

    def of(self, sequences: Leaves) -> Leaves:
        """This part of each."""
        return tuple(sequence[self.part] for sequence in sequences)

    def steps(self, parts: Leaves) -> list[Leaves]:
        """The leaves of each step, in the order of the steps. ``parts``: as :meth:`of` gives."""
        steps = [part.unbind(0) for part in parts]
        first = self.part.start
        return [tuple(step[time - first] for step in steps) for time in self.times]

    def in_time(self, steps: Sequence[T]) -> list[T]:
        """What steps have made, in the order of time."""
        return list(steps if self.times.step > 0 else reversed(steps))


@dataclass
class Before:
    """What was so before a chunk besides the state, and must be so again in backward."""

    buffers: dict[str, Tensor]
    variables: VariableStates
    random: RandomStates


class Mark(NamedTuple):
    """All that a step might change besides what it returns, at some time."""

    versions: dict[str, tuple[int, int]]
    buffers: dict[str, Tensor]
    variables: VariableStates
    random: RandomStates


@dataclass
class Run:
    """The steps of one layer and direction, and what forward finds out that backward needs."""

    call: SequenceCall
    """Without its tensors, which only autograd may keep."""
    step: StepFunction
    signature: Any
    """All that makes the step another one besides its tensors."""
    weights: Weights
    noise: Noise
    chunk_size: int = 1

    closed_over: dict[int, Tensor] = field(default_factory=dict)
    """Tensors with gradient that the step reads besides weights and what it gets, by id."""
    changed_buffers: list[str] = field(default_factory=list)
    changed_variables: list[VariableKey] = field(default_factory=list)
    refused_variables: list[VariableKey] = field(default_factory=list)
    """Of the changed ones those that get tensors with gradient."""
    kept: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """In backward of a chunk, what earlier steps have kept in variables, as leaves of its graph."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Parameters without gradient and buffers that the steps had in forward."""
    training: list[bool] = field(default_factory=list)
    """Of all modules, in forward."""
    befores: list[Before] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    """Of the outputs of each chunk, to which backward compares."""
    draws: bool = False
    """Whether the step draws from ``noise``."""
    draws_in_python: bool = False
    """Whether the first step has drawn from a generator of Python's or NumPy's. To note the states
    of these takes too long to do it before each chunk of every step."""
    is_known: bool = False
    """Whether a first step has shown what it reads and draws."""
    graphs: Graphs | None = None
    """Where chunks are recorded and repeated; None: nowhere."""
    autocast: tuple[bool, torch.dtype] = (False, torch.float32)

    def __post_init__(self) -> None:
        kind = self.call.device.type
        self.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        weights = self.weights
        self.python = Variables.of(weights.used.modules(), weights.held)

    # Steps and chunks

    def chunks(self) -> list[Chunk]:
        call, found = self.call, []
        way = -1 if call.backwards else 1
        for start in range(0, call.seq_len, self.chunk_size):
            stop = min(start + self.chunk_size, call.seq_len)
            times = range(call.time(start), call.time(stop - 1) + way, way)
            found.append(Chunk(start, stop, times))
        return found

    def enter(self, chunk: Chunk) -> None:
        self.noise.chunk(chunk.part.start, len(chunk.times), self.call.rows)

    def recorded(self, what: str, function: Callable[..., T]) -> Recorded[T] | None:
        """A function of a whole chunk that is to be recorded; None if there is no graph."""
        if self.graphs is None:
            return None
        return self.graphs.recorded(what, function, self.call.device)

    def give_up_graphs(self, error: CannotRecord) -> None:
        assert self.graphs is not None
        self.graphs.give_up(error)

    def is_whole(self, chunk: Chunk) -> bool:
        return len(chunk.times) == self.chunk_size

    def take(self, time: int, state: Leaves, x: Leaves, constants: Leaves) -> tuple[Leaves, Leaves]:
        """One step, whose errors name it."""
        self.noise.step(time)
        versions = versions_of((*state, *x))
        try:
            new, y = self.step(state, x, constants)
        except Exception as error:
            add_note(error, f"fusedrnn: in the step at time {time}{self.call.place}")
            raise
        now = versions_of((*state, *x))
        if now != versions:
            place = [a == b for a, b in zip(now, versions, strict=True)].index(False)
            name = [*self.call.names.state, *self.call.names.input][place]
            raise RuntimeError(
                f"fusedrnn: the step changes {name} in place, at time {time}; it must return new "
                "tensors, since backward recomputes the step from the old ones"
            )
        return new, y

    # What surrounds a step

    @contextmanager
    def watched(
        self, replacements: dict[int, Tensor] | None = None, closed_over: ClosedOver | None = None
    ) -> Iterator[None]:
        """Within: steps draw their noise here, and read ``replacements``."""
        with ExitStack() as stack:
            is_on, dtype = self.autocast
            if is_on or torch.is_autocast_enabled(self.call.device.type):
                stack.enter_context(
                    torch.autocast(self.call.device.type, dtype, enabled=is_on, cache_enabled=True)
                )
            looks = closed_over is not None
            # What the first step does not draw, others draw from torch's generators.
            draws = self.draws or (looks and not self.is_known)
            if draws or replacements or looks:
                noise = self.noise if draws else None
                stack.enter_context(Watch(noise, replacements, closed_over))
            yield

    @contextmanager
    def watched_backward(self) -> Iterator[None]:
        """Within, autograd passes steps backward, which must not draw."""
        with Watch(DrawsRefused()) if self.draws else nullcontext():
            yield

    def before(self) -> Before:
        states = self.random_states(self.draws_in_python)
        if self.befores and states.is_same(self.befores[-1].random):
            states = self.befores[-1].random  # each takes 5 KB, or 30
        return Before(self.weights.copies(self.changed_buffers), self.python.values(), states)

    @contextmanager
    def again(self, index: int, whole: bool = False) -> Iterator[dict[str, Tensor]]:
        """Within, variables and generators are as before this chunk.

        Gives the buffers of that time.

        Args:
            whole: Whether all chunks after it follow within.
        """
        before = self.befores[index]
        after = self.befores[-1 if whole else index + 1].random
        copies = {name: buffer.clone() for name, buffer in before.buffers.items()}
        variables, self.kept = before.variables, {}
        if index:  # else they are as before the call
            known = {*self.closed_over, *tensors_of(self.befores[0].variables)}
            variables, self.kept = self.python.with_leaves(variables, self.refused_variables, known)
        # What the steps change, and what somebody has changed since.
        keys = [*dict.fromkeys([*self.changed_variables, *self.python.changed(before.variables)])]
        now = self.python.values(keys)
        contents = [VariableState.of(variables[key].value) for key in now if key in variables]
        draws = not before.random.is_same(after)
        if draws:
            random = self.random_states(self.draws_in_python)
            self.set_random_states(before.random)
        try:
            self.python.put_back(variables, keys)
            yield copies
        finally:
            for content in contents:  # of containers that are in no variable any more
                content.put_back()
            self.python.put_back(now, keys)
            if draws:
                self.set_random_states(random)

    def for_trial(self, steps: int) -> Run:
        """The same step for the first steps, with noise of its own, from which it draws."""
        call = self.call._replace(seq_len=steps, returns_sequence=True, last=None)
        noise = Noise.for_trial()
        return Run(call, self.step, self.signature, self.weights, noise, steps, draws=True)

    def mark(self, in_python: bool = True) -> Mark:
        """``in_python``: as that of :meth:`random_states`."""
        versions = self.weights.buffer_versions()
        buffers = self.weights.copies(versions)
        return Mark(versions, buffers, self.python.values(), self.random_states(in_python))

    def change(self, mark: Mark) -> str:
        """What the step has changed since, which no graph would change again; "" for nothing."""
        changed = self.python.changed(mark.variables)
        if changed:
            return f"the step changes {self.python.name(changed[0])}"
        if self.weights.changed(mark.versions, mark.buffers):
            return "the step changes a buffer"
        return ""

    def check_written(self, mark: Mark) -> None:
        """Refuses a tensor that the step has written in place and that is no buffer."""
        written = self.python.written(mark.variables)
        if written is not None:
            raise RuntimeError(
                f"fusedrnn: the step changes the tensor in {written} in place, so backward cannot "
                "recompute the step from its old values; make it a buffer, or assign a new tensor"
            )

    def has_drawn(self, mark: Mark) -> bool:
        """Whether numbers have been drawn since, but for those of ``noise``."""
        return not mark.random.is_same(self.random_states())

    def missed(self, random: tuple[Tensor, ...]) -> list[torch.device]:
        """Where torch's own generator has moved since, though another one was given."""
        if self.noise.seed.generator is None or not random:
            return []
        devices = [torch.device("cpu"), self.call.device]
        states = zip(devices, random, self._states_of_torch(), strict=False)
        return [
            device
            for device, before, after in states
            if self.noise.seed.misses(device) and not torch.equal(before, after)
        ]

    def aside(self, function: Callable[[], T], weights: dict[str, Tensor] | None = None) -> T:
        """``function()``, after which all that it may change is as before."""
        mark = self.mark()
        try:
            return self.weights.call_with((weights or {}) | mark.buffers, function)
        finally:
            self.python.put_back(mark.variables, self.python.changed(mark.variables))
            self.set_random_states(mark.random)

    def random_states(self, in_python: bool = True) -> RandomStates:
        """
        Args:
            in_python: Whether to note those of Python's and NumPy's generators, too, which takes
                longer than all else.
        """
        others: tuple[State, ...] = ()
        if in_python:
            others = states_of([*global_generators(), *self.weights.held.generators])
        return RandomStates(self._states_of_torch(), others)

    def _states_of_torch(self) -> tuple[Tensor, ...]:
        if self.call.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return ()
            return torch.get_rng_state(), torch.cuda.get_rng_state(self.call.device)
        return (torch.get_rng_state(),)

    def set_random_states(self, states: RandomStates) -> None:
        if states.torch:
            torch.set_rng_state(states.torch[0])
        if len(states.torch) > 1:
            torch.cuda.set_rng_state(states.torch[1], self.call.device)
        for state in states.others:
            state.put_back()


def add_note(error: Exception, note: str) -> None:
    """A line below the error's message, for which Python 3.10 has no place of its own."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)


def as_leaf(tensor: Tensor, needs_gradient: bool = True) -> Tensor:
    """The same values for another graph."""
    return tensor.detach().requires_grad_(needs_gradient and differentiable(tensor))
