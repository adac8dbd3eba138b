"""Results and gradients of Recurrent, against torch.nn and against the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import MODES, Mixed, Noisy, check_same, generator, leaves_with_gradient, plain_loop
from torch import nn
from torch.utils import _pytree as pytree

import fusedrnn

PAIRS = [(nn.RNNCell, nn.RNN), (nn.GRUCell, nn.GRU), (nn.LSTMCell, nn.LSTM)]


def copied(layer: Any, cell_type: Any, directions: int) -> list[nn.Module]:
    """The cells of a layer of torch.nn, with its weights."""
    cells = []
    for i in range(layer.num_layers * directions):
        ending = f"_l{i // directions}{'_reverse' if i % directions else ''}"
        width = getattr(layer, "weight_ih" + ending).shape[1]
        cell = cell_type(width, layer.hidden_size, dtype=torch.float64)
        for name, _ in list(cell.named_parameters()):
            setattr(cell, name, getattr(layer, name + ending))  # the same parameter
        cells.append(cell)
    return cells


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
@pytest.mark.parametrize(("cell_type", "layer_type"), PAIRS)
def test_torch_nn(cell_type: Any, layer_type: Any, mode: str, chunk_size: int | None) -> None:
    """One cell is torch.nn's layer."""
    layer = layer_type(3, 5, dtype=torch.float64)
    (cell,) = copied(layer, cell_type, 1)
    rnn = fusedrnn.Recurrent(cell, mode=mode, chunk_size=chunk_size)
    x = torch.randn(11, 2, 3, dtype=torch.float64, requires_grad=True)

    def expected() -> tuple[Any, Any]:
        output, state = layer(x)
        return output, pytree.tree_map(lambda leaf: leaf[0], state)

    check_same(lambda: rnn(x), expected, [x, *layer.parameters()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["plain", "batch_first", "packed", "unbatched"])
@pytest.mark.parametrize(("cell_type", "layer_type"), PAIRS)
def test_layers_and_directions(cell_type: Any, layer_type: Any, form: str, mode: str) -> None:
    """A list of cells is torch.nn's stack, in all forms of input and with given states."""
    batch_first = form == "batch_first"
    layer = layer_type(
        3, 4, num_layers=2, bidirectional=True, batch_first=batch_first, dtype=torch.float64
    )
    cells = copied(layer, cell_type, 2)
    rnn = fusedrnn.Recurrent(cells, bidirectional=True, batch_first=batch_first, mode=mode)
    x = torch.randn(7, 7, 3, dtype=torch.float64, requires_grad=True)
    rows = () if form == "unbatched" else (7,)
    count = 2 if layer_type is nn.LSTM else 1
    start = [
        torch.randn(4, *rows, 4, dtype=torch.float64, requires_grad=True) for _ in range(count)
    ]

    def input() -> Any:
        if form == "unbatched":
            return x[:, 0]
        if form != "packed":
            return x
        return nn.utils.rnn.pack_padded_sequence(x, [3, 7, 1, 4, 4, 2, 6], enforce_sorted=False)

    def unpacked(output: Any) -> Any:
        if form != "packed":
            return output
        return output.data, output.sorted_indices, output.unsorted_indices

    def run() -> tuple[Any, Any]:
        states = [tuple(leaf[i] for leaf in start) for i in range(4)]
        output, state = rnn(input(), tuple(s if count == 2 else s[0] for s in states))
        stacked = [
            torch.stack(leaves) for leaves in zip(*map(pytree.tree_leaves, state), strict=True)
        ]
        return unpacked(output), tuple(stacked)

    def expected() -> tuple[Any, Any]:
        output, state = layer(input(), tuple(start) if count == 2 else start[0])
        return unpacked(output), tuple(pytree.tree_leaves(state))

    check_same(run, expected, [x, *start, *layer.parameters()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("return_sequence", [True, False])
def test_trees(mode: str, return_sequence: bool) -> None:
    """Nested inputs, states and outputs, one of them of integers."""
    cell = Mixed()
    rnn = fusedrnn.Recurrent(cell, mode=mode, return_sequence=return_sequence)
    input = {
        "x": torch.randn(9, 3, 3, dtype=torch.float64, requires_grad=True),
        "scale": torch.randn(9, 3, dtype=torch.float64, requires_grad=True),
    }

    def expected() -> tuple[Any, Any]:
        output, state = plain_loop(cell, input, cell.initial_state(3))
        if not return_sequence:
            output = pytree.tree_map(lambda leaf: leaf[-1], output)
        return output, state

    check_same(lambda: rnn(input), expected, [*leaves_with_gradient(input), *cell.parameters()])
    assert rnn(input)[1]["rest"][0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 20])
def test_noise(mode: str, chunk_size: int | None) -> None:
    """All kinds of draws: the same numbers in forward and backward, for chunks of any size."""
    cell = Noisy()
    rnn = fusedrnn.Recurrent(cell, mode=mode, chunk_size=chunk_size)
    x = torch.randn(13, 3, 4, dtype=torch.float64, requires_grad=True)
    h = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    check_same(
        lambda: rnn(x, h, generator=generator()),
        lambda: plain_loop(cell, x, h),
        [x, h, *cell.parameters()],
    )
