"""Numbers by which ranks notice that they have diverged."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

from .block_layout import Place
from .task import Task


def describe_places(places: Sequence[Place]) -> list[tuple[Any, ...]]:
    """Names, shapes and dtypes."""
    return [(place.names, place.shape, str(place.dtype)) for place in places]


def digest_of(what: Any) -> int:
    """A number for what has the same text on all ranks."""
    return zlib.crc32(repr(what).encode())


def weight_checksums(task: Task) -> list[int]:
    """A checksum of each weight."""
    found = []
    for place, tensor in zip(task.places, task.tensors, strict=True):
        if place.is_parameter:
            dense = tensor.detach().contiguous()
            memory = (ctypes.c_uint8 * dense.nbytes).from_address(dense.data_ptr())
            found.append(zlib.crc32(memory) if dense.nbytes else 0)
    return found
