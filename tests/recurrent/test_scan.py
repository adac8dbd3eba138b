"""The functional form: closed-over tensors, params, states and outputs of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent.loops import WAYS, check_same, check_scan, double, generator, scan_loop, twice
from torch import Tensor, nn

import fusedrnn

pytestmark = [
    pytest.mark.usefixtures("steps_in_python"),
    pytest.mark.filterwarnings("error:fusedrnn"),
]
T, B, H = 10, 3, 4


def closed_over() -> Any:
    """Leaves, and results of operations outside of the step."""
    weight, raw = double(H, H), double(H)
    bias = raw.exp()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ weight + bias)
        return h, h.sum(-1)

    return step, [weight, raw]


def views() -> Any:
    """tensor.T is an attribute, of a tensor that nothing else reads."""
    weight, other = double(H, H), double(H, H)
    return lambda h, x: twice(torch.tanh(x + h @ weight.T + h @ other.mT)), [weight, other]


def named_tuple() -> Any:
    pair = torch.return_types.max((double(H), double(H)))
    return lambda h, x: twice(torch.tanh(h + x + torch.stack(pair).sum(0))), [*pair]


class Model(nn.Module):
    """Its step reads a module and the weight of this, whose gradient is that of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=torch.float64)

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return twice(torch.tanh(self.linear(h) + 0.3 * h @ self.linear.weight + x))

    forward = step


def method() -> Any:
    model = Model()
    return model.step, [*model.parameters()]


def module() -> Any:
    model = Model()
    return model, [*model.parameters()]


def params() -> Any:
    """A tree of them, and a tree of outputs."""
    given = {"w": double(H, H), "b": [double(H)]}

    def step(h: Tensor, x: Tensor, p: Any) -> tuple[Tensor, Any]:
        h = torch.tanh(x + h @ p["w"] + p["b"][0])
        return h, (h, {"square": h * h})

    return step, [], given


STEPS = [closed_over, views, named_tuple, method, module, params]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", STEPS)
def test_steps(make: Any, way: str, reverse: bool) -> None:
    step, more, *given = make()
    h, xs = double(B, H), double(T, B, H)
    check_scan(step, h, xs, *given, more=more, reverse=reverse, **WAYS[way])


def test_a_tensor_that_only_the_last_step_reads() -> None:
    weight, last = double(H, H), double(H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x[:, :H] + h @ weight)
        return twice(h + last if x[0, H] == T - 1 else h)

    numbers = torch.arange(T, dtype=torch.float64).view(T, 1, 1).expand(T, B, 1)
    xs = torch.cat([double(T, B, H), numbers], -1).detach()
    check_scan(step, double(B, H), xs, more=[weight, last], chunk_size=4)


def test_a_tensor_that_an_autograd_function_alone_reads() -> None:

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(h, weight)
            return h * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h, weight = ctx.saved_tensors
            return gradient * weight, (gradient * h).sum(0)

    def step(h: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return twice(Scale.apply(h, weight) + x)

    h, xs, weight = double(B, H), double(T, B, H), double(H)
    check_scan(lambda h, x: step(h, x, weight), h, xs, more=[weight])
    check_scan(step, h, xs, weight)


def test_states_and_outputs_without_a_batch() -> None:
    """Any shapes will do: a linear filter with a scalar state."""
    decay = double()

    def step(level: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        level = torch.sigmoid(decay) * level + x
        return level, level * x

    check_scan(step, double(), double(T), more=[decay])


@pytest.mark.parametrize("inputs", [None, ()])
def test_steps_without_an_input(inputs: Any) -> None:
    """As in jax.lax.scan, ``length`` says how many there are."""
    h, weight = double(B, H), double(H, H)

    def step(h: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        assert x == inputs
        h = torch.tanh(h @ weight)
        return h, h * 2

    def expected() -> tuple[Tensor, Tensor]:
        state, outputs = h, []
        for _ in range(T):
            state, y = step(state, inputs)
            outputs.append(y)
        return state, torch.stack(outputs[::-1])

    check_same(
        lambda: fusedrnn.scan(step, h, inputs, length=T, reverse=True, chunk_size=3),
        expected,
        [h, weight],
    )
    assert fusedrnn.scan(lambda h, x: (h, x), h, weight[:, 0], length=4)[1].shape == (4,)


def test_a_step_of_another_kind() -> None:
    """Whatever can be called, also what has no attributes of its own."""

    class Step:
        def __call__(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return h + x, h * x

    h, xs = double(B, H), double(T, B, H)
    instance = Step()
    for step in (instance, instance.__call__, torch.broadcast_tensors):
        output = fusedrnn.scan(step, h, xs)[1]
        torch.testing.assert_close(output, scan_loop(step, h, xs)[1])


def test_a_generator_decides_the_noise() -> None:
    def noise(seed: int | None = None) -> Tensor:
        given = None if seed is None else generator(seed)
        zeros = torch.zeros(T, B)
        step = lambda h, x: (h, x + torch.randn_like(x))  # noqa: E731
        return fusedrnn.scan(step, zeros[0], zeros, generator=given)[1]  # type: ignore[no-any-return]

    first = noise(1)
    assert torch.equal(first, noise(1))
    assert not torch.equal(first, noise(2))
    assert first.unique().numel() == T * B
    torch.manual_seed(3)
    first = noise()
    assert not torch.equal(first, noise())
    torch.manual_seed(3)
    assert torch.equal(first, noise())
