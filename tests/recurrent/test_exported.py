"""torch.export and torch.compile around a Recurrent: a plain loop in graphs, or none at all."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import allow_tf32
from loops import Mixed, Noisy, generator
from torch import Tensor, nn

import fusedrnn

T, B, H = 5, 3, 4


@pytest.fixture(autouse=True)
def _export_refuses_what_the_fixture_of_all_tests_sets() -> None:
    allow_tf32(True)


class WithOutput(nn.Module):
    """Returns an output besides its state, and keeps statistics of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(H, H, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(H, dtype=torch.float64)

    def forward(self, x: Tensor, state: Any) -> tuple[dict[str, Tensor], Any]:
        h, c = self.cell(x, state)
        return {"normed": self.norm(h), "sum": c.sum(-1)}, (h, c)


def two_states() -> tuple[Tensor, Tensor]:
    return torch.zeros(B, H, dtype=torch.float64), torch.ones(B, H, dtype=torch.float64)


@pytest.mark.parametrize(
    ("cell", "state"),
    [
        (nn.GRUCell(H, H, dtype=torch.float64), None),
        (WithOutput(), two_states()),
        (WithOutput().eval(), two_states()),
    ],
)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_an_exported_program_is_the_plain_loop(cell: Any, state: Any, resets: bool) -> None:
    rnn = fusedrnn.Recurrent(cell)
    named = {"reset": torch.rand(T, B) < 0.3} if resets else {}
    x = torch.randn(T, B, H, dtype=torch.float64)
    program = torch.export.export(rnn, (x, state), named, strict=False).module()
    for name, buffer in program.named_buffers():  # batch norm has kept what it has seen
        buffer.copy_(dict(rnn.named_buffers())[name])
    x = torch.randn_like(x)
    if resets:
        named = {"reset": torch.rand(T, B) < 0.3}
    torch.testing.assert_close(
        program(x, state, **named), rnn(x, state, **named), rtol=1e-10, atol=1e-10
    )


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_an_exported_tree() -> None:
    rnn = fusedrnn.Recurrent(Mixed())
    input = {
        "x": torch.randn(T, B, 3, dtype=torch.float64),
        "scale": torch.randn(T, B, dtype=torch.float64),
    }
    program = torch.export.export(rnn, (input,), strict=False).module()
    torch.testing.assert_close(program(input), rnn(input), rtol=1e-10, atol=1e-10)


class Drawing(nn.Module):
    """Without torch.distributions, which look at values unless validate_args=False."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(nn.functional.dropout(h, 0.25) + x * torch.randn_like(x))


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_an_exported_program_draws_anew_in_each_call() -> None:
    rnn = fusedrnn.Recurrent(Drawing())
    x, start = torch.randn(2, T, B, H, dtype=torch.float64).unbind(0)
    program = torch.export.export(rnn, (x, start[0]), strict=False).module()
    found = []
    for run in (program, program, rnn):
        torch.manual_seed(0)
        found += [run(x, start[0])[0], run(x, start[0])[0]]
    assert not torch.equal(found[0], found[1])
    for others in (found[2:4], found[4:]):
        torch.testing.assert_close(others, found[:2], rtol=1e-10, atol=1e-10)


def test_lengths_cannot_be_exported() -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H))
    named = {"lengths": torch.tensor([2, 5, 1])}
    with pytest.raises(RuntimeError, match="fusedrnn: lengths cannot be exported"):
        torch.export.export(rnn, (torch.randn(T, B, H),), named, strict=False)


def in_a_module(x: Tensor) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = fusedrnn.Recurrent(nn.GRUCell(H, H))

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    return torch.compile(Model(), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: torch.export.export(fusedrnn.Recurrent(nn.GRUCell(H, H)), (x,), strict=True),
        lambda x: torch.compile(
            fusedrnn.Recurrent(nn.GRUCell(H, H)), fullgraph=True, backend="eager"
        )(x),
        in_a_module,
    ],
)
def test_what_must_be_one_graph_is_told_what_to_do(run: Callable[[Tensor], Any]) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"without fullgraph=True; export.* with strict=False"):
        run(torch.randn(T, B, H))


def test_a_compiled_module_around() -> None:
    torch._dynamo.reset()
    rnn = fusedrnn.Recurrent(Noisy())
    compiled = torch.compile(rnn, backend="aot_eager")
    x, start = torch.randn(2, T, B, H, dtype=torch.float64).unbind(0)
    found, expected = (run(x, start[0], generator=generator()) for run in (compiled, rnn))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_while_another_thread_imports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the modules then, but without its names."""
    rnn, x = fusedrnn.Recurrent(nn.GRUCell(H, H)), torch.randn(T, B, H, requires_grad=True)
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    rnn(x)[0].sum().backward()
    assert x.grad is not None
