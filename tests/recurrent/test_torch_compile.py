"""``torch_compile=True``: same numbers, compiled once, and a reason where that cannot be.

Most are slow, for what takes time is the compiler.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import (
    MODES,
    By,
    Mixed,
    Noisy,
    check_cell,
    check_same,
    check_scan,
    counted,
    double,
    generator,
    leaves_with_gradient,
    plain_loop,
)
from torch import Tensor, nn

import fusedrnn

H = 4
X = torch.randn(6, 3, H)
START = torch.zeros(3, H)


def check_now(rnn: fusedrnn.Recurrent, x: Tensor = X, h: Tensor = START) -> None:
    """Its numbers are those of the cell without the compiler."""
    found, expected = (
        one(x, h, generator=generator()) for one in (rnn, fusedrnn.Recurrent(rnn.cell))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Mixed, Noisy])
def test_values(make: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, trees, lengths: results and gradients of the plain loop, for any T and B."""
    counter = counted(monkeypatch)
    cell = make()
    rnn = fusedrnn.Recurrent(cell, mode=mode, torch_compile=True)
    graphs = []
    for seq_len, batch in ((7, 3), (12, 5), (9, 3), (20, 2)):
        x: Any = double(seq_len, batch, H)
        start: Any = torch.zeros(batch, H, dtype=torch.float64)
        if make is Mixed:
            x = {"x": double(seq_len, batch, 3), "scale": double(seq_len, batch)}
            start = cell.initial_state(batch)
        check_same(
            lambda: rnn(x, start, generator=generator()),  # noqa: B023
            lambda: plain_loop(cell, x, start),  # noqa: B023
            [*leaves_with_gradient(x), *cell.parameters()],
        )
        graphs.append(counter.frame_count)
    assert rnn.explain(x, start).uses_torch_compile
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0], "compiled anew for another seq_len or batch"


@pytest.mark.slow
def test_values_by_the_usual_backend() -> None:
    start = torch.zeros(3, H, dtype=torch.float64)
    check_cell(Noisy(), double(7, 3, H), start, torch_compile=True)


def naming(c: Any, x: Tensor, h: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns tensors by the names that it has now."""
    h = torch.tanh(x + h)
    return {name: h * (2 + ord(name)) for name in c.names}, h


@pytest.mark.slow
@pytest.mark.filterwarnings("error:fusedrnn")
def test_outputs_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order, and which there are, may differ between calls."""
    counter = counted(monkeypatch)
    cell = By(naming)
    rnn, eager = fusedrnn.Recurrent(cell, torch_compile=True), fusedrnn.Recurrent(cell)
    x, graphs = double(6, 3, H), []
    for _ in range(2):
        for names in ("ab", "ba", "abc", "c"):
            cell.names = tuple(names)
            check_same(lambda: rnn(x, START.double()), lambda: eager(x, START.double()), [x])
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 0


def test_weights_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs hold no weights: those that an optimizer or a user sets count; also of other cells."""
    counted(monkeypatch)
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H), torch_compile=True)
    check_now(rnn)
    with torch.no_grad():
        rnn.cell.weight_hh.mul_(2)
    rnn.cell.bias_hh = nn.Parameter(torch.ones(3 * H))
    check_now(rnn)
    check_now(copy.deepcopy(rnn))
    rnn.cell = nn.GRUCell(H, H)
    check_now(rnn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    cell, x = Noisy(), double(6, 3, H)
    leaves, found = [x, *cell.parameters()], []
    for torch_compile in (False, True):
        rnn = fusedrnn.Recurrent(cell, torch_compile=torch_compile)
        output, _ = rnn(x, START.double(), generator=generator())
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


def drawing(c: Any, x: Tensor, h: Tensor) -> Tensor:
    """Draws or not, and from one distribution or the other."""
    if c.kind == "normal":
        h = h + torch.randn_like(h)
    if c.kind == "uniform":
        h = h + torch.rand_like(h)
    return torch.tanh(x + h)


@pytest.mark.parametrize("kinds", [("none", "normal"), ("normal", "uniform"), ("normal", "none")])
@pytest.mark.filterwarnings("ignore:fusedrnn")
def test_draws_that_change(kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are of the distribution that the step asks for now."""
    counted(monkeypatch)
    cell = By(drawing, kind=kinds[0])
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    check_now(rnn)
    cell.kind = kinds[1]
    check_now(rnn)
    check_now(rnn, X.double(), START.double())


@pytest.mark.filterwarnings("error:fusedrnn")
def test_numbers_that_change_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes them as inputs."""
    counted(monkeypatch)
    cell = By(lambda c, x, h: torch.tanh(c.linear(h) + x * c.factor), linear=nn.Linear(H, H))
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    for i in range(12):
        cell.factor = 1.5**i
        check_now(rnn)


@pytest.mark.slow
def test_attributes_that_change_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gives up at some time; the numbers stay right."""
    counted(monkeypatch)
    cell = By(lambda c, x, h: torch.tanh(c.linear(h) + x * int(c.text)), linear=nn.Linear(H, H))
    rnn = fusedrnn.Recurrent(cell, torch_compile=True)
    with pytest.warns(UserWarning, match="without torch.compile, because torch.compile raises"):
        for i in range(12):
            cell.text = str(i)
            check_now(rnn)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda c, x, h: torch.tanh(x + h) * (1 + (float(h.sum()) > 9)), "torch.compile raises"),
        (
            lambda c, x, h: torch.tanh(x + h * torch.randint(3, h.shape)),
            "draws random numbers in a",
        ),
        (
            lambda c, x, h: torch.tanh(x + h) @ CLOSED_OVER,
            "tensors of its own that need a gradient",
        ),
    ],
)
def test_what_cannot_be_compiled_runs_without(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch)

    rnn = fusedrnn.Recurrent(By(function), torch_compile=True)
    x, start = torch.randn(5, 3, H, requires_grad=True), torch.zeros(3, H)
    with pytest.warns(UserWarning, match=f"runs without torch.compile, because.*{reason}"):
        output, _ = rnn(x, start)
    output.sum().backward()
    assert reason in rnn.explain(x, start).torch_compile_reason


CLOSED_OVER = torch.eye(H, requires_grad=True)


def test_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = counted(monkeypatch)

    def step(h: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h @ weight)
        return h, h.sum(-1)

    weight, graphs = double(H, H), []
    for seq_len, batch in ((6, 3), (9, 2)):
        check_scan(step, double(batch, H), double(seq_len, batch, H), weight, torch_compile=True)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 0
