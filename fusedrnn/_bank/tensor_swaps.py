"""The time in which a module has other tensors than its own: those of calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .task import Task, is_plain, list_weights


def swap_in(task: Task, tensors: Sequence[Tensor]) -> None:
    """Puts others in the place of a module's own tensors. For the holder of the lock alone.

    Calls may end in another order than they began in, as those of two generators do, so each ends
    by itself: the module then has what the last of the others has put there.
    """
    if task.swaps:
        if values := reassigned_buffers(task):
            write_values(task.swaps[-1], values)
    else:
        task.lists = [(rnn._flat_weights, rnn._flat_weight_refs) for rnn in task._rnns]
    task.swaps.append(tensors)
    _install(task, tensors)


def swap_back(task: Task, tensors: Sequence[Tensor]) -> None:
    """Undoes ``swap`` of these."""
    del task.swaps[max(i for i, swapped in enumerate(task.swaps) if swapped is tensors)]
    _install(task, task.swaps[-1] if task.swaps else task.tensors)
    if not task.swaps:
        for rnn, (weights, refs) in zip(task._rnns, task.lists, strict=True):
            rnn._flat_weights, rnn._flat_weight_refs = weights, refs


def _install(task: Task, tensors: Sequence[Tensor]) -> None:
    for owners, tensor in zip(task._owners, tensors, strict=True):
        for where, name in owners:
            where[name] = tensor
    list_weights(task._rnns)


def write_values(tensors: Sequence[Tensor], values: dict[int, Tensor]) -> None:
    """Writes to tensors of a call, as changes that count."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    with torch.no_grad():
        # A value may be another tensor of the call, to which another value goes.
        apart = {
            i: value.clone() if value.untyped_storage().data_ptr() in own else value
            for i, value in values.items()
        }
        for i, value in apart.items():
            tensors[i].copy_(value)


def reassigned_buffers(task: Task) -> dict[int, Tensor]:
    """The buffers that a call has set to other tensors, and these.

    Raises:
        RuntimeError: It has set something that cannot go to the host.
    """
    return {
        i: _value_of(task, i)
        for i, (owners, tensor) in enumerate(zip(task._owners, task.swaps[-1], strict=True))
        for where, name in owners
        if where.get(name) is not tensor
    }


def _value_of(task: Task, i: int) -> Tensor:
    place = task.places[i]
    value, *others = [where.get(name) for where, name in task._owners[i]]
    if any(other is not value for other in others):
        why = "replaced under one of its names"
    elif value is None:
        why = "deleted"
    elif place.is_parameter:
        why = "replaced"
    elif not is_plain(value) or (value.shape, value.dtype) != (place.shape, place.dtype):
        was, now = f"{place.dtype} {place.shape}", f"{value.dtype} {tuple(value.shape)}"
        why = f"{was}, and was set to {now} of {type(value).__name__},"
    elif value.requires_grad:
        raise RuntimeError(
            f"fusedrnn: {place.names[0]} of {task.name} was set to a tensor with a grad_fn, whose "
            "graph cannot go to the host: detach() it"
        )
    else:
        return value
    raise RuntimeError(
        f"fusedrnn: {place.names[0]} of {task.name} was {why} during a call: a task keeps its "
        "tensors' names, shapes and dtypes, and during a call its module has device tensors. "
        f"Change bank[{task.key!r}] outside of calls"
    )


def reassign_buffers(task: Task, values: dict[int, Tensor]) -> None:
    """Has buffers be these tensors, which the next call moves to their places."""
    for i, value in values.items():
        new = value.to("cpu", copy=True)  # it may be another tensor of the call
        for where, name in task._owners[i]:
            where[name] = new
