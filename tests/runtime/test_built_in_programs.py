"""Built-in cells as programs: the driver of programs makes what that of built-in layers makes."""

from __future__ import annotations

import pytest
import torch
from runtime.built_in_cells import DTYPES, BuiltIn, by_layer
from runtime.driver_calls import Call, found, random_call, resets

from fusedrnn._cells import CELL_NAMES, Sizes

SIZES = {"projected_lstm": Sizes(5, 12, 7, 8)}
CELLS = {
    f"{name}{'' if noise else ' without noise'}{'' if bias else ' without bias'}": BuiltIn.of(
        name, SIZES.get(name, Sizes(5, 12, 7, 12)), bias=bias, noise=noise
    )
    for name in CELL_NAMES
    for noise in ([True, False] if name == "stochastic_gru" else [True])
    for bias in (True, False)
}
# The last row takes all steps, so that both drivers multiply the same rows.
LENGTHS = {"none": None, "lengths": torch.tensor([3, 1, 5, 7])}


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> BuiltIn:
    return CELLS[request.param]


def call_of(cell: BuiltIn, dtype: torch.dtype, lengths: str, *, reverse: bool, saves: bool) -> Call:
    call = random_call(
        cell,
        lengths=LENGTHS[lengths],
        reset=None if lengths == "none" else resets(7, 4),
        reverse=reverse,
        stream=int(reverse),  # built-in layers run backwards in the second direction alone
        saves=saves,
        chunk=3,
    ).to(dtype)
    call.weights = [w.t().contiguous().t() for w in call.weights]  # as built-in layers have them
    call.grad_sequences[1:] = [torch.empty(0, dtype=dtype) for _ in call.grad_sequences[1:]]
    return call


def test_programs_are_those_that_python_can_write(cell: BuiltIn) -> None:
    """Fields are in the same order in C++ and in Python."""
    program = cell.program
    assert len(program.order) == len(program.products) + len(program.stages)
    assert program.inputs == [cell.sizes.input]
    assert program.sequences[0] == cell.sizes.output
    assert [stage.width for stage in program.stages][-1] == cell.sizes.output
    assert bool(program.vectors) == cell.bias and bool(program.streams) == bool(cell.draws)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_bits(cell: BuiltIn, dtype: torch.dtype, lengths: str, reverse: bool) -> None:
    """Where both drivers add up the same numbers in the same order.

    Not so: built-in layers add the products of an LSTM's input and state before the biases; a
    compiler may round a sample's noise times scale before it adds it, since built-in layers keep
    that product for backward, or not; and built-in layers multiply the gradients of a GRU's input
    gates in two parts, those that hidden gates share and the others.
    """
    if "Lstm" in cell.stages or cell.draws:
        pytest.skip("sums are in another order")
    call = call_of(cell, dtype, lengths, reverse=reverse, saves=True)
    theirs = by_layer(call)
    mine = found(call)
    for name, right in theirs.items():
        if name not in ("grad input 0", "grad weight 0"):
            assert torch.equal(mine[name], right), name


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors(cell: BuiltIn, dtype: torch.dtype, lengths: str, reverse: bool) -> None:
    """Those of both drivers to float64, by the norm of each tensor.

    In 16 bits, a program's steps read its carries and its noise as they are in tensors, where those
    of built-in layers have them in float32.
    """
    slack = torch.finfo(dtype).eps * (4 if dtype in (torch.float64, torch.float32) else 1 / 2)
    for saves in (False, True):
        call = call_of(cell, dtype, lengths, reverse=reverse, saves=saves)
        right = by_layer(call.to(torch.float64))
        theirs, mine = by_layer(call), found(call)
        for name, tensor in right.items():
            scale = tensor.norm() + 1e-30
            own, other = ((t[name].double() - tensor).norm() / scale for t in (mine, theirs))
            assert own <= 2 * other + slack, (name, own, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_do_not_matter(cell: BuiltIn, dtype: torch.dtype) -> None:
    for saves in (False, True):
        call = call_of(cell, dtype, "lengths", reverse=False, saves=saves)
        right = found(call)
        for call.chunk in (1, 7):
            for name, tensor in found(call).items():
                error = (tensor.double() - right[name].double()).norm()
                bound = 4 * torch.finfo(dtype).eps * right[name].double().norm()
                assert error <= bound, name
