"""The functional form: closed-over tensors, params, states and outputs of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import MODES, check_same, generator, stack
from torch import Tensor, nn

import fusedrnn

T, B = 10, 3


def float64(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def loop(step: Any, state: Any, inputs: Tensor, *params: Any, reverse: bool = False) -> Any:
    outputs: dict[int, Any] = {}
    for time in range(len(inputs))[:: -1 if reverse else 1]:
        state, outputs[time] = step(state, inputs[time], *params)
    return state, stack([outputs[time] for time in range(len(inputs))])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reverse", [False, True])
def test_closed_over_tensors_get_gradients(mode: str, reverse: bool) -> None:
    """Leaves, and results of operations outside of the step."""
    weight, raw = float64(4, 4), float64(4)
    bias = raw.exp()  # not a leaf

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ weight + bias)
        return h, h.sum(-1)

    h, xs = float64(B, 4), float64(T, B, 4)
    check_same(
        lambda: fusedrnn.scan(step, h, xs, mode=mode, reverse=reverse),
        lambda: loop(step, h, xs, reverse=reverse),
        [h, xs, weight, raw],
    )


@pytest.mark.parametrize("mode", MODES)
def test_params(mode: str) -> None:
    params = {"w": float64(4, 4), "b": [float64(4)]}

    def step(h: Tensor, x: Tensor, p: Any) -> tuple[Tensor, Any]:
        h = torch.tanh(x + h @ p["w"] + p["b"][0])
        return h, (h, {"square": h * h})

    h, xs = float64(B, 4), float64(T, B, 4)
    check_same(
        lambda: fusedrnn.scan(step, h, xs, params, mode=mode, chunk_size=3),
        lambda: loop(step, h, xs, params),
        [h, xs, params["w"], params["b"][0]],
    )


def test_a_tensor_that_only_the_last_step_reads() -> None:
    weight, last = float64(4, 4), float64(4)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x[:, :4] + h @ weight)
        if x[0, 4] == T - 1:
            h = h + last
        return h, h

    h = float64(B, 4)
    numbers = torch.arange(T, dtype=torch.float64).view(T, 1, 1).expand(T, B, 1)
    xs = torch.cat([float64(T, B, 4), numbers], -1).detach()
    check_same(
        lambda: fusedrnn.scan(step, h, xs, chunk_size=4),
        lambda: loop(step, h, xs),
        [h, weight, last],
    )


def test_what_no_function_of_torch_sees_is_an_error() -> None:
    """No gradient is left out in silence."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(h, weight)
            return h * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h, weight = ctx.saved_tensors
            return gradient * weight, (gradient * h).sum(0)

    weight = float64(4)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = Scale.apply(h, weight) + x
        return h, h

    h, xs = float64(B, 4), float64(T, B, 4)
    output = fusedrnn.scan(step, h, xs)[1]
    with pytest.raises(RuntimeError, match=r"shape \(4,\).*Pass it in"):
        output.sum().backward()

    def step_with(h: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = Scale.apply(h, weight) + x
        return h, h

    check_same(
        lambda: fusedrnn.scan(step_with, h, xs, weight),
        lambda: loop(step_with, h, xs, weight),
        [h, xs, weight],
    )


def test_states_and_outputs_without_a_batch() -> None:
    """Replay takes any shapes: a linear filter with a scalar state."""
    decay = float64()

    def step(level: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        level = torch.sigmoid(decay) * level + x
        return level, level * x

    level, xs = float64(), float64(T)
    check_same(
        lambda: fusedrnn.scan(step, level, xs), lambda: loop(step, level, xs), [level, xs, decay]
    )


@pytest.mark.parametrize("mode", MODES)
def test_methods_and_modules(mode: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(h) + x)
            return h, h

        forward = step

    model = Model()
    h, xs = float64(B, 4), float64(T, B, 4)
    for step in (model, model.step):
        check_same(
            lambda step=step: fusedrnn.scan(step, h, xs, mode=mode),  # type: ignore[misc]
            lambda: loop(model.step, h, xs),
            [h, xs, *model.parameters()],
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", [None, ()])
def test_steps_without_an_input(mode: str, inputs: Any) -> None:
    """As in jax.lax.scan, ``length`` says how many there are."""
    h, weight = float64(B, 4), float64(4, 4)

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
        lambda: fusedrnn.scan(step, h, inputs, length=T, mode=mode, reverse=True, chunk_size=3),
        expected,
        [h, weight],
    )
    assert fusedrnn.scan(lambda h, x: (h, x), h, weight[:, 0], length=4)[1].shape == (4,)


def test_return_sequence() -> None:
    weight = float64(4, 4)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ weight)
        return h, h * 2

    h, xs = float64(B, 4), float64(T, B, 4)

    def expected() -> tuple[Tensor, Tensor]:
        state, outputs = loop(step, h, xs)
        return state, outputs[-1]

    check_same(lambda: fusedrnn.scan(step, h, xs, return_sequence=False), expected, [h, xs, weight])


def test_a_step_of_another_kind() -> None:
    """Whatever can be called, also what has no attributes of its own."""

    class Step:
        def __call__(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return h + x, h * x

    h, xs = float64(B, 4), float64(T, B, 4)
    instance = Step()
    for step in (instance, instance.__call__, torch.broadcast_tensors):
        output = fusedrnn.scan(step, h, xs)[1]
        torch.testing.assert_close(output, loop(step, h, xs)[1])


def test_a_generator_decides_the_noise() -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h, x + torch.randn_like(x)

    h, xs = torch.zeros(B), torch.zeros(T, B)
    first, again, other = (
        fusedrnn.scan(step, h, xs, generator=generator(seed))[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().numel() == T * B
    torch.manual_seed(3)
    first = fusedrnn.scan(step, h, xs)[1]
    assert not torch.equal(first, fusedrnn.scan(step, h, xs)[1])
    torch.manual_seed(3)
    assert torch.equal(first, fusedrnn.scan(step, h, xs)[1])
