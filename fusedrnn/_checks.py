"""Checks of tensors: one set of errors for modules and functional forms.

A TypeError is for a wrong type, a ValueError for a wrong value, rank or dtype, and a RuntimeError
for a wrong shape or device, as in torch.nn. All are raised before anything is drawn or computed.
Options are checked in _options.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import _helpers as helpers
from . import _library
from ._options import DTYPES, check_flag, kind_of
from ._tracers import has_values, is_compiling


def types(tensors: Mapping[str, Any], optional: Sequence[str] = ()) -> None:
    """Each must be a dense tensor; ``optional`` ones may be None."""
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"fusedrnn: {name} must be a tensor, got {kind_of(tensor)}")
        if tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else str(tensor.layout)
            raise TypeError(f"fusedrnn: {name} must be a dense tensor, got a {layout} one")


_NO_WEIGHTS = ("input", "hx", "cx", "eps")


def dtypes_and_devices(tensors: Mapping[str, Tensor | None]) -> None:
    """All must have the dtype and the device of ``tensors["input"]``."""
    input = tensors["input"]
    assert input is not None
    if input.dtype not in DTYPES:
        raise ValueError(
            f"fusedrnn: input must be float32, float64, bfloat16 or float16, got {input.dtype}"
        )
    if input.is_cuda and _library.cuda_obstacle is not None:
        raise RuntimeError(f"fusedrnn: input is on {input.device}, but {_library.cuda_obstacle}")
    weights = [t for name, t in tensors.items() if name not in _NO_WEIGHTS and t is not None]
    share_dtype = len({weight.dtype for weight in weights}) == 1
    share_device = len({weight.device for weight in weights}) == 1
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        is_weight, hint = name not in _NO_WEIGHTS, ""
        if tensor.dtype != input.dtype:
            error = RuntimeError if name in ("hx", "cx") else ValueError  # as in torch.nn
            if is_weight and share_dtype:
                hint = f"; or convert the input by .to({tensor.dtype})"
            raise error(
                f"fusedrnn: {name} must be {input.dtype} as input is, got {tensor.dtype}{hint}"
            )
        if is_weight and share_device:
            hint = f'; or move the input by .to("{tensor.device}")'
        on_device(name, tensor, input, hint)


def on_device(name: str, tensor: Tensor, input: Tensor, hint: str = "") -> None:
    """A tensor must be on the device of the input. ``hint``: the end of the message."""
    if tensor.device != input.device:
        raise RuntimeError(
            f"fusedrnn: {name} must be on {input.device} as input is, got {tensor.device}{hint}"
        )


def shape(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> None:
    """A tensor must have this shape, unless it is None."""
    # Tuples of plain numbers: torch.compile of torch 2.11 compares nothing else with a torch.Size.
    if tensor is not None and tuple(tensor.shape) != tuple(expected):
        raise RuntimeError(
            f"fusedrnn: {name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}"
        )


def rank_of_step(name: str, tensor: Tensor, input: Tensor) -> None:
    """A cell's state or noise must have one dimension, or two with a batch."""
    if tensor.dim() not in (1, 2):
        raise ValueError(
            f"fusedrnn: {name} must have {input.dim()} dimension(s), as input has, "
            f"got {tensor.dim()}"
        )


def rows(seq_len: int, batch: int, got: Sequence[int]) -> None:
    """There must be a step, and no more rows than operators count. ``got``: the input's shape."""
    if seq_len == 0:
        raise RuntimeError(
            f"fusedrnn: expected a sequence of at least one step, got shape {tuple(got)}"
        )
    if seq_len * max(batch, 1) > helpers.MOST_ROWS:
        raise RuntimeError(f"fusedrnn: seq_len * batch must be below 2^32, got shape {tuple(got)}")


def noise(eps: object, seed: object, generator: object, sample: bool) -> None:
    """At most one source of noise may be given, and none if nothing is sampled."""
    check_flag("sample", sample)
    sources = {"eps": eps, "seed": seed, "generator": generator}
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise ValueError(f"fusedrnn: {' and '.join(given)} exclude each other: give one of them")
    if given and not sample:
        raise ValueError(f"fusedrnn: sample=False draws no noise, so {given[0]} must not be given")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"fusedrnn: generator must be a torch.Generator, got {kind_of(generator)}")


def own_copy(tensor: Tensor) -> Tensor:
    """A copy of lengths, flags, indices or a seed: callers may write to theirs before backward.

    Larger tensors are not copied. If a caller writes to one, autograd refuses backward. That also
    happens under torch.compile, where nothing is copied: inductor may put off a copy until
    backward, and the copy would have what the caller has written.
    """
    if is_compiling():
        return tensor.contiguous()
    return tensor.clone(memory_format=torch.contiguous_format)


def seed(value: Tensor, input: Tensor) -> Tensor:
    """A checked seed, one int64 on the input's device, as the call's own copy."""
    types({"seed": value})
    if value.dtype != torch.int64 or value.numel() != 1:
        raise ValueError(
            f"fusedrnn: seed must be one int64, got {value.dtype} of shape {tuple(value.shape)}"
        )
    on_device("seed", value, input)
    return own_copy(value)


def reset(value: Tensor, expected: tuple[int, ...], device: torch.device) -> None:
    """A reset is a bool for each row of the input."""
    types({"reset": value})
    if value.dtype != torch.bool:
        raise ValueError(f"fusedrnn: reset must be torch.bool, got {value.dtype}; use reset.bool()")
    got = tuple(value.shape)
    if got != tuple(expected):
        hint = _hint_for_reset(got, tuple(expected))
        raise RuntimeError(f"fusedrnn: reset must have shape {tuple(expected)}, got {got}{hint}")
    if value.device != device:
        raise RuntimeError(f"fusedrnn: reset must be on {device} as input is, got {value.device}")


def _hint_for_reset(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What makes flags of a known other form right: TorchRL's have a last dimension of one."""
    if got == (*expected, 1):
        return "; use reset.squeeze(-1)"
    if got == expected[::-1]:
        return "; its steps and batch must be in the order of batch_first: use reset.t()"
    return ""


_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


_HUGE = 2**62  # stands for all larger lengths, which an int64 may not hold
_HUGE_TEXTS = {_HUGE: "2^62 or more", -_HUGE: "-2^62 or less"}


def lengths(value: Tensor | Sequence[int], seq_len: int, batch: int) -> Tensor:
    """Checked lengths, as a contiguous int64 tensor on the CPU that is the call's own."""
    wanted = "lengths must be a tensor or a sequence of integers"
    if isinstance(value, Tensor):
        types({"lengths": value})
        host = value
    else:
        if isinstance(value, str | bytes | Mapping | Set) or not hasattr(value, "__len__"):
            raise TypeError(f"fusedrnn: {wanted}, got {kind_of(value)}")
        items: list[Any] = []
        try:  # ints of all kinds, NumPy's and tensors too
            items = list(value)
            if any(type(n) is not int and _is_no_length(n) for n in items):
                raise TypeError
            # A tracer has symbols here, which operator.index would make numbers of one call.
            is_traced = is_compiling()
            numbers = items if is_traced else [operator.index(n) for n in items]
        except TypeError:  # here and not above: torch.compile of torch 2.11 knows no names of types
            kinds = " and ".join(sorted({_kind_of_length(n) for n in items}))
            got = f"one with {kinds}" if kinds else kind_of(value)
            raise TypeError(f"fusedrnn: {wanted}, got {got}") from None
        if is_traced and items:  # the dtype tells whether there are floats
            host = torch.tensor(numbers, device="cpu")
        else:  # what is too large for an int64 is too long as well
            kept = [max(-_HUGE, min(n, _HUGE)) for n in numbers]
            host = torch.tensor(kept, dtype=torch.int64, device="cpu")
    if host.dtype not in _INTEGERS:
        raise ValueError(f"fusedrnn: {wanted}, got {host.dtype}")
    if not host.is_cpu:
        raise RuntimeError(
            f"fusedrnn: lengths must be on the CPU, as for pack_padded_sequence, got {host.device}"
        )
    is_unsigned = host.dtype == torch.uint64
    host = host.to(torch.int64)
    if is_unsigned:  # from 2^63 on they have become negative
        host = host.masked_fill(host < 0, _HUGE)
    if isinstance(value, Tensor):
        host = own_copy(host)
    shape("lengths", host, (batch,))
    if has_values(host):  # else the operator looks at them
        least, most = (int(host.min()), int(host.max())) if batch else (1, 1)
        if least < 1 or most > seq_len:
            wrong = least if least < 1 else most
            got = _HUGE_TEXTS.get(wrong, str(wrong))
            raise ValueError(f"fusedrnn: lengths must be in [1, {seq_len}], got {got}")
    return host


def _is_no_length(value: object) -> bool:
    """Whether it is a bool or a tensor of no integer, which Python may take for an index."""
    if isinstance(value, Tensor):
        return value.dtype not in _INTEGERS
    return isinstance(value, bool)


def _kind_of_length(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else kind_of(value)


class Packing(NamedTuple):
    """How the rows of a PackedSequence's data are ordered, in tensors of the call's own."""

    batch_sizes: Tensor
    """Rows that take each step, (seq_len,) int64 on the CPU; they never rise."""
    sorted_indices: Tensor | None
    """Places in the batch as the user has it, (batch,) int64; None if they are the same."""
    unsorted_indices: Tensor | None

    def batch(self) -> int:
        """The number of sequences: all of them take the first step."""
        count: Any = self.batch_sizes[0]
        # To torch.jit.trace an int would be a constant.
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        return count if is_traced else int(count)

    def sort(self, tensor: Tensor, dim: int) -> Tensor:
        """From the user's order of sequences to the order of the data."""
        if self.sorted_indices is None:
            return tensor
        return tensor.index_select(dim, self.sorted_indices)

    def unsort(self, tensor: Tensor, dim: int) -> Tensor:
        """From the order of the data to the user's order of sequences."""
        if self.unsorted_indices is None:
            return tensor
        return tensor.index_select(dim, self.unsorted_indices)

    def pack(self, data: Tensor) -> PackedSequence:
        """A PackedSequence of other data, with the same rows."""
        return PackedSequence(data, *self)


def packing(input: PackedSequence) -> Packing:
    """The checked packing of a PackedSequence, which anybody can make by hand.

    Indices on a GPU are checked by torch, on the GPU: a check here would wait for the GPU.
    """
    data, batch_sizes = input[:2]
    types({"data of the PackedSequence": data, "batch_sizes": batch_sizes})
    if batch_sizes.dtype != torch.int64 or batch_sizes.dim() != 1:
        raise ValueError(
            "fusedrnn: batch_sizes must be int64 of 1 dimension, "
            f"got {batch_sizes.dtype} of shape {tuple(batch_sizes.shape)}"
        )
    if not batch_sizes.is_cpu:
        raise RuntimeError(f"fusedrnn: batch_sizes must be on the CPU, got {batch_sizes.device}")
    if data.dim() != 2:
        raise ValueError(
            f"fusedrnn: data of a PackedSequence must have 2 dimensions, got {data.dim()}"
        )
    if batch_sizes.numel() == 0:
        raise RuntimeError("fusedrnn: expected a PackedSequence of at least one step")
    if has_values(batch_sizes):  # else the operator looks at them
        _check_packing(input)
    return own_packing(input)


def own_packing(input: PackedSequence) -> Packing:
    """The packing of a PackedSequence, unchecked, as the call's own copies."""
    indices = [own_copy(t) if isinstance(t, Tensor) else t for t in input[2:]]
    return Packing(own_copy(input.batch_sizes), *indices)


def _check_packing(input: PackedSequence) -> None:
    data, batch_sizes, sorted_indices, unsorted_indices = input
    if int(batch_sizes.min()) < 1 or bool((batch_sizes[1:] > batch_sizes[:-1]).any()):
        raise ValueError("fusedrnn: batch_sizes must be positive and never rise")
    batch, rows = int(batch_sizes[0]), data.shape[0]
    if batch > rows or int(batch_sizes.sum()) != rows:
        raise RuntimeError(f"fusedrnn: batch_sizes must add up to the {rows} rows of the data")
    if sorted_indices is not None or unsorted_indices is not None:
        _check_order(sorted_indices, unsorted_indices, batch, data)


def _check_order(
    sorted_indices: Tensor | None, unsorted_indices: Tensor | None, batch: int, data: Tensor
) -> None:
    orders = {"sorted_indices": sorted_indices, "unsorted_indices": unsorted_indices}
    types(orders)
    for name, order in orders.items():
        assert order is not None
        if order.dtype != torch.int64:
            raise ValueError(f"fusedrnn: {name} must be int64, got {order.dtype}")
        shape(name, order, (batch,))
        on_device(name, order, data)
        if order.is_cpu and batch and not 0 <= int(order.min()) <= int(order.max()) < batch:
            raise ValueError(f"fusedrnn: {name} must be in [0, {batch})")
    if data.is_cpu:
        assert sorted_indices is not None and unsorted_indices is not None
        places = torch.arange(batch, device="cpu")
        if not torch.equal(sorted_indices[unsorted_indices], places):
            raise ValueError(
                "fusedrnn: sorted_indices and unsorted_indices must be permutations, each the "
                "inverse of the other"
            )
