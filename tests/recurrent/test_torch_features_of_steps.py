"""PyTorch's features around steps in Python: as they work around a loop over the cell.

Those that work alike around compiled cells are in recurrent/test_torch_features.py.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from recurrent.loops import (
    F64,
    By,
    Noisy,
    check_cell,
    check_same,
    double,
    generator,
    linear,
    loss_of,
    plain_loop,
)
from torch import Tensor, nn

import fusedrnn

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 10, 3, 4


def sequence() -> Tensor:
    return double(T, B, H)


def gru(dtype: torch.dtype = F64) -> nn.GRUCell:
    return nn.GRUCell(H, H, dtype=dtype)


def start(dtype: torch.dtype = F64) -> Tensor:
    return torch.zeros(B, H, dtype=dtype)


def test_second_derivatives() -> None:
    cell, x = Noisy(), sequence()
    rnn = fusedrnn.Recurrent(cell)
    leaves = [x, *cell.parameters()]

    def second(results: Any) -> list[Any]:
        first = torch.autograd.grad(loss_of(*results), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = second(rnn(x, start(), generator=generator()))
    torch.testing.assert_close(mine, second(plain_loop(cell, x, start())), rtol=1e-10, atol=1e-10)


def test_autocast() -> None:
    """Products are rounded as in the loop; weights keep their gradients within the region."""
    cell, x = gru(torch.float32), sequence().detach().float().requires_grad_()
    after, rnn = nn.Linear(H, H), fusedrnn.Recurrent(cell)
    rounded = By(lambda c, x, h: cell(x, h).float())

    def results(run: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output, state = run(x, start(torch.float32))
            assert state.dtype == output.dtype == torch.float32
            return output, cell(after(x[0]), state.detach()).float()

    leaves = [x, *cell.parameters(), *after.parameters()]
    check_same(
        lambda: results(rnn), lambda: results(lambda *a: plain_loop(rounded, *a)), leaves, 3e-2
    )


class Shared(nn.Module):
    """One module by several ways, and a norm that is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)
        self.again, self.hidden = self.linear, [self.linear]
        self.norm = nn.BatchNorm1d(H, dtype=F64)
        self.norms = nn.Sequential(self.norm, nn.Tanh())
        self.tied = nn.Linear(H, H, dtype=F64)
        self.tied.weight = self.linear.weight

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        made = self.norm(self.linear(h)) + self.again(x) + self.tied(h)
        return self.norms(made) * self.hidden[0](x)


def normed() -> nn.Module:
    """Batch norm and spectral norm in training."""
    norm, a = nn.BatchNorm1d(H, dtype=F64), nn.utils.parametrizations.spectral_norm(linear(H))
    return By(lambda c, x, h: torch.tanh(c.norm(c.a(h) + x)), a=a, norm=norm)


@pytest.mark.parametrize("chunk_size", [1, 3, 4])
@pytest.mark.parametrize("make", [Shared, normed])
def test_buffers_that_change(make: Any, chunk_size: int) -> None:
    """What they keep moves once per step, no more; parameters stay what they are."""
    cell, x, h = make(), sequence(), double(B, H)
    parameters, other = list(cell.parameters()), copy.deepcopy(cell)
    rnn = fusedrnn.Recurrent(cell, chunk_size=chunk_size)
    rnn.explain(x, h)
    for calls in (1, 2):
        check_same(
            lambda: rnn(x, h),
            lambda: plain_loop(other, x, h),
            [x, h, *parameters],
            their_leaves=[x, h, *other.parameters()],
        )
        torch.testing.assert_close(dict(cell.named_buffers()), dict(other.named_buffers()))
        assert cell.norm.num_batches_tracked % (calls * T) == 0
    assert all(a is b for a, b in zip(parameters, cell.parameters(), strict=True))


def test_names() -> None:
    cell = gru()
    assert list(fusedrnn.Recurrent(cell).state_dict()) == [f"cell.{n}" for n in cell.state_dict()]
    assert "chunk_size=3" in repr(fusedrnn.Recurrent(cell, chunk_size=3))


def test_part_of_the_results() -> None:
    """Gradients of the state alone, of the output alone, and of none of both."""
    cell, x = nn.LSTMCell(H, H, dtype=F64), sequence()
    for pick in (lambda o, s: [o[3]], lambda o, s: [s[0]], lambda o, s: [s[1]]):
        check_same(
            lambda: pick(*fusedrnn.Recurrent(cell)(x)),  # noqa: B023
            lambda: pick(*plain_loop(cell, x, (start(), start()))),  # noqa: B023
            [x, *cell.parameters()],
        )


def test_truncated_backpropagation() -> None:
    """A detached state from one piece of a sequence to the next."""
    cell, h = gru(), start()
    for piece in sequence().split(4):
        rnn = check_cell(cell, piece, h)
        h = rnn(piece, h)[1].detach()


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(*fusedrnn.Recurrent(gru())(sequence())).backward()


def test_cells_of_this_package() -> None:
    """A cell with weights in a flat buffer, inside."""
    layer, x = fusedrnn.GRU(H, H, dtype=F64), sequence()
    cell = fusedrnn.GRUCell(H, H, dtype=F64)
    with torch.no_grad():
        cell.flat_weight.copy_(layer.flat_weight)

    def expected() -> tuple[Tensor, Tensor]:
        output, state = layer(x)
        return output, state[0]

    check_same(
        lambda: fusedrnn.Recurrent(cell)(x),
        expected,
        [x, *cell.parameters()],
        their_leaves=[x, *layer.parameters()],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_draws_that_some_steps_make(seed: int, chunk_size: int | None) -> None:
    """Whether or not the first step draws; gradients against small differences."""

    def sometimes(c: Any, x: Tensor, h: Tensor) -> Tensor:
        if x[0, 0] > 0:
            h = h + torch.randn_like(h)
        if x[0, 1] > 0:
            h = h * torch.rand(h.shape, dtype=h.dtype)
        return torch.tanh(c.linear(h) + x)

    torch.manual_seed(seed)
    cell, x = By(sometimes, linear=linear(H)), torch.randn(T, B, H, dtype=F64)
    rnn = fusedrnn.Recurrent(cell, chunk_size=chunk_size)

    def loss(h: Tensor) -> Tensor:
        torch.manual_seed(1)
        return loss_of(*rnn(x, h))

    assert torch.autograd.gradcheck(loss, start().requires_grad_())


@pytest.mark.parametrize("draws", [False, True])
def test_a_cell_by_torch_compile(draws: bool) -> None:
    """Its steps are taken in Python, and draw the same numbers."""
    cell = Noisy() if draws else nn.GRUCell(H, H, dtype=F64)
    compiled = torch.compile(cell, backend="aot_eager")
    x, h = double(T, B, H), double(B, H)
    found = []
    for one in (cell, compiled):
        torch.manual_seed(0)
        output, _ = fusedrnn.Recurrent(one, compile="never")(x, h)
        found.append((output, torch.autograd.grad(output.square().sum(), [x, *cell.parameters()])))
    torch.testing.assert_close(*found)
