"""What autograd saves during a call of a task.

A saved weight is kept as its place in the task and the version of the numbers, without memory: in
backward it is taken from a slot, to which the task comes back if it has been overwritten meanwhile.
So any number of tasks can be in one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._graphs import unseen
from .slots import Slot
from .task import Task

if TYPE_CHECKING:
    from .device import Device


def saving(device: Device, task: Task, slot: Slot) -> AbstractContextManager[Any]:
    """Hooks for a call of ``task``, whose weights are in ``slot``."""
    if not torch.is_grad_enabled():
        return nullcontext()
    pack = functools.partial(unseen(_Saving.pack), _Saving(device, task, slot))
    return saved_tensors_hooks(pack, unseen(_unpack))


class _Saving:
    """What one call saves."""

    def __init__(self, device: Device, task: Task, slot: Slot) -> None:
        self._device, self._task = device, task
        self._key, self._address = slot.key, slot.address
        self._end = task.layout.parameter_end
        # torch calls the innermost hooks only: others, as a checkpoint's, are called from here.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if is_plain and tensor.numel() and tensor.untyped_storage().data_ptr() == self._address:
            first = tensor.data_ptr() - self._address
            if first >= self._end or tensor.is_conj() or tensor.is_neg():
                return _copy(tensor)  # of a buffer, which the next call may change
            return self._weight(first, tensor)
        if self._outer is not None:
            return _outer(tensor, *self._outer)
        return _other(tensor)

    def _weight(self, first: int, tensor: Tensor) -> Callable[[], Tensor]:
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        device, task, key = self._device, self._task, self._key

        def view(slot: Slot) -> Tensor:
            return slot.typed(dtype).as_strided(shape, stride, first // dtype.itemsize)

        return functools.partial(device.for_backward, task, key, view)


def _unpack(unpack: Callable[[], Tensor]) -> Tensor:
    return unpack()


def _copy(tensor: Tensor) -> Callable[[], Tensor]:
    copy = tensor.detach().clone()
    return lambda: copy


def _outer(
    tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Callable[[], Tensor]:
    packed = pack(tensor)
    return lambda: unpack(packed)


def _other(tensor: Tensor) -> Callable[[], Tensor]:
    """As torch saves it without hooks: a change before backward is an error.

    Detached, since an output that is saved would otherwise keep its own history alive.
    """
    saved = tensor.detach()
    version = saved._version

    def unpack() -> Tensor:
        if saved._version != version:
            raise RuntimeError(
                "fusedrnn: one of the variables needed for gradient computation has been modified "
                f"by an inplace operation: a tensor of {tuple(saved.shape)} that a call of a "
                f"WeightBank saved is at version {saved._version}; expected version {version}"
            )
        return saved

    return unpack
