"""Chunks of sequences, cut and joined under autograd without a second copy of the sequence.

Slices and torch.cat would do the same, but hold the gradients of all chunks until they are joined,
and the outputs of all chunks beside what they are joined to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._step.trees import differentiable


def is_batched(gradient: Tensor | None) -> bool:
    """By torch.func.vmap, or by torch.autograd.grad with is_grads_batched=True."""
    return gradient is not None and "Batched" in str(torch._C._dispatch_keys(gradient))


def _has_address(gradient: Tensor | None) -> bool:
    """Whether memory tells one from others: some classes of tensors say that theirs is at 0."""
    return gradient is None or (type(gradient) is Tensor and not is_batched(gradient))


class Cut(torch.autograd.Function):
    """Takes some steps from an end of a sequence: ``part, rest = Cut.apply(rest, steps, whole)``.

    Backward writes the gradients of all parts into one tensor, of which each Cut hands on the part
    that is complete.
    """

    @staticmethod
    def forward(ctx: Any, rest: Tensor, steps: int, whole: Whole) -> tuple[Tensor, Tensor]:
        cut = len(rest) - steps if whole.backwards else steps
        ctx.cut, ctx.whole, ctx.form = cut, whole, (rest.shape, rest.dtype)
        ctx.set_materialize_grads(False)
        ends = rest[:cut].detach(), rest[cut:].detach()  # no views, as in Steps
        return ends[::-1] if whole.backwards else ends

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        ends = tangent[: ctx.cut].clone(), tangent[ctx.cut :].clone()
        return ends[::-1] if ctx.whole.backwards else ends

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        of_part, of_rest = gradients
        whole, cut = ctx.whole, ctx.cut
        known = next((g for g in gradients if g is not None), None)
        if known is None:
            return None, None, None
        ends = (of_rest, of_part) if whole.backwards else (of_part, of_rest)
        shape, dtype = ctx.form
        sizes = [(cut, *shape[1:]), (shape[0] - cut, *shape[1:])]
        if torch.is_grad_enabled() or not all(map(_has_address, gradients)):
            both = zip(ends, sizes, strict=True)
            made = [known.new_zeros(s, dtype=dtype) if g is None else g for g, s in both]
            return torch.cat(made), None, None
        gradient = whole.gradient_around(of_rest, shape, cut)
        if gradient is None:
            gradient = whole.new_gradient(known, shape, dtype)
        for place, end in zip((gradient[:cut], gradient[cut:]), ends, strict=True):
            if end is None:
                place.zero_()
            elif end.data_ptr() != place.data_ptr():
                place.copy_(end)
        if len(gradient) == whole.steps:
            whole.gradient = None
        return gradient, None, None


class Whole:
    """What the Cuts of one sequence share."""

    def __init__(self, steps: int, backwards: bool) -> None:
        self.steps, self.backwards = steps, backwards
        """How many steps there are, and whether the first part is taken from the end."""
        self.gradient: Tensor | None = None
        """Of all steps, while backward is on its way."""

    def new_gradient(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of what a Cut has cut, within a new gradient of all steps."""
        whole = like.new_empty((self.steps, *shape[1:]), dtype=dtype)
        self.gradient = whole
        return self._end(whole, shape[0])

    def gradient_around(
        self, of_rest: Tensor | None, shape: Sequence[int], cut: int
    ) -> Tensor | None:
        """The same within the one that the gradient of the rest is in, if it is in one."""
        whole = self.gradient
        if whole is None or of_rest is None or not len(of_rest):
            return None
        end = self._end(whole, shape[0])
        rest = end[:cut] if self.backwards else end[cut:]
        same = rest.data_ptr() == of_rest.data_ptr() and rest.stride() == of_rest.stride()
        return end if same else None

    def _end(self, whole: Tensor, steps: int) -> Tensor:
        return whole[:steps] if self.backwards else whole[self.steps - steps :]


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


def cut(leaf: Tensor, steps: int, whole: Whole) -> tuple[Tensor, Tensor]:
    """The next steps of a sequence, and those after them."""
    if leaf.requires_grad and torch.is_grad_enabled():
        part, rest = Cut.apply(leaf, steps, whole)
        return part, rest
    at = len(leaf) - steps if whole.backwards else steps
    ends = leaf[:at], leaf[at:]
    return ends[::-1] if whole.backwards else ends
