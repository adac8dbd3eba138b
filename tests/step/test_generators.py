"""``generator=``: all random numbers of a call come from it, whatever function draws them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recurrent.loops import By, Unseen, generator
from torch import Tensor, nn
from torch.distributions import Dirichlet, Gamma
from torch.nn import functional as F

import fusedrnn
from fusedrnn._step import torch_draws
from fusedrnn._step.noise import Seed

pytestmark = [
    pytest.mark.usefixtures("steps_in_python"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]
T, B, H = 7, 3, 4
BY_SCAN, NO_RECOMPUTATION = "scan", "no recomputation"
Draw = Callable[[Any, Tensor], Tensor]


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)


def nested(c: Any, x: Tensor) -> Tensor:
    rnn = fusedrnn.Recurrent(By(lambda c, x, h: x + torch.randn_like(h)), compile="never")
    return rnn(x[None], x)[0][0]  # type: ignore[no-any-return]


DRAWS: dict[str, Draw] = {
    "rand_like": lambda c, x: torch.rand_like(x),
    "dropout": lambda c, x: F.dropout(x),
    "exponential_": lambda c, x: torch.empty_like(x).exponential_(),
    "multinomial": lambda c, x: x.gather(1, torch.multinomial(x.softmax(-1), H)),
    "init": lambda c, x: nn.init.kaiming_uniform_(torch.empty_like(x)),
    "alpha_dropout": lambda c, x: F.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda c, x: F.feature_alpha_dropout(x, 0.5, True),
    "dropout1d": lambda c, x: F.dropout1d(x),
    "rrelu": lambda c, x: F.rrelu(x, training=True),
    "cauchy_": lambda c, x: torch.empty_like(x).cauchy_().clamp(-1, 1),
    "log_normal_": lambda c, x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda c, x: torch.empty_like(x).geometric_(0.5),
    "random_": lambda c, x: torch.empty_like(x).random_(3),
    "randint": lambda c, x: torch.randint(3, x.shape),
    "randperm": lambda c, x: x * torch.randperm(H),
    "poisson": lambda c, x: torch.poisson(x.exp()),
    "binomial": lambda c, x: torch.binomial(torch.full_like(x, 3), torch.full_like(x, 0.5)),
    "gamma": lambda c, x: Gamma(x.exp(), 1.0).rsample(),
    "dirichlet": lambda c, x: Dirichlet(x.exp()).rsample(),
    "attention": lambda c, x: c.attention(x, x, x)[0],
    "a scripted function": lambda c, x: scripted(x),
    "in vmap": lambda c, x: torch.func.vmap(F.dropout, randomness="different")(x),
    "a cell of ours": lambda c, x: c.cell(x),
    "nested": nested,
    "of both kinds": lambda c, x: torch.randint(3, x.shape) * torch.rand_like(x),
}
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "never": {"compile": "never"},
    "chunks of 3": {"compile": "never", "chunk_size": 3},
    NO_RECOMPUTATION: {"compile": "never", "recompute": False},
    BY_SCAN: {},
}


def results(draw: Draw, way: str, seed: int) -> list[Tensor]:
    """Outputs, the gradient of the input, and the state of the generator afterwards."""
    cell = By(
        lambda c, x, h: torch.tanh(x + h + draw(c, x)),
        attention=nn.MultiheadAttention(H, 2, 0.5),
        cell=fusedrnn.StochasticGRUCell(H, H),
    )
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.fill_(0.1)
    x = torch.linspace(-1, 1, T * B * H).view(T, B, H).requires_grad_()
    start, given = torch.zeros(B, H), generator(seed)
    before = torch.get_rng_state()
    if way == BY_SCAN:
        _, output = fusedrnn.scan(lambda h, x: (cell(x, h),) * 2, start, x, generator=given)
    else:
        output, _ = fusedrnn.Recurrent(cell, **WAYS[way])(x, start, generator=given)
    assert torch.equal(torch.get_rng_state(), before)
    return [output, *torch.autograd.grad(output.square().sum(), x), given.get_state()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DRAWS)
def test_all_numbers_come_from_it(name: str, way: str) -> None:
    """Whatever state torch's own generator has, which stays as it is."""
    found = []
    for seed, of_torch in ((1, 10), (1, 20), (2, 10)):
        torch.manual_seed(of_torch)
        found.append(results(DRAWS[name], way, seed))
    first, same, other = found
    for a, b in zip(first, same, strict=True):
        # A nested cell may be compiled after its first steps.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[-1], generator(1).get_state())  # the next call has others


def later(draw: Callable[[Tensor], Tensor]) -> By:
    """Draws in each step but the first one."""

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        c.count += 1
        return torch.tanh(x + h + (draw(h) if c.count % T != 1 else 0))

    return By(step, count=0)


@pytest.mark.parametrize("draw", [torch.rand_like, lambda h: torch.randint(3, h.shape)])
@pytest.mark.parametrize("options", [{}, {"recompute": False}, {"chunk_size": 3}], ids=str)
def test_what_later_steps_alone_draw(options: Any, draw: Any) -> None:
    rnn = fusedrnn.Recurrent(later(draw), compile="never", **options)
    x, start, found = torch.randn(T, B, H, requires_grad=True), torch.zeros(B, H), []
    for seed in (1, 1, 2):
        output, _ = rnn(x, start, generator=generator(seed))
        found.append([output, *torch.autograd.grad(output.sum(), x)])
        torch.rand(3)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("options", [{}, {"recompute": False}], ids=str)
def test_an_error_in_a_step_leaves_torchs_generator(options: Any, at: int) -> None:
    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        made = h + torch.randint(3, h.shape)
        c.count += 1
        if c.count > at:
            raise ArithmeticError
        return made

    rnn = fusedrnn.Recurrent(By(step, count=0), compile="never", **options)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        rnn(torch.ones(T, B, H), torch.zeros(B, H), generator=generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_while_a_graph_is_captured_other_functions_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When no generator tells its state."""
    monkeypatch.setattr(torch_draws, "is_capturing", lambda device: True)
    rnn = fusedrnn.Recurrent(By(lambda c, x, h: x + F.dropout1d(h)), compile="never")
    with pytest.raises(RuntimeError, match=r"aten.bernoulli_ .* not draw .* graph is captured"):
        rnn(torch.randn(T, B, H), torch.zeros(B, H), generator=generator())


def test_draws_on_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seed, "can_lend", lambda seed, device: False)
    rnn = fusedrnn.Recurrent(By(lambda c, x, h: F.dropout1d(x + h)))
    x, given, before = torch.randn(T, B, H), generator(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"aten.bernoulli_ .* draws on cpu from torch's default"):
        rnn(x, torch.zeros(B, H), generator=given)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(given.get_state(), generator().get_state())


def test_layers_and_directions() -> None:
    cells = [By(lambda c, x, h: x[:, :H] + torch.randint(9, h.shape) + h) for _ in range(4)]
    rnn, x, found = fusedrnn.Recurrent(cells, bidirectional=True), torch.zeros(T, B, H), []
    for given in (generator(), generator(), generator(1)):
        torch.rand(3)
        output, states = rnn(x, [torch.zeros(B, H)] * 4, generator=given)
        found.append([output, *states, given.get_state()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][1], found[0][2])


def test_other_threads_may_draw_meanwhile() -> None:
    """From torch's own generator, which is then not lent to the call."""
    x, found = torch.randn(T, B, H), []
    for times in ((), (1, 3), (1,), (3,)):
        taken = Unseen(0)

        def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
            taken.value += 1  # noqa: B023
            if taken.value in times:  # noqa: B023
                thread = threading.Thread(target=torch.rand, args=(3,))
                thread.start()
                thread.join()
            return torch.tanh(x + h * torch.rand_like(h))

        before, given = torch.get_rng_state(), generator()
        rnn = fusedrnn.Recurrent(By(step), compile="never")
        found.append([*rnn(x, torch.ones(B, H), generator=given), given.get_state()])
        assert torch.equal(torch.get_rng_state(), before) == (not times)
        torch.testing.assert_close(found[0], found[-1], rtol=0, atol=0)
