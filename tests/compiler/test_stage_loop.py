"""Generated stages by loops on the CPU and by kernels for GPUs, for every storage type."""

from __future__ import annotations

import random

import pytest
import torch
from compiler.guarded import guarded
from compiler.stage_cases import KINDS, Case, Sizes, check_largest
from compiler.stage_library import (
    DTYPES,
    KERNELS,
    STAGES,
    TARGETS,
    Call,
    Input,
    Output,
    accumulated,
    instruction_sets,
    marked_sets,
)

NIGHTLY = pytest.mark.nightly
WIDTHS = [1, 3, 16, 32, 33, 100]
GROUPS = [1, 3, 16, 32, 40]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=marked_sets())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[*marked_sets(), *KERNELS])
def backend(request: pytest.FixtureRequest) -> str:
    """An instruction set, or what runs the GPU's kernels."""
    return request.param


def test_all_stages_have_a_reference() -> None:
    assert list(KINDS) == STAGES


@pytest.mark.parametrize("lengths", [None, [3, 0, 10, 4]], ids=["all rows", "some take no step"])
@pytest.mark.parametrize("stage", KINDS)
def test_values_and_gradients(
    dtype: torch.dtype, backend: str, stage: str, lengths: list[int] | None
) -> None:
    rng = random.Random(stage)
    for width in [*WIDTHS, 300]:
        for _ in range(6 if backend in TARGETS else 2):
            groups = tuple(rng.sample([*GROUPS, width], 2))
            case = Case(stage, dtype, Sizes(width, groups=groups, lengths=lengths), rng, backend)
            case.hide_rows_that_take_no_step()
            case.run()
            case.check()


@pytest.mark.parametrize("stage", KINDS)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, isa: str, stage: str) -> None:
    for width in WIDTHS:
        found = []
        for pieces in ([], [1, 2, 7, 7, 11]):
            torch.manual_seed(1)
            case = Case(stage, dtype, Sizes(width, groups=(3, 32)), random.Random(width), isa)
            case.run(pieces=pieces)
            found.append(case.found())
        for whole, in_pieces in zip(*found, strict=True):
            assert torch.equal(whole, in_pieces)


def sums(x: torch.Tensor, dtype: torch.dtype, isa: str, group: int) -> torch.Tensor:
    """Of the groups of each row."""
    rows, width = x.shape
    to = x.new_empty(rows, width // group, dtype=accumulated(dtype))
    call = Call("moments", dtype, width, rows, [Input(x)], [Output(to, group=group), Output()])
    call.run(isa, 0, rows, backward=False)
    return to


@pytest.mark.parametrize(("width", "group"), [(4096, 4096), (100_000, 100_000), (6000, 3000)])
def test_sums_are_as_accurate_as_those_of_torch(
    dtype: torch.dtype, isa: str, width: int, group: int
) -> None:
    x = (torch.rand(4, width) + 0.1).to(dtype)
    exact = x.double().view(4, -1, group).sum(2)
    if dtype == torch.float64:  # there is no wider type: all terms and their sums are integers
        x = (x * 2**30).round() * 2.0**13
        exact = (x / 2.0**13).long().view(4, -1, group).sum(2).double() * 2.0**13
    found = sums(x, dtype, isa, group).double()
    assert ((found / exact - 1).abs() <= 2 * torch.finfo(accumulated(dtype)).eps).all()


def test_gradients_of_groups_are_accurate_sums(isa: str) -> None:
    width = 100_000
    x, mean = torch.zeros(1, width), torch.zeros(1, 1)
    dout, gradient = torch.rand(1, width) + 0.1, torch.empty(1, 1)
    one, weight = torch.ones(1, 1), torch.ones(1, width)
    inputs = [Input(x), Input(mean, gradient=gradient, group=width)]
    inputs += [Input(one, group=width), Input(weight)]
    call = Call("normalize", torch.float32, width, 1, inputs, [Output(gradients=[dout])])
    call.run(isa, 0, 1, backward=True)
    assert abs(gradient.item() / -dout.double().sum().item() - 1) < 2e-7


@pytest.mark.parametrize("width", [5, 64])
def test_sums_of_infinities(dtype: torch.dtype, isa: str, width: int) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.ones(5, width, dtype=dtype)
    x[0, 1], x[1, -1], x[2, 0] = inf, -inf, nan
    x[3, 1], x[3, 4] = inf, -inf
    expected = torch.tensor([inf, -inf, nan, nan, width], dtype=accumulated(dtype))
    torch.testing.assert_close(sums(x, dtype, isa, width)[:, 0], expected, equal_nan=True)


@pytest.mark.parametrize("width", [1, 5, 16, 64, 100, 300])
def test_largest_numbers_with_ties_and_nan(dtype: torch.dtype, backend: str, width: int) -> None:
    check_largest(dtype, backend, width, trials=200 if backend in TARGETS else 20)


def test_gradients_of_largest_numbers_are_not_read(dtype: torch.dtype, isa: str) -> None:
    gradient = torch.full((1, 33), torch.nan, dtype=dtype)
    nothing = guarded(1, dtype, at_end=True)
    nothing.fill_(torch.nan)
    outputs = [Output(gradients=[nothing[None]], group=33) for _ in range(2)]
    call = Call("largest", dtype, 33, 1, [Input(gradient.clone(), gradient=gradient)], outputs)
    call.run(isa, 0, 1, backward=True)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_nothing_wanted(dtype: torch.dtype, isa: str) -> None:
    """Neither results nor gradients: only what is there is read."""
    x = torch.randn(2, 33, dtype=dtype)
    call = Call("lstm", dtype, 33, 2, [Input(x) for _ in range(5)], [Output(), Output()])
    for backward in (False, True):
        call.run(isa, 0, 2, backward=backward)
        call.run(isa, 1, 1, backward=backward)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(torch.float16, marks=NIGHTLY)], ids=str)
def test_draws_of_all_lanes(dtype: torch.dtype) -> None:
    """Every instruction set draws the same numbers, up to rounding."""
    found = []
    for isa in instruction_sets():
        torch.manual_seed(2)
        case = Case("draws", dtype, Sizes(333, steps=1, batch=1), random.Random(5), isa)
        case.call.outputs[:] = [Output(torch.empty(1, 333, dtype=dtype)) for _ in range(2)]
        case.call.run(isa, 0, 1, backward=False)
        found.append(torch.cat([output.data for output in case.call.outputs]))  # type: ignore[misc]
    for drawn in found[1:]:
        torch.testing.assert_close(drawn, found[0])
