"""Export, traces and torch.compile around a Recurrent: a plain loop in graphs, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import allow_tf32
from recurrent.loops import F64, By, Mixed
from torch import Tensor, nn

import fusedrnn

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 5, 3, 4


@pytest.fixture(autouse=True)
def _export_refuses_what_the_fixture_of_all_tests_sets() -> None:
    allow_tf32(True)


def with_output(c: Any, x: Tensor, state: Any) -> tuple[dict[str, Tensor], Any]:
    """Returns an output besides its state, and keeps statistics of it."""
    h, s = c.cell(x, state)
    return {"normed": c.norm(h), "sum": s.sum(-1)}, (h, s)


def normed() -> tuple[nn.Module, Any]:
    cell, norm = nn.LSTMCell(H, H, dtype=F64), nn.BatchNorm1d(H, dtype=F64)
    zeros = torch.zeros(B, H, dtype=F64)
    return By(with_output, cell=cell, norm=norm), (zeros, zeros + 1)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_an_exported_program_is_the_plain_loop(resets: bool, is_training: bool) -> None:
    cell, state = normed() if is_training or resets else (nn.GRUCell(H, H, dtype=F64), None)
    rnn = fusedrnn.Recurrent(cell).train(is_training)
    named = {"reset": torch.rand(T, B) < 0.3} if resets else {}
    x = torch.randn(T, B, H, dtype=F64)
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
    input = {"x": torch.randn(T, B, 3, dtype=F64), "scale": torch.randn(T, B, dtype=F64)}
    program = torch.export.export(rnn, (input,), strict=False).module()
    torch.testing.assert_close(program(input), rnn(input), rtol=1e-10, atol=1e-10)


def drawing(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Without torch.distributions, which look at values unless validate_args=False."""
    return torch.tanh(nn.functional.dropout(h, 0.25) + x * torch.randn_like(x))


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_an_exported_program_draws_anew_in_each_call() -> None:
    rnn = fusedrnn.Recurrent(By(drawing))
    x, start = torch.randn(2, T, B, H, dtype=F64).unbind(0)
    program = torch.export.export(rnn, (x, start[0]), strict=False).module()
    found = []
    for run in (program, program, rnn):
        torch.manual_seed(0)
        found += [run(x, start[0])[0], run(x, start[0])[0]]
    assert not torch.equal(found[0], found[1])
    for others in (found[2:4], found[4:]):
        torch.testing.assert_close(others, found[:2], rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_lengths_cannot_be_exported_or_traced() -> None:
    """A trace would keep how many steps the longest sequence has."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H))
    named = {"lengths": torch.tensor([2, 4, 1])}
    x = torch.randn(T, B, H)
    with pytest.raises(RuntimeError, match="fusedrnn: a call with lengths cannot be exported"):
        torch.export.export(rnn, (x,), named, strict=False)
    with pytest.raises(RuntimeError, match="with lengths cannot be exported or traced"):
        torch.jit.trace(rnn, example_kwarg_inputs={"input": x, **named})


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore:fusedrnn")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile": "never", "chunk_size": 2},
        {"batch_first": True},
        {"return_sequence": False},
        {"bidirectional": True},
    ],
)
def test_a_trace_is_the_plain_loop_over_as_many_steps(options: dict[str, Any]) -> None:
    """Other sequences are refused, not cut."""
    cells = [nn.GRUCell(H, H, dtype=F64) for _ in range(2 if "bidirectional" in options else 1)]
    rnn = fusedrnn.Recurrent(cells, **options)

    def sequence(steps: int, batch: int) -> Tensor:
        x = torch.randn(steps, batch, H, dtype=F64)
        return x.transpose(0, 1) if rnn.batch_first else x

    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            traced = torch.jit.trace(rnn, sequence(T, B))
        for batch in (B, B + 2, 1):
            x = sequence(T, batch)
            torch.testing.assert_close(traced(x), rnn(x), rtol=1e-10, atol=1e-10)
        for steps in (T - 2, T + 3):
            with pytest.raises(RuntimeError, match=f"Expected {T} elements in a list but found"):
                traced(sequence(steps, B))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_a_traced_scan() -> None:
    cell = nn.GRUCell(H, H, dtype=F64).requires_grad_(False)

    def run(start: Tensor, x: Tensor) -> Any:
        return fusedrnn.scan(lambda h, x: (cell(x, h),) * 2, start, x)

    start, x = torch.zeros(B, H, dtype=F64), torch.randn(T, B, H, dtype=F64)
    traced = torch.jit.trace(run, (start, x))
    torch.testing.assert_close(traced(start + 1, x), run(start + 1, x), rtol=1e-10, atol=1e-10)
    with pytest.raises(RuntimeError, match=f"Expected {T} elements in a list but found"):
        traced(start, torch.cat([x, x]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = fusedrnn.Recurrent(nn.GRUCell(H, H))

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: torch.export.export(Model().rnn, (x,), strict=True),
        lambda x: torch.compile(Model().rnn, fullgraph=True, backend="eager")(x),
        lambda x: torch.compile(Model(), fullgraph=True, backend="eager")(x),
    ],
)
def test_what_must_be_one_graph_is_told_what_to_do(run: Callable[[Tensor], Any]) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"without fullgraph=True; export.* with strict=False"):
        run(torch.randn(T, B, H))
