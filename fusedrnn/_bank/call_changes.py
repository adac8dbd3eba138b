"""What a call has changed of its tensors: it goes to the host, or an error says why it cannot."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from .bank_device import Device
from .slots import Slot, Use
from .task import Task, versions_of
from .tensor_swaps import reassign_buffers, write_values


def keep_reassigned(task: Task, slot: Slot, use: Use, values: dict[int, Tensor]) -> None:
    """Buffers that a call has set to other tensors have their values.

    These are written to the slot. If somebody keeps a tensor there, as a call that returns what a
    buffer was before, they go to the host alone, and the next call brings the task again.
    """
    if not values:
        return
    is_kept = any(_references(use.tensors, i) > _ALONE for i in values) or slot.is_held()
    if is_kept and not task.swaps:
        reassign_buffers(task, values)
    else:
        write_values(use.tensors, values)


def _references(tensors: Sequence[object], i: int) -> int:
    return sys.getrefcount(tensors[i])


_ALONE = _references([object()], 0)
"""Of a tensor that is in a list alone."""


def is_changed(task: Task, use: Use) -> bool:
    """Whether a call may have changed its tensors."""
    return versions_of(use.tensors) != use.versions or not task.counts_buffers()


def bring_changes_home(device: Device, task: Task, slot: Slot, use: Use) -> None:
    """What a call has changed in place goes to the host, and the slot stays current.

    torch's counts of changes go with it, so that they are those of the module alone.

    Raises:
        RuntimeError: It cannot be kept. The slot is then forgotten.
    """
    is_moved = [tensor.data_ptr() for tensor in use.tensors] != use.addresses
    if not is_moved and not is_changed(task, use):
        return
    now = versions_of(use.tensors)
    counts = [after - before for before, after in zip(use.versions, now, strict=True)]
    here = task.version().tensors
    there = here if slot.key is None else slot.key.task.tensors
    is_ours = [a == b for a, b in zip(here, there, strict=True)]
    counted = [i for i, count in enumerate(counts) if count]
    suspects = range(len(counts)) if is_moved else counted
    why = next((why for i in suspects if (why := _obstacle(device, task, use, i, is_ours))), None)
    if why is not None:
        slot.forget()
        raise RuntimeError(f"fusedrnn: {why}")
    silent: list[int] = []
    buffers = [i for i, place in enumerate(task.places) if not place.is_parameter]
    # Batch norm counts the batches, by which one shows that has trained for a part of the call.
    if not task.counts_buffers() or any(counts[i] for i in buffers):
        silent = [i for i in buffers if is_ours[i] and not counts[i]]
    changed = [*silent, *counted]
    with torch.inference_mode(False), torch.no_grad():
        for i in changed:
            task.tensors[i].data.copy_(use.tensors[i].detach())  # waits for the device
            torch.autograd.graph.increment_version([task.tensors[i]] * counts[i])
            device.home.nbytes_out += task.tensors[i].nbytes
    task.refresh(silent)
    use.versions = now
    if slot.key is not None:
        tensors = list(there)
        for i in changed:  # what else has changed on the host is not in the slot
            tensors[i] = task.version_of(i)
        slot.key = slot.key._replace(task=slot.key.task._replace(tensors=tuple(tensors)))


def _obstacle(device: Device, task: Task, use: Use, i: int, is_ours: Sequence[bool]) -> str | None:
    """Why the change of a tensor cannot go to the host."""
    place, tensor = task.places[i], use.tensors[i]
    if tensor.data_ptr() != use.addresses[i]:
        why = (
            "moved or converted during a call, while it is on the device: convert the whole bank "
            f"by to(), or change bank[{task.key!r}] outside of calls"
        )
    elif use.versions[i] == tensor._version:
        return None
    elif tensor.grad_fn is not None and tensor.grad_fn.name() != "FetchBackward":
        why = (
            "changed in place during a call by an operation that autograd records, and its graph "
            "cannot go to the host: change weights under no_grad(), and buffers by detached tensors"
        )
    elif place.is_parameter and device.shared is not None:
        why = (
            "changed in place during a call, while it is the sum with a shared weight: change "
            f"bank.shared or bank[{task.key!r}] outside of calls"
        )
    elif not is_ours[i]:
        why = (
            "changed both during a call and on the host, as step() does: end the call, or leave "
            "the with block of active(), before the change on the host"
        )
    else:
        return None
    return f"{place.names[0]} of {task.name} was {why}"
