"""Random calls of Recurrent, against a loop with masks: cells, sizes, chunks, lengths, resets."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compiled.plain import Masks, loop
from loops import check_same, generator, leaves_with_gradient, loss_of
from recorders import Repeated
from torch import nn
from torch.utils import _pytree as pytree

import fusedrnn
from docs.examples import published_cells as published
from fusedrnn.recurrent import graphs


class Call:
    """All arguments of a call, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        case = draw.choice(published.CASES)
        seq_len, batch = draw.choice([1, 2, 3, 7, 13, 20]), draw.choice([1, 2, 3, 5])
        width = draw.choice([8, 16])
        self.cell = case.cell(width, batch, torch.float64)
        self.input = case.inputs(seq_len, batch, width, torch.float64)
        self.state = self._like_state(width, batch)
        lengths = reset = reset_to = None
        if draw.random() < 0.5:
            lengths = [draw.randint(1, seq_len) for _ in range(batch)]
        kind = draw.choice(["none", "zero", "one row", "rows", "steps"])
        if kind != "none":
            reset = torch.rand(seq_len, batch) < 0.3
        if kind in ("one row", "rows", "steps"):
            steps = (seq_len,) if kind == "steps" else ()
            reset_to = self._like_state(width, 1 if kind == "one row" else batch, *steps)
        self.masks = Masks(lengths, reset, reset_to, kind == "steps")
        modes = ["auto"] if case.name == "AttentionDecoder" else ["replay", "parallel"]
        named: dict[str, Any] = {"mode": draw.choice(modes)}
        if draw.random() < 0.6:
            named["chunk_size"] = draw.choice([1, 2, 3, 5, 50])
        named["return_sequence"] = draw.random() < 0.7
        self.rnn = fusedrnn.Recurrent(self.cell, **named)

    def _like_state(self, width: int, rows: int, *steps: int) -> Any:
        zeros = torch.zeros(1, width)
        like = (zeros, zeros) if isinstance(self.cell, nn.LSTMCell) else zeros
        if hasattr(self.cell, "initial_state"):
            like = self.cell.initial_state(1)
        return pytree.tree_map(
            lambda leaf: torch.randn(
                *steps, rows, *leaf.shape[1:], dtype=torch.float64, requires_grad=True
            ),
            like,
        )

    def run(self) -> tuple[Any, Any]:
        m = self.masks
        return self.rnn(self.input, self.state, m.lengths, m.reset, m.reset_to, generator())

    def check(self) -> None:
        def expected() -> tuple[Any, Any]:
            sequence = self.rnn.return_sequence
            return loop(self.cell, self.input, self.state, self.masks, returns_sequence=sequence)

        leaves = leaves_with_gradient(self.input, self.state, self.masks.reset_to)
        memory = getattr(self.cell, "memory", None)
        leaves += [*self.cell.parameters(), *([] if memory is None else [memory])]
        check_same(self.run, expected, leaves, unused_is_zero=True)


def seeds(first: int, quick: int, end: int) -> list[Any]:
    late = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, end)]
    return [*range(first, quick), *late]


@pytest.mark.parametrize("seed", seeds(0, 60, 150))
def test_random_calls(seed: int) -> None:
    Call(seed).check()


@pytest.mark.parametrize("seed", seeds(150, 190, 250))
def test_random_calls_by_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is the first one that records."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Repeated)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    call = Call(seed)
    call.rnn.cuda_graphs = True
    loss_of(*call.run()).backward(retain_graph=True)  # that of an attended memory
    call.check()
