"""One allocation for many tensors, each with a storage of its own.

Tools that save weights go by storages. torch.save writes a tensor's whole storage; safetensors, and
with it accelerate and transformers, takes tensors that share one for copies of each other, and
keeps one of them. So each weight of a module has a storage that begins and ends with it, and all
of these lie side by side in one allocation, which lives as long as one of them.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

# Devices whose memory can be compared and replaced. Elsewhere (meta, XLA) weights are left alone.
DEVICES = ("cpu", "cuda")


class Slot(NamedTuple):
    """Where one weight lies: contiguous, ``shape``, from element ``offset`` of the flat buffer."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The offset just behind the last element."""
        return self.offset + math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This weight's part of ``flat``, without a copy."""
        return flat[self.offset : self.end].view(self.shape)

    def part(self, flat: Tensor) -> Tensor:
        """The same with a storage and a version of its own, neither a view nor differentiable.

        Without memory, as on the meta device, it is a new tensor.
        """
        view = self.view(flat)
        if not _has_memory(flat):
            return torch.zeros_like(view)
        begin = view.storage_offset() * view.itemsize
        storage = view.untyped_storage()[begin : begin + view.nbytes]
        own = torch.empty(0, dtype=view.dtype, device=view.device)
        return own.set_(storage, 0, view.shape, view.stride()).data


def size_of(slots: Sequence[Slot]) -> int:
    """How many elements a buffer of these slots has."""
    return max(slot.end for slot in slots)


class Place(NamedTuple):
    """Where tensors lie side by side."""

    storage: UntypedStorage
    first_byte: int

    def tensor(self, like: Tensor, size: int) -> Tensor:
        """All of them as one 1-D tensor, without a copy, detached from autograd."""
        with torch.inference_mode(like.is_inference()):
            whole = torch.empty(0, dtype=like.dtype, device=like.device)
            return whole.set_(self.storage, self.first_byte // like.itemsize, (size,), (1,))


def place_of(
    slots: Sequence[Slot], tensors: Sequence[Tensor], memory: Sequence[UntypedStorage | None]
) -> Place | str:
    """Where tensors lie side by side. Looks at addresses alone, so tracers see nothing of it.

    Args:
        tensors: Of equal dtype and device, with the shapes of the slots.
        memory: One of these storages must hold all of them.

    Returns:
        Or the name of the first one that is not where the slots have it.
    """
    first = tensors[0]
    start = first.data_ptr() - slots[0].offset * first.itemsize
    for slot, tensor in zip(slots, tensors, strict=True):
        is_there = tensor.data_ptr() == start + slot.offset * first.itemsize
        if not is_there or not tensor.is_contiguous() or tensor.is_neg():
            return slot.name
    for storage in memory:
        place = 0 if storage is None else start - storage.data_ptr()
        # Tensors of several allocations may be neighbours by chance.
        if storage is not None and 0 <= place <= storage.nbytes() - size_of(slots) * first.itemsize:
            return Place(storage, place)
    return slots[1].name


def are_all_of_a_storage(weights: Sequence[Tensor]) -> bool:
    """Whether weights that lie side by side are views of one storage, which holds nothing else."""
    return weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)


def is_used_elsewhere(weights: Sequence[Tensor]) -> bool:
    """Whether something else uses the storage of which these are views. It may have that resized or
    moved, which must not free the memory of weights."""
    storage = weights[0].untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > len(weights) + len([storage])


def new_version(device: torch.device | None) -> Tensor:
    """What counts the writes to a buffer."""
    with torch.inference_mode(False):  # tensors made in that mode have no version
        return torch.empty(0, device=device)


class FlatBuffer:
    """What is known of an allocation that weights lie in. It is these that keep it."""

    version: Tensor
    """Empty. Its version is that of the memory: each write through ``flat_weight`` is one of this
    tensor, as autograd counts them, so a layer that has saved it notices the write. Weights have
    versions of their own."""

    def __init__(self, version: Tensor, flat: Tensor | None = None) -> None:
        self.version = version
        self._storage: StorageWeakRef | None = None
        if flat is not None and _has_memory(flat):
            self._storage = StorageWeakRef(flat.untyped_storage())
        self._given: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[object, ...]:
        """A copy of the module, or one in another process, has other memory."""
        return FlatBuffer, (new_version(self.version.device),)

    def flat_weight(self, memory: Tensor) -> Tensor:
        """The memory as a user gets it, with its version."""
        flat = self.version.detach()
        flat.data = memory
        self._given[id(flat)] = flat
        return flat

    def follow(self, memory: Tensor) -> None:
        """Has what users have got be the memory to which the weights have moved."""
        for flat in list(self._given.values()):
            flat.data = memory

    def storage(self) -> UntypedStorage | None:
        """All of the memory, or None if no tensor lies there any more."""
        known = self._storage
        whole = None if known is None else UntypedStorage._new_with_weak_ptr(known.cdata)
        # Another one for the same memory: torch gives a storage other memory when it is resized or
        # sent to another process, and frees the former.
        return None if whole is None else whole[:]

    def is_gone(self) -> bool:
        """Whether no tensor lies there any more. Others may have got its addresses."""
        return self._storage is None or self._storage.expired()


# By the address of a weight's storage its buffer. Weights may belong to several modules, outlive
# them, and be passed to a functional form.
_buffers: dict[int, FlatBuffer] = {}
_least_to_clean = 256
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread that has it is not in the child


def remember(buffer: FlatBuffer, weights: Sequence[Tensor]) -> None:
    """Has ``buffer_of`` find the buffer of these weights."""
    global _least_to_clean
    with _lock:  # memory that is found to be gone may be another thread's when its entry goes
        if len(_buffers) > _least_to_clean:
            for address in [a for a, known in _buffers.items() if known.is_gone()]:
                del _buffers[address]
            _least_to_clean = 2 * len(_buffers) + 256
        for weight in weights:
            if (address := address_of(weight)) != 0:
                _buffers[address] = buffer


def buffer_of(weight: Tensor) -> FlatBuffer | None:
    """The buffer that a module's weight lies in; None of other tensors."""
    buffer = _buffers.get(address_of(weight))  # there is none for an address of 0
    if buffer is None or buffer.is_gone() or buffer.version.device != weight.device:
        return None
    return buffer


def version_of(weight: Tensor) -> Tensor | None:
    """``FlatBuffer.version`` of a weight's module; None of other tensors."""
    buffer = buffer_of(weight)
    return None if buffer is None else buffer.version


def address_of(weight: Tensor) -> int:
    """Of the memory that a weight is a part of; 0 where it has none of the usual kind."""
    if not _has_memory(weight):
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return 0
    return weight.untyped_storage().data_ptr()


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (nn.Parameter, Tensor) and tensor.device.type in DEVICES


def joined_gradients(slots: Sequence[Slot], weights: Sequence[Tensor]) -> Tensor | None:
    """The gradients of weights as one 1-D tensor; None unless they lie side by side."""
    grads = [weight.grad for weight in weights]
    if not all(_is_like(grad, weight) for grad, weight in zip(grads, weights, strict=True)):
        return None
    found = cast(list[Tensor], grads)
    place = place_of(slots, found, [found[0].untyped_storage()])
    return None if isinstance(place, str) else place.tensor(found[0], size_of(slots))


def set_gradients(slots: Sequence[Slot], weights: Sequence[Tensor], flat: Any) -> None:
    """Has the gradients of weights be parts of a 1-D tensor, or none at all.

    Raises:
        TypeError, ValueError: ``flat`` is neither None nor such a tensor.
    """
    if not isinstance(flat, Tensor | None):
        raise TypeError(f"fusedrnn: flat_grad must be a Tensor or None, got {type(flat)}")
    first, shape = weights[0], (size_of(slots),)
    flat = None if flat is None else flat.detach()
    if flat is not None and not (
        flat.shape == shape and _is_like(flat, first) and flat.is_contiguous()
    ):
        wanted = f"contiguous, of shape {shape} and {memory_kind(first)}"
        got = f"shape {tuple(flat.shape)}, strides {flat.stride()} and {memory_kind(flat)}"
        raise ValueError(f"fusedrnn: flat_grad must be {wanted}, got {got}")
    for slot, weight in zip(slots, weights, strict=True):
        # .data, so that each has a version of its own.
        weight.grad = None if flat is None else slot.view(flat).data


def _is_like(tensor: Tensor | None, weight: Tensor) -> bool:
    """Whether a gradient, or all of them as one, has a weight's kind of memory."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_neg():
        return False
    return tensor.dtype == weight.dtype and tensor.device == weight.device


def memory_kind(weight: Tensor) -> str:
    """The properties that all tensors in one buffer share, in words for the user."""
    made = " and made in inference mode" if weight.is_inference() else ""
    return f"{weight.dtype} on {weight.device}{made}"
