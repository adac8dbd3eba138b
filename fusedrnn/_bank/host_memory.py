"""Memory on the host, of exact size, that a GPU can copy while the host goes on.

torch's allocator of pinned memory rounds each block up to a power of two: 34 MB take 64. Here a
block is a mapping of whole pages, which is registered with CUDA as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Registry(Protocol):
    """What makes memory that exists known to a GPU."""

    def register(self, address: int, nbytes: int) -> str:
        """Returns why it cannot be, or "" if it is."""

    def unregister(self, address: int) -> None:
        """After all copies from and to the memory are done."""


def allocate(nbytes: int) -> Tensor:
    """New memory of the host: uint8, zeros, from the beginning of a page.

    It is freed when no tensor has a part of it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    nbytes = max(nbytes, 1)
    # An array of the mapping, since it tells that it goes before the mapping does, not after.
    pages = (ctypes.c_uint8 * nbytes).from_buffer(mmap.mmap(-1, nbytes, flags=flags))
    with torch.inference_mode(False):  # tensors made in that mode have no version
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    _mappings[memory.data_ptr()] = pages
    return memory


# A tensor keeps its pages, and they can tell when they go.
_Pages = ctypes.Array[ctypes.c_uint8]
_mappings: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()
_registered: set[int] = set()


def pin(memory: Tensor, registry: Registry, *, warns: bool = True) -> bool:
    """Registers what ``allocate`` has returned with a GPU, once, for as long as it exists.

    Args:
        warns: If that fails. Then copies are right, but the host waits for them.

    Returns:
        Whether it is registered.
    """
    address, nbytes = memory.data_ptr(), memory.nbytes
    if address in _registered:
        return True
    if reason := registry.register(address, nbytes):
        if warns:
            warnings.warn(
                f"fusedrnn: {nbytes:,} bytes of a WeightBank's host memory could not be pinned "
                f"({reason}): the host will wait for each copy. `ulimit -l` shows the limit of "
                "locked memory",
                RuntimeWarning,
                stacklevel=2,
            )
        return False
    _registered.add(address)
    pages, process = _mappings[address], os.getpid()
    finalizer = weakref.finalize(pages, _unpin, registry.unregister, address, process)
    finalizer.atexit = False  # CUDA may be gone
    return True


def _unpin(unregister: Callable[[int], None], address: int, process: int) -> None:
    _registered.discard(address)
    if os.getpid() == process:  # a forked child must not call CUDA
        unregister(address)


class _Kept:
    """A block of a pool."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.own = _references(memory)
        """The references to the storage that the pool itself has."""
        self.filled: Any = None
        """The event at which the copy into it is done."""


class HostPool:
    """Blocks of host memory that are used again when no tensor has a part of them."""

    def __init__(self, prepare: Callable[[Tensor], None], wait: Callable[[Any], None]) -> None:
        """
        Args:
            prepare: Called once with each new block.
            wait: Has the host wait for an event.
        """
        self._prepare, self._wait = prepare, wait
        self._blocks: list[_Kept] = []

    def take(self, nbytes: int) -> Tensor:
        """A block of at least ``nbytes``, with any content. Keep it, or a view, while in use."""
        free = [
            kept
            for kept in self._blocks
            if kept.memory.nbytes >= nbytes and _references(kept.memory) <= kept.own
        ]
        if free:
            best = min(free, key=lambda kept: kept.memory.nbytes)
            if best.filled is not None:  # by a copy for somebody who has failed meanwhile
                self._wait(best.filled)
                best.filled = None
            return best.memory.view(-1)
        for kept in [kept for kept in self._blocks if _references(kept.memory) <= kept.own]:
            if kept.filled is not None:
                self._wait(kept.filled)
            self._blocks.remove(kept)  # it was too small, and the new one serves for both
        memory = allocate(nbytes)
        self._prepare(memory)
        self._blocks.append(_Kept(memory))
        return memory.view(-1)

    def fills(self, memory: Tensor, event: Any) -> None:
        """A copy into memory that was taken is done when this event comes."""
        for kept in self._blocks:
            if kept.memory.data_ptr() == memory.data_ptr():
                kept.filled = event

    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(kept.memory.nbytes for kept in self._blocks)


def _references(block: Tensor) -> int:
    return references(block.untyped_storage())


def references(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages have this memory, ``storage`` itself included."""
    return torch._C._storage_Use_Count(storage._cdata)
