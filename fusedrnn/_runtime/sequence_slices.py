"""Chunks of sequences, cut and joined under autograd without a second copy of the sequence.

Slices and torch.cat would do the same, but hold the gradients of all chunks until they are joined,
and the outputs of all chunks beside what they are joined to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves, differentiable
from .python_variables import versions_of


def is_batched(gradient: Tensor | None) -> bool:
    """By torch.func.vmap, or by torch.autograd.grad with is_grads_batched=True."""
    return gradient is not None and "Batched" in str(torch._C._dispatch_keys(gradient))


class Cut(torch.autograd.Function):
    """Takes some steps of a sequence: ``part, rest = Cut.apply(rest, steps)``.

    Gradients of all parts are written into one tensor, which each Cut hands on.
    """

    @staticmethod
    def forward(ctx: Any, rest: Tensor, steps: slice) -> tuple[Tensor, Tensor]:
        ctx.steps, ctx.shape = steps, rest.shape
        ctx.set_materialize_grads(False)
        return rest[steps].detach(), rest.detach()  # no views, whose changes autograd would follow

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        return tangent[ctx.steps].clone(), tangent.clone()

    @staticmethod
    def backward(
        ctx: Any, of_part: Tensor | None, of_rest: Tensor | None
    ) -> tuple[Tensor | None, None]:
        if of_part is None:
            return of_rest, None
        whole = of_part.new_zeros(ctx.shape) if of_rest is None else of_rest
        if torch.is_grad_enabled() or type(of_part) is not Tensor or is_batched(of_part):
            start, stop = ctx.steps.start, ctx.steps.stop
            return torch.cat([whole[:start], of_part, whole[stop:]]), None
        whole[ctx.steps] = of_part  # made by the next Cut, for this one
        return whole, None


class Write(torch.autograd.Function):
    """Moves outputs of a chunk to their place in the sequence."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, place: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        made = place.copy_(outputs).detach()
        if not differentiable(made):
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


class Join(torch.autograd.Function):
    """The sequence, when all parts have been written to their places."""

    @staticmethod
    def forward(ctx: Any, sequence: Tensor, *parts: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shapes = [part.shape for part in parts]
        made = sequence.detach()
        if not differentiable(made):
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        known = next(tangent for tangent in tangents if tangent is not None)
        both = zip(tangents, ctx.shapes, strict=True)
        return torch.cat([known.new_zeros(shape) if t is None else t for t, shape in both])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, *[None] * len(ctx.shapes)
        return None, *gradient.split([shape[0] for shape in ctx.shapes])


def cut(rest: Tensor, steps: slice) -> tuple[Tensor, Tensor]:
    """Some steps of a sequence, and what others are taken from."""
    if not (rest.requires_grad and torch.is_grad_enabled()):
        return rest[steps], rest
    part, rest = Cut.apply(rest, steps)
    return part, rest


class Outputs:
    """Outputs of all steps in one tensor for each leaf, or the last ones."""

    def __init__(self, call: SequenceCall) -> None:
        self._call = call
        self._sequences: list[Tensor] = []
        self._are_plain = True
        """Whether all outputs so far are of the class torch.Tensor, and in their places."""
        self._parts: list[tuple[int, Leaves]] = []
        self.last: Leaves = ()
        self.is_over = self.are_asked_for = False
        """Whether all steps have been taken, and some again already before."""
        self._refs: list[TensorWeakRef] = []
        self._versions: tuple[int, ...] = ()
        self._places: list[Any] = []

    def add(self, place: slice, outputs: Leaves) -> None:
        if not self._call.returns_sequence:
            self.last = outputs
            return
        self._are_plain &= all(type(leaf) is Tensor for leaf in outputs)
        if self._are_plain:
            if not self._parts:
                size = self._call.seq_len
                self._sequences = [leaf.new_empty((size, *leaf.shape[1:])) for leaf in outputs]
            places = zip(outputs, self._sequences, strict=True)
            outputs = tuple([Write.apply(leaf, sequence[place]) for leaf, sequence in places])
        self._parts.append((place.start, outputs))

    def joined(self) -> Leaves:
        """All of them, of which only :meth:`part` may be asked afterwards."""
        self.is_over, last = True, self.last
        in_time = sorted(self._parts, key=lambda part: part[0])
        sequences, self._sequences, self._parts, self.last = self._sequences, [], [], ()
        if not self._call.returns_sequence:
            return tuple(leaf.clone() for leaf in last)
        parts = list(zip(*(part for _, part in in_time), strict=True))
        if not self._are_plain:
            return tuple(map(torch.cat, parts))
        both = zip(sequences, parts, strict=True)
        made = tuple(Join.apply(sequence, *some) for sequence, some in both)
        self._refs, self._versions = list(map(TensorWeakRef, made)), versions_of(made)
        self._places = list(map(_place_of, made))
        return made

    def part(self, place: slice) -> Leaves:
        """Those of some steps, if somebody has them still, and as they were."""
        outputs = [ref() for ref in self._refs]
        known = [leaf for leaf in outputs if leaf is not None]
        is_same = versions_of(known) == self._versions
        if not (is_same and list(map(_place_of, known)) == self._places):
            return ()
        return tuple([leaf[place] for leaf in known])


def _place_of(leaf: Tensor) -> tuple[Any, ...]:
    """Another one after ``leaf.data = ...`` and after resizing, neither of which has a version."""
    return leaf.shape, leaf.untyped_storage().data_ptr()
