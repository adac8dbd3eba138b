"""Cells that people publish (docs/examples/published_cells.py), against the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import check_same, generator, leaves_with_gradient, loss_of, plain_loop
from torch import nn

import fusedrnn
from docs.examples import published_cells as published

T, B, WIDTH = 11, 3, 16


def start_of(cell: nn.Module) -> Any:
    if hasattr(cell, "initial_state"):
        return cell.initial_state(B)
    zeros = torch.zeros(B, WIDTH, dtype=torch.float64)
    return (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros


def tensors_of(cell: nn.Module, input: Any) -> list[torch.Tensor]:
    leaves = [*leaves_with_gradient(input), *cell.parameters()]
    memory = getattr(cell, "memory", None)
    return leaves if memory is None else [*leaves, memory]


@pytest.mark.parametrize("mode", ["auto", "parallel", "replay"])
@pytest.mark.parametrize("case", published.CASES, ids=lambda case: case.name)
def test_gradients(case: Any, mode: str) -> None:
    if mode == "parallel" and case.name == "AttentionDecoder":
        pytest.skip("its memory has rows of the batch")
    cell, input = case.cell(WIDTH, B, torch.float64), case.inputs(T, B, WIDTH, torch.float64)
    rnn = fusedrnn.Recurrent(cell, mode=mode)
    check_same(
        lambda: rnn(input, start_of(cell), generator=generator()),
        lambda: plain_loop(cell, input, start_of(cell)),
        tensors_of(cell, input),
    )


@pytest.mark.parametrize("case", published.CASES, ids=lambda case: case.name)
def test_lengths_and_resets(case: Any) -> None:
    """A row that ends, and a row that starts anew in the middle."""
    cell, input = case.cell(WIDTH, B, torch.float64), case.inputs(T, B, WIDTH, torch.float64)
    rnn = fusedrnn.Recurrent(cell)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[5] = True
    output, state = rnn(input, lengths=[T, 7, 5], reset=reset, generator=generator())
    whole, _ = rnn(input, generator=generator())
    pairs = zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (output, whole)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine[:5], other[:5])
        assert mine[7:, 1].eq(0).all()
        assert mine[5:, 2].eq(0).all()
    found = torch.autograd.grad(loss_of(output, state), tensors_of(cell, input), allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_forum_cell_is_a_stochastic_gru(dtype: torch.dtype) -> None:
    """The same noise for the same seed, so the same numbers and gradients."""
    layer = fusedrnn.StochasticGRU(8, 12, 12, dtype=dtype)
    cell = published.ForumCell(8, 12).to(dtype)
    cell.load_state_dict({name[:-3]: value for name, value in layer.state_dict().items()})
    x = torch.randn(T, B, 8, dtype=dtype, requires_grad=True)
    output, state = fusedrnn.Recurrent(cell)(x, generator=generator(5))
    expected, last = layer(x, generator=generator(5))
    found = torch.autograd.grad(loss_of(output, state), [x, *cell.parameters()])
    exact = torch.autograd.grad(loss_of(expected, last[0]), [x, *layer.parameters()])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    names = ["input", *(f"{name}_l0" for name, _ in cell.named_parameters())]
    mine = dict(zip(names, found, strict=True))
    theirs = dict(zip(["input", *dict(layer.named_parameters())], exact, strict=True))
    torch.testing.assert_close((output, state), (expected, last[0]), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    published.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [case.name for case in published.CASES]
