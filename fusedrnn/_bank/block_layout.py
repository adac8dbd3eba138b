"""Where the tensors of a module lie in one block of bytes.

Tensors that lie side by side in one memory keep their distances, so that a module with one flat
buffer has one afterwards, and tensors that share memory go on sharing it. Others begin at multiples
of 64 bytes. Parameters come before buffers. A tensor whose own elements share memory, such as an
expanded one, becomes contiguous, as nobody could write to it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from .._buffers import buffer_of

ALIGNMENT = 64  # bytes


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Place(NamedTuple):
    """Where one tensor lies in a block of bytes."""

    names: tuple[str, ...]
    """In ``named_parameters`` or ``named_buffers``; several if it is tied."""
    is_parameter: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Bytes from its first to its last element."""
        return span_of(self.shape, self.stride) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """This tensor in a block of uint8, which it shares, without a history."""
        begin = (memory.storage_offset() + self.offset) // self.dtype.itemsize
        own = torch.empty(0, dtype=self.dtype, device=memory.device)
        return own.set_(memory.untyped_storage(), begin, self.shape, self.stride)

    def part(self, memory: Tensor) -> Tensor:
        """The same with a storage of its own, as tools that save tensors want it."""
        begin = memory.storage_offset() + self.offset
        storage: UntypedStorage = memory.untyped_storage()[begin : begin + self.span]
        own = torch.empty(0, dtype=self.dtype, device="cpu")
        return own.set_(storage, 0, self.shape, self.stride).data

    def like(self, other: Place) -> bool:
        """Whether both are the same tensor of two states of one module."""
        return self._replace(offset=0) == other._replace(offset=0)

    def __str__(self) -> str:
        return f"{self.names[0]} is {self.dtype} {self.shape}"


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor."""
    if not all(shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _is_folded(tensor: Tensor) -> bool:
    """Whether elements of a tensor may share memory: a dimension's step is within a smaller one."""
    span = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step < span:
            return bool(tensor.numel())
        span += (size - 1) * step
    return False


class Layout(NamedTuple):
    """All tensors of a module in one block of bytes."""

    places: tuple[Place, ...]
    """Of parameters, then of buffers."""
    parameter_end: int
    """Bytes of parameters."""
    nbytes: int


class Segment(NamedTuple):
    """The gradients of one dtype within a block."""

    dtype: torch.dtype
    members: tuple[int, ...]
    """Indices of the gradients."""
    begin: int
    """In bytes."""
    counts: int
    """Where a number for each member says how many ranks have it, in bytes."""
    end: int


class GradientLayout(NamedTuple):
    """Where gradients of a task lie in one block of bytes."""

    indices: tuple[int, ...]
    """Of the task's tensors."""
    parameters: tuple[nn.Parameter, ...]
    places: tuple[Place, ...]
    segments: tuple[Segment, ...]
    nbytes: int


def tensors_of(module: nn.Module) -> list[tuple[tuple[str, ...], bool, Tensor]]:
    """Names of each tensor of a module, whether it is a parameter, and the tensor."""
    found: dict[int, tuple[list[str], bool, Tensor]] = {}
    for is_parameter, named in (
        (True, module.named_parameters(remove_duplicate=False)),
        (False, module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            found.setdefault(id(tensor), ([], is_parameter, tensor))[0].append(name)
    return [(tuple(names), is_parameter, tensor) for names, is_parameter, tensor in found.values()]


def lay_out(module: nn.Module, what: str) -> Layout:
    """Plans one block for all parameters and buffers of a module.

    Args:
        what: The module in an error.

    Raises:
        TypeError: A tensor is a subclass, such as a DTensor, or not strided.
        ValueError: A tensor has no memory yet, or a buffer shares that of a parameter.
    """
    tensors = tensors_of(module)
    for names, _, tensor in tensors:
        if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
            raise TypeError(
                f"fusedrnn: a WeightBank takes plain tensors, got a {type(tensor).__name__} for "
                f"{names[0]} of {what}"
            )
        if tensor.layout != torch.strided:
            raise TypeError(
                f"fusedrnn: a WeightBank takes strided tensors, got {tensor.layout} for "
                f"{names[0]} of {what}"
            )
        if tensor.is_meta:
            raise ValueError(
                f"fusedrnn: a WeightBank takes modules with memory, got {names[0]} of {what} on "
                "the meta device: call to_empty(device='cpu') and set its values before"
            )
    parameters, end = _lay_out(item for item in tensors if item[1])
    buffers, nbytes = _lay_out((item for item in tensors if not item[1]), aligned(end))
    _check_apart(tensors, what)
    return Layout((*parameters, *buffers), end, nbytes)


def _lay_out(
    tensors: Iterable[tuple[tuple[str, ...], bool, Tensor]], end: int = 0
) -> tuple[list[Place], int]:
    """Places in the order of ``tensors``, and where the last one ends."""
    named = list(tensors)
    places: dict[int, Place] = {}
    for cluster in _clusters([tensor for _, _, tensor in named]):
        # At the same remainder as before, so that each tensor is aligned as it was.
        first = named[cluster[0]][2].data_ptr()
        base = aligned(end) + first % ALIGNMENT
        for i in cluster:
            names, is_parameter, tensor = named[i]
            offset = base + tensor.data_ptr() - first
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            if _is_folded(tensor):
                stride = torch.empty(shape, device="meta").stride()
            places[i] = Place(names, is_parameter, offset, shape, stride, tensor.dtype)
            end = max(end, offset + places[i].span)
    return [places[i] for i in range(len(named))], end


def _clusters(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors that lie side by side, each list in the order of addresses."""
    memories: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        known = buffer_of(tensor) if tensor.numel() else None
        memory = tensor.untyped_storage().data_ptr() if known is None else id(known)
        if _is_folded(tensor):
            memory = 0  # it needs more than it has
        memories.setdefault(memory or id(tensor), []).append(i)
    clusters: list[list[int]] = []
    for members in memories.values():
        end = None
        for i in sorted(members, key=lambda i: tensors[i].data_ptr()):
            begin = tensors[i].data_ptr()
            if end is None or begin - end > ALIGNMENT:
                clusters.append([])
                end = begin
            clusters[-1].append(i)
            span = span_of(tensors[i].shape, tensors[i].stride()) * tensors[i].itemsize
            end = max(end, begin + span)
    return clusters


def _check_apart(tensors: Sequence[tuple[tuple[str, ...], bool, Tensor]], what: str) -> None:
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + span_of(t.shape, t.stride()) * t.itemsize, kind, names[0])
        for names, kind, t in tensors
        if t.numel()
    )
    # How far the tensors of each kind have come, and the name of the one that came so far.
    reach = {True: (0, ""), False: (0, "")}
    for begin, end, kind, name in spans:
        if begin < reach[not kind][0]:
            raise ValueError(
                f"fusedrnn: {reach[not kind][1]} and {name} of {what} share memory: in a "
                "WeightBank a buffer must have its own"
            )
        reach[kind] = max(reach[kind], (end, name))
