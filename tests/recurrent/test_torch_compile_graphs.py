"""How many graphs ``torch_compile=True`` makes for sequences of different kinds and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import (
    MODES,
    By,
    Noisy,
    check_same,
    counted,
    double,
    generator,
    leaves_with_gradient,
)
from torch import Tensor, nn

import fusedrnn

pytestmark = pytest.mark.slow  # for what takes time is the compiler
H = 4


def calls_of(kind: str, seq_len: int, batch: int) -> dict[str, Any]:
    """What a call of this kind has besides its input."""
    if kind == "lengths":
        return {"lengths": [max(1, seq_len - 2 * i) for i in range(batch)][::-1]}
    if kind == "nothing":
        return {}
    shape = {
        "resets": None,
        "resets to one row": (1, H),
        "resets to rows": (batch, H),
        "resets to a sequence": (seq_len, batch, H),
    }[kind]
    to = None if shape is None else double(*shape)
    return {"reset": torch.rand(seq_len, batch) < 0.3, "reset_to": to}


SIZES = [(6, 3), (9, 2), (7, 8), (5, 1), (10, 1)]
TO = ["rows", "one row", "a sequence"]
KINDS = ["nothing", "lengths", "resets", *(f"resets to {what}" for what in TO)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind",
    # CI has one kind of what a reset goes to.
    [*KINDS[:4], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[4:])],
)
@pytest.mark.filterwarnings("error:fusedrnn")
def test_as_many_graphs_as_uses(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths, the resets and the sizes, but one row has graphs of its own.

    Uses are forward, and backward with or without a gradient of the input; in parallel mode also
    single steps, and a chunk may have as many rows as what it is reset to, or more.
    """
    counter = counted(monkeypatch)
    cell = nn.GRUCell(H, H, dtype=torch.float64)
    rnn = fusedrnn.Recurrent(cell, mode=mode, torch_compile=True)
    eager = fusedrnn.Recurrent(cell, mode=mode)
    graphs = []
    for seq_len, batch in SIZES:
        for needs_gradient in (False, True):
            x = torch.randn(seq_len, batch, H, dtype=torch.float64)
            call = calls_of(kind, seq_len, batch)
            for i, length in enumerate(call.get("lengths", [])):
                x[length:, i] = torch.nan
            x.requires_grad_(needs_gradient)
            check_same(
                lambda: rnn(x, **call),  # noqa: B023
                lambda: eager(x, **call),  # noqa: B023
                [*leaves_with_gradient(x, call.get("reset_to")), *cell.parameters()],
            )
            with torch.no_grad():
                torch.testing.assert_close(rnn(x, **call), eager(x, **call))
        graphs.append(counter.frame_count)
    uses = 3 if mode == "replay" else 4
    if kind == "resets to rows" and mode == "parallel":
        assert graphs[2] <= uses + 2
    else:
        assert graphs[2] == uses
    assert graphs[-1] <= 2 * graphs[2]
    assert rnn.explain(x, lengths=call.get("lengths")).uses_torch_compile


@pytest.mark.filterwarnings("error:fusedrnn")
def test_a_memory_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the cell, such as what an attention reads."""
    counted(monkeypatch)

    def reading(c: Any, x: Tensor, h: Tensor) -> Tensor:
        weights = (c.memory * h).sum(-1, keepdim=True).softmax(0)
        return torch.tanh(c.linear(x + h) + (weights * c.memory).sum(0))

    cell = By(reading, linear=nn.Linear(H, H, dtype=torch.float64))
    rnn, eager = fusedrnn.Recurrent(cell, torch_compile=True), fusedrnn.Recurrent(cell)
    for places, batch in ((5, 3), (6, 3), (5, 2), (7, 4), (8, 3), (9, 3), (4, 5), (10, 2)):
        cell.memory = torch.randn(places, batch, H, dtype=torch.float64)
        x, start = torch.randn(7, batch, H, dtype=torch.float64).split([6, 1])
        check_same(
            lambda: rnn(x, start[0]),  # noqa: B023
            lambda: eager(x, start[0]),  # noqa: B023
            [*cell.parameters()],
        )


def test_no_rows_before_and_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler turns these checks off, which fail where there are no rows.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    counted(monkeypatch)
    rnn = fusedrnn.Recurrent(Noisy(), torch_compile=True)
    for batch in (0, 3, 0, 2):
        x = double(6, batch, H)
        start = torch.zeros(batch, H, dtype=torch.float64)
        found = rnn(x, start, generator=generator())
        found[0].sum().backward()
        expected = fusedrnn.Recurrent(rnn.cell)(x, start, generator=generator())
        torch.testing.assert_close(found, expected)
    assert rnn.explain(x, start).uses_torch_compile
