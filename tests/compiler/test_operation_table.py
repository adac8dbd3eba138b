"""What fusedrnn/_compiler/operations.py claims of operations, by numbers.

Each flag claims something that the compiler relies on, and a row without it claims nothing. So a
flag that is wrong fails here, and one that is missing costs only speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedrnn._compiler import operations
from fusedrnn._compiler.decompositions import decompositions
from fusedrnn._compiler.operations import Operation

aten = torch.ops.aten
ROWS = {row.name: row for rows in operations.OPERATIONS.values() for row in rows}
CORNERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, 0.3, -0.3, 1e-30, -1e-30]
LARGE = [1e3, -1e3, 1e30, -1e30]
NEAR = 1e-7
KINK = 1e-3
"""Derivatives that differ more than this, on two sides that are so near, are others."""

# How an operation is called that takes more than tensors of numbers.
CALLS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "where": (2, lambda a, b: torch.where(torch.tensor([True, False] * len(a))[: len(a)], a, b)),
    "clamp": (1, lambda a: torch.clamp(a, -0.4, 0.7)),
    "clamp_min": (1, lambda a: torch.clamp_min(a, -0.4)),
    "clamp_max": (1, lambda a: torch.clamp_max(a, 0.7)),
    "clamp.Tensor": (3, torch.clamp),
    "clamp_min.Tensor": (2, torch.clamp_min),
    "clamp_max.Tensor": (2, torch.clamp_max),
    "leaky_relu": (1, lambda a: aten.leaky_relu(a, 0.2)),
    "threshold": (1, lambda a: aten.threshold(a, 0.3, -0.5)),
}


def operands_of(name: str) -> int:
    if name in CALLS:
        return CALLS[name][0]
    packet = ROWS[name].target
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    counts = [
        sum(str(a.type) == "Tensor" and not a.is_out for a in schema.arguments)
        for schema in schemas
    ]
    return max(counts)


def call(name: str, *given: Tensor) -> Tensor:
    if name in CALLS:
        return CALLS[name][1](*given)
    if "loss" in name:
        return getattr(torch.nn.functional, name)(*given, reduction="none")
    made: Tensor = ROWS[name].target(*given)
    return made


def found(name: str, *given: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The result, and the derivative by each operand."""
    takes_flags = name.startswith(("logical", "bitwise"))
    leaves = [g > 0 if takes_flags else g.clone().requires_grad_() for g in given]
    y = call(name, *leaves)
    if not y.requires_grad:
        return y.double(), [torch.zeros_like(g) for g in given]
    wanted = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return y.detach(), [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(wanted, leaves, strict=True)
    ]


def points(name: str, numbers: list[float]) -> list[Tensor]:
    """Every choice of operands among some numbers; of three, all from few."""
    count = operands_of(name)
    every = itertools.product(numbers if count < 3 else numbers[::3], repeat=count)
    return list(torch.tensor(list(every), dtype=torch.float64).T.contiguous())


def meetings(name: str) -> list[Tensor]:
    """Operands that are equal, and none of them a number where anything else may be."""
    numbers = torch.tensor([0.123, 0.71, 1.37, 2.44, 4.7, 17.3], dtype=torch.float64)
    return [numbers.clone() for _ in range(operands_of(name))]


def sides(name: str, at: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Near these operands, on two sides of each of them, and on one side and there."""
    for i in range(len(at)):
        shift = NEAR * (1 + at[i].abs())
        above, below = (
            [x + sign * shift if j == i else x for j, x in enumerate(at)] for sign in (1, -1)
        )
        yield above, below
        yield above, at


def largest_jump(name: str, at: list[Tensor], of_derivative: bool = True) -> float:
    """Of results and derivatives, relative to their size."""
    most = 0.0
    for one, other in sides(name, at):
        ones, others = found(name, *one), found(name, *other)
        pairs = [(ones[0], others[0])]
        if of_derivative:
            pairs += zip(ones[1], others[1], strict=True)
        for a, b in pairs:
            off = (a - b).abs() / (1 + a.abs() + b.abs())
            most = max(most, off[off.isfinite()].max().item())
    return most


def with_flag(flag: str) -> Any:
    names = [name for name, row in ROWS.items() if getattr(row, flag)]
    return pytest.mark.parametrize("name", names)


def test_every_row_has_an_operation() -> None:
    known = [name for rows in operations.OPERATIONS.values() for name in (r.name for r in rows)]
    assert len(known) == len(set(known))
    assert [name for name, row in ROWS.items() if row.target is None] == []


def test_a_row_without_flags_claims_nothing() -> None:
    row = Operation("new")
    assert row.meets and not row.cpp
    flags = ("whole", "mask", "costly", "jumps", "smooth", "kinks_at_numbers", "pole", "apart")
    assert not any(getattr(row, flag) for flag in (*flags, "bounded"))


@with_flag("whole")
def test_whole_operations_have_parts(name: str) -> None:
    """Whose derivatives are those of torch; test_operations.py compares them."""
    packet = ROWS[name].target
    known = decompositions()
    assert ROWS[name].cpp or any(getattr(packet, o) in known for o in packet.overloads())


@with_flag("bounded")
def test_bounded(name: str) -> None:
    for gradient in found(name, *points(name, CORNERS + LARGE))[1]:
        assert gradient.isfinite().all()


@with_flag("smooth")
def test_smooth(name: str) -> None:
    if ROWS[name].mask:  # of flags, or flags of what is no number
        return
    assert largest_jump(name, points(name, CORNERS)) < KINK
    assert largest_jump(name, meetings(name)) < KINK


@with_flag("jumps")
def test_jumps(name: str) -> None:
    assert largest_jump(name, points(name, CORNERS), of_derivative=False) > 0.1


@with_flag("kinks_at_numbers")
def test_kinks_are_at_numbers_only(name: str) -> None:
    """At most three of them, and none where operands meet."""
    if operands_of(name) > 1:
        assert largest_jump(name, meetings(name)) < KINK
        return
    grid = torch.arange(-200, 201, dtype=torch.float64) / 4
    ones, others = (found(name, x) for x in (grid + NEAR, grid - NEAR))
    jumps = torch.zeros_like(grid, dtype=torch.bool)
    for a, b in ((ones[0], others[0]), (ones[1][0], others[1][0])):
        jumps |= (a - b).abs() > KINK * (1 + a.abs() + b.abs())
    assert int(jumps.sum()) <= 3


@with_flag("pole")
def test_poles(name: str) -> None:
    assert not found(name, torch.zeros(1, dtype=torch.float64))[1][0].isfinite().any()
    numbers = torch.linspace(0.1, 20, 400, dtype=torch.float64)
    assert largest_jump(name, [torch.cat([numbers, torch.ones_like(numbers)])]) < KINK


@with_flag("apart")
def test_apart(name: str) -> None:
    """From 0, where operands are equal or the only one is 1."""
    row = ROWS[name]
    if row.mask:
        return
    at = meetings(name) if operands_of(name) > 1 else [torch.ones(1, dtype=torch.float64)]
    assert (found(name, *at)[0].abs() > 0.01).all()


@with_flag("mask")
def test_masks(name: str) -> None:
    flags = torch.ones(2, dtype=torch.bool)
    given = [flags if name.startswith(("logical", "bitwise")) else flags.double()]
    assert call(name, *given * operands_of(name)).dtype == torch.bool


WRONG = [
    ("bounded", "sqrt", test_bounded),
    ("bounded", "pow", test_bounded),
    ("bounded", "exp", test_bounded),
    ("smooth", "relu", test_smooth),
    ("smooth", "hardshrink", test_smooth),
    ("smooth", "maximum", test_smooth),
    ("smooth", "sqrt", test_smooth),
    ("jumps", "relu", test_jumps),
    ("kinks_at_numbers", "floor", test_kinks_are_at_numbers_only),
    ("kinks_at_numbers", "minimum", test_kinks_are_at_numbers_only),
    ("kinks_at_numbers", "clamp_min.Tensor", test_kinks_are_at_numbers_only),
    ("pole", "abs", test_poles),
    ("apart", "sub", test_apart),
    ("apart", "log", test_apart),
]


@pytest.mark.parametrize(("flag", "name", "test"), WRONG)
def test_a_wrong_flag_is_noticed(flag: str, name: str, test: Callable[[str], None]) -> None:
    assert not getattr(ROWS[name], flag)
    with pytest.raises(AssertionError):
        test(name)
