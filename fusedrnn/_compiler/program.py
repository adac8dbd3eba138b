"""A cell as a program, and the list of numbers that csrc/program/program.h reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints


class OperandSource(IntEnum):
    INPUT = 0
    CARRY = 1
    VALUE = 2
    ARRAY = 3
    VECTOR = 4
    DRAW = 5
    NONE = 6


class Phase(IntEnum):
    BEFORE = 0
    STEP = 1
    AFTER = 2


class In(IntEnum):
    COLUMN = 0
    GROUP = 1
    NORMAL = 2
    UNIFORM = 3
    INDEX = 4


class Out(IntEnum):
    COLUMN = 0
    SUM = 1
    MAX = 2
    ARG_MAX = 3


@dataclass(frozen=True)  # because tuples have an index of their own
class Operand:
    source: OperandSource
    index: int
    offset: int


class Carry(NamedTuple):
    width: int
    sequence: int
    offset: int


class Value(NamedTuple):
    columns: int
    sequence: int
    offset: int
    carry: int
    carry_offset: int
    is_operand: bool
    is_read: bool


class Array(NamedTuple):
    columns: int
    bias: int


class Product(NamedTuple):
    operand: Operand
    weight: int
    terms: int
    columns: int
    array: int
    offset: int
    adds: bool
    phase: Phase


class StageInput(NamedTuple):
    operand: Operand
    kind: In
    group: int


class StageOutput(NamedTuple):
    value: int
    kind: Out
    group: int


class Stage(NamedTuple):
    width: int
    phase: Phase
    is_sequential: bool
    inputs: list[StageInput]
    outputs: list[StageOutput]


class Program(NamedTuple):
    inputs: list[int]
    sequences: list[int]
    vectors: list[int]
    streams: list[int]
    carries: list[Carry]
    values: list[Value]
    arrays: list[Array]
    products: list[Product]
    stages: list[Stage]
    order: list[tuple[bool, int]]

    def numbers(self) -> list[int]:
        """All of it in the order of the fields, each list preceded by its length."""
        return list(numbers_of(self))

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> Program:
        """The program that has these.

        Raises:
            TypeError, ValueError: None has.
        """
        left = iter(numbers)
        try:
            found: Program = _read(Program, left)
        except StopIteration:
            raise ValueError("too few numbers for a program") from None
        if next(left, None) is not None:
            raise ValueError("too many numbers for a program")
        return found


def numbers_of(part: object) -> Iterator[int]:
    """All that it consists of, each list after its length."""
    if isinstance(part, int):
        yield int(part)
        return
    if isinstance(part, list):
        yield len(part)
    parts = part if isinstance(part, list | tuple) else vars(part).values()
    for smaller in parts:
        yield from numbers_of(smaller)


def _read(kind: Any, left: Iterator[int]) -> Any:
    """A part of some type, from the numbers that come next."""
    if isinstance(kind, type) and issubclass(kind, int):
        return kind(next(left))
    if get_origin(kind) is list:
        (one,) = get_args(kind)
        return [_read(one, left) for _ in range(next(left))]
    if get_origin(kind) is tuple:
        return tuple([_read(one, left) for one in get_args(kind)])
    return kind(*[_read(one, left) for one in _parts(kind)])


@functools.cache
def _parts(kind: Any) -> list[Any]:
    return list(get_type_hints(kind).values())
