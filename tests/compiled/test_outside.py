"""What a call computes of a program's constants, before its steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusedrnn
from bench.any_cell_steps import Size, start_of
from docs.examples.published_cells import CASES
from fusedrnn._compile import ready
from fusedrnn._compile.outside import Outside
from fusedrnn.recurrent.program_call import Call

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
    asked: list[tuple[Outside, Sequence[Tensor]]] = []
    compute = Outside.__call__

    def noted(self: Outside, constants: Sequence[Tensor], like: Tensor) -> Any:
        asked.append((self, constants))
        return compute(self, constants, like)

    monkeypatch.setattr(Outside, "__call__", noted)
    if name in OWN:
        cell: nn.Module = OWN[name]()
        inputs: Any = torch.randn(T, B, H)
    else:
        case = next(case for case in CASES if case.name == name)
        cell, inputs = case.cell(H, B), case.inputs(T, B, H)
    with interpreted():
        fusedrnn.Recurrent(cell, compile="require")(inputs, start_of(cell, Size(T, B, H), "cpu"))
    outside, constants = asked[-1]
    meta = [constant.to("meta") for constant in constants]
    carry = torch.empty(B, H, device="meta")
    with pytest.raises(AssertionError), OnlyOn("meta"):
        compute(outside, meta, carry)
    with torch.inference_mode():
        outside.hold_on(torch.device("meta"))
    with OnlyOn("meta"):
        compute(outside, meta, carry)
    assert not any(number.is_inference() for number in outside._held.values())
    held = dict(outside._held)
    outside.hold_on(torch.device("meta"))  # as another first use of the program does
    assert all(number is held[key] for key, number in outside._held.items()), "a graph may read it"


def test_every_library_has_what_its_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a record, which is not compared to anything."""
    held: list[torch.device] = []
    outside = SimpleNamespace(hold_on=held.append, numbers=lambda *_: [], has_recipes=False)
    program: Any = SimpleNamespace(
        printed=SimpleNamespace(text="", outside=outside),
        form=None,
        dtype=torch.float32,
        sequence_shapes=[],
        state_shapes=[],
    )
    monkeypatch.setattr(ready, "build", lambda *_, **__: SimpleNamespace(function=0))
    monkeypatch.setattr(ready.operators, "add_program", lambda *_, **__: 0)
    device = torch.device("cpu")
    assert ready.with_library(program, None, device, lambda *_: None) is program
    assert held == [device]


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name != "AttentionDecoder"])
def test_weights_of_published_cells_are_the_cells_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then operators make them: short calls take a fraction of the time."""
    case = next(case for case in CASES if case.name == name)
    found: list[bool] = []
    with_program = Call.with_program

    def noted(self: Call, program: Any, constants: Sequence[Tensor]) -> Call:
        found.append(program.printed.outside.fit(constants))
        return with_program(self, program, constants)

    monkeypatch.setattr(Call, "with_program", noted)
    cell = case.cell(H, B)
    with interpreted():
        rnn = fusedrnn.Recurrent(cell, compile="require")
        rnn(case.inputs(T, B, H), start_of(cell, Size(T, B, H), "cpu"))
    assert found
    assert all(found)


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
