"""The built-in cells as programs: by the driver of programs, and by that of the built-in layers."""

from __future__ import annotations

import ctypes
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from compiler.stage_library import TYPES, compiled, of_functions
from runtime.driver_calls import SEED, Call, Results
from runtime.driver_cells import Cell

from fusedrnn import _helpers as helpers
from fusedrnn import _ops
from fusedrnn._cells import CELLS, Sizes
from fusedrnn._compiler import program_operators
from fusedrnn._compiler.program import Program


def read(numbers: list[int]) -> Program:
    """The inverse of :meth:`Program.numbers`."""
    left = iter(numbers)
    program: Program = _read(Program, left)
    assert next(left, None) is None
    return program


def _read(kind: typing.Any, left: Iterator[int]) -> typing.Any:
    if typing.get_origin(kind) is list:
        return [_read(typing.get_args(kind)[0], left) for _ in range(next(left))]
    if typing.get_origin(kind) is tuple:
        return tuple(_read(part, left) for part in typing.get_args(kind))
    if issubclass(kind, int):
        return kind(next(left))
    return kind(*(_read(part, left) for part in typing.get_type_hints(kind).values()))


@dataclass(frozen=True, kw_only=True)
class BuiltIn(Cell):
    """A built-in cell of some sizes; ``name`` is that of the table of cells."""

    sizes: Sizes
    bias: bool
    noise: bool

    @classmethod
    def of(cls, name: str, sizes: Sizes, *, bias: bool = True, noise: bool = True) -> BuiltIn:
        numbers, stages = helpers.cell_program(
            cell=name,
            input_size=sizes.input,
            hidden_size=sizes.hidden,
            latent_size=sizes.latent,
            output_size=sizes.output,
            bias=bias,
            noise=noise,
        )
        program = read(numbers)
        draws = (sizes.latent,) * len(program.streams)
        return cls(name, program, stages, _no_step, draws, sizes=sizes, bias=bias, noise=noise)

    def number(self, dtype: torch.dtype) -> int:
        """Of the operators."""
        return _number(tuple(self.program.numbers()), self.stages, dtype)

    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the layer's parameters, in their order."""
        sizes = (self.sizes.input, self.sizes.hidden, self.sizes.latent, self.sizes.output)
        return helpers.layer_layout(self.name, *sizes, self.bias)

    def places(self) -> dict[str, tuple[str, int]]:
        """By the name of each parameter, which weight or vector of the program it is."""
        weights = [name for name, _ in CELLS[self.name].weights]
        parameters = {name for name, _ in self.layout()}
        biases = [name.replace("weight", "bias") for name in weights]
        biases = [name for name in biases if name in parameters]
        places = {name: ("weight", i) for i, name in enumerate(weights)}
        return places | {name: ("vector", i) for i, name in enumerate(biases)}


def _no_step(*_: object) -> typing.NoReturn:
    raise NotImplementedError("built-in cells have no step in Python")


@functools.cache
def _number(numbers: tuple[int, ...], stages: tuple[str, ...], dtype: torch.dtype) -> int:
    name = "_".join(("stages", *stages))
    function = ctypes.cast(library(dtype)[name], ctypes.c_void_p).value
    assert function is not None
    return program_operators.add_program(read(list(numbers)), function, dtype=dtype)


ALL_STAGES = (("Gru",), ("Lstm",), ("Lstm", "Linear"), ("Sample", "Gru"), ("Linear", "Gru"))


DTYPES = [
    torch.float32,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.bfloat16)),
    pytest.param(torch.float16, marks=pytest.mark.nightly),
]


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """With a function for the stages of each cell."""
    functions = {
        "_".join(("stages", *stages)): [f"Printed<fusedrnn::{stage}>" for stage in stages]
        for stages in ALL_STAGES
    }
    text = of_functions(dtype, functions, "cell/printed.h")
    return ctypes.CDLL(str(compiled(f"built_in_{TYPES[dtype]}", text)))


def by_layer(call: Call) -> Results:
    """The same as driver_calls.found() by the operators of built-in layers, of call.weights."""
    cell = call.cell
    assert isinstance(cell, BuiltIn)
    places = cell.places()
    weights = []
    for name, shape in cell.layout():
        kind, i = places[name]
        given = call.weights[i].t() if kind == "weight" else call.vectors[i]
        rest = torch.full((shape[0] - given.shape[0], *given.shape[1:]), 0.5, dtype=call.dtype)
        weights.append(torch.cat([given, rest]))
    has_state = CELLS[cell.name].has_cell_state
    tensors = _ops.LayerTensors(
        call.inputs[0],
        call.carries[0][None],
        weights,
        call.carries[1][None] if has_state else None,
        seed=torch.tensor([SEED]) if cell.draws else None,
        lengths=call.lengths,
        reset=call.reset,
    )
    layer = _ops.LayerCall(
        cell=cell.name,
        noise_stream=call.stream,
        first_step=call.first_step,
        reverse=call.reverse,
        chunk_size=call.chunk,
    )
    made = _ops.forward(layer, tensors, save_gates=call.saves)
    flags: typing.Any = _ops.LayerTensors(True, True, [True] * len(weights), has_state)
    gradients = _ops.backward(
        layer,
        _ops.needs_of(flags),
        _ops.Cotangents(
            call.grad_sequences[0],
            call.grad_last[0][None],
            call.grad_last[1][None] if has_state else None,
        ),
        _ops.Saved(
            made.output,
            made.saved_gates if call.saves else None,
            made.chunk_cell_states if has_state else None,
        ),
        tensors,
    )
    results = {
        "sequence 0": made.output,
        "last 0": made.h_n[0],
        "grad input 0": gradients.input,
        "grad carry 0": gradients.hx[0],
    }
    if has_state:
        results |= {"last 1": made.c_n[0], "grad carry 1": gradients.cx[0]}
    at = 0
    for (name, _), weight in zip(cell.layout(), weights, strict=True):
        kind, i = places[name]
        gradient = gradients.weights[at : at + weight.numel()].view(weight.shape)
        at += weight.numel()
        given = call.weights[i].t() if kind == "weight" else call.vectors[i]
        gradient = gradient[: given.shape[0]]
        results[f"grad {kind} {i}"] = gradient.t() if kind == "weight" else gradient
    return results
