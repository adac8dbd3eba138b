"""PyTorch's features around Recurrent: as they work around a loop over the cell.

Longer than 350 lines, because it has a test or two for each of many features.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from loops import MODES, Noisy, check_same, generator, loss_of, plain_loop
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusedrnn

T, B, H = 10, 3, 4


def sequence(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(T, B, H, dtype=dtype, requires_grad=True)


def gru(dtype: torch.dtype = torch.float64) -> nn.GRUCell:
    return nn.GRUCell(H, H, dtype=dtype)


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(B, H, dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives(mode: str) -> None:
    cell, x = Noisy(), sequence()
    rnn = fusedrnn.Recurrent(cell, mode=mode)
    leaves = [x, *cell.parameters()]

    def second(results: Any) -> list[Any]:
        first = torch.autograd.grad(loss_of(*results), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    with pytest.warns(UserWarning, match="take a plain loop over the steps"):
        mine = second(rnn(x, start(), generator=generator()))
    torch.testing.assert_close(mine, second(plain_loop(cell, x, start())), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_torch_func() -> None:
    cell, x = gru(), sequence()
    rnn = fusedrnn.Recurrent(cell)
    parameters = dict(rnn.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(*torch.func.functional_call(rnn, values, (x,)))

    expected = torch.autograd.grad(loss_of(*rnn(x)), list(parameters.values()))
    found = torch.func.grad(loss)(parameters, x)
    torch.testing.assert_close(list(found.values()), list(expected), rtol=1e-10, atol=1e-10)
    each = torch.func.vmap(torch.func.grad(loss), (None, 1))(parameters, x[:, :, None])
    total = [gradient.sum(0) for gradient in each.values()]
    apart = [
        torch.autograd.grad(loss_of(*rnn(x[:, i : i + 1])), list(parameters.values()))
        for i in range(B)
    ]
    summed = [sum(gradients) for gradients in zip(*apart, strict=True)]
    torch.testing.assert_close(total, summed, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_forward_mode() -> None:
    cell, x = gru(), sequence()
    rnn = fusedrnn.Recurrent(cell)
    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        made = loss_of(*rnn(forward_ad.make_dual(x, tangent)))
        found = forward_ad.unpack_dual(made).tangent
    (gradient,) = torch.autograd.grad(loss_of(*rnn(x)), [x])
    torch.testing.assert_close(found, (gradient * tangent).sum())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    cell, x = Noisy(), sequence()
    rnn = fusedrnn.Recurrent(cell)
    results = []
    for wrap in (False, True):
        torch.manual_seed(1)
        if wrap:
            output = checkpoint(rnn, x, start(), use_reentrant=use_reentrant)
        else:
            output = rnn(x, start())
        for leaf in (x, *cell.parameters()):
            leaf.grad = None
        loss_of(*output).backward()
        results.append([x.grad, *(p.grad for p in cell.parameters())])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode: str) -> None:
    """Products are rounded as in the loop; weights keep their gradients within the region."""
    cell, x = gru(torch.float32), sequence(torch.float32)
    linear = nn.Linear(H, H)
    rnn = fusedrnn.Recurrent(cell, mode=mode)

    def loss(use_loop: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if use_loop:
                state, outputs = start(torch.float32), []
                for step in x:
                    state = cell(step, state).float()
                    outputs.append(state)
                output = torch.stack(outputs)
            else:
                output, state = rnn(x)
                assert state.dtype == output.dtype == torch.float32
            once_more = cell(linear(x[0]), state.detach())
            return output.square().sum() + once_more.float().sum()

    leaves = [x, *cell.parameters(), *linear.parameters()]
    found = torch.autograd.grad(loss(False), leaves)
    expected = torch.autograd.grad(loss(True), leaves)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


def test_no_gradient_keeps_nothing() -> None:
    rnn = fusedrnn.Recurrent(gru())
    x = sequence()
    expected = rnn(x)[0]
    with torch.no_grad():
        assert rnn(x)[0].grad_fn is None
    with torch.inference_mode():
        torch.testing.assert_close(rnn(x.detach())[0], expected)
    frozen = copy.deepcopy(rnn).requires_grad_(False)
    assert not frozen(x.detach())[0].requires_grad
    output = frozen(x)[0]
    (gradient,) = torch.autograd.grad(output.sum(), [x])
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), [x])[0])


@pytest.mark.parametrize("mode", MODES)
def test_hooks_run_once(mode: str) -> None:
    cell, x = gru(), sequence()
    counts: list[int] = []
    for leaf in (x, cell.weight_hh):
        leaf.register_hook(lambda gradient: counts.append(1) or gradient * 2)  # type: ignore[func-returns-value]
    cell.weight_ih.register_post_accumulate_grad_hook(lambda p: counts.append(1))
    loss_of(*fusedrnn.Recurrent(cell, mode=mode)(x)).backward()
    assert len(counts) == 3
    mine = [x.grad, cell.weight_hh.grad]
    x.grad = cell.weight_hh.grad = None
    loss_of(*plain_loop(cell, x, start())).backward()
    torch.testing.assert_close(mine, [x.grad, cell.weight_hh.grad])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "tied", "half frozen"])
def test_weights_of_all_kinds(kind: str, mode: str) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(H, H, dtype=torch.float64) for _ in "ab")

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(self.a(x) + self.b(h))

    cell = Cell()
    if kind == "weight_norm":
        nn.utils.parametrizations.weight_norm(cell.b)
    elif kind == "spectral_norm":
        nn.utils.parametrizations.spectral_norm(cell.b)
        cell.eval()
    elif kind == "tied":
        cell.b.weight = cell.a.weight
    else:
        cell.b.requires_grad_(False)
    x = sequence()
    leaves = [x, *(p for p in cell.parameters() if p.requires_grad)]
    rnn = fusedrnn.Recurrent(cell, mode=mode)
    check_same(lambda: rnn(x, start()), lambda: plain_loop(cell, x, start()), leaves)


def test_buffers_that_change() -> None:
    """Batch norm and spectral norm in training: what they keep moves once per step, no more."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(H, H, dtype=torch.float64))
            self.norm = nn.BatchNorm1d(H, dtype=torch.float64)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(self.norm(self.a(h) + x))

    cell, x = Cell(), sequence()
    other = copy.deepcopy(cell)
    mine = fusedrnn.Recurrent(cell, chunk_size=3)(x, start())
    expected = plain_loop(other, x, start())
    torch.testing.assert_close(mine, expected)
    found = torch.autograd.grad(loss_of(*mine), [x, *cell.parameters()])
    exact = torch.autograd.grad(loss_of(*expected), [x, *other.parameters()])
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dict(cell.named_buffers()), dict(other.named_buffers()))
    assert cell.norm.num_batches_tracked == T


def test_random_numbers_of_torch() -> None:
    """Functions that are not handed on: torch's generator is as the loop leaves it."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(H, 2, 0.5, batch_first=True)
            self.double()

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            both = torch.stack([x, h], 1)
            mixed = self.attention(both, both, both, need_weights=False)[0]
            return torch.tanh(mixed[:, 0] + torch.randint(3, h.shape) * h)

    cell, x = Cell(), sequence()
    leaves = [x, *cell.parameters()]
    torch.manual_seed(2)
    mine = fusedrnn.Recurrent(cell, chunk_size=3)(x, start())
    state = torch.get_rng_state()
    found = torch.autograd.grad(loss_of(*mine), leaves)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    h, outputs = start(), []
    for step in x:
        h = cell(step, h)
        outputs.append(h)
    assert torch.equal(torch.get_rng_state(), state)
    exact = torch.autograd.grad(loss_of(torch.stack(outputs), h), leaves)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_copies() -> None:
    rnn, x = fusedrnn.Recurrent([gru(), gru()], mode="parallel"), sequence()
    expected = rnn(x)[0]
    stored = io.BytesIO()
    torch.save(rnn, stored)
    stored.seek(0)
    for other in (copy.deepcopy(rnn), torch.load(stored, weights_only=False)):
        torch.testing.assert_close(other(x)[0], expected)
    single = fusedrnn.Recurrent(gru())
    assert list(single.state_dict()) == [f"cell.{n}" for n in gru().state_dict()]
    assert "mode='parallel'" in repr(rnn)


def test_part_of_the_results() -> None:
    """Gradients of the state alone, of the output alone, and of none of both."""
    cell, x = nn.LSTMCell(H, H, dtype=torch.float64), sequence()
    zeros = (start(), start())
    for pick in (lambda o, s: o[3], lambda o, s: s[0], lambda o, s: s[1]):
        for mode in MODES:
            mine = pick(*fusedrnn.Recurrent(cell, mode=mode)(x))
            found = torch.autograd.grad(loss_of(mine), [x, *cell.parameters()])
            expected = pick(*plain_loop(cell, x, zeros))
            exact = torch.autograd.grad(loss_of(expected), [x, *cell.parameters()])
            torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_torch_compile_around() -> None:
    """The graph breaks at the call; results are the same."""
    cell, x = Noisy(), sequence()
    rnn = fusedrnn.Recurrent(cell)

    def model(x: Tensor) -> Tensor:
        return rnn(x * 2, start(), generator=generator())[0] * 3

    leaves = [x, *cell.parameters()]
    expected = torch.autograd.grad(loss_of(model(x)), leaves)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(loss_of(compiled(x)), leaves), expected)


def test_saved_tensors_hooks() -> None:
    cell, x = gru(), sequence()
    expected = torch.autograd.grad(loss_of(*plain_loop(cell, x, start())), [x])
    with torch.autograd.graph.save_on_cpu():
        output = fusedrnn.Recurrent(cell)(x)
    torch.testing.assert_close(torch.autograd.grad(loss_of(*output), [x]), expected)


def test_twice_through_the_same_graph() -> None:
    cell, x = gru(), sequence()
    loss = loss_of(*fusedrnn.Recurrent(cell)(x))
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, [x]), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [x])


def test_truncated_backpropagation() -> None:
    """A detached state from one piece of a sequence to the next."""
    cell, x = gru(), sequence()
    rnn, h, other = fusedrnn.Recurrent(cell), start(), start()
    for piece in x.split(4):
        output, h = rnn(piece, h.detach())
        expected, other = plain_loop(cell, piece, other.detach())
        found = torch.autograd.grad(loss_of(output, h), list(cell.parameters()))
        exact = torch.autograd.grad(loss_of(expected, other), list(cell.parameters()))
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(*fusedrnn.Recurrent(gru())(sequence())).backward()


def test_cells_of_this_package() -> None:
    """A cell with weights in a flat buffer, inside."""
    layer, x = fusedrnn.GRU(H, H, dtype=torch.float64), sequence()
    cell = fusedrnn.GRUCell(H, H, dtype=torch.float64)
    with torch.no_grad():
        cell.flat_weight.copy_(layer.flat_weight)
    output, state = fusedrnn.Recurrent(cell)(x)
    expected, last = layer(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(state, last[0])
    found = torch.autograd.grad(loss_of(output), [x, *cell.parameters()])
    exact = torch.autograd.grad(loss_of(expected), [x, *layer.parameters()])
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_a_gradient_inside_of_the_step(mode: str, chunk_size: int | None) -> None:
    """A leaf that the step makes itself is not taken for one from outside."""

    class Descends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H, dtype=torch.float64)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            with torch.enable_grad():
                z = h.detach().requires_grad_()
                energy = torch.tanh(self.linear(z)).square().sum()
                (slope,) = torch.autograd.grad(energy, z, create_graph=True)
            return torch.tanh(x + h - 0.1 * slope)

    cell, x = Descends(), sequence()
    check_same(
        lambda: fusedrnn.Recurrent(cell, mode=mode, chunk_size=chunk_size)(x, start()),
        lambda: plain_loop(cell, x, start()),
        [x, *cell.parameters()],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_draws_that_some_steps_make(seed: int, chunk_size: int | None) -> None:
    """Whether or not the first step draws; gradients against small differences."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H, dtype=torch.float64)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            if x[0, 0] > 0:
                h = h + torch.randn_like(h)
            if x[0, 1] > 0:
                h = h * torch.rand(h.shape, dtype=h.dtype)
            return torch.tanh(self.linear(h) + x)

    torch.manual_seed(seed)
    cell, x = Sometimes(), torch.randn(T, B, H, dtype=torch.float64)
    rnn = fusedrnn.Recurrent(cell, chunk_size=chunk_size)

    def loss(h: Tensor) -> Tensor:
        torch.manual_seed(1)
        return loss_of(*rnn(x, h))

    assert torch.autograd.gradcheck(loss, start().requires_grad_())


def test_nested_recurrents() -> None:
    """A sequence inside of a step, with noise of its own."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = gru()

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.gru(x + torch.randn_like(x), h)  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gru = fusedrnn.Recurrent(Inner()), gru()

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            output, _ = self.inner(x.expand(3, -1, -1), h)
            return self.gru(output[-1], h)  # type: ignore[no-any-return]

    rnn = fusedrnn.Recurrent(Outer(), chunk_size=3)
    x = sequence().detach()

    def loss(h: Tensor) -> Tensor:
        torch.manual_seed(1)
        return loss_of(*rnn(x, h))

    assert torch.autograd.gradcheck(loss, start().requires_grad_())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(1, 3), (5, 0), (1, 1)])
def test_small_sizes(mode: str, sizes: tuple[int, int]) -> None:
    cell = nn.LSTMCell(H, H, dtype=torch.float64)
    x = torch.randn(*sizes, H, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(sizes[1], H, dtype=torch.float64)
    check_same(
        lambda: fusedrnn.Recurrent(cell, mode=mode)(x),
        lambda: plain_loop(cell, x, (zeros, zeros)),
        [x, *cell.parameters()],
    )
