"""Random calls of Recurrent, against a loop with masks: cells, sizes, chunks, lengths, resets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loops import at, check_same, generator, leaves_with_gradient, loss_of, stack
from recorders import Repeated
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedrnn
from docs.examples import published_cells as published
from fusedrnn.recurrent import graphs
from fusedrnn.recurrent.noise import Noise, Seed
from fusedrnn.recurrent.reads import Watch


@dataclass
class Call:
    """All arguments of a call, drawn from a seed."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        case = draw.choice(published.CASES)
        self.seq_len, self.batch = draw.choice([1, 2, 3, 7, 13, 20]), draw.choice([1, 2, 3, 5])
        width, sizes = draw.choice([8, 16]), (self.seq_len, self.batch)
        self.cell = case.cell(width, self.batch, torch.float64)
        self.input = case.inputs(*sizes, width, torch.float64)
        self.only_last = draw.random() < 0.3
        self.state = self._like_state(width, lambda shape: shape)
        self.lengths = None
        if draw.random() < 0.5:
            self.lengths = [draw.randint(1, self.seq_len) for _ in range(self.batch)]
        self.reset = torch.rand(sizes) < 0.3 if draw.random() < 0.5 else None
        kinds = {
            "one row": lambda shape: (1, *shape[1:]),
            "rows": lambda shape: shape,
            "steps": lambda shape: (self.seq_len, *shape),
        }
        kind = draw.choice(["zero", *kinds])
        self.reset_to, self.has_steps = None, kind == "steps"
        if self.reset is not None and kind != "zero":
            self.reset_to = self._like_state(width, kinds[kind])
        modes = ["auto"] if case.name == "AttentionDecoder" else ["replay", "parallel"]
        self.named: dict[str, Any] = {"mode": draw.choice(modes)}
        if draw.random() < 0.6:
            self.named["chunk_size"] = draw.choice([1, 2, 3, 5, 50])
        self.rnn = fusedrnn.Recurrent(self.cell, return_sequence=not self.only_last, **self.named)

    def _like_state(self, width: int, size: Any) -> Any:
        if hasattr(self.cell, "initial_state"):
            like = self.cell.initial_state(self.batch)
        else:
            zeros = torch.zeros(self.batch, width)
            like = (zeros, zeros) if isinstance(self.cell, nn.LSTMCell) else zeros
        return pytree.tree_map(
            lambda leaf: torch.randn(size(leaf.shape), dtype=torch.float64, requires_grad=True),
            like,
        )

    def run(self) -> tuple[Any, Any]:
        masks = (self.lengths, self.reset, self.reset_to)
        return self.rnn(self.input, self.state, *masks, generator())

    def loop(self) -> tuple[Any, Any]:
        noise = Noise(Seed(generator()), 0)
        noise.chunk(0, self.seq_len, self.batch)
        state, outputs, last = self.state, [], None
        lengths = self.lengths or [self.seq_len] * self.batch
        with Watch(noise):
            for time in range(self.seq_len):
                noise.step(time)
                active = torch.tensor([time < n for n in lengths])
                x = pytree.tree_map(lambda leaf: masked(leaf, active), at(self.input, time))  # noqa: B023
                new, y = self._step(x, self._reset(state, time))
                state = chosen(active, new, state)
                last = y if last is None else chosen(active, y, last)
                outputs.append(pytree.tree_map(lambda leaf: masked(leaf, active), y))  # noqa: B023
        return last if self.only_last else stack(outputs), state

    def _step(self, x: Any, state: Any) -> tuple[Any, Any]:
        result = self.cell(x, state)
        if pytree.tree_structure(result) == pytree.tree_structure(state):
            return result, pytree.tree_leaves(result)[0]
        return result[1], result[0]

    def _reset(self, state: Any, time: int) -> Any:
        if self.reset is None:
            return state
        if self.reset_to is None:
            to = pytree.tree_map(torch.zeros_like, state)
        else:
            to = at(self.reset_to, time) if self.has_steps else self.reset_to
        return chosen(self.reset[time], to, state)

    def leaves(self) -> list[Tensor]:
        found = leaves_with_gradient(self.input, self.state, self.reset_to)
        memory = getattr(self.cell, "memory", None)
        return [*found, *self.cell.parameters(), *([] if memory is None else [memory])]


def rows(flags: Tensor, leaf: Tensor) -> Tensor:
    return flags.reshape(-1, *(1,) * (leaf.dim() - 1))


def masked(leaf: Tensor, active: Tensor) -> Tensor:
    return leaf.masked_fill(~rows(active, leaf), 0)


def chosen(flags: Tensor, a: Any, b: Any) -> Any:
    return pytree.tree_map(lambda x, y: torch.where(rows(flags, y), x, y), a, b)


@pytest.mark.parametrize("seed", range(150))
def test_random_calls(seed: int) -> None:
    call = Call(seed)
    check_same(call.run, call.loop, call.leaves(), unused_is_zero=True)


@pytest.mark.parametrize("seed", range(150, 250))
def test_random_calls_by_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is the first one that records."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Repeated)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    call = Call(seed)
    call.rnn.cuda_graphs = True
    loss_of(*call.run()).backward(retain_graph=True)  # that of an attended memory
    check_same(call.run, call.loop, call.leaves(), unused_is_zero=True)
