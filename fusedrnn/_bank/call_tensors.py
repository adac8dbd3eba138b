"""The tensors that a call of a task computes with, and their node of autograd.

The node is between the parameters of the task, on the host, and tensors on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backward_passes import executed
from .bank_device import Device
from .slots import Slot
from .task import Task


def tensors_of_call(device: Device, task: Task, slot: Slot | None) -> list[Tensor]:
    """What a call of the task computes with: with a history, if a gradient is wanted.

    Args:
        slot: Where the weights are; None if that is the host.
    """
    device.this_pass()  # so that passes within this one are known to be
    theta = [] if device.shared is None else list(device.shared.parameters())
    parameters = sum(place.is_parameter for place in task.places)
    own = [i for i in range(parameters) if task.tensors[i].requires_grad]
    theirs = [i for i, tensor in enumerate(theta) if tensor.requires_grad]
    trained = sorted({*own, *theirs})
    wants = torch.is_grad_enabled() and trained and not torch.is_inference_mode_enabled()
    if slot is not None and torch.is_grad_enabled():
        _check_buffers(task, parameters)
    # A call within a pass, as of a checkpoint, has tensors of its own.
    leaves = [(task.tensors[i], *theta[i : i + 1]) for i in trained]
    hooked = [i for i, some in zip(trained, leaves, strict=True) if any(map(_has_hooks, some))]
    made_for = own, theirs, hooked, torch._C._current_graph_task_id()
    if slot is not None and slot.views is not None and wants and slot.views[0] == made_for:
        return slot.views[1]  # so that gradients of several calls are added on the device
    with torch.inference_mode(False):
        if slot is None:
            found = [tensor.detach() for tensor in task.tensors[:parameters]]
            found += task.tensors[parameters:]
        else:
            found = [place.view(slot.memory) for place in task.places]
    if not wants:
        return found
    # One with hooks has a node of its own, so that they are not called if it gets no gradient.
    for group in [[i for i in trained if i not in hooked], *([i] for i in hooked)]:
        inside = set(group)
        ours, added = ([i for i in some if i in inside] for some in (own, theirs))
        inputs = [*(task.tensors[i] for i in ours), *(theta[i] for i in added)]
        views = [found[i] for i in group]
        made = Fetch.apply(device, task, group, ours, added, views, *inputs) if group else ()
        for i, tensor in zip(group, made, strict=True):
            found[i] = tensor
    if slot is not None:
        slot.views = made_for, found
    return found


def _check_buffers(task: Task, first: int) -> None:
    for place, tensor in zip(task.places[first:], task.tensors[first:], strict=True):
        if tensor.requires_grad:
            raise RuntimeError(
                f"fusedrnn: the buffer {place.names[0]} of {task.name} requires a gradient, and a "
                "WeightBank has gradients of parameters only: make it an nn.Parameter, or detach() "
                "it"
            )


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
