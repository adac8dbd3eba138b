"""A program run by torch, one step and stage after the other.

Slow, and exact in any dtype: first uses are verified against it, and so is the compiler in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .call_weights import CallWeights
from .derive import Derived, DerivedPlan
from .program import In, Operand, OperandSource, Out, StageInput

Draws = Callable[[int], Tensor]
"""The numbers of draw i of the step at all steps, (seq_len, batch, width)."""


class _StageFunction(torch.autograd.Function):
    """One column of a stage, with the derivative that is printed."""

    @staticmethod
    def forward(ctx: Any, derived: Derived, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.derived = derived
        ctx.save_for_backward(*inputs)
        made = derived.forward(*inputs)
        shape = torch.broadcast_tensors(*inputs)[0].shape if inputs else ()
        return tuple(y.expand(shape).clone() for y in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        found = ctx.derived.backward(*inputs, *gradients)
        return (
            None,
            None,
            *(None if g is None else g.expand(x.shape) for g, x in zip(found, inputs, strict=True)),
        )


class Interpreter:
    """Runs the plan of a program."""

    def __init__(self, derived: DerivedPlan, call_weights: CallWeights) -> None:
        self._derived, self._call_weights = derived, call_weights

    def __call__(
        self,
        constants: Sequence[Tensor],
        inputs: Sequence[Tensor],
        carries: Sequence[Tensor],
        draws: Draws,
        steps: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sequences that the step returns, (seq_len, batch, width) each, and the last carries.

        Args:
            inputs: (seq_len, batch, ...) each.
            carries: (batch, ...) each.
        """
        plan = self._derived.plan
        tensors = self._call_weights.tensors(constants, carries[0])
        weights, vectors = self._call_weights.recipes.made(tensors, carries[0])
        inputs = self._call_weights.inputs(tensors, inputs, carries[0])
        state = [carry.reshape(carry.shape[0], -1) for carry in carries]
        numbers = {d: draws(d) for d in plan.draws}
        sequences: list[list[Tensor]] = [[] for _ in plan.program.sequences]
        for t in range(steps):
            now = _Step(
                self._derived,
                weights,
                vectors,
                [x[t] for x in inputs],
                state,
                {d: n[t] for d, n in numbers.items()},
            )
            state = now.run()
            for sequence, columns in zip(sequences, now.sequences(), strict=True):
                sequence.append(columns)
        return [torch.stack(sequences[i]) for i in plan.output_sequences], state


@dataclass
class _Step:
    """One step."""

    derived: DerivedPlan
    weights: list[Tensor]
    vectors: list[Tensor]
    inputs: list[Tensor]
    carries: list[Tensor]
    draws: dict[int, Tensor]
    arrays: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def run(self) -> list[Tensor]:
        program = self.derived.plan.program
        for is_stage, i in program.order:
            if is_stage:
                self._stage(i)
                continue
            product = program.products[i]
            made = self._columns(product.operand, product.terms) @ self.weights[i]
            known = self.arrays.get(product.array)
            self.arrays[product.array] = made if known is None else known + made
        return [self._placed("carry", j, carry.width) for j, carry in enumerate(program.carries)]

    def sequences(self) -> list[Tensor]:
        widths = self.derived.plan.program.sequences
        return [self._placed("sequence", i, width) for i, width in enumerate(widths)]

    def _placed(self, what: str, number: int, width: int) -> Tensor:
        """A carry or a sequence of the values that are parts of it."""
        parts = {}
        for i, value in enumerate(self.derived.plan.program.values):
            at = value.carry_offset if what == "carry" else value.offset
            if getattr(value, what) == number:
                parts[at] = self.values[i]
        made = torch.cat([parts[at] for at in sorted(parts)], 1)
        assert made.shape[1] == width
        return made

    def _columns(self, operand: Operand, width: int) -> Tensor:
        end = operand.offset + width
        if operand.source == OperandSource.INPUT:
            return self.inputs[operand.index][:, operand.offset : end]
        if operand.source == OperandSource.CARRY:
            return self.carries[operand.index][:, operand.offset : end]
        return self.values[operand.index][:, operand.offset : end]

    def _input(self, one: StageInput, width: int) -> Tensor:
        operand = one.operand
        rows = self.carries[0].shape[0]
        if one.kind == In.INDEX:
            places = torch.arange(width) % one.group
            return places.to(self.carries[0]).expand(rows, width)
        if operand.source == OperandSource.VECTOR:
            return self.vectors[operand.index].expand(rows, width)
        if operand.source == OperandSource.DRAW:
            number = self.derived.plan.draws[operand.index]
            return self.draws[number][:, operand.offset : operand.offset + width]
        count = -(-width // one.group) if one.kind == In.GROUP else width
        if operand.source == OperandSource.ARRAY:
            bias = self.derived.plan.program.arrays[operand.index].bias
            array = self.arrays[operand.index]
            array = array if bias < 0 else array + self.vectors[bias]
            found = array[:, operand.offset : operand.offset + count]
        else:
            found = self._columns(operand, count)
        if one.kind == In.GROUP:
            found = found.repeat_interleave(one.group, 1)[:, :width]
        return found

    def _stage(self, i: int) -> None:
        form, stage = self.derived.plan.program.stages[i], self.derived.plan.stages[i]
        inputs = [self._input(one, form.width) for one in form.inputs]
        if not inputs:
            inputs = [self.carries[0].new_zeros(self.carries[0].shape[0], form.width)]
            made = [y.expand_as(inputs[0]).to(inputs[0]) for y in self.derived.stages[i].forward()]
        else:
            made = list(_StageFunction.apply(self.derived.stages[i], len(stage.results), *inputs))
        for result, y in zip(form.outputs, made, strict=True):
            y = y.to(self.carries[0].dtype)  # a choice of two constants is in float64
            self.values[result.value] = _reduced(y, result.kind, result.group)


def _reduced(y: Tensor, kind: Out, group: int) -> Tensor:
    if kind == Out.COLUMN:
        return y
    parts = y.unflatten(1, (-1, group))
    if kind == Out.SUM:
        return parts.sum(2)
    if kind == Out.MAX:
        return parts.amax(2).detach()
    return parts.argmax(2).to(y).detach()
