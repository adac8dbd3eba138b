"""What a step computes on a few steps of random or special numbers, which its program must, too.

What a program is made of does not show everything: custom autograd.Functions, hooks, changes in
place. So the graph of the step is run under autograd, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import _ops
from .._front.refusals import CannotCompile, StepRaises
from .._front.step_graph import Given, StepGraph
from .._step.noise import MOST_DRAWS, Draw, Noise, TrialSeed
from .._step.trees import Leaves, differentiable
from .._step.watch import Watch
from .compiled_step import CompiledStep
from .interpreter import Interpreter

STEPS, BATCH = 3, 2
"""The batch is another one than that of the trace, in case that its size is in the graph."""

STEPS_OF_KNOWN = 2
"""A step that has a record has passed all trials before."""

_FEW = 16381
"""Normal numbers that are added to weights."""

Numbers = Callable[[Tensor], Tensor]
"""Makes special numbers of random ones."""


class Trial:
    """Tensors for a few steps, and what the step makes of them."""

    def __init__(
        self,
        constants: Leaves,
        trained: Sequence[bool],
        inputs: Leaves,
        state: Leaves,
        take_steps: Callable[[Trial], tuple[Sequence[Tensor], Sequence[Tensor]]],
        used: Sequence[bool] | None = None,
        corner: Numbers | None = None,
        batch: int = BATCH,
        *,
        dtype: torch.dtype,
        steps: int = STEPS,
        computes_in: torch.dtype = torch.float64,
    ) -> None:
        """
        Args:
            trained: Which constants have gradients.
            take_steps: From a trial with tensors to what the steps return, and to the last state.
            used: Which of these results have gradients; all by default.
            corner: What inputs and states are; constants are then as they come.
            batch: Rows.
            dtype: Of the program. But at corners, numbers are such as float32 has, if it is that;
                so its library is compared to the same trial.
            steps: How many are taken.
            computes_in: The dtype of all floating-point tensors.
        """
        self._random = torch.Generator().manual_seed(1)
        self._dtype = torch.float32 if dtype == torch.float32 else torch.float64
        self._computes_in = computes_in
        self._few: Tensor | None = None
        self._made: tuple[Any, list[Tensor], list[Tensor]] | None = None
        self._corner, self.batch, self.steps, self._originals = corner, batch, steps, constants
        self.constants = [self._constant(c, t) for c, t in zip(constants, trained, strict=True)]
        self.inputs = [self._input(leaf) for leaf in inputs]
        self.state = [self._state(leaf) for leaf in state]
        self.noise = _TrialNoise(self._dtype)
        outputs, last = take_steps(self)
        if any(y.shape[1:2] != (batch,) for y in outputs) or any(
            leaf.shape[:1] != (batch,) for leaf in last
        ):
            raise CannotCompile(
                "a result of the step has the same batch size whatever the batch size of the call"
            )
        self.outputs = [y.reshape(*y.shape[:2], -1) for y in outputs]
        self.last = [leaf.reshape(batch, -1) for leaf in last]
        results = (*self.outputs, *self.last)
        self.cotangents = [
            self._normal(*y.shape) * is_used
            for y, is_used in zip(results, used or [True] * len(results), strict=True)
        ]
        try:
            self.gradients = self.gradients_of([*self.outputs, *self.last])
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise StepRaises(f"backward of the step raises: {said}") from error

    @property
    def is_at_corner(self) -> bool:
        return self._corner is not None

    def leaves(self) -> list[Tensor]:
        return [t for t in (*self.constants, *self.inputs, *self.state) if t.requires_grad]

    def gradients_of(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Of the leaves."""
        pairs = [(y, g) for y, g in zip(results, self.cotangents, strict=True) if y.requires_grad]
        leaves = self.leaves()
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        # A sum, because torch imports its compiler for the gradients of several results.
        total = torch.stack([(y * g).sum() for y, g in pairs]).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        ]

    def rounded(self, dtype: torch.dtype, scale: float) -> Trial:
        """The same with numbers that a dtype has, still in float64.

        Args:
            scale: Of inputs and states, for another trial.
        """

        def of(tensor: Tensor, scale: float = 1.0) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            own = (tensor.detach() * scale).to(dtype).double()
            return own.requires_grad_(tensor.requires_grad)

        if dtype == self._dtype and scale == 1 and not self.is_at_corner:
            return self
        made = copy.copy(self)
        made._dtype, made._made = dtype, None
        made.constants = [of(c) for c in self.constants]
        made.inputs = [of(x, scale) for x in self.inputs]
        made.state = [of(leaf, scale) for leaf in self.state]
        made.cotangents = [of(g) for g in self.cotangents]
        return made

    def _draws(self, distribution: int, number: int, width: int) -> Tensor:
        """What the loop has drawn, (seq_len, batch, width), or what a program draws."""
        return _ops.draw(
            self.noise.seed.on(torch.device("cpu")),
            self.steps,
            self.batch,
            width,
            stream=number * MOST_DRAWS,
            distribution=distribution,
            dtype=self._dtype,
        ).to(self._computes_in)

    def _normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        # Drawn in float32, because float64 takes six times longer.
        return torch.randn(shape, generator=self._random).to(dtype or self._computes_in)

    def _noise_like(self, weight: Tensor) -> Tensor:
        """A few normal numbers again and again: to draw one for each weight takes longer than the
        steps. Their count is prime, so rows and columns of weights differ."""
        if self._few is None:
            self._few = self._normal(_FEW, dtype=self._dtype)
        first, count = int(torch.randint(_FEW, (), generator=self._random)), weight.numel()
        repeated = self._few.repeat(-(-(first + count) // _FEW))
        return repeated[first : first + count].view(weight.shape)

    def _constant(self, constant: Tensor, is_trained: bool) -> Tensor:
        """Near the real one: what is zero now hides what is wrong."""
        value = constant.detach().cpu()
        if not differentiable(value):
            return value.clone()
        if self._corner is not None:
            return value.to(self._computes_in, copy=True).requires_grad_(is_trained)
        value = value.to(self._dtype)
        noise = self._noise_like(value)
        if is_trained:
            value = torch.add(value, noise, alpha=0.05, out=noise)
        else:  # maybe a variance, so it stays positive; zeros are filled, which would hide an error
            value = torch.where(value == 0, 0.05 * noise.abs(), value * (1 + 0.1 * noise.tanh()))
        return value.to(self._computes_in).requires_grad_(is_trained)

    def _input(self, leaf: Tensor) -> Tensor:
        shape = (self.steps, self.batch, *leaf.shape[2:])
        if leaf.dtype == torch.bool:
            return torch.rand(shape, generator=self._random) < 0.5
        if not leaf.is_floating_point():  # maybe places in a table: only what came is safe
            flat = leaf.detach().cpu().reshape(-1, *leaf.shape[2:])
            return flat[torch.arange(self.steps * self.batch) % flat.shape[0]].reshape(shape)
        made = self._normal(*shape)
        return (made if self._corner is None else self._corner(made)).requires_grad_()

    def _state(self, leaf: Tensor) -> Tensor:
        made = self._normal(self.batch, *leaf.shape[1:])
        # Positive, since some states are divided by, or have a logarithm.
        made = made.abs() if self._corner is None else self._corner(made)
        return made.requires_grad_()

    @staticmethod
    def of_graph(
        graph: StepGraph,
        given: Given,
        trained: Sequence[bool],
        inputs: Leaves,
        state: Leaves,
        corner: Numbers | None = None,
        batch: int = BATCH,
        *,
        is_known: bool = False,
    ) -> Trial:
        """What a step's graph makes.

        Args:
            trained: Which constants have gradients.
            is_known: The step has a record, which one that changes weights in place never has. So
                that is not looked for, fewer steps are taken, and float32 is computed in float32.

        Raises:
            CannotCompile: It cannot be tried.
        """
        dtype = state[0].dtype
        computes_in = dtype if is_known and dtype == torch.float32 else torch.float64
        return Trial(
            given.constants,
            trained,
            inputs,
            state,
            lambda trial: trial._loop(graph, given, not is_known),
            corner=corner,
            batch=batch,
            dtype=dtype,
            steps=STEPS_OF_KNOWN if is_known else STEPS,
            computes_in=computes_in,
        )

    @staticmethod
    def of_program(
        program: CompiledStep,
        constants: Leaves,
        trained: Sequence[bool],
        inputs: Leaves,
        state: Leaves,
        used: Sequence[bool],
    ) -> Trial:
        """What a program makes that is known to be right.

        Raises:
            CannotCompile: Its derivatives are not finite.
        """

        def take_steps(trial: Trial) -> tuple[list[Tensor], list[Tensor]]:
            return _interpreter(program)(
                trial.constants,
                trial.inputs,
                trial.state,
                trial.numbers(program).__getitem__,
                trial.steps,
            )

        return Trial(constants, trained, inputs, state, take_steps, used, dtype=program.dtype)

    def numbers(self, program: CompiledStep) -> dict[int, Tensor]:
        """What a program draws in these steps, by the numbers of its draws."""
        draws = program.derived().plan.lowered.draws
        return {i: self._draws(d.distribution, i, d.width) for i, d in enumerate(draws)}

    def by_interpreter(self, program: CompiledStep) -> tuple[list[Tensor], list[Tensor]]:
        """What a program makes of the same, and gradients of the leaves."""
        if self._made is None or self._made[0] is not program.generated:
            numbers = self.numbers(program)
            with torch.enable_grad():
                outputs, last = _interpreter(program)(
                    self.constants, self.inputs, self.state, numbers.__getitem__, self.steps
                )
                results = [*outputs, *last]
                gradients = self.gradients_of(results)
            self._made = program.generated, [y.detach() for y in results], gradients
        return self._made[1:]

    def _loop(
        self, graph: StepGraph, given: Given, looks_for_changes: bool
    ) -> tuple[Leaves, Leaves]:
        """All steps by the graph."""
        module = graph.on_cpu(self._computes_in)
        own = given._replace(constants=tuple(self.constants))
        before = [c.detach().clone() for c in self.constants] if looks_for_changes else []
        state, outputs = tuple(self.state), list[Leaves]()
        self.noise.chunk(0, self.steps, self.batch)
        try:
            with torch.enable_grad(), Watch(self.noise), _WithoutHooks():
                for time in range(self.steps):
                    self.noise.step(time)
                    x = tuple(leaf[time] for leaf in self.inputs)
                    state, y = graph.take(own, x, state, self.batch, module)
                    outputs.append(y)
        except CannotCompile:
            raise
        except Exception as error:
            raise StepRaises(
                f"in float64 the step raises {type(error).__name__}: "
                f"{str(error).splitlines()[0][:200]}"
            ) from error
        for name, constant, old in zip(graph.names, self.constants, before, strict=False):
            if not torch.equal(constant.detach(), old):  # also what .data hides from versions
                raise CannotCompile(f"the step changes {name} in place")
        return tuple(torch.stack(y) for y in zip(*outputs, strict=True)), state


def _interpreter(program: CompiledStep) -> Interpreter:
    return Interpreter(program.derived(), program.generated.call_weights)


class _TrialNoise(Noise):
    """Numbers of one dtype, as those of another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(TrialSeed(), 0)
        self._dtype = dtype

    def _numbers(self, draw: Draw) -> Tensor:
        return super()._numbers(draw._replace(dtype=self._dtype)).to(draw.dtype)


class _WithoutHooks(TorchFunctionMode):
    """Within, the step has no hooks for backward: they may do something to rare gradients alone."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.register_hook:
            raise CannotCompile("the step registers a backward hook")
        return function(*args, **(kwargs or {}))
