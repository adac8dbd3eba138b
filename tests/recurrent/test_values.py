"""Results and gradients: any cell by any way is the plain loop; layers are those of torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recurrent.loops import F64, WAYS, By, Mixed, Noisy, check_cell, check_same, double, linear
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn

pytestmark = [
    pytest.mark.usefixtures("steps_in_python"),
    pytest.mark.filterwarnings("error:fusedrnn"),
]
T, B, H = 11, 3, 4
PAIRS = [(nn.RNNCell, nn.RNN), (nn.GRUCell, nn.GRU), (nn.LSTMCell, nn.LSTM)]


def two_layers(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        cell = By(lambda c, x, h: torch.tanh(c.a(x) + c.b(h)), a=linear(H), b=linear(H))
        change(cell)
        return cell.eval()  # else spectral_norm changes buffers

    return make


def tie(cell: Any) -> None:
    cell.b.weight = cell.a.weight


def lstm() -> tuple[Any, ...]:
    return nn.LSTMCell(H, H, dtype=F64), double(T, B, H), (double(B, H), double(B, H))


def of_size(seq_len: int, batch: int) -> Callable[[], Any]:
    return lambda: (lstm()[0], double(seq_len, batch, H), (double(batch, H), double(batch, H)))


def mixed() -> tuple[Any, ...]:
    x = {"x": double(T, B, 3), "scale": double(T, B)}
    return Mixed(), x, Mixed().initial_state(B)


def descending(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """A gradient inside of the step: a leaf that it makes is not taken for one from outside."""
    with torch.enable_grad():
        z = h.detach().requires_grad_()
        energy = torch.tanh(c.linear(z)).square().sum()
        (slope,) = torch.autograd.grad(energy, z, create_graph=True)
    return torch.tanh(x + h - 0.1 * slope)


def scanning(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """A scan over a part of the cell itself."""

    def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.tanh(c.linear(s) + u)
        return s, s

    return torch.tanh(c.linear(fusedrnn.scan(step, h, torch.stack([h, 2 * h]))[0]) + x)


def rescaled(c: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(x + h * torch.rand_like(h))


def attending(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Its dropout draws from torch's generator."""
    both = torch.stack([x, h], 1)
    return c.attention(both, both, both, need_weights=False)[0][:, 0]  # type: ignore[no-any-return]


def attention() -> nn.Module:
    return nn.MultiheadAttention(H, 2, 0.5, batch_first=True, dtype=F64)


def beside_attention() -> By:
    """Numbers of both kinds, and a built-in cell."""
    return By(
        lambda c, x, h: c.cell(c.dropout(x), h) + attending(c, x, h),
        attention=attention(),
        cell=fusedrnn.StochasticGRUCell(H, H, dtype=F64),
        dropout=nn.Dropout(0.3),
    )


def nested() -> By:
    """A sequence inside of a step, with noise of its own."""
    inner = By(lambda c, x, h: c.gru(x + torch.randn_like(x), h), gru=nn.GRUCell(H, H, dtype=F64))
    return By(
        lambda c, x, h: c.gru(c.inner(x.expand(3, -1, -1), h)[0][-1], h),
        inner=fusedrnn.Recurrent(inner),
        gru=nn.GRUCell(H, H, dtype=F64),
    )


CELLS: dict[str, Callable[[], Any]] = {
    "torch's numbers": lambda: By(
        lambda c, x, h: torch.tanh(attending(c, x, h) + torch.randint(3, h.shape) * h),
        attention=attention(),
    ),
    "beside attention": beside_attention,
    "nested": nested,
    "RNNCell": lambda: nn.RNNCell(H, H, dtype=F64),
    "GRUCell": lambda: nn.GRUCell(H, H, dtype=F64),
    "LSTMCell": lstm,
    "one step": of_size(1, 3),
    "no rows": of_size(5, 0),
    "one step of one row": of_size(1, 1),
    "trees, a count of integers": mixed,
    "all kinds of draws": Noisy,
    "draws of no rows": lambda: (By(rescaled), double(T, 0, H), double(0, H)),
    "a gradient inside": lambda: By(descending, linear=linear(H)),
    "a scan inside": lambda: By(scanning, linear=linear(H)),
    "weight_norm": two_layers(lambda c: nn.utils.parametrizations.weight_norm(c.b)),
    "spectral_norm": two_layers(lambda c: nn.utils.parametrizations.spectral_norm(c.b)),
    "old weight_norm": two_layers(lambda c: nn.utils.weight_norm(c.b)),
    "old spectral_norm": two_layers(lambda c: nn.utils.spectral_norm(c.b)),
    "tied": two_layers(tie),
    "half frozen": two_layers(lambda c: c.b.requires_grad_(False)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_cells(name: str, way: str) -> None:
    made = CELLS[name]()
    cell, x, h = made if isinstance(made, tuple) else (made, double(T, B, H), double(B, H))
    check_cell(cell, x, h, **WAYS[way])


def copied(layer: Any, cell_type: Any) -> list[nn.Module]:
    """The cells of a layer of torch.nn in two directions, with its weights."""
    cells = []
    for i in range(layer.num_layers * 2):
        ending = f"_l{i // 2}{'_reverse' if i % 2 else ''}"
        width = getattr(layer, "weight_ih" + ending).shape[1]
        cell = cell_type(width, layer.hidden_size, dtype=F64)
        for name, _ in list(cell.named_parameters()):
            setattr(cell, name, getattr(layer, name + ending))  # the same parameter
        cells.append(cell)
    return cells


@pytest.mark.parametrize("form", ["plain", "batch_first", "packed", "unbatched"])
@pytest.mark.parametrize(("cell_type", "layer_type"), PAIRS)
def test_layers_and_directions(cell_type: Any, layer_type: Any, form: str) -> None:
    """A list of cells is torch.nn's stack, in all forms of input and with given states."""
    options: Any = {"bidirectional": True, "batch_first": form == "batch_first"}
    layer = layer_type(3, H, num_layers=2, dtype=F64, **options)
    rnn = fusedrnn.Recurrent(copied(layer, cell_type), **options)
    x = double(7, 7, 3)
    rows = () if form == "unbatched" else (7,)
    count = 2 if layer_type is nn.LSTM else 1
    start = [double(4, *rows, H) for _ in range(count)]

    def input() -> Any:
        if form == "packed":
            return nn.utils.rnn.pack_padded_sequence(x, [3, 7, 1, 4, 4, 2, 6], enforce_sorted=False)
        return x[:, 0] if form == "unbatched" else x

    def unpacked(output: Any) -> Any:
        if form != "packed":
            return output
        return output.data, output.sorted_indices, output.unsorted_indices

    def run() -> tuple[Any, Any]:
        states = [tuple(leaf[i] for leaf in start) for i in range(4)]
        output, state = rnn(input(), tuple(s if count == 2 else s[0] for s in states))
        leaves = zip(*map(pytree.tree_leaves, state), strict=True)
        return unpacked(output), tuple(torch.stack(each) for each in leaves)

    def expected() -> tuple[Any, Any]:
        output, state = layer(input(), tuple(start) if count == 2 else start[0])
        return unpacked(output), tuple(pytree.tree_leaves(state))

    check_same(run, expected, [x, *start, *layer.parameters()])
