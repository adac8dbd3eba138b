"""Rows of numbers in memory that notices accesses beyond them."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import weakref

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_ACCESS = 0


def guarded(count: int, dtype: torch.dtype, *, at_end: bool) -> Tensor:
    """Numbers between two pages without access, next to the second one or else to the first."""
    size = count * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    everything = pages + 2 * mmap.PAGESIZE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    start = _libc.mmap(None, everything, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value), "no memory"
    for page in (start, start + mmap.PAGESIZE + pages):
        assert _libc.mprotect(page, mmap.PAGESIZE, _NO_ACCESS) == 0
    place = start + mmap.PAGESIZE + (pages - size if at_end else 0)
    memory = (ctypes.c_byte * size).from_address(place)
    weakref.finalize(memory, _libc.munmap, start, everything)
    return torch.frombuffer(memory, dtype=dtype)


class Rows:
    """(rows, columns) with gaps between the rows, of which all is NaN until it is written.

    On a GPU, memory beyond them is not guarded.
    """

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, rng: random.Random, device: str
    ):
        stride = columns + rng.choice([0, 0, 1, 7])
        count = (rows - 1) * stride + columns
        self.memory = (
            guarded(count, dtype, at_end=rng.random() < 0.7)
            if device == "cpu"
            else torch.empty(count, dtype=dtype, device=device)
        )
        self.memory.fill_(math.nan)
        self.view = self.memory.as_strided((rows, columns), (stride, 1))

    def gaps_are_untouched(self) -> bool:
        """Whether the numbers between the rows are still NaN; overwrites the rows."""
        self.view.fill_(math.nan)
        return bool(self.memory.isnan().all())
