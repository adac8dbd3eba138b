"""The node of autograd between the weights of a task on the host and those on the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .passes import executed
from .task import Task

if TYPE_CHECKING:
    from .device import Device


class Fetch(torch.autograd.Function):
    """Parameters on the host in, tensors on the device out."""

    @staticmethod
    def forward(
        ctx: Any,
        device: Device,
        task: Task,
        trained: list[int],
        own: list[int],
        theirs: list[int],
        views: list[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """
        Args:
            trained: Indices of the tensors in ``views``.
            own: Of those that the task trains, whose parameters come first in ``inputs``.
            theirs: Of those whose weights that are added are trained, which follow.
        """
        ctx.device, ctx.task, ctx.trained, ctx.own, ctx.theirs = device, task, trained, own, theirs
        with device.lock:
            outer = device.this_pass()
        ctx.outer = None if outer is None else weakref.ref(outer)
        ctx.set_materialize_grads(False)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        device: Device = ctx.device
        task, own = ctx.task, ctx.own
        at = {i: grad for i, grad in zip(ctx.trained, grads, strict=True)}
        mine = [at[i] for i in own]
        now = executed(ctx, len(own))
        is_at_once = True
        if torch.is_grad_enabled() or _are_batched(mine):
            home: list[Tensor | None] = [None if g is None else g.to("cpu") for g in mine]
        elif now is None or _has_hooked(task, own):
            home = device.return_gradients(task, own, mine)
        else:
            kept = [g if has else None for g, has in zip(mine, now, strict=True)]
            device.take_gradients(task, own, kept, ctx.outer)
            home, is_at_once = [None] * len(own), False
        if is_at_once and now is not None:
            device.returned_gradients(task, ctx.outer)
        return (None,) * 6 + (*home, *(at[i] for i in ctx.theirs))


def has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def _has_hooked(task: Task, own: Sequence[int]) -> bool:
    return any(has_hooks(task.tensors[i]) for i in own)


def _are_batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether each stands for a batch of gradients."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None or torch._C._functorch.is_functorch_wrapped_tensor(first):
        return first is not None
    return "Batched" in str(torch._C._dispatch_keys(first))  # is_grads_batched=True
