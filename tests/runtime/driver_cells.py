"""Cells as programs written by hand, and as steps of torch: what the driver is tested with.

Longer than 350 lines, because it is a list of programs written by hand.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from compiler.stage_library import HERE, TYPES, compiled, of_functions
from torch import Tensor

from fusedrnn._compiler import program_operators
from fusedrnn._compiler.program import (
    Array,
    Carry,
    In,
    Operand,
    OperandSource,
    Out,
    Phase,
    Product,
    Program,
    Stage,
    StageInput,
    StageOutput,
    Value,
)

Tensors = Sequence[Tensor]
Made = tuple[list[Tensor], list[Tensor]]
"""New carries, and columns of each sequence."""
Step = Callable[[Tensors, Tensors, Tensors, Tensors, Tensors], Made]
"""Of weights, vectors, inputs, carries and draws."""

NONE = -1


@dataclass(frozen=True)
class Cell:
    name: str
    program: Program
    stages: tuple[str, ...]
    """Structs of stages.h and driver_stages.h."""
    step: Step
    draws: tuple[int, ...] = ()
    """Widths."""

    def number(self, dtype: torch.dtype) -> int:
        """Of the operators."""
        key = (self.name, dtype, *self.program.numbers())
        if key not in _numbers:
            function = ctypes.cast(library(dtype)[f"stages_of_{self.name}"], ctypes.c_void_p).value
            assert function is not None
            _numbers[key] = program_operators.add_program(self.program, function, dtype=dtype)
        return _numbers[key]

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Shapes."""
        shapes = {p.weight: (p.terms, p.columns) for p in self.program.products}
        return [shapes[i] for i in range(len(shapes))]


_numbers: dict[object, int] = {}


# Each has a library of its own, that takes seconds to build.
NARROW = [
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
    pytest.param(torch.float16, marks=pytest.mark.nightly),
]
DTYPES = [torch.float64, *NARROW]


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Of the stages of all cells, with a function for each cell."""
    functions = {
        f"stages_of_{cell.name}": [f"program::{stage}" for stage in cell.stages]
        for cell in CELLS.values()
    }
    text = of_functions(
        dtype, functions, f"{HERE}/stages.h", f"{HERE.parent}/runtime/driver_stages.h"
    )
    return ctypes.CDLL(str(compiled(f"driver_{TYPES[dtype]}", text)))


def read(source: OperandSource, index: int, offset: int = 0, group: int = 0) -> StageInput:
    return StageInput(Operand(source, index, offset), In.GROUP if group else In.COLUMN, group)


def gates(array: int, size: int, count: int) -> list[StageInput]:
    return [read(OperandSource.ARRAY, array, i * size) for i in range(count)]


def made(*values: int) -> list[StageOutput]:
    return [StageOutput(value, Out.COLUMN, 0) for value in values]


def stage(
    width: int,
    inputs: list[StageInput],
    outputs: list[StageOutput],
    phase: Phase = Phase.STEP,
    is_sequential: bool = False,
) -> Stage:
    return Stage(width, phase, is_sequential, inputs, outputs)


def value(
    columns: int,
    *,
    kept: tuple[int, int] = (NONE, 0),
    carry: int = NONE,
    is_operand: bool = False,
    is_read: bool = False,
) -> Value:
    return Value(columns, *kept, carry, 0, is_operand, is_read)


def product(
    source: OperandSource,
    index: int,
    weight: int,
    shape: tuple[int, int],
    array: int,
    *,
    adds: bool = False,
    phase: Phase = Phase.STEP,
) -> Product:
    return Product(Operand(source, index, 0), weight, *shape, array, 0, adds, phase)


INPUT, CARRY, VALUE, ARRAY, VECTOR = list(OperandSource)[:5]


def gru(inputs: int = 3, size: int = 5) -> Cell:
    """All steps' inputs at once; a sum of two products, and a product by itself, with biases."""
    form = Program(
        inputs=[inputs],
        sequences=[size],
        vectors=[3 * size, size],
        streams=[],
        carries=[Carry(size, 0, 0)],
        values=[value(size, kept=(0, 0), carry=0)],
        arrays=[Array(3 * size, 0), Array(size, 1)],
        products=[
            product(INPUT, 0, 0, (inputs, 3 * size), 0, phase=Phase.BEFORE),
            product(CARRY, 0, 1, (size, 2 * size), 0, adds=True),
            product(CARRY, 0, 2, (size, size), 1),
        ],
        stages=[
            stage(size, [*gates(0, size, 3), read(ARRAY, 1), read(CARRY, 0)], made(0)),
        ],
        order=[(False, 0), (False, 1), (False, 2), (True, 0)],
    )

    def step(w: Tensors, v: Tensors, x: Tensors, carries: Tensors, draws: Tensors) -> Made:
        h = _gru(x[0] @ w[0] + v[0], carries[0], w[1:], v[1], carries[0])
        return [h], [h]

    return Cell("gru", form, ("Gru",), step)


def _gru(gates: Tensor, z: Tensor, weights: Tensors, bias: Tensor, h: Tensor) -> Tensor:
    size = h.shape[1]
    shared = torch.sigmoid(gates[:, : 2 * size] + z @ weights[0])
    r, u = shared.chunk(2, 1)
    n = torch.tanh(gates[:, 2 * size :] + r * (z @ weights[1] + bias))
    return n + u * (h - n)


def lstm(inputs: int = 3, size: int = 5) -> Cell:
    """A carry that is kept before each chunk."""
    form = Program(
        inputs=[inputs],
        sequences=[size],
        vectors=[4 * size],
        streams=[],
        carries=[Carry(size, 0, 0), Carry(size, NONE, 0)],
        values=[value(size, kept=(0, 0), carry=0), value(size, carry=1)],
        arrays=[Array(4 * size, 0)],
        products=[
            product(INPUT, 0, 0, (inputs, 4 * size), 0, phase=Phase.BEFORE),
            product(CARRY, 0, 1, (size, 4 * size), 0, adds=True),
        ],
        stages=[
            stage(size, [*gates(0, size, 4), read(CARRY, 1)], made(0, 1), is_sequential=True),
        ],
        order=[(False, 0), (False, 1), (True, 0)],
    )

    def step(w: Tensors, v: Tensors, x: Tensors, carries: Tensors, draws: Tensors) -> Made:
        gates = x[0] @ w[0] + v[0] + carries[0] @ w[1]
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * carries[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return [h, c], [h]

    return Cell("lstm", form, ("Lstm",), step)


def sample(inputs: int = 3, size: int = 5, latent: int = 6) -> Cell:
    """Two stages; a latent that is drawn, multiplied and returned."""
    drawn = StageInput(Operand(OperandSource.DRAW, 0, 0), In.NORMAL, 0)
    form = Program(
        inputs=[inputs],
        sequences=[size, latent],
        vectors=[2 * latent, size],
        streams=[7],
        carries=[Carry(size, 0, 0)],
        values=[
            value(latent, kept=(1, 0), is_operand=True, is_read=True),
            value(size, kept=(0, 0), carry=0),
        ],
        arrays=[Array(2 * latent, 0), Array(3 * size, NONE), Array(size, 1)],
        products=[
            product(INPUT, 0, 0, (inputs, 3 * size), 1, phase=Phase.BEFORE),
            product(CARRY, 0, 1, (size, 2 * latent), 0),
            product(VALUE, 0, 2, (latent, 2 * size), 1, adds=True),
            product(VALUE, 0, 3, (latent, size), 2),
        ],
        stages=[
            stage(latent, [*gates(0, latent, 2), drawn], made(0)),
            stage(size, [*gates(1, size, 3), read(ARRAY, 2), read(CARRY, 0)], made(1)),
        ],
        order=[(False, 0), (False, 1), (True, 0), (False, 2), (False, 3), (True, 1)],
    )

    def step(w: Tensors, v: Tensors, x: Tensors, carries: Tensors, draws: Tensors) -> Made:
        loc, logvar = (carries[0] @ w[1] + v[0]).chunk(2, 1)
        z = loc + draws[0] * torch.exp(logvar / 2)
        h = _gru(x[0] @ w[0], z, w[2:], v[1], carries[0])
        return [h], [h, z]

    return Cell("sample", form, ("Sample", "Gru"), step, (latent,))


def norm(inputs: int = 3, size: int = 8) -> Cell:
    """Sums over groups of 4 columns, and numbers of groups; what two stages read."""
    groups = size // 4
    sums = [StageOutput(0, Out.SUM, 4), StageOutput(1, Out.SUM, 4)]
    columns = [read(ARRAY, 0), read(VALUE, 2, group=4), read(VALUE, 3, group=4), read(VECTOR, 1)]
    form = Program(
        inputs=[inputs],
        sequences=[size],
        vectors=[size, size, size],
        streams=[],
        carries=[Carry(size, 0, 0)],
        values=[
            *(value(groups, is_read=True) for _ in range(4)),
            value(size, is_read=True),
            value(size, kept=(0, 0), carry=0),
        ],
        arrays=[Array(size, 0)],
        products=[
            product(INPUT, 0, 0, (inputs, size), 0, phase=Phase.BEFORE),
            product(CARRY, 0, 1, (size, size), 0, adds=True),
        ],
        stages=[
            stage(size, [read(ARRAY, 0)], sums),
            stage(groups, [read(VALUE, 0), read(VALUE, 1)], made(2, 3)),
            stage(size, columns, made(4)),
            stage(size, [read(VALUE, 4), read(VECTOR, 2)], made(5)),
        ],
        order=[(False, 0), (False, 1), *((True, i) for i in range(4))],
    )

    def step(w: Tensors, v: Tensors, x: Tensors, carries: Tensors, draws: Tensors) -> Made:
        p = x[0] @ w[0] + v[0] + carries[0] @ w[1]
        p = p.unflatten(1, (-1, 4))
        variance, mean = torch.var_mean(p, 2, correction=0, keepdim=True)
        y = ((p - mean) * torch.rsqrt(variance + 0.125)).flatten(1) * v[1]
        h = torch.tanh(y + v[2])
        return [h], [h]

    return Cell("norm", form, ("Moments", "Scale", "Normalize", "Tanh"), step)


def output(inputs: int = 3, size: int = 6, outputs: int = 4) -> Cell:
    """Products and a stage after the steps, which read a carry before and after each step."""
    columns = [read(ARRAY, 0), read(CARRY, 1), read(VECTOR, 0), read(VECTOR, 1, group=3)]
    form = Program(
        inputs=[inputs, outputs],
        sequences=[size, outputs],
        vectors=[size, size // 3, outputs],
        streams=[],
        carries=[Carry(size, 0, 0), Carry(size, NONE, 0)],
        values=[
            value(size, kept=(0, 0), carry=0),
            value(size, carry=1, is_operand=True, is_read=True),
            value(outputs, kept=(1, 0)),
        ],
        arrays=[Array(size, NONE), Array(outputs, 2)],
        products=[
            product(INPUT, 0, 0, (inputs, size), 0, phase=Phase.BEFORE),
            product(CARRY, 0, 1, (size, size), 0, adds=True),
            product(VALUE, 1, 2, (size, outputs), 1, phase=Phase.AFTER),
            product(CARRY, 1, 3, (size, outputs), 1, adds=True, phase=Phase.AFTER),
            product(CARRY, 0, 4, (size, outputs), 1, adds=True, phase=Phase.AFTER),
        ],
        stages=[
            stage(size, columns, made(0, 1), is_sequential=True),
            stage(outputs, [read(ARRAY, 1), read(INPUT, 1)], made(2), Phase.AFTER),
        ],
        order=[(False, 0), (False, 1), (True, 0), (False, 2), (False, 3), (False, 4), (True, 1)],
    )

    def step(w: Tensors, v: Tensors, x: Tensors, carries: Tensors, draws: Tensors) -> Made:
        h, c = carries
        p = x[0] @ w[0] + h @ w[1]
        new_h = torch.tanh(p + c * v[0]) + v[1].repeat_interleave(3)
        new_c = c / 2 + new_h
        q = new_c @ w[2] + c @ w[3] + h @ w[4]
        return [new_h, new_c], [new_h, torch.tanh(q + v[2] + x[1])]

    return Cell("output", form, ("Leaky", "Tanh"), step)


def embed(inputs: int = 3, size: int = 5) -> Cell:
    """A stage before the steps, whose result is multiplied in the steps and is a carry itself."""
    form = Program(
        inputs=[inputs, size],
        sequences=[size],
        vectors=[size],
        streams=[],
        carries=[Carry(size, 0, 0), Carry(size, NONE, 0)],
        values=[
            value(size, carry=1, is_operand=True, is_read=True),
            value(size, is_read=True),
            value(size, kept=(0, 0), carry=0),
        ],
        arrays=[Array(size, NONE), Array(size, NONE)],
        products=[
            product(INPUT, 0, 0, (inputs, size), 0, phase=Phase.BEFORE),
            product(VALUE, 0, 1, (size, size), 1),
            product(CARRY, 0, 2, (size, size), 1, adds=True),
        ],
        stages=[
            stage(size, [read(ARRAY, 0), read(VECTOR, 0)], made(0), Phase.BEFORE),
            stage(size, [read(CARRY, 1), read(INPUT, 1)], made(1), is_sequential=True),
            stage(size, [read(ARRAY, 1), read(VALUE, 1)], made(2), is_sequential=True),
        ],
        order=[(False, 0), (True, 0), (False, 1), (False, 2), (True, 1), (True, 2)],
    )

    def step(w: Tensors, v: Tensors, x: Tensors, carries: Tensors, draws: Tensors) -> Made:
        e = torch.tanh(x[0] @ w[0] + v[0])
        h = torch.tanh(e @ w[1] + carries[0] @ w[2] + carries[1] * x[1])
        return [h, e], [h]

    return Cell("embed", form, ("Tanh", "Times", "Tanh"), step)


CELLS = {cell.name: cell for cell in (gru(), lstm(), sample(), norm(), output(), embed())}
