"""Single steps of cells as autograd sees them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._autograd import below_autograd, needs_grad, plainly
from ._cells import CELLS
from ._tracers import is_alone


def run_step(
    cell: str,
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    weights: Sequence[Tensor],
    seed: Tensor | None,
    flat_version: Tensor | None,
    tuning: int,
) -> tuple[Tensor, Tensor | None]:
    """One step of a cell where nothing but autograd looks -> h, and c if there is one.

    Args:
        tensors: input, hx, cx and eps.
    """
    input, hx, cx, eps = tensors
    if needs_grad((*tensors, *weights)):
        found = _apply_step(cell, tuning, flat_version, seed, *tensors, *weights)
        return found if type(found) is tuple else (found, None)
    with below_autograd():
        h, c = _ops.step(cell, input, hx, cx, weights, eps, seed, tuning)
    return h, c


class Step(torch.autograd.Function):
    """A single step where nothing but autograd looks at it. It saves its arguments alone.

    It has no rules for torch.func: under a transform a step is a layer. The gradients of its
    gradients are those of the operator ``step_backward``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: str,
        tuning: int,
        flat_version: Tensor | None,
        seed: Tensor | None,
        *differentiable: Any,
    ) -> Any:
        input, hx, cx, eps, *weights = differentiable
        ctx.cell, ctx.tuning = cell, tuning
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(flat_version, seed, *differentiable)
        with below_autograd():
            results = _ops.step(cell, input, hx, cx, weights, eps, seed, tuning)
        # The empty c of a cell without cell state would have a node, too.
        return results if CELLS[cell].has_cell_state else results[0]

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None = None) -> tuple[Any, ...]:
        # Read once: torch.utils.checkpoint does not let saved tensors be read twice.
        flat_version, seed, input, hx, cx, eps, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        if grad_h is None and grad_c is None:
            return (None,) * (4 + len(needed))
        arguments = (ctx.cell, (grad_h, grad_c), input, hx, cx, weights, eps, seed, ctx.tuning)
        if torch.is_grad_enabled() or not is_alone():
            found = _ops.step_backward(*arguments, _bits(needed), flat_version)
        else:
            with below_autograd():
                found = _ops.step_backward(*arguments, _bits(needed))
        if len(found) == len(needed):
            return (None, None, None, None, *found)
        rest = iter(found)
        return (None, None, None, None, *[next(rest) if need else None for need in needed])


@functools.lru_cache(maxsize=64)
def _bits(needed: tuple[bool, ...]) -> int:
    """:func:`_ops.needs_of` for flags of input, hx, cx, eps and each weight."""
    return sum(1 << i for i, need in enumerate(needed) if need)


_apply_step = plainly(Step)
