"""Programs that the driver refuses, and wrong calls of the operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from runtime.driver_calls import ROWS, STEPS, Call, Memory, random_call, resets, run
from runtime.driver_cells import CELLS
from torch import Tensor

from fusedrnn import _library
from fusedrnn._compiler import program_operators
from fusedrnn._compiler.program import In, Operand, OperandSource, Out, Phase, Program, Stage

GRU, LSTM, SAMPLE, NORM, OUTPUT, EMBED = (cell.program for cell in CELLS.values())


Form = TypeVar("Form", Program, Stage)


def add(program: Program) -> int:
    return program_operators.add_program(program, 1, dtype=torch.float32)  # no stage is ever called


def changed(whole: Form, part: str, index: int, **fields: Any) -> Form:
    """With other fields in an item of a list."""
    items = list(getattr(whole, part))
    items[index] = items[index]._replace(**fields)
    return whole._replace(**{part: items})


def with_input(program: Program, stage: int, index: int, **fields: Any) -> Program:
    inputs = changed(program.stages[stage], "inputs", index, **fields).inputs
    return changed(program, "stages", stage, inputs=inputs)


def with_result(program: Program, stage: int, index: int, **fields: Any) -> Program:
    outputs = changed(program.stages[stage], "outputs", index, **fields).outputs
    return changed(program, "stages", stage, outputs=outputs)


def source(kind: OperandSource, index: int, offset: int = 0) -> dict[str, Operand]:
    return {"operand": Operand(kind, index, offset)}


REFUSED = {
    "width": (GRU._replace(inputs=[0]), "positive number of columns below 2"),
    "large width": (GRU._replace(inputs=[1 << 31]), "positive number of columns below 2"),
    "stream": (SAMPLE._replace(streams=[1 << 32]), "stream"),
    "carry's sequence": (changed(GRU, "carries", 0, sequence=1), "sequence 1 of 1"),
    "carry's columns": (changed(GRU, "carries", 0, offset=1), "5 columns from 1 on of 5"),
    "value's columns": (changed(GRU, "values", 0, columns=4), "kept where|no value writes"),
    "value's place": (changed(GRU, "values", 0, offset=-1), "5 columns from -1 on of 5"),
    "value's carry": (changed(GRU, "values", 0, carry=1), "carry 1 of 1"),
    "carry elsewhere": (changed(LSTM, "values", 1, carry=0), "columns that another has"),
    "no carry": (changed(LSTM, "values", 1, carry=-1), "carry 1 .* no value writes"),
    "no sequence": (changed(OUTPUT, "values", 2, sequence=-1), "sequence 1 .* no value writes"),
    "carry not kept": (changed(LSTM, "carries", 1, sequence=0), "kept where its carry is"),
    "two values": (changed(OUTPUT, "values", 2, sequence=0), "columns that another has"),
    "bias": (changed(GRU, "arrays", 0, bias=2), "vector 2 of 2"),
    "bias's width": (changed(GRU, "arrays", 0, bias=1), "15 columns and a bias of 5"),
    "product of a vector": (
        changed(GRU, "products", 0, **source(OperandSource.VECTOR, 0)),
        "multiply",
    ),
    "operand's columns": (changed(GRU, "products", 0, terms=4), "4 columns from 0 on of 3"),
    "product's array": (changed(GRU, "products", 0, array=2), "array 2 of 2"),
    "product's columns": (changed(GRU, "products", 0, offset=1), "15 columns from 1 on of 15"),
    "weight": (changed(GRU, "products", 0, weight=3), "weight 3 of 3"),
    "weight's shape": (changed(GRU, "products", 0, weight=1), "another shape"),
    "unread weight": (changed(OUTPUT, "products", 3, weight=2), "no product .* reads weight 3"),
    "value is no operand": (changed(SAMPLE, "values", 0, is_operand=False), "is no operand"),
    "unread operand": (changed(SAMPLE, "values", 0, is_read=False), "is no operand"),
    "value is not read": (changed(NORM, "values", 0, is_read=False), "not to be read"),
    "input's index": (with_input(GRU, 0, 0, **source(OperandSource.ARRAY, 2)), "source 2 of 2"),
    "input's columns": (
        with_input(GRU, 0, 0, **source(OperandSource.ARRAY, 0, 11)),
        "5 columns from 11",
    ),
    "negative offset": (with_input(GRU, 0, 0, **source(OperandSource.ARRAY, 0, -1)), "from -1 on"),
    "input's kind": (with_input(GRU, 0, 0, kind=In.NORMAL), "kind is none of its source"),
    "drawn column": (with_input(SAMPLE, 0, 2, kind=In.COLUMN), "kind is none of its source"),
    "group of columns": (with_input(GRU, 0, 0, group=5), "groups of 5 columns"),
    "no group": (with_input(NORM, 2, 1, group=0), "groups of 0 columns"),
    "groups of nothing": (with_result(NORM, 0, 0, group=0), "groups of 0 columns"),
    "uneven groups": (with_result(NORM, 0, 0, group=3), "one number of 3 columns of 8"),
    "result's columns": (with_result(NORM, 0, 0, kind=Out.COLUMN, group=0), "8 columns of a value"),
    "made twice": (with_result(NORM, 0, 1, value=0), "result of 2 stages"),
    "no results": (changed(GRU, "stages", 0, outputs=[]), "1 to 16 results"),
    "many inputs": (changed(GRU, "stages", 0, inputs=GRU.stages[0].inputs * 7), "up to 32 inputs"),
    "item twice": (GRU._replace(order=[*GRU.order, (True, 0)]), "an item 2 times"),
    "item left out": (GRU._replace(order=GRU.order[1:]), "an item 0 times"),
    "no such item": (GRU._replace(order=[*GRU.order, (True, 1)]), "stage 1 of 1"),
    "product too late": (GRU._replace(order=[*GRU.order[:2], (True, 0), (False, 2)]), "before it"),
    "value too late": (NORM._replace(order=[*NORM.order[:2], *NORM.order[:1:-1]]), "before it is"),
    "adds to nothing": (changed(GRU, "products", 2, adds=True), "must add to columns"),
    "does not add": (changed(GRU, "products", 1, adds=False), "must add to columns"),
    "carry before the steps": (changed(GRU, "products", 1, phase=Phase.BEFORE), "before the steps"),
    "made after the steps": (changed(GRU, "stages", 0, phase=Phase.AFTER), "made after the steps"),
    "not sequential": (changed(LSTM, "stages", 0, is_sequential=False), "is not sequential"),
    "product of the kept": (
        changed(OUTPUT, "products", 3, phase=Phase.STEP),
        "is not sequential|add",
    ),
    "sequential before": (changed(EMBED, "stages", 0, is_sequential=True), "but not in a step"),
    "nothing": (GRU._replace(arrays=[], products=[], stages=[], order=[]), "result of 0 stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_programs(name: str) -> None:
    program, reason = REFUSED[name]
    with pytest.raises(RuntimeError, match=rf"^fusedrnn: .*({reason})"):
        add(program)


def test_programs_that_are_not_refused() -> None:
    numbers = [add(cell.program) for cell in CELLS.values()]
    assert numbers == list(range(numbers[0], numbers[0] + len(CELLS)))


class _Numbers:
    """In place of a program."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def numbers(self) -> list[int]:
        return self._numbers


def test_random_numbers() -> None:
    """Any list of numbers is a program, or an error."""
    chance = random.Random(1)
    accepted = 0
    for cell in CELLS.values():
        right = cell.program.numbers()
        for _ in range(500):
            numbers = list(right)
            for _ in range(chance.choice([1, 1, 1, 2, 5])):
                i = chance.randrange(len(numbers))
                change = chance.choice([-1, 1, 2, 7, -(1 << 63), (1 << 63) - 1, 1 << 31])
                value = chance.choice([numbers[i] + change, change])
                numbers[i] = max(-(1 << 63), min(value, (1 << 63) - 1))
            if chance.random() < 0.1:
                numbers = numbers[: chance.randrange(len(numbers))]
            try:
                add(_Numbers(numbers))  # type: ignore[arg-type]
                accepted += 1
            except RuntimeError as error:
                assert str(error).startswith("fusedrnn: ")
    assert accepted > 10  # offsets of kept carries, for example, mean nothing


def test_a_program_needs_stages() -> None:
    with pytest.raises(RuntimeError, match=r"^fusedrnn: a program needs the function"):
        program_operators.add_program(GRU, 0, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"^fusedrnn: a program must be of a floating dtype"):
        program_operators.add_program(GRU, 1, dtype=torch.int64)


def with_tensor(
    name: str, tensor: Callable[[Tensor], Tensor], index: int = 0
) -> Callable[[Call], Any]:
    """Changes one tensor of a call."""

    def change(call: Call) -> None:
        getattr(call, name)[index] = tensor(getattr(call, name)[index])

    return change


def with_field(name: str, value: Any) -> Callable[[Call], Any]:
    return lambda call: setattr(call, name, value)


def rows(tensor: Tensor) -> Tensor:
    return tensor[:-1]


WRONG = {
    "input's shape": (with_tensor("inputs", lambda x: x[:, 1:]), r"inputs\[0\] must have shape"),
    "input's width": (with_tensor("inputs", lambda x: x[..., 1:]), r"inputs\[0\] must have shape"),
    "input's dtype": (
        with_tensor("inputs", Tensor.float),
        r"inputs\[0\] must be Double, got Float",
    ),
    "inputs": (lambda c: c.inputs.append(c.inputs[0]), "inputs must have 1 tensors .*, got 2"),
    "carry's shape": (with_tensor("carries", rows), r"carries\[0\] must have shape \(4, 5\)"),
    "carries": (lambda c: c.carries.append(c.carries[0]), "carries must have 1 tensors"),
    "weight's shape": (with_tensor("weights", Tensor.t), r"weights\[0\] must have shape \(3, 15\)"),
    "weights": (lambda c: c.weights.pop(), "weights must have 3 tensors"),
    "vector's shape": (with_tensor("vectors", rows), r"vectors\[0\] must have shape \(15,\)"),
    "vector's dtype": (
        with_tensor("vectors", Tensor.half),
        r"vectors\[0\] must be Double, got Half",
    ),
    "gradient's shape": (
        with_tensor("grad_sequences", rows),
        r"grad_sequences\[0\] must have shape",
    ),
    "last gradient's": (with_tensor("grad_last", rows), r"grad_last\[0\] must have shape"),
    "no length": (
        with_field("lengths", torch.tensor([1, 2])),
        "lengths must be 4 contiguous Longs",
    ),
    "int32 lengths": (with_field("lengths", torch.ones(4, dtype=torch.int32)), "lengths must be 4"),
    "large length": (with_field("lengths", torch.tensor([1, 2, 8, 3])), r"in \[0, 7\], got 8"),
    "negative length": (with_field("lengths", torch.tensor([1, 2, -1, 3])), r"in \[0, 7\], got -1"),
    "reset's shape": (with_field("reset", resets(4, 7)), r"reset must have shape \(7, 4\)"),
    "reset's dtype": (with_field("reset", torch.ones(7, 4)), "reset must be Bool, got Float"),
    "strided reset": (with_field("reset", resets(4, 7).t()), "reset must be contiguous"),
    "kinds": (with_field("kinds", [0]), "must have 1 entries each, or none, got 0 and 1"),
    "step": (with_field("first_step", -1), "first_step must be 0 or more"),
    "large step": (with_field("first_step", (1 << 32) - 7), "first_step must be 0 or more"),
    "stream": (with_field("stream", -1), "stream must be 0 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    change, reason = WRONG[name]
    call = random_call(CELLS["gru"])
    memory = Memory.of(call)
    change(call)
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*{reason}"):
        run(call, memory)


@pytest.mark.parametrize(
    ("kinds", "reset_to", "reason"),
    [
        ([4], [torch.empty(0)], r"reset_kinds must be in \[0, 3\], got 4"),
        ([-1], [torch.empty(0)], r"reset_kinds must be in \[0, 3\], got -1"),
        ([0], [torch.zeros(4, 5)], r"reset_to\[0\] must be empty for kind 0"),
        ([ROWS], [torch.zeros(3, 5)], r"reset_to\[0\] must have shape \(4, 5\)"),
        ([ROWS], [torch.empty(0)], r"reset_to\[0\] must have shape \(4, 5\)"),
        ([STEPS], [torch.zeros(4, 5)], r"reset_to\[0\] must have shape \(7, 4, 5\)"),
        ([STEPS], [torch.zeros(7, 4, 5).half()], r"reset_to\[0\] must be Double"),
    ],
)
def test_wrong_resets(kinds: list[int], reset_to: list[Tensor], reason: str) -> None:
    call = random_call(CELLS["gru"], reset=resets(7, 4))
    memory = Memory.of(call)
    call.kinds = kinds
    call.reset_to = [t.double() if t.dtype == torch.float32 else t for t in reset_to]
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*{reason}"):
        run(call, memory)


def _forward(call: Call, **changes: Any) -> None:
    form = call.cell.program
    arguments: dict[str, Any] = {
        "sequences": [torch.empty(7, 4, w, dtype=torch.float64) for w in form.sequences],
        "last": [torch.empty(4, c.width, dtype=torch.float64) for c in form.carries],
        "kept": [],
        "saved": [],
        "number": call.cell.number(torch.float64),
    } | changes
    number = arguments.pop("number")
    tensors = (call.inputs, call.carries, call.weights, call.vectors)
    _library.operators.program_forward(number, *tensors, [], [], **arguments)


def double(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"number": 1 << 40}, "there is no program 1099511627776"),
        ({"number": -1}, "there is no program -1"),
        ({"chunk": -1}, "chunk must be 0"),
        ({"sequences": []}, "sequences must have 1 tensors"),
        ({"sequences": [double(7, 4, 6)]}, r"sequences\[0\] must have shape \(7, 4, 5\)"),
        ({"sequences": [double(0, 4, 5)]}, "at least one step"),
        ({"sequences": [double(7, 5)]}, "must have 3 dimensions"),
        ({"sequences": [double(4, 7, 5).transpose(0, 1)]}, r"sequences\[0\] must be contiguous"),
        ({"sequences": [double(7, 4, 5).float()]}, r"sequences\[0\] must be Double"),
        ({"last": [double(4, 5)]}, "last must have 2 tensors"),
        ({"last": [double(4, 5), double(5, 4).t()]}, "last must be contiguous"),
        ({"kept": [double(2, 4, 5)], "chunk": 3}, r"kept\[0\] must have shape \(3, 4, 5\)"),
        ({"kept": [double(3, 4, 5).float()], "chunk": 3}, r"kept\[0\] must be Double"),
        ({"saved": [double(28, 19)]}, r"saved\[0\] must have shape \(28, 20\)"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, r"seed must be one Long, got .*\(2,\)"),
        ({"seed": torch.zeros(1)}, "seed must be one Long, got Float"),
    ],
)
def test_wrong_memory(changes: dict[str, Any], reason: str) -> None:
    call = random_call(CELLS["lstm"])
    _forward(call)
    with pytest.raises(RuntimeError, match=f"fusedrnn: .*{reason}"):
        _forward(call, **changes)


def test_a_seed_is_needed() -> None:
    with pytest.raises(RuntimeError, match="fusedrnn: this program needs a seed"):
        _forward(random_call(CELLS["sample"]))
    with pytest.raises(RuntimeError, match=r"fusedrnn: stream must be below 2\^32"):
        _forward(random_call(CELLS["sample"]), seed=torch.tensor([1]), stream=(1 << 32) - 7)


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("input", double(7, 4, 4), r"shape \(7, 4, 3\)"),
        ("input", double(7, 4, 3).float(), "Double, got Float"),
        ("input", double(7, 3, 4).transpose(1, 2), "contiguous"),
        ("carry", double(5, 4), r"shape \(4, 5\)"),
        ("weight", double(15, 3), r"shape \(3, 15\)"),
        ("weight", double(3, 15).float(), "Double, got Float"),
        ("weight", double(6, 15)[::2], "contiguous, or its transpose"),
        ("vector", double(5), r"shape \(15,\)"),
        ("reset_to", double(4, 5), "empty, as reset_to is"),
    ],
)
def test_wrong_memory_of_gradients(name: str, wrong: Tensor, reason: str) -> None:
    call = random_call(CELLS["gru"])
    memory = Memory.of(call)
    memory.gradients[name][0] = wrong
    with pytest.raises(
        RuntimeError, match=rf"fusedrnn: grad_\w+\[0\] must be {reason}|have {reason}"
    ):
        run(call, memory)


def test_plans_of_wrong_sizes() -> None:
    number = CELLS["gru"].number(torch.float64)
    for arguments, reason in {
        (number, 0, 1, torch.float64, 0, 0): "at least one step",
        (number, 1 << 31, 4, torch.float64, 0, 0): r"seq_len \* batch must be below",
        (number, 7, -1, torch.float64, 0, 0): r"seq_len \* batch must be below",
        (number, 7, 4, torch.float32, 0, 0): "this program is for Double, got Float",
        (number, 7, 4, torch.float64, -1, 0): "chunk_size must be 0",
        (number, 7, 4, torch.float64, 0, -1): "workspace_bytes must be 0",
        (number, 7, 4, torch.float64, 1, 1): "exclude each other",
        (-1, 7, 4, torch.float64, 0, 0): "there is no program -1",
    }.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{reason}"):
            program_operators.chunk(*arguments)
