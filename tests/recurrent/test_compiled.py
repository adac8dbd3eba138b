"""``torch_compile=True``: same numbers, compiled once, and a reason where that cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import (
    MODES,
    Mixed,
    Noisy,
    check_same,
    counted,
    generator,
    leaves_with_gradient,
    plain_loop,
)
from torch import Tensor, nn

import fusedrnn

H = 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Noisy, Mixed])
def test_values(make: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, trees, lengths: results and gradients of the plain loop, for any T and B."""
    counter = counted(monkeypatch)
    cell = make()
    rnn = fusedrnn.Recurrent(cell, mode=mode, torch_compile=True)
    graphs = []
    for seq_len, batch in ((7, 3), (12, 5), (9, 3), (20, 2)):
        shape = (seq_len, batch)
        x: Any = torch.randn(*shape, H, dtype=torch.float64, requires_grad=True)
        start = torch.zeros(batch, H, dtype=torch.float64)
        if make is Mixed:
            scale = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
            x, start = {"x": x[..., :3].detach().requires_grad_(), "scale": scale}, None
        expected_start = cell.initial_state(batch) if start is None else start
        check_same(
            lambda: rnn(x, start, generator=generator()),  # noqa: B023
            lambda: plain_loop(cell, x, expected_start),  # noqa: B023
            [*leaves_with_gradient(x), *cell.parameters()],
        )
        graphs.append(counter.frame_count)
    assert rnn.explain(x, start).is_compiled
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0], "compiled anew for another seq_len or batch"


@pytest.mark.slow
def test_values_by_the_usual_backend() -> None:
    cell = Noisy()
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    x = torch.randn(7, 3, H, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(3, H, dtype=torch.float64)
    check_same(
        lambda: rnn(x, start, generator=generator()),
        lambda: plain_loop(cell, x, start),
        [x, *cell.parameters()],
    )


def test_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    rnn = fusedrnn.Recurrent(nn.LSTMCell(H, H), torch_compile=True)
    x = torch.randn(6, 3, H)
    for other in (rnn, copy.deepcopy(rnn)):
        torch.testing.assert_close(other(x), fusedrnn.Recurrent(rnn.cell)(x))


class Naming(nn.Module):
    """Returns tensors by the names that it has now."""

    names: tuple[str, ...] = ()

    def forward(self, x: Tensor, h: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        h = torch.tanh(x + h)
        return {name: h * (2 + ord(name)) for name in self.names}, h


@pytest.mark.filterwarnings("error:fusedrnn")
def test_outputs_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order, and which there are, may differ between calls."""
    counter = counted(monkeypatch)
    cell = Naming()
    rnn, eager = fusedrnn.Recurrent(cell, torch_compile=True), fusedrnn.Recurrent(cell)
    x = torch.randn(6, 3, H, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(3, H, dtype=torch.float64)
    graphs = []
    for _ in range(2):
        for names in ("ab", "ba", "abc", "c"):
            cell.names = tuple(names)
            check_same(lambda: rnn(x, start), lambda: eager(x, start), [x])
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 0


def test_weights_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs hold no weights: those that an optimizer or a user sets count."""
    counted(monkeypatch)
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), torch_compile=True)
    x = torch.randn(6, 3, H)
    rnn(x)
    with torch.no_grad():
        rnn.cell.weight_hh.mul_(2)
    rnn.cell.bias_hh = nn.Parameter(torch.ones(3 * H))
    torch.testing.assert_close(rnn(x), fusedrnn.Recurrent(rnn.cell)(x))


@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    cell = Noisy()
    x = torch.randn(6, 3, H, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(3, H, dtype=torch.float64)
    leaves, found = [x, *cell.parameters()], []
    for torch_compile in (False, True):
        rnn = fusedrnn.Recurrent(cell, torch_compile=torch_compile)
        output, _ = rnn(x, start, generator=generator())
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(H, H), 1.0

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h) + x * self.factor)


def test_attributes_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of the cell that changes is seen."""
    counted(monkeypatch)
    cell = Scaled()
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    x, start = torch.randn(6, 3, H), torch.zeros(3, H)
    rnn(x, start)
    cell.factor = 0.5
    torch.testing.assert_close(rnn(x, start), fusedrnn.Recurrent(cell)(x, start))


class Switched(nn.Module):
    """Draws or not, and from one distribution or the other."""

    kind = "none"

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if self.kind == "normal":
            h = h + torch.randn_like(h)
        if self.kind == "uniform":
            h = h + torch.rand_like(h)
        return torch.tanh(x + h)


@pytest.mark.parametrize("kinds", [("none", "normal"), ("normal", "uniform"), ("normal", "none")])
@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_draws_that_change(kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are of the distribution that the step asks for now."""
    counted(monkeypatch)
    cell = Switched()
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    for kind, dtype in (
        (kinds[0], torch.float32),
        (kinds[1], torch.float32),
        (kinds[1], torch.float64),
    ):
        cell.kind = kind
        x, start = torch.randn(6, 3, H, dtype=dtype), torch.zeros(3, H, dtype=dtype)
        found = rnn(x, start, generator=generator())
        expected = fusedrnn.Recurrent(cell)(x, start, generator=generator())
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("error:fusedrnn")
def test_numbers_that_change_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes them as inputs."""
    counted(monkeypatch)
    cell = Scaled()
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    x, start = torch.randn(6, 3, H), torch.zeros(3, H)
    for i in range(12):
        cell.factor = 1.5**i
        torch.testing.assert_close(rnn(x, start), fusedrnn.Recurrent(cell)(x, start))


class ScaledByText(Scaled):
    text = "1"

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return super().forward(x * int(self.text), h)


def test_attributes_that_change_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gives up at some time; the numbers stay right."""
    counted(monkeypatch)
    cell = ScaledByText()
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    x, start = torch.randn(6, 3, H), torch.zeros(3, H)
    with pytest.warns(UserWarning, match="without torch.compile, because torch.compile raises"):
        for i in range(12):
            cell.text = str(i)
            torch.testing.assert_close(rnn(x, start), fusedrnn.Recurrent(cell)(x, start))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, h: torch.tanh(x + h) * (2 if float(h.sum()) > 9 else 1), "torch.compile raises"),
        (lambda x, h: torch.tanh(x + h * torch.randint(3, h.shape)), "draws random numbers in a"),
        (lambda x, h: torch.tanh(x + h) @ CLOSED_OVER, "tensors of its own that need a gradient"),
    ],
)
def test_what_cannot_be_compiled_runs_without(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch)

    class Cell(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return function(x, h)  # type: ignore[no-any-return]

    rnn = fusedrnn.Recurrent(Cell(), torch_compile=True)
    x, start = torch.randn(5, 3, H, requires_grad=True), torch.zeros(3, H)
    with pytest.warns(UserWarning, match=f"runs without torch.compile, because.*{reason}"):
        output, _ = rnn(x, start)
    output.sum().backward()
    assert reason in rnn.explain(x, start).compile_reason


CLOSED_OVER = torch.eye(H, requires_grad=True)


def test_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = counted(monkeypatch)

    def step(h: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ weight)
        return h, h.sum(-1)

    weight = torch.randn(H, H, dtype=torch.float64, requires_grad=True)
    graphs = []
    for seq_len, batch in ((6, 3), (9, 2)):
        h = torch.randn(batch, H, dtype=torch.float64)
        x = torch.randn(seq_len, batch, H, dtype=torch.float64, requires_grad=True)
        check_same(
            lambda: fusedrnn.scan(step, h, x, weight, torch_compile=True),  # noqa: B023
            lambda: fusedrnn.scan(step, h, x, weight),  # noqa: B023
            [x, weight],
        )
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 0
