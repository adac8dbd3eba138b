"""Wrong values in place of right ones.

``wrong(value, rng)`` returns another value, and whether it can never be right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

INTS = [-1, 0, 1, 2, 3, 7, 10**6, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
INTS += [2**62, 2**63 - 1, 2**63, 2**70, -(2**63)]
HUGE = [2**32 + 1, 2**33, 2**40, 2**60]
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.uint8, torch.bool),
]


def nothings() -> list[Any]:
    """Values that no argument of a call may have."""
    some: list[Any] = ["3", b"3", object(), torch.float32, {"a": 1}, {1, 2}, lambda: 1, 1j, type]
    return [*some, np.zeros(3), ...]


class Strange(Tensor):
    """A subclass of Tensor that no code knows."""


# Tensors that have no strides, or are more than numbers in memory.
EXOTIC: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.to_sparse(),
    lambda t: t.to_sparse_csr(),
    lambda t: t.to_sparse(1),
    lambda t: t.float().to_mkldnn(),
    lambda t: torch.nested.nested_tensor(list(t)),
    lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    lambda t: t.to("meta"),
    lambda t: t.to(torch.complex64),
    lambda t: t.to(torch.complex64).conj(),
    lambda t: t.to(torch.complex64).imag,  # imaginary parts are ordinary numbers
]


def tensor(value: Tensor, rng: random.Random) -> tuple[Any, bool]:
    """Another tensor, or something else."""
    t = value.detach()
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice(nothings()), True
    if kind == 1:
        some: list[Any] = [
            None,
            True,
            3,
            1.5,
            t.tolist(),
            [t],
            (t, t),
            t.float().resolve_neg().numpy(),
        ]
        return rng.choice(some), False
    if kind in (2, 3):
        try:
            return rng.choice(EXOTIC)(t), False
        except (RuntimeError, IndexError):  # not possible for this rank or type
            return t.to("meta"), False
    if kind == 4:
        return t.to(rng.choice(DTYPES)), False
    if kind == 5:  # another rank
        ways = [t[None], t[..., None], t.flatten(), t.sum(), t[:0], t.new_empty(0), t[None, None]]
        return rng.choice(ways), False
    if kind == 6 and t.dim():  # another size
        dim = rng.randrange(t.dim())
        ways = [
            t.narrow(dim, 0, max(t.shape[dim] - 1, 0)),
            t.narrow(dim, 0, 0),
            t.narrow(dim, 0, min(1, t.shape[dim])),
            torch.cat([t, t], dim),
            t.transpose(dim, 0),
            t.transpose(dim, -1).contiguous(),
        ]
        return rng.choice(ways), False
    if kind == 7 and t.dim():  # huge, without memory
        dim = rng.randrange(t.dim())
        shape = list(t.shape)
        shape[dim] = rng.choice(HUGE)
        # torch copies a negative view whole before an operator sees it.
        one = t.flatten()[:1].resolve_neg() if t.numel() else t.new_zeros(1)
        try:
            return one.as_strided(shape, [0] * len(shape)), False
        except RuntimeError:  # too many elements
            return t[None], False
    if kind == 8:
        return t.as_subclass(Strange), False
    if kind == 9:
        return torch.full_like(t, rng.choice([0, 1, 100])), False
    if kind == 10 and t.is_floating_point():
        return torch.full_like(t, rng.choice([torch.nan, torch.inf, -torch.inf])), False
    if kind == 11 and t.dtype == torch.int64:
        return torch.full_like(t, rng.choice([-(2**63), 2**63 - 1, -1, 0, 2**40])), False
    return torch.zeros([0] * max(t.dim(), 1), dtype=t.dtype), False


def integer(value: int, rng: random.Random) -> tuple[Any, bool]:
    if rng.random() < 0.7:
        return rng.choice(INTS), False
    some = [1.5, True, "3", None, torch.tensor(3), [3], np.int64(3), float("nan"), (1, 2)]
    chosen = rng.choice(some)
    return chosen, isinstance(chosen, str | list | tuple)


def number(value: float, rng: random.Random) -> tuple[Any, bool]:
    """A number that is no probability, or a value of another type."""
    some: list[Any] = [float("nan"), float("inf"), True, torch.tensor(0.5), (0.1, 0.2), (0.1,)]
    some += [(0.1, 0.2, 0.3), [0.1, 0.2], np.float32(0.5)]
    none = [-0.1, 1.1, 2**70, "0.5", None, 1j]
    chosen = rng.choice(some + none)
    return chosen, any(chosen is one for one in none)


def flag(value: bool, rng: random.Random) -> tuple[Any, bool]:
    """A value that Python takes for true or false, but this package must refuse."""
    chosen = rng.choice(["False", 0, 1, None, torch.tensor(True), 1.0, [], "", np.bool_(True)])
    return chosen, True


def text(value: str, rng: random.Random) -> tuple[Any, bool]:
    some: list[Any] = ["", "elman", "gru", "lstm\0", "persistent", "cuda", "x" * 10_000, "é{}%s"]
    some += [3, None, b"gru"]
    return rng.choice(some), False


def sequence(value: Any, rng: random.Random) -> tuple[Any, bool]:
    """A list of another length or kind, or with a wrong element."""
    values = list(value)
    at = rng.randrange(len(values)) if values else 0
    kind = rng.randrange(10)
    if kind < 4 and values:
        values[at], is_wrong = wrong(values[at], rng)
        return type(value)(values), is_wrong
    if kind == 4:
        return rng.choice([None, 3, "abc", values[0] if values else 0, (), [], {}]), False
    if kind == 5:
        return (v for v in values), False
    if kind == 6:
        return [values], False
    if kind == 7:
        return values + values[:1], False
    if kind == 8:
        return values[:-1], False
    return rng.sample(values, len(values)), False


def packed(value: PackedSequence, rng: random.Random) -> tuple[Any, bool]:
    """A PackedSequence made by hand, with parts that do not fit."""
    data, sizes, order, back = value
    rows, steps, batch = len(data), len(sizes), int(sizes[0])
    kind = rng.randrange(4)
    if kind == 0:
        return hand_made(tensor(data, rng)[0], sizes, order, back), False
    if kind in (1, 2):
        down = sizes.tolist()
        hole, back_again = [*down], [*down]
        hole[rng.randrange(steps)] = 0
        back_again[rng.randrange(steps)] = -1
        some: list[Any] = [
            *map(torch.tensor, (hole, back_again, down[::-1], [*down, 1], down[:-1], [rows])),
            *map(torch.tensor, ([rows + 1], [2**62] * steps, [n + 1 for n in down], [0] * steps)),
            *(torch.tensor([3, 3, 3, 0, 2, 1]), torch.tensor([3, 3, 3, -1, 2, 2])),
            *(torch.tensor([2**63 - 1, 2**63 - 1, rows + 2]), torch.tensor([1] * rows)),
            *(sizes.float(), sizes.int(), sizes[None], sizes.to("meta"), sizes[:0], down, None),
            *(sizes.repeat_interleave(2)[::2], sizes.sum(), torch.tensor([batch] * steps)),
        ]
        return hand_made(data, rng.choice(some), order, back), False
    index = torch.arange(batch)
    some = [
        *(index + 1, index - 1, index * 0, index * 2**40, index.float(), index.int(), index[None]),
        *(index[:-1], torch.arange(batch + 1), index.to("meta"), index.bool(), [0], 3, None),
    ]
    if rng.random() < 0.5:
        return hand_made(data, sizes, rng.choice(some), back), False
    return hand_made(data, sizes, order, rng.choice(some)), False


def hand_made(*parts: Any) -> PackedSequence:
    """A PackedSequence made without its constructor's checks, as by unpickling."""
    return tuple.__new__(PackedSequence, parts)


def other(value: Any, rng: random.Random) -> tuple[Any, bool]:
    """A wrong value in place of None, a generator, a dtype or a module."""
    some: list[Any] = [None, 3, "cuda", "cpu", "meta", True, [1, 2], (), object()]
    some += [torch.Generator(), torch.zeros(2, 3), torch.tensor([1]), torch.zeros(1).bool()]
    some += [torch.int8, torch.float16]
    some += [torch.device("meta"), torch.nn.Linear(2, 3), torch.nn.GRU, [2**70], [None], -(2**70)]
    some += [torch.zeros(3, 2, 7, 4), (torch.zeros(1), None), {"a": 1}, np.zeros(3), [0], [[1]]]
    return rng.choice(some), False


def wrong(value: Any, rng: random.Random) -> tuple[Any, bool]:
    """A wrong value, chosen by the kind of the right one."""
    if rng.random() < 0.05:
        return other(value, rng)
    kinds: list[tuple[Any, Callable[[Any, random.Random], tuple[Any, bool]]]] = [
        (PackedSequence, packed),
        (Tensor, tensor),
        (bool, flag),
        (int, integer),
        (float, number),
        (str, text),
        ((list, tuple), sequence),
    ]
    for kind, make in kinds:
        if isinstance(value, kind):
            return make(value, rng)
    return other(value, rng)
