"""Cells that people publish (docs/examples/published_cells.py), against the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent.loops import check_same, generator, loss_of, plain_loop
from runtime.plain import Masks

import fusedrnn
from docs.examples import published_cells as published

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, WIDTH = 11, 3, 16


@pytest.mark.parametrize("lengths", [None, [T, 4, 7]])
def test_a_memory_of_the_batch(lengths: list[int] | None) -> None:
    """runtime/test_published_cells.py tries the other cells, with steps in Python too."""
    (case,) = (case for case in published.CASES if case.name == "AttentionDecoder")
    cell: Any = case.cell(WIDTH, B, torch.float64)
    x, reset = case.inputs(T, B, WIDTH, torch.float64), torch.rand(T, B) < 0.2
    rnn = fusedrnn.Recurrent(cell, chunk_size=3)
    check_same(
        lambda: rnn(x, lengths=lengths, reset=reset),
        lambda: plain_loop(cell, x, cell.initial_state(B), Masks(lengths, reset)),
        [x, cell.memory, *cell.parameters()],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", published.CASES, ids=lambda case: case.name)
def test_rounding_is_no_error(case: Any, dtype: torch.dtype) -> None:
    """Steps that backward takes again are compared with those of forward."""
    cell, input = case.cell(WIDTH, B, dtype), case.inputs(T, B, WIDTH, dtype)
    loss_of(fusedrnn.Recurrent(cell)(input)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_forum_cell_is_a_stochastic_gru(dtype: torch.dtype) -> None:
    """The same noise for the same seed, so the same numbers and gradients."""
    layer = fusedrnn.StochasticGRU(8, 12, 12, dtype=dtype)
    cell = published.ForumCell(8, 12).to(dtype)
    cell.load_state_dict({name[:-3]: value for name, value in layer.state_dict().items()})
    x = torch.randn(T, B, 8, dtype=dtype, requires_grad=True)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10

    def expected() -> Any:
        output, last = layer(x, generator=generator(5))
        return output, last[0]

    check_same(
        lambda: fusedrnn.Recurrent(cell)(x, generator=generator(5)),
        expected,
        [x, *cell.parameters()],
        tolerance,
        their_leaves=[x, *(getattr(layer, f"{name}_l0") for name, _ in cell.named_parameters())],
    )


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    published.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [case.name for case in published.CASES]
