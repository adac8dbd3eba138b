"""Whether a program computes what the step does: values and all gradients.

A graph of operations does not show everything: custom autograd.Functions, hooks, changes in place
without a graph. So the untouched step is taken a few times under autograd, in float64, and its
program is run by the interpreter.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..recurrent.autograd import plain_loop
from ..recurrent.noise import MOST_DRAWS, Noise
from ..recurrent.reads import ClosedOver
from ..recurrent.runs import Run
from ..recurrent.trees import Leaves, differentiable
from ..recurrent.values import Values
from .interpret import Interpreter
from .trace import CannotCompile

STEPS, BATCH = 3, 2
"""The batch is another one than that of the trace, in case that its size is in the graph."""
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative: a step may have numbers that depend on the dtype of its weights, such as an eps."""


class Trial:
    """Tensors for a few steps, and what the untouched step makes of them."""

    def __init__(
        self, run: Run, names: Sequence[str], constants: Leaves, inputs: Leaves, state: Leaves
    ) -> None:
        self._random = torch.Generator().manual_seed(1)
        self.constants = [
            self._constant(c, n in run.weights.trained())
            for n, c in zip(names, constants, strict=True)
        ]
        self.inputs = [self._input(leaf) for leaf in inputs]
        # Positive, since some states are divided by, or have a logarithm.
        self.state = [self._normal(BATCH, *leaf.shape[1:]).abs().requires_grad_() for leaf in state]
        self.noise = Noise.for_trial()
        self._names = names
        outputs, last = self._loop(run)
        self.outputs = [y.reshape(*y.shape[:2], -1) for y in outputs]
        self.last = [leaf.reshape(BATCH, -1) for leaf in last]
        self.cotangents = [self._normal(*y.shape) for y in (*self.outputs, *self.last)]
        self.gradients = self.gradients_of([*self.outputs, *self.last])

    def leaves(self) -> list[Tensor]:
        return [t for t in (*self.constants, *self.inputs, *self.state) if t.requires_grad]

    def gradients_of(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Of the leaves."""
        pairs = [(y, g) for y, g in zip(results, self.cotangents, strict=True) if y.requires_grad]
        leaves = self.leaves()
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(
            [y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
        )
        return [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        ]

    def draws(self, distribution: int, number: int, width: int) -> Tensor:
        """What the loop has drawn, (seq_len, batch, width)."""
        return _ops.draw(
            self.noise.seed.on(torch.device("cpu")),
            STEPS,
            BATCH,
            width,
            stream=number * MOST_DRAWS,
            distribution=distribution,
            dtype=torch.float64,
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self._random)

    def _constant(self, constant: Tensor, is_trained: bool) -> Tensor:
        """Near the real one: what is zero now hides what is wrong."""
        value = constant.detach().cpu()
        if not differentiable(value):
            return value
        value = value.double()
        noise = self._normal(*value.shape)
        # What is not trained may be a variance: it stays positive.
        value = value + 0.05 * noise if is_trained else value * (1 + 0.1 * noise.tanh())
        return value.requires_grad_(is_trained)

    def _input(self, leaf: Tensor) -> Tensor:
        shape = (STEPS, BATCH, *leaf.shape[2:])
        if leaf.dtype == torch.bool:
            return torch.rand(shape, generator=self._random) < 0.5
        if not leaf.is_floating_point():  # maybe places in a table: only what came is safe
            flat = leaf.detach().cpu().reshape(-1, *leaf.shape[2:])
            return flat[torch.arange(STEPS * BATCH) % flat.shape[0]].reshape(shape)
        return self._normal(*shape).requires_grad_()

    def _loop(self, run: Run) -> tuple[Leaves, Leaves]:
        step = copy.copy(run.user_step)
        step.output, step._kinds = None, []
        trial = dataclasses.replace(
            run.for_trial(STEPS),
            step=step,
            user_step=step,
            rows=BATCH,
            backwards=False,
            compiled=None,
            noise=self.noise,
            device=torch.device("cpu"),
        )
        trial.draws = True
        trial.autocast = (False, torch.float32)
        values = dict(zip(self._names, self.constants, strict=True))
        found = ClosedOver([*run.weights.tensors(), *self.constants, *self.inputs, *self.state])
        changes = [""]

        def take_steps() -> tuple[Leaves, Leaves]:
            mark = trial.mark()
            with torch.enable_grad(), trial.watched(closed_over=found):
                given = Values(tuple(self.inputs), tuple(self.state), (), {}, {})
                result = plain_loop(trial, given, {})
            changes[0] = trial.change(mark)
            if trial.has_drawn(mark):
                changes[0] = "the step draws random numbers that backward could not draw again"
            return result

        try:
            result = run.aside(lambda: run.weights.call_with(values, take_steps))
        except Exception as error:
            raise CannotCompile(
                f"in float64 it raises {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            ) from error
        if changes[0]:
            raise CannotCompile(changes[0])
        others = [*found.with_gradient.values(), *found.others.values()]
        if others:
            raise CannotCompile(
                f"the step reads a tensor of shape {tuple(others[0].shape)} that is no weight, "
                "buffer, input or state of it; register it as a buffer"
            )
        return result


def verify(interpreter: Interpreter, trial: Trial, dtype: torch.dtype) -> None:
    """Compares a program to the step.

    Raises:
        CannotCompile: They differ.
    """
    plan = interpreter._plan
    numbers = {
        i: trial.draws(one.distribution, i, one.width) for i, one in enumerate(plan.lowered.draws)
    }
    with torch.enable_grad():
        outputs, last = interpreter(
            trial.constants, trial.inputs, trial.state, numbers.__getitem__, STEPS
        )
        results = [*outputs, *last]
        gradients = trial.gradients_of(results)
    tolerance = _TOLERANCES[dtype]
    compare(results, [*trial.outputs, *trial.last], tolerance, "values")
    compare(gradients, trial.gradients, tolerance, "derivatives")


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float, what: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.detach().double(), b.detach().double()
        finite = b.isfinite()
        if not bool(finite.all()):
            raise CannotCompile(f"{what} of the step on random numbers are not finite")
        scale = b.abs().max().item() if b.numel() else 0.0
        difference = (a - b).abs().max().item() if b.numel() else 0.0
        if not difference <= tolerance * (1 + scale):
            hint = (
                ""
                if what == "values"
                else ": does it have a custom autograd.Function, a hook, or a change in place "
                "without a graph?"
            )
            raise CannotCompile(f"{what} of the program are not those of the step itself{hint}")


def examples(leaves: Sequence[Tensor], rows: int, of_steps: bool) -> list[Tensor]:
    """Leaves of ``rows`` rows to trace with."""
    found: list[Any] = []
    for leaf in leaves:
        shape = (rows, *leaf.shape[(2 if of_steps else 1) :])
        if leaf.is_floating_point():
            random = torch.Generator().manual_seed(len(found))
            numbers = torch.rand(shape, generator=random) + 0.25
            found.append(numbers.to(leaf.dtype))
        else:
            flat = leaf.detach().reshape(-1, *shape[1:])
            found.append(flat[torch.arange(rows) % flat.shape[0]].cpu())
    return found
