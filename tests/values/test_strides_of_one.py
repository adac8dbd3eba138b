"""Weights with one row or one column, whose stride along it says nothing, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn import functional

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 0.1}
ROWS = [(1, 1), (1, 3), (3, 1), (9, 2), (40, 5)]


def spread(weight: Tensor) -> Tensor:
    """The same numbers, two apart along rows and along columns, and with NaN between them."""
    wide = torch.full([2 * n for n in weight.shape], torch.nan, dtype=weight.dtype)
    wide[tuple(slice(None, None, 2) for _ in weight.shape)] = weight
    return wide[tuple(slice(None, None, 2) for _ in weight.shape)]


def transposed(weight: Tensor) -> Tensor:
    """The same numbers, in a slice of a matrix whose columns are contiguous."""
    if weight.dim() == 1:
        return weight
    rows, columns = weight.shape
    wide = torch.full((columns, rows + 3), torch.nan, dtype=weight.dtype)
    wide[:, :rows] = weight.t()
    return wide.t()[:rows]


LAYOUTS = [spread, transposed]
# Sizes of input, state, latent or projection, of which one is 1.
CELLS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "gru, one input": (functional.gru, {"input": 1, "hidden": 22}),
    "gru, one unit": (functional.gru, {"input": 5, "hidden": 1}),
    "lstm, one input": (functional.lstm, {"input": 1, "hidden": 22}),
    "lstm, one unit": (functional.lstm, {"input": 5, "hidden": 1}),
    "lstm, one projected": (functional.lstm, {"input": 3, "hidden": 50, "projected": 1}),
    "stochastic_gru, one latent": (
        functional.stochastic_gru,
        {"input": 4, "hidden": 20, "latent": 1},
    ),
    "stochastic_gru, one unit": (
        functional.stochastic_gru,
        {"input": 4, "hidden": 1, "latent": 33},
    ),
}


def module_of(cell: str, sizes: dict[str, int]) -> nn.Module:
    if cell.startswith("gru"):
        return fusedrnn.GRU(sizes["input"], sizes["hidden"])
    if cell.startswith("lstm"):
        projected = sizes.get("projected", 0)
        return fusedrnn.LSTM(sizes["input"], sizes["hidden"], proj_size=projected)
    return fusedrnn.StochasticGRU(sizes["input"], sizes["hidden"], sizes["latent"])


def results(
    run: Callable[..., Any], x: Tensor, weights: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    x = x.detach().requires_grad_()
    weights = [w.detach().requires_grad_() for w in weights]
    torch.manual_seed(3)
    output = run(x, weights, **options)[0]
    return [output, *torch.autograd.grad(output.square().sum(), [x, *weights])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("steps", "batch"), ROWS)
@pytest.mark.parametrize("cell", CELLS)
def test_layers(cell, steps, batch, dtype, layout):
    run, sizes = CELLS[cell]
    torch.manual_seed(1)
    weights = [w.detach().to(dtype) for w in module_of(cell, sizes).parameters()]
    options = {"proj_size": 1} if "projected" in sizes else {}
    x = torch.randn(steps, batch, sizes["input"], dtype=dtype)
    expected = results(run, x, weights, options)
    found = results(run, x, [layout(w) for w in weights], options)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class Gated(nn.Module):
    """A cell with one gate for all units."""

    def __init__(self, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.candidate = nn.Parameter(layout(torch.randn(20, 3, dtype=dtype)))
        self.gate = nn.Parameter(layout(torch.randn(1, 20, dtype=dtype)))
        self.back = nn.Parameter(layout(torch.randn(20, 1, dtype=dtype)))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        gate = torch.sigmoid(nn.functional.linear(h, self.gate))
        back = nn.functional.linear(gate, self.back)
        return gate * torch.tanh(nn.functional.linear(x, self.candidate) + back) + (1 - gate) * h


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("steps", "batch"), [(1, 2), (9, 2), (40, 5)])
def test_a_cell(steps, batch, dtype, layout):
    def run(layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
        cell = Gated(layout, dtype)
        rnn = fusedrnn.Recurrent(cell, compile="require")
        torch.manual_seed(2)
        x = torch.randn(steps, batch, 3, dtype=dtype, requires_grad=True)
        h = torch.randn(batch, 20, dtype=dtype, requires_grad=True)
        output = rnn(x, h)[0]
        return [output, *torch.autograd.grad(output.square().sum(), [x, h, *cell.parameters()])]

    for a, b in zip(run(torch.Tensor.contiguous), run(layout), strict=True):
        torch.testing.assert_close(b, a, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
