"""Backward of a sequence, from the last chunk to the first, each with a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .forward import like_rows
from .runs import Chunk, Run, as_leaf, check_nothing_missed, differentiable
from .trees import Leaves
from .values import Values

Gradients = list[Tensor | None]


@dataclass
class Backward:
    """The backward pass of one call, and the gradients that it has so far."""

    run: Run
    values: Values
    starts: Sequence[Leaves]
    states: Sequence[Tensor]
    """In parallel mode, each leaf of the state after the step at each time; else empty."""
    needs: Sequence[bool]
    """Which of ``values.leaves()`` need a gradient."""
    output_gradients: Gradients
    state_gradients: Gradients
    """Of the state after the steps that are still to be passed."""

    input_gradients: Gradients = field(init=False)
    shared: Gradients = field(init=False)
    """Gradients of constants, weights and closed-over tensors."""
    shared_leaves: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        values, needs = self.values, self.needs
        self.input_gradients = [
            torch.empty_like(leaf, memory_format=torch.contiguous_format) if need else None
            for leaf, need in zip(values.inputs, needs, strict=False)
        ]
        first = len(values.inputs) + len(values.state)
        shared = values.leaves()[first:]
        needed = zip(shared, needs[first:], strict=True)
        self.shared_leaves = [as_leaf(leaf, need) for leaf, need in needed]
        self.shared = [None] * len(shared)
        self._owns = [False] * len(shared)
        self._same: list[Tensor] = []

    def gradients(self) -> Gradients:
        """Of ``values.leaves()``."""
        step = self._replay if not self.states else self._pass_in_parallel
        chunks = self.run.chunks()
        for index in reversed(range(len(chunks))):
            self.run.enter(chunks[index])
            with self.run.again(index) as buffers:
                step(index, chunks[index], buffers)
        self._check_same()
        firsts = [
            gradient if need else None
            for gradient, need in zip(
                self.state_gradients, self.needs[len(self.values.inputs) :], strict=False
            )
        ]
        return [*self.input_gradients, *firsts, *self.shared]

    def _replay(self, index: int, chunk: Chunk, buffers: dict[str, Tensor]) -> None:
        """Takes the steps of a chunk again, with a graph of all of them."""
        run, values = self.run, self._with_shared(self.shared_leaves)
        start, inputs = self._leaves(self.starts[index]), self._input_leaves(chunk)
        outputs: list[Leaves] = []
        firsts: list[Tensor] = []
        parts: list[Any] = []

        def take(time: int, state: Leaves) -> tuple[Leaves, Leaves]:
            x = tuple(part[time - chunk.part.start] for part in parts)
            return run.take(time, state, x, values.constants)

        def take_first() -> list[Tensor]:
            state, y = take(chunk.times[0], start)
            return [*state, *y]

        def take_steps() -> Leaves:
            state = start
            with run.watched(values.closed_over):
                for time in chunk.times:
                    state, y = take(time, state)
                    firsts[:] = firsts or [*state, *y]
                    outputs.append(y)
                known = [*start, *inputs, *self.shared_leaves]
                check_nothing_missed(firsts, known, take_first)
            return state

        with torch.enable_grad():
            parts = [leaf.unbind(0) for leaf in inputs]
            state = run.call_with(values.weights | buffers, take_steps)
        self._compare(state, self.starts[index + 1])
        roots, gradients = [*state], [*self.state_gradients]
        for time, y in zip(chunk.times, outputs, strict=True):
            roots += y
            gradients += self._output_gradients_at(time)
        leaves = [*start, *inputs, *self.shared_leaves]
        found = iter(gradients_of(roots, gradients, leaves))
        self.state_gradients = [next(found) for _ in start]
        self._keep(chunk, [next(found) for _ in inputs], [*found])

    def _pass_in_parallel(self, index: int, chunk: Chunk, buffers: dict[str, Tensor]) -> None:
        """The gradient of each state, step by step; then those of the rest, of all steps at once.

        The rows of a batch being independent, the steps of a chunk are one step of a larger batch.
        """
        run, part = self.run, chunk.part
        alone = self._with_shared([leaf.detach() for leaf in self.shared_leaves])
        before = self._states_before(chunk)
        steps = chunk.steps(self.values.inputs)
        adjoints = [torch.zeros_like(leaf) if differentiable(leaf) else None for leaf in before]

        def pass_steps() -> None:
            with run.watched(alone.closed_over):
                for time, x in zip(reversed(chunk.times), reversed(steps), strict=True):
                    place = time - part.start
                    for adjoint, gradient in zip(adjoints, self.state_gradients, strict=True):
                        if adjoint is not None and gradient is not None:
                            adjoint[place] = gradient
                    start = self._leaves([leaf[place] for leaf in before])
                    state, y = run.take(time, start, x, alone.constants)
                    given = [*self.state_gradients, *self._output_gradients_at(time)]
                    self.state_gradients = gradients_of([*state, *y], given, start)

        inputs = self._input_leaves(chunk)
        values = self._with_shared(self.shared_leaves)

        def take_at_once() -> tuple[Leaves, Leaves]:
            run.noise.all_steps()
            with run.watched(values.closed_over):
                return run.bare_step(
                    tuple(leaf.flatten(0, 1) for leaf in before),
                    tuple(leaf.flatten(0, 1) for leaf in inputs),
                    values.constants,
                )

        def take_and_check() -> tuple[Leaves, Leaves]:
            state, y = take_at_once()
            check_nothing_missed([*state, *y], leaves, lambda: [*sum(take_at_once(), ())])
            return state, y

        with torch.enable_grad():
            run.call_with(alone.weights | buffers, pass_steps)
            leaves = [*inputs, *self.shared_leaves]
            if not any(leaf.requires_grad for leaf in leaves):
                return
            state, y = run.call_with(values.weights | buffers, take_and_check)
        kept = [leaf[part].flatten(0, 1) for leaf in self.states]
        self._compare(state, kept)
        given = [None if a is None else a.flatten(0, 1) for a in adjoints]
        given += [None if g is None else g.flatten(0, 1) for g in self._output_gradients_of(chunk)]
        found = gradients_of([*state, *y], given, leaves)
        self._keep(chunk, found[: len(inputs)], found[len(inputs) :])

    # What both do

    def _with_shared(self, leaves: Sequence[Tensor]) -> Values:
        return self.values.layout().values([*self.values.inputs, *self.values.state, *leaves])

    def _leaves(self, state: Sequence[Tensor]) -> Leaves:
        return tuple(as_leaf(leaf) for leaf in state)

    def _input_leaves(self, chunk: Chunk) -> Leaves:
        needs = self.needs
        return tuple(
            as_leaf(leaf[chunk.part], need)
            for leaf, need in zip(self.values.inputs, needs, strict=False)
        )

    def _states_before(self, chunk: Chunk) -> Leaves:
        """The state before each step of a chunk, in the order of time."""
        part, way = chunk.part, -1 if self.run.backwards else 1
        if chunk.start:
            moved = slice(part.start - way, part.stop - way)
            return tuple(leaf[moved] for leaf in self.states)
        parts = []
        for first, leaf in zip(self.values.state, self.states, strict=True):
            rest = [first[None], leaf[: part.stop - 1]]
            if self.run.backwards:
                rest = [leaf[part.start + 1 :], first[None]]
            parts.append(torch.cat(rest))
        return tuple(parts)

    def _output_gradients_at(self, time: int) -> Gradients:
        run = self.run
        if run.returns_sequence:
            return [None if g is None else g[time] for g in self.output_gradients]
        if run.last is None:
            is_last = time == run.time(run.seq_len - 1)
            return [g if is_last else None for g in self.output_gradients]
        flags = run.last[time]
        return [
            None if g is None else torch.where(like_rows(flags, g), g, torch.zeros_like(g))
            for g in self.output_gradients
        ]

    def _output_gradients_of(self, chunk: Chunk) -> Gradients:
        """Of all steps of a chunk, in the order of time."""
        if self.run.returns_sequence:
            return [None if g is None else g[chunk.part] for g in self.output_gradients]
        steps = [self._output_gradients_at(time) for time in sorted(chunk.times)]
        return [
            None
            if whole is None
            else torch.stack([torch.zeros_like(whole) if g is None else g for g in each])
            for whole, each in zip(self.output_gradients, zip(*steps, strict=True), strict=True)
        ]

    def _keep(self, chunk: Chunk, inputs: Gradients, shared: Gradients) -> None:
        for whole, part in zip(self.input_gradients, inputs, strict=True):
            if whole is not None:
                whole[chunk.part] = 0 if part is None else part.view_as(whole[chunk.part])
        for i, gradient in enumerate(shared):
            kept = self.shared[i]
            if kept is None or gradient is None:
                self.shared[i] = gradient if kept is None else kept
            elif self._owns[i]:
                kept += gradient
            else:  # autograd may have given the same tensor for two leaves
                self.shared[i], self._owns[i] = kept + gradient, True

    def _compare(self, state: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        same = [is_close(new, old) for new, old in zip(state, kept, strict=True)]
        self._same.append(torch.stack(same))

    def _check_same(self) -> None:
        """Once for all chunks, since it waits for the device."""
        is_cuda = self.run.device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph cannot ask
        same = torch.stack(self._same).all(0).tolist()
        if not all(same):
            name = self.run.names.state[same.index(False)]
            raise RuntimeError(
                f"fusedrnn: taken again for backward, the steps give another {name} than in "
                "forward; steps must depend only on their arguments, weights and buffers and on "
                "torch's random numbers, and these must not change before backward"
            )


def gradients_of(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    create_graph: bool = False,
) -> Gradients:
    """Of the leaves, None for those that need none or that no root depends on."""
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root.requires_grad and gradient is not None
    ]
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not needed:
        return [None] * len(leaves)
    found = iter(
        torch.autograd.grad(
            [root for root, _ in pairs],
            needed,
            [gradient for _, gradient in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def is_close(a: Tensor, b: Tensor) -> Tensor:
    """Whether only rounding tells them apart, in which kernels with and without a graph differ."""
    same = a == b
    if differentiable(a):
        a, b = a.detach(), b.detach()
        scale = b.abs().nan_to_num(0.0, 0.0, 0.0).amax() if b.numel() else 0.0
        tolerance = torch.finfo(a.dtype).eps ** 0.5
        same = same | ((a - b).abs() <= tolerance * (scale + b.abs())) | (a.isnan() & b.isnan())
    return same.all()
