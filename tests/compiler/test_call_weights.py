"""What a call computes of a program's constants, before its steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiler.interpreted import interpreted
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusedrnn
from bench.any_cell_steps import Size, start_of
from docs.examples.published_cells import CASES
from fusedrnn._compiler import pipeline
from fusedrnn._compiler.call_weights import CallWeights
from fusedrnn._runtime import sequence_parts

T, B, H = 4, 3, 16


class Leaky(nn.Module):
    """It has numbers of its own, and takes each weight for several columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.rates = nn.Parameter(torch.rand(H // 4))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.tensor([0.5, 2.0]).repeat(H // 2)
        h = torch.tanh(self.linear(h) * own + x) * self.rates.repeat_interleave(4)
        return h, h


class Unweighted(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * torch.tensor([0.5, 2.0]).repeat(H // 2) + x)
        return h, h


OWN = {"Leaky": Leaky, "Unweighted": Unweighted}


class OnlyOn(TorchDispatchMode):
    """Refuses operators that read or make tensors on another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs, made)):
            assert not isinstance(tensor, Tensor) or tensor.device.type == self._device, func
        return made


@pytest.mark.parametrize("name", [*OWN, "DreamerV3"])
def test_a_call_copies_nothing_to_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a GPU, and torch could not capture it in a CUDA graph."""
    asked: list[tuple[CallWeights, Sequence[Tensor]]] = []
    tensors = CallWeights.tensors

    def noted(self: CallWeights, constants: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        asked.append((self, constants))
        return tensors(self, constants, like)

    def make(call_weights: CallWeights) -> None:
        every = tensors(call_weights, meta, carry)
        call_weights.recipes.made(every, carry)

    monkeypatch.setattr(CallWeights, "tensors", noted)
    if name in OWN:
        cell: nn.Module = OWN[name]()
        inputs: Any = torch.randn(T, B, H)
    else:
        case = next(case for case in CASES if case.name == name)
        cell, inputs = case.cell(H, B), case.inputs(T, B, H)
    with interpreted():
        fusedrnn.Recurrent(cell, compile="require")(inputs, start_of(cell, Size(T, B, H), "cpu"))
    call_weights, constants = asked[-1]
    meta = [constant.to("meta") for constant in constants]
    carry = torch.empty(B, H, device="meta")
    with pytest.raises(AssertionError), OnlyOn("meta"):
        make(call_weights)
    with torch.inference_mode():
        call_weights.prepare(carry.device, carry.dtype)
    with OnlyOn("meta"):
        make(call_weights)
    (known,) = [one for (device, _), one in call_weights._known.items() if device == carry.device]
    assert not any(number.is_inference() for number in known._held.values())
    call_weights.prepare(carry.device, carry.dtype)  # as another first use of the program does
    assert known in call_weights._known.values(), "a graph may read it"


def test_every_library_has_what_its_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a record, which is not compared to anything."""
    held: list[Any] = []
    call_weights = SimpleNamespace(prepare=lambda *given: held.append(given), numbers=lambda *_: [])
    program: Any = SimpleNamespace(
        generated=SimpleNamespace(text="", call_weights=call_weights),
        form=None,
        dtype=torch.float32,
        sequence_shapes=[],
        state_shapes=[],
    )
    monkeypatch.setattr(pipeline, "build", lambda *_, **__: SimpleNamespace(function=0))
    monkeypatch.setattr(pipeline.program_operators, "add_program", lambda *_, **__: 0)
    device = torch.device("cpu")
    pipeline.add_library(program, device)
    assert held == [(device, torch.float32)]


class Derived(nn.Module):
    """All of its weights and vectors are computed of others, as those of spiking cells are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(H, H)), nn.Parameter(torch.ones(H, 1))
        self.decay, self.bias = nn.Parameter(torch.rand(())), nn.Parameter(torch.zeros(1))
        self.register_buffer("ranks", torch.arange(H) % 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        decay = self.decay.clamp(0, 1)
        weight = self.weight * self.scale / self.weight.norm()
        h = decay * h + torch.nn.functional.linear(torch.tanh(h), weight, self.bias.expand(H))
        h = h + (1 - decay) * x * torch.sigmoid(self.decay + self.ranks)
        return h.abs() * torch.tensor([0.5, 2.0]).repeat(H // 2), h


@pytest.mark.parametrize("way", ["whole", "parts", "last state alone", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_that_are_computed(
    way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cell, x, h = Derived().to(dtype), torch.randn(9, B, H, dtype=dtype), torch.randn(B, H).to(dtype)
    cell.decay.requires_grad_(way != "frozen")

    def run(cell: nn.Module, compile: str) -> list[Tensor]:
        rnn = fusedrnn.Recurrent(cell, compile=compile, return_sequence=way != "parts")
        trained = [p for p in cell.parameters() if p.requires_grad]
        y, last = rnn(x.to(trained[0].dtype), h.to(trained[0].dtype))
        loss = last.sum() if way == "last state alone" else y.square().sum()
        return [y, last, *torch.autograd.grad(loss, trained)]

    if way == "parts":
        monkeypatch.setattr(sequence_parts, "_LEAST_STEPS", 2)
        monkeypatch.setattr(sequence_parts, "_LEAST_ROWS", 2)
    exact = run(copy.deepcopy(cell).double(), "never")
    for ours, eager, one in zip(run(cell, "require"), run(cell, "never"), exact, strict=True):
        ours, eager, one = ours.detach(), eager.detach(), one.detach()
        worst = float((eager.double() - one).abs().max())
        # The gradient of a number may be right to the last bit by luck; in float64 all are.
        last_bit = torch.finfo(dtype).eps * float(one.abs().max())
        bits = 8 if dtype == torch.float64 else 1
        found = float((ours.double() - one).abs().max())
        assert found <= 2 * worst + bits * last_bit, (found / last_bit, worst / last_bit)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(H, H), nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor, h: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h = torch.tanh(self.linear(x) + h)
        return (h, h * self.gain.sigmoid()), h


@pytest.mark.parametrize("return_sequence", [True, False])
def test_what_unused_results_alone_compute(return_sequence: bool) -> None:
    """It has no gradient, not zeros, and hooks of the user's tensors do not see what is done."""
    cell, seen = TwoOutputs(), list[Tensor]()
    rnn = fusedrnn.Recurrent(cell, compile="require", return_sequence=return_sequence)
    (y, _), _ = rnn(torch.randn(T, B, H), torch.zeros(B, H))
    cell.gain.register_hook(lambda gradient: seen.append(gradient))
    y.sum().backward()
    assert cell.gain.grad is None and cell.linear.weight.grad is not None
    assert all(gradient is None for gradient in seen)


@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_parts_over_many_steps(batch: int) -> None:
    """Steps add up in memory of their own, and all parts of a weight become one gradient."""
    torch.manual_seed(0)
    case = next(case for case in CASES if case.name == "LayerNormLSTM")
    cell = case.cell(H, batch, device="cpu").double()
    x = torch.randn(40, batch, H, dtype=torch.float64)
    state = cell.initial_state(batch)
    found = []
    for rnn in (fusedrnn.Recurrent(cell, compile=how) for how in ("never", "require")):
        loss = rnn(x, state)[0].square().sum()
        found.append(torch.autograd.grad(loss, [*cell.parameters()]))
    for expected, gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, expected)
