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
        views: list[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.device, ctx.task, ctx.trained, ctx.own = device, task, trained, own
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
        of_theta: list[Tensor | None] = []
        if device.shared is not None:
            wanted = [p.requires_grad for p in device.shared.parameters()]
            of_theta = [grad for i, grad in at.items() if wanted[i]]
        now = executed(ctx, len(own))
        # Among ranks gradients lose a history of their own, as under DistributedDataParallel.
        is_traced = torch.is_grad_enabled() and (now is None or not device._keeps())
        if is_traced or _are_batched(mine):
            home: list[Tensor | None] = [None if g is None else g.to("cpu") for g in mine]
        else:
            if now is None or (_has_hooked(task, own) and not device._keeps()):
                home = device.return_gradients(task, own, mine)
            else:
                kept = [g if has else None for g, has in zip(mine, now, strict=True)]
                device.take_gradients(task, own, kept, ctx.outer)
                home = [None] * len(own)
        return (None, None, None, None, None, *home, *of_theta)


def input_of(parameter: Tensor, keeps: bool) -> Tensor:
    """A parameter as autograd is to know it.

    Where gradients come to ``.grad`` only at the end of the pass, hooks are called there. Autograd
    would call them before, without a gradient, so it gets another leaf.
    """
    return parameter.detach().requires_grad_() if keeps and _has_hooks(parameter) else parameter


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def _has_hooked(task: Task, own: Sequence[int]) -> bool:
    return any(_has_hooks(task.tensors[i]) for i in own)


def _are_batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether each stands for a batch of gradients."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None or torch._C._functorch.is_functorch_wrapped_tensor(first):
        return first is not None
    return "Batched" in str(torch._C._dispatch_keys(first))  # is_grads_batched=True
