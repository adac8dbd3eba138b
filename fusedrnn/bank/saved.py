"""What autograd saves during a call of a task.

A saved weight is kept as its place in the task and the version of the numbers, without memory: in
backward it is taken from a slot, to which the task comes back if it has been overwritten meanwhile.
So any number of tasks can be in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .slots import Slot
from .task import Task

if TYPE_CHECKING:
    from .device import Device


def saving(device: Device, task: Task, slot: Slot) -> AbstractContextManager[Any]:
    """Hooks for a call of ``task``, whose weights are in ``slot``."""
    if not torch.is_grad_enabled():
        return nullcontext()
    key, address, end = slot.key, slot.address, task.layout.parameter_end
    # torch calls the innermost hooks only: others, as those of a checkpoint, are called from here.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if is_plain and tensor.numel() and tensor.untyped_storage().data_ptr() == address:
            first = tensor.data_ptr() - address
            if first >= end or tensor.is_conj() or tensor.is_neg():
                return _copy(tensor)  # of a buffer, which the next call may change
            return _weight(first, tensor)
        if outer is not None:
            return _outer(tensor, *outer)
        return _other(tensor)

    def _weight(first: int, tensor: Tensor) -> Callable[[], Tensor]:
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype

        def unpack() -> Tensor:
            now = device.for_backward(task, key)
            return now.typed(dtype).as_strided(shape, stride, first // dtype.itemsize)

        return unpack

    return saved_tensors_hooks(pack, lambda unpack: unpack())


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
