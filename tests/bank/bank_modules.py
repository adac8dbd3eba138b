"""Kinds of modules that tests put into banks: (T, B, INPUT) to (T, B, something)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusedrnn

INPUT, HIDDEN = 3, 4


class Fails(torch.autograd.Function):
    """The identity, whose backward fails: behind a bank it ends a pass that has gone through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("on purpose")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUT, INPUT), nn.Linear(INPUT, INPUT)
        self.b.weight = self.a.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(INPUT, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.a(x.flatten(0, 1))))


class Rnn(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class MinimalGatedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(INPUT, 2 * HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        f, n = self.ih(x).chunk(2, -1)
        g, m = self.hh(h).chunk(2, -1)
        f = torch.sigmoid(f + g)
        return h + f * (torch.tanh(n + f * m) - h)

    def initial_state(self, batch: int) -> Tensor:
        return self.hh.weight.new_zeros(batch, HIDDEN)


def _partly_frozen() -> nn.Module:
    module = Rnn(fusedrnn.GRU(INPUT, HIDDEN))
    module.rnn.weight_hh_l0.requires_grad_(False)
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2)),
    "tied": Tied,
    "batch_norm": Norm,
    "nn_lstm": lambda: Rnn(nn.LSTM(INPUT, HIDDEN)),
    "gru": lambda: Rnn(fusedrnn.GRU(INPUT, HIDDEN, 2)),
    "lstm": lambda: Rnn(fusedrnn.LSTM(INPUT, HIDDEN)),
    "stochastic_gru": lambda: Rnn(fusedrnn.StochasticGRU(INPUT, HIDDEN, latent_size=2)),
    "partly_frozen": _partly_frozen,
    "last_state": lambda: Rnn(fusedrnn.GRU(INPUT, HIDDEN, return_sequence=False)),
    "recurrent_in_python": lambda: Rnn(
        fusedrnn.Recurrent(nn.RNNCell(INPUT, HIDDEN), compile="never")
    ),
    "recurrent": lambda: Rnn(fusedrnn.Recurrent(MinimalGatedUnit(), compile="require")),
}
