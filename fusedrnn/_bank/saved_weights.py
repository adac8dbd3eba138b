"""What autograd saves during a call of a task.

A saved weight is kept as its place in the task and the version of its numbers, without memory: in
backward it is taken from a slot, to which the task comes back if it has been overwritten meanwhile.
So any number of tasks can be in one graph. As in torch, others of the task may have changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._tracers import unseen
from .bank_device import Device
from .slots import Slot


def saving(device: Device, slot: Slot) -> AbstractContextManager[Any]:
    """Hooks for a call whose weights are in ``slot``."""
    if not torch.is_grad_enabled():
        return nullcontext()
    pack = functools.partial(unseen(_Saving.pack), _Saving(device, slot))
    return saved_tensors_hooks(pack, unseen(_unpack))


class _Saving:
    """What one call saves."""

    def __init__(self, device: Device, slot: Slot) -> None:
        self._device, self._slot, self._address = device, slot, slot.address
        # torch calls the innermost hooks only: others, as a checkpoint's, are called from here.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.numel():
            slot = self._slot_of(tensor)
            if slot is not None and slot.task is not None:
                first = tensor.data_ptr() - slot.address
                if first >= slot.task.layout.parameter_end or tensor.is_conj() or tensor.is_neg():
                    return _saved_copy(tensor)  # of a buffer, which the next call may change
                return _Weight(self._device, slot, first, tensor)
        if self._outer is not None:
            return _saved_by_outer_hooks(tensor, *self._outer)
        return _saved_as_torch_does(tensor)

    def _slot_of(self, tensor: Tensor) -> Slot | None:
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # it has none, as a tangent that is 0
            return None
        # Calls may end in another order than they began in: torch then has the hooks of another.
        if address == self._address:
            return self._slot
        assert self._device.slots is not None
        return self._device.slots.at(address)


class _Weight:
    """A weight that was saved, or a part of one. Called, it is a tensor in a slot."""

    __slots__ = ("_changes", "_device", "_first", "_form", "_indices", "_key", "_task")

    def __init__(self, device: Device, slot: Slot, first: int, tensor: Tensor) -> None:
        assert slot.task is not None
        self._device, self._task, self._first = device, slot.task, first
        self._key, self._indices = slot.key, slot.task.indices_at(first)
        self._changes = slot.changes(self._indices)
        self._form = tensor.dtype, tensor.shape, tensor.stride()

    def __call__(self) -> Tensor:
        return self._device.for_backward(self._task, self._key, self._view)

    def _view(self, slot: Slot) -> Tensor:
        if slot.key is not self._key or self._changes or slot.uses:
            self._device._check_unchanged(self._task, slot, self._key, self._indices, self._changes)
        dtype, shape, stride = self._form
        return slot.typed(dtype).as_strided(shape, stride, self._first // dtype.itemsize)


def _unpack(unpack: Callable[[], Tensor]) -> Tensor:
    return unpack()


def _saved_copy(tensor: Tensor) -> Callable[[], Tensor]:
    copy = tensor.detach().clone()
    return lambda: copy


def _saved_by_outer_hooks(
    tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Callable[[], Tensor]:
    packed = pack(tensor)
    return lambda: unpack(packed)


def _saved_as_torch_does(tensor: Tensor) -> Callable[[], Tensor]:
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
