"""Steps that read, draw and keep things in ways that are easily missed: right, or an error.

Longer than 350 lines, because its tests are of one topic and share their helpers.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import MODES, Unseen, check_same, plain_loop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fusedrnn

Step = Callable[[Any, Any], tuple[Any, Any]]
SEQ_LEN, BATCH, H = 16, 2, 3


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fusedrnn")
        yield


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def loop(step: Step, state: Any, xs: Tensor) -> tuple[Any, Any]:
    outputs = []
    for x in xs:
        state, y = step(state, x)
        outputs.append(y)
    return state, torch.stack(outputs)


def check(step: Step, leaves: list[Tensor], state: Any = None, **named: Any) -> None:
    """A scan's results and gradients are the loop's."""
    xs = double(SEQ_LEN, BATCH, H)
    if state is None:
        state = torch.zeros(BATCH, H, dtype=torch.float64)
    check_same(
        lambda: fusedrnn.scan(step, state, xs, **named),
        lambda: loop(step, state, xs),
        [xs, *leaves],
    )


# --- what steps read -----------------------------------------------------------------------------


def test_attributes_that_are_views() -> None:
    """tensor.T is an attribute, of a tensor that nothing else reads."""
    weight, other = double(H, H), double(H, H)
    check(lambda h, x: (torch.tanh(x + h @ weight.T + h @ other.mT),) * 2, [weight, other])


def test_a_tensor_that_only_a_middle_step_reads() -> None:
    first = double(BATCH, H)

    def step(h: Tensor, given: Any) -> tuple[Tensor, Tensor]:
        x, is_done = given
        if is_done.any():
            h = torch.where(is_done[:, None], first, h)
        h = torch.tanh(h + x)
        return h, h

    done = torch.zeros(SEQ_LEN, BATCH, dtype=torch.bool)
    done[6, 1] = True
    xs = double(SEQ_LEN, BATCH, H)
    output = fusedrnn.scan(step, torch.zeros(BATCH, H, dtype=torch.float64), (xs, done))[1]
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) by a way that forward has not seen"):
        output.sum().backward()


def test_a_tensor_that_a_step_returns_as_it_is() -> None:
    weight = double(BATCH, H)
    xs = double(SEQ_LEN, BATCH, H)
    output = fusedrnn.scan(lambda h, x: (h + x, weight), xs[0] * 0, xs)[1]
    with pytest.raises(RuntimeError, match="forward has not seen"):
        output.sum().backward()


def test_named_tuples_of_tensors() -> None:
    pair = torch.return_types.max((double(BATCH, H), double(BATCH, H)))
    check(lambda h, x: (torch.tanh(h + x + torch.stack(pair).sum(0)),) * 2, [*pair])


@pytest.mark.parametrize("is_random", [False, True])
def test_a_scan_in_a_step(is_random: bool) -> None:
    weight = double(H)

    def inner(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * weight + x)
        return h, F.dropout(h, 0.5, is_random)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h, parts = fusedrnn.scan(inner, h, torch.stack([x, x.sin(), x.cos()]))
        return h, parts.sum(0) + F.dropout(x, 0.5, is_random)

    if not is_random:
        return check(step, [weight])
    xs = double(SEQ_LEN, BATCH, H)
    results = []
    for size in (SEQ_LEN, 4, 1):
        torch.manual_seed(3)
        output = fusedrnn.scan(step, xs[0].detach() * 0, xs, chunk_size=size)[1]
        results.append([output, *torch.autograd.grad(output.square().sum(), [xs, weight])])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


class Keeping(nn.Module):
    """Computes something from a weight once."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(H, dtype=torch.float64))
        self.kept: Any = None

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.raw.tanh()
        return torch.tanh(x + h * self.kept)


@pytest.mark.parametrize("seq_len", [SEQ_LEN, 1])
def test_values_that_are_computed_once(seq_len: int) -> None:
    cell = Keeping()
    rnn = fusedrnn.Recurrent(cell)
    x, h = double(seq_len, BATCH, H), double(BATCH, H)
    for kept in (None, cell.raw.tanh()):
        gradients = []
        for run in (lambda: rnn(x, h), lambda: plain_loop(cell, x, h)):
            cell.kept = kept
            loss = run()[0].square().sum()
            gradients.append(torch.autograd.grad(loss, [x, h, cell.raw], retain_graph=True))
        torch.testing.assert_close(*gradients)


def test_parametrizations_that_are_cached() -> None:
    cell: Any = parametrizations.weight_norm(nn.GRUCell(H, H, dtype=torch.float64), "weight_hh")
    rnn = fusedrnn.Recurrent(cell)
    x, h = double(SEQ_LEN, BATCH, H), double(BATCH, H)
    gradients = []
    for run in (lambda: rnn(x, h), lambda: plain_loop(cell, x, h)):
        with parametrize.cached():
            loss = run()[0].square().sum()
            gradients.append(torch.autograd.grad(loss, [x, h, *cell.parameters()]))
    torch.testing.assert_close(*gradients)


def test_batch_norm_around_a_function() -> None:
    """Of a function, a partial function and a method, modules are found."""
    norm = nn.BatchNorm1d(H)
    expected = nn.BatchNorm1d(H)
    xs = torch.randn(SEQ_LEN, BATCH, H, requires_grad=True)

    def step(h: Tensor, x: Tensor, module: Any = None) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + (module or norm)(x))
        return h, h

    loop(lambda h, x: step(h, x, expected), torch.zeros(BATCH, H), xs)[1].sum().backward()
    for used, given in ((norm, step), (None, functools.partial(step))):
        if used is None:
            norm.reset_parameters()
        fusedrnn.scan(given, torch.zeros(BATCH, H), xs)[1].sum().backward()
        torch.testing.assert_close(norm.running_mean, expected.running_mean)
        assert int(norm.num_batches_tracked) == SEQ_LEN
        torch.testing.assert_close(norm.weight.grad, expected.weight.grad)
        norm.zero_grad()


def test_two_threads() -> None:
    """Backward of one thread exchanges weights; the other one's gradients must not get lost."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=torch.float64))
    x = torch.randn(SEQ_LEN, BATCH, H, dtype=torch.float64)
    rnn(x)[0].sum().backward()
    expected = [p.grad.clone() for p in rnn.parameters()]
    rnn.zero_grad()

    def work() -> None:
        for _ in range(20):
            rnn(x)[0].sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(rnn.cell.weight_ih, nn.Parameter)
    for parameter, gradient in zip(rnn.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 40 * gradient)


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_functional_call_around_forward(name: str) -> None:
    """Backward comes when the module has its own tensors again."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H, dtype=torch.float64)
            self.register_buffer("scale", torch.ones(H, dtype=torch.float64))
            self.shift = nn.Parameter(torch.zeros(H, dtype=torch.float64), requires_grad=False)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(x) + h * self.scale + self.shift)
            return h * self.scale, h

    cell = Scaled()
    rnn = fusedrnn.Recurrent(cell)
    x, h = double(SEQ_LEN, BATCH, H), torch.zeros(BATCH, H, dtype=torch.float64)
    value = torch.rand(H, dtype=torch.float64)
    output = torch.func.functional_call(rnn, {f"cell.{name}": value}, (x, h))[0]
    found = torch.autograd.grad(output.sum(), [x, *cell.linear.parameters()])
    expected = torch.func.functional_call(rnn, {f"cell.{name}": value}, (x, h))
    setattr(cell, name, nn.Parameter(value, requires_grad=False) if name == "shift" else value)
    wanted = plain_loop(cell, x, h)
    torch.testing.assert_close(expected, wanted)
    exact = torch.autograd.grad(wanted[0].sum(), [x, *cell.linear.parameters()])
    torch.testing.assert_close(found, exact)


def test_another_cell_and_other_functions_are_compiled_anew() -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), torch_compile=True)
    x = torch.randn(SEQ_LEN, BATCH, H)
    rnn(x)
    rnn.cell = nn.GRUCell(H, H)
    torch.testing.assert_close(rnn(x)[0], fusedrnn.Recurrent(rnn.cell)(x)[0])

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(h + x), x * 2

    @functools.wraps(step)
    def other(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h, y = step(h, x)
        return h * 0.5, y * 2

    fusedrnn.scan(step, x[0], x, torch_compile=True)
    functools.update_wrapper(other, step)  # after the first call it has more attributes
    found = fusedrnn.scan(other, x[0], x, torch_compile=True)
    torch.testing.assert_close(found, fusedrnn.scan(other, x[0], x))


def test_a_compiled_function_whose_tensor_gets_a_gradient_later() -> None:
    weight = torch.rand(H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * weight + x)
        return h, h

    xs = torch.randn(SEQ_LEN, BATCH, H)
    fusedrnn.scan(step, xs[0], xs, torch_compile=True)
    weight.requires_grad_()
    with pytest.warns(UserWarning, match="reads tensors of its own that need a gradient"):
        output = fusedrnn.scan(step, xs[0], xs, torch_compile=True)[1]
    found = torch.autograd.grad(output.sum(), weight)
    expected = torch.autograd.grad(loop(step, xs[0], xs)[1].sum(), weight)
    torch.testing.assert_close(found, expected)


# --- what steps draw -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["torch's numbers first", "ours first"])
def test_numbers_of_two_kinds(order: str) -> None:
    """Of this package's generator and of torch's: forward and backward have the same ones."""
    weight = torch.ones(BATCH, H, requires_grad=True)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        draws = [lambda: torch.randint(0, 100, x.shape), lambda: torch.rand(x.shape)]
        a, b = (draw() for draw in (draws if order == "torch's numbers first" else draws[::-1]))
        return h, weight * a * b

    xs = torch.randn(SEQ_LEN, BATCH, H)
    for _ in range(2):
        output = fusedrnn.scan(step, xs[0], xs)[1]
        (gradient,) = torch.autograd.grad(output.sum(), weight)
        torch.testing.assert_close(gradient, output.detach().sum(0))
    torch.manual_seed(7)
    with torch.no_grad():
        evaluated = fusedrnn.scan(step, xs[0], xs)[1]
    torch.manual_seed(7)
    assert torch.equal(evaluated, fusedrnn.scan(step, xs[0], xs)[1])


def test_dropout_beside_attention_and_built_in_cells() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
            self.cell, self.dropout = fusedrnn.StochasticGRUCell(4, 4), nn.Dropout(0.3)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            read = self.attention(x[:, None], h[:, None], h[:, None])[0][:, 0]
            return self.dropout(self.cell(x, h)) + read

    rnn = fusedrnn.Recurrent(Attending())
    x, h = torch.randn(SEQ_LEN, BATCH, 4), torch.zeros(BATCH, 4)
    rnn(x, h)[0].sum().backward()  # an error if backward drew other numbers


def test_checkpoint_in_a_step_that_draws() -> None:
    weight = torch.ones(H, requires_grad=True)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h, checkpoint(lambda w: F.dropout((w * x).exp(), 0.5), weight, use_reentrant=False)

    output = fusedrnn.scan(step, torch.zeros(H), torch.ones(SEQ_LEN, H))[1]
    with pytest.raises(RuntimeError, match="draws random numbers in backward"):
        output.sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        lambda h, x: (h, torch.multinomial(x, 1)),
        lambda h, x: (h, torch.multinomial(x.abs() * torch.nan, 1)),
        lambda h, x: (h, torch.multinomial(x * 0, 1)),
        lambda h, x: (h, torch.bernoulli(x + 3)),
        lambda h, x: (h, torch.empty(3).bernoulli_(-0.5)),
        lambda h, x: (h, torch.normal(x, -x.abs())),
        lambda h, x: (h, torch.normal(x, -1.0)),
        lambda h, x: (h, x.clone().normal_(0, -1)),
        lambda h, x: (h, x.clone().exponential_(-1)),
        lambda h, x: (h, x.clone().uniform_(2, 1)),
    ],
)
def test_wrong_arguments_of_draws(step: Step) -> None:
    xs = torch.randn(5, BATCH, H) - 3
    with pytest.raises(RuntimeError):
        step(xs[0], xs[0])
    with pytest.raises(RuntimeError, match=r"fusedrnn: .* expects"):
        fusedrnn.scan(step, xs[0], xs)


def test_kinds_of_numbers() -> None:
    xs = torch.ones(200, BATCH, 64, dtype=torch.float64)
    dropped = fusedrnn.scan(lambda h, x: (h, F.dropout(x, 0.3)), xs[0], xs)[1]
    assert set(dropped.unique().tolist()) == {0.0, 1 / (1 - 0.3)}
    drawn = fusedrnn.scan(
        lambda h, x: (h, torch.randn(x.shape, dtype=torch.complex128)), xs[0], xs
    )[1]
    torch.testing.assert_close(drawn.abs().square().mean().item(), 1.0, rtol=0.05, atol=0)
    empty = fusedrnn.scan(
        lambda h, x: (h, x + torch.rand(64)), torch.zeros(0, 64), torch.zeros(5, 0, 64)
    )[1]
    assert empty.shape == (5, 0, 64)


# --- what changes between forward and backward ---------------------------------------------------


def test_modes_of_modules_are_those_of_forward() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(H, H), nn.Dropout(0.5)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.dropout(self.linear(x)), h

    rnn = fusedrnn.Recurrent(Dropping())
    x, h = torch.randn(SEQ_LEN, BATCH, H), torch.zeros(BATCH, H)
    gradients = []
    for changes in (False, True):
        torch.manual_seed(0)
        output = rnn.train()(x, h)[0]
        rnn.train(not changes)
        gradients.append(torch.autograd.grad(output.sum(), [*rnn.parameters()]))
        assert rnn.cell.dropout.training != changes
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("returns", [True, False])
def test_outputs_that_are_others_in_backward(returns: bool, mode: str) -> None:
    """Though the states are the same."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(H, H), Unseen(1.0)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(x) + h)
            return h * self.factor.value, h

    rnn = fusedrnn.Recurrent(Counting(), mode=mode, return_sequence=returns)
    output = rnn(torch.randn(SEQ_LEN, BATCH, H), torch.zeros(BATCH, H))[0]
    rnn.cell.factor.value = 2.0
    with pytest.raises(RuntimeError, match="the steps give another output than in forward"):
        output.sum().backward()


def test_weights_that_are_frozen_in_forward() -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H).requires_grad_(False))
    x = torch.randn(SEQ_LEN, BATCH, H, requires_grad=True)
    output = rnn(x)[0]
    rnn.requires_grad_()
    output.sum().backward()
    assert rnn.cell.weight_ih.grad is None
    assert x.grad is not None


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x, h: (h / h.norm().clamp(min=6), torch.tanh(h + x)), None),
        (lambda x, h: _with_hook(torch.tanh(h + x)), "gradient of .* differs"),
    ],
)
def test_rows_that_are_mixed_where_a_trial_does_not_look(step: Any, reason: str | None) -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Any:
            return step(x, h)

    rnn = fusedrnn.Recurrent(Mixing(), mode="parallel")
    x = torch.randn(40, 12, H, requires_grad=True)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            rnn(x, torch.zeros(12, H))
        return
    output = rnn(x, torch.zeros(12, H))[0]
    with pytest.raises(RuntimeError, match="another output than in forward"):
        output.sum().backward()


def _with_hook(h: Tensor) -> tuple[Tensor, Tensor]:
    if h.requires_grad:
        h.register_hook(lambda g: g / (g.norm() + 1))
    return h, h


@pytest.mark.parametrize("mode", MODES)
def test_lengths_with_a_step_that_has_no_value_at_zero(mode: str) -> None:
    """Rows that have ended get no zeros, whose logarithm would make gradients NaN."""

    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H, dtype=torch.float64)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(self.linear(x.log()) + h)

    cell = Log()
    rnn = fusedrnn.Recurrent(cell, mode=mode)
    x = torch.rand(7, 3, H, dtype=torch.float64) + 0.5
    lengths = [2, 5, 3]
    for row, length in enumerate(lengths):
        x[length:, row] = torch.nan
    x.requires_grad_()
    h = torch.zeros(3, H, dtype=torch.float64)
    output, last = rnn(x, h, lengths=lengths)
    assert output.shape == (7, 3, H)
    found = torch.autograd.grad(output.sum() + last.square().sum(), [x, *cell.parameters()])
    total: Any = 0.0
    for row, length in enumerate(lengths):
        part, end = plain_loop(cell, x[:length, row : row + 1], h[:1])
        torch.testing.assert_close(output[:length, row : row + 1], part)
        assert not output[length:, row].any()
        total = total + part.sum() + end.square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(total, [x, *cell.parameters()]))


# --- trees and memory ----------------------------------------------------------------------------


def test_dicts_in_another_order() -> None:
    def step(state: Any, x: Tensor) -> Any:
        h, c = state["h"], state["c"]
        new = {"c": torch.sin(c + h), "h": torch.tanh(h + x)}
        return new if h.sum() > 0 else dict(reversed(new.items())), {"a": h, "b": c}

    zeros = torch.zeros(BATCH, H, dtype=torch.float64)
    xs = double(SEQ_LEN, BATCH, H)
    state, ys = fusedrnn.scan(step, {"h": zeros, "c": zeros + 1}, xs)
    expected = {"h": zeros, "c": zeros + 1}
    for x, a, b in zip(xs, ys["a"], ys["b"], strict=True):
        expected, y = step(expected, x)
        torch.testing.assert_close([a, b], [y["a"], y["b"]])
    torch.testing.assert_close(state, {"h": expected["h"], "c": expected["c"]})
    assert list(state) == ["h", "c"]


def test_gradients_of_a_batch_of_gradients() -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=torch.float64))
    x = double(SEQ_LEN, BATCH, H)
    output = rnn(x)[0]
    vectors = torch.randn(4, *output.shape, dtype=torch.float64)
    with pytest.warns(UserWarning, match="plain loop"):
        (found,) = torch.autograd.grad(output, x, vectors, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(output, x, v, retain_graph=True)[0] for v in vectors]
    torch.testing.assert_close(found, torch.stack(expected))


def test_what_is_kept_of_states_and_generators() -> None:
    """A part of a larger tensor keeps no more than itself; random states are kept once."""
    weight = torch.randn(H, 400 * H)
    xs = torch.randn(50, BATCH, H, requires_grad=True)
    _, y = fusedrnn.scan(lambda h, x: ((h @ weight)[:, :H], x), xs[0].detach(), xs, chunk_size=1)
    assert all(t.untyped_storage().nbytes() <= xs.nbytes for t in y.grad_fn.saved_tensors)
    befores = y.grad_fn.run.befores
    assert len({id(before.random[0]) for before in befores}) == 1
