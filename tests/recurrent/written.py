"""Small cells in the forms that users write: states, outputs and inputs of all structures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from recurrent.published import Cell
from torch import Tensor, nn


class Dropped(Cell):
    """Dropout of the input and of the candidate, with other numbers in each step."""

    def __init__(self, inputs: int, hidden: int, p: float = 0.3) -> None:
        super().__init__(hidden)
        self.drop, self.gru = nn.Dropout(p), nn.GRUCell(inputs, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(self.drop(x), h)
        return F.dropout(self.out(h), 0.2, self.training), h


class Zoneout(Cell):
    """Units that keep their state at random, on average in evaluation. Krueger et al. 2017."""

    def __init__(self, inputs: int, hidden: int, p: float = 0.3) -> None:
        super().__init__(hidden, hidden)
        self.lstm, self.p = nn.LSTMCell(inputs, hidden), p

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = self.lstm(x, state)
        return self._mixed(state[0], h), self._mixed(state[1], c)

    def _mixed(self, old: Tensor, new: Tensor) -> Tensor:
        if not self.training:
            return self.p * old + (1 - self.p) * new
        keep = torch.bernoulli(torch.full_like(old, self.p))
        return keep * old + (1 - keep) * new


class ZoneoutByDropout(Zoneout):
    """By dropout of the difference, as many repositories have it."""

    def _mixed(self, old: Tensor, new: Tensor) -> Tensor:
        return (1 - self.p) * F.dropout(new - old, self.p, self.training) + old


class ZoneoutByRand(Zoneout):
    """By a comparison of uniform numbers."""

    def _mixed(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.where(torch.rand_like(old) < self.p, old, new)


class DictState(nn.Module):
    """A nested state by names."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.cell = hidden, nn.LSTMCell(inputs, hidden)
        self.mean = nn.Linear(hidden, 3)

    def forward(self, x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        h, c = self.cell(x, state["lstm"])
        mean = 0.9 * state["mean"] + 0.1 * self.mean(h)
        return h * mean.sum(-1, keepdim=True), {"lstm": (h, c), "mean": mean}

    def initial_state(self, batch: int) -> dict[str, Any]:
        zeros = self.mean.weight.new_zeros(batch, self.hidden)
        return {"lstm": (zeros, zeros.clone()), "mean": zeros[:, :3].clone()}


class TupleOutput(Cell):
    """Outputs that are a value twice, a part of the state, the input, and a number per row."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.cell = nn.RNNCell(inputs, hidden)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Any, Tensor]:
        h = self.cell(x, h)
        return (h, h, h[:, :2], x, h.square().sum(-1), h.view(len(h), 2, -1)), h


class DictOutput(Cell):
    """Outputs by names, one of them from the old state, and one that nothing depends on."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.cell, self.head = nn.GRUCell(inputs, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor, h: Tensor) -> tuple[dict[str, Any], Tensor]:
        value, advantage = self.head(h).split([1, 3], -1)
        new = self.cell(x, h)
        log_policy = F.log_softmax(advantage, -1)
        entropy = -(log_policy.exp() * log_policy).sum(-1)
        return {"value": value.squeeze(-1), "policy": (log_policy, entropy), "old": h}, new


class Embedded(Cell):
    """Tokens as input."""

    def __init__(self, tokens: int, width: int, hidden: int) -> None:
        super().__init__(hidden)
        self.embedding, self.cell = nn.Embedding(tokens, width), nn.GRUCell(width, hidden)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.embedding(token), h)
        return self.head(h), h


class TiedEmbedding(Embedded):
    """The weight that reads tokens writes them, too."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__(tokens, hidden, hidden)
        self.head.weight = self.embedding.weight


class ResetInside(Cell):
    """Starts anew by itself, from a state that is learned."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.cell, self.start = nn.GRUCell(inputs, hidden), nn.Parameter(torch.randn(hidden))

    def forward(self, x: dict[str, Tensor], h: Tensor) -> Tensor:
        return self.cell(x["value"], torch.where(x["reset"][:, None], self.start, h))


class ResetByFactor(Cell):
    """A flag as a number, 1 where a row goes on."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden, hidden)
        self.cell = nn.LSTMCell(inputs, hidden)

    def forward(self, x: tuple[Tensor, Tensor], state: tuple[Tensor, Tensor]) -> Any:
        value, goes_on = x
        return self.cell(value, tuple(s * goes_on.unsqueeze(-1) for s in state))


class Listed(Cell):
    """Weights in lists, and a loop over them."""

    def __init__(self, inputs: int, hidden: int, depth: int = 3) -> None:
        super().__init__(hidden)
        sizes = [(inputs, hidden), *[(hidden, hidden)] * (depth - 1)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s) * s[0] ** -0.5) for s in sizes)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(hidden)) for _ in sizes)
        self.gates = nn.ModuleList(nn.Linear(hidden, hidden) for _ in sizes)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y = x
        for weight, bias, gate in zip(self.weights, self.biases, self.gates, strict=True):
            y = torch.tanh(y @ weight + bias) * torch.sigmoid(gate(h))
        return h + 0.3 * (y - h)


class Tied(Cell):
    """One weight in two products, once as it is and once transposed, and one bias in both."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.linear, self.again = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.again.weight = self.linear.weight
        self.again.bias = self.linear.bias

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.again(h))
        return torch.tanh(F.linear(y, self.linear.weight.t(), self.linear.bias) + 0.5 * h)


class Frozen(Cell):
    """Some parameters take no gradient, and a buffer is a weight."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.ih = nn.Linear(inputs, hidden).requires_grad_(False)
        self.hh, self.scale = nn.Linear(hidden, hidden), nn.Parameter(torch.ones(()))
        self.register_buffer("mix", torch.randn(hidden, hidden) * hidden**-0.5)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.ih(x) + self.scale * self.hh(h) @ self.mix)


class InPlace(Cell):
    """Gates by in-place operations, as tutorials write them to save memory."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.ih, self.hh = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        x_r, x_u, x_n = self.ih(x).tensor_split(3, -1)
        h_r, h_u, h_n = self.hh(h).tensor_split(3, -1)
        r = (x_r + h_r).sigmoid_()
        u = torch.add(x_u, h_u).sigmoid_()
        n = torch.mul(r, h_n).add_(x_n).tanh_()
        new = torch.empty_like(h)
        new[:, :2] = h[:, :2]
        new[:, 2:] = torch.lerp(n, h, u)[:, 2:]
        return new


class Detached(Cell):
    """A stopped gradient, and numbers that are rounded with the gradient of the identity."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.ih, self.hh = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.hh(h.detach()))
        y = self.ih(x) + gate * h
        with torch.no_grad():
            norm = y.norm(dim=-1, keepdim=True).clamp(min=1.0)
        rounded = y + (torch.round(4 * y) / 4 - y).detach()
        return rounded, torch.tanh(y / norm)


class LowRank(Cell):
    """A linear system of low rank: a product of a sum of products, with nothing in between."""

    def __init__(self, inputs: int, hidden: int, rank: int = 3) -> None:
        super().__init__(hidden)
        self.of_input, self.down = nn.Linear(inputs, rank), nn.Linear(hidden, rank)
        self.up = nn.Linear(rank, hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.up(self.of_input(x) + self.down(h))


class TwoSpeeds(Cell):
    """A slow state beside a fast one, whose new value a product and a sum read, too."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden, hidden)
        self.ih, self.hh = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h, slow = state
        h = torch.tanh(self.ih(x) + self.hh(h))
        y = self.out(h) * slow + h.square().sum(-1, keepdim=True)
        return y, (h, 0.5 * slow + h)


class Wrapped(nn.Module):
    """A model of several modules with a state of layers, as policies have it."""

    def __init__(self, inputs: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.hidden = hidden
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.LeakyReLU())
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(layers))
        self.heads = nn.ModuleDict({"mean": nn.Linear(hidden, 2), "value": nn.Linear(hidden, 1)})

    def forward(self, x: Tensor, state: list[tuple[Tensor, Tensor]]) -> Any:
        y, new = self.body(x), []
        for cell, old in zip(self.cells, state, strict=True):
            new.append(cell(y, old))
            y = y + new[-1][0]
        return {name: head(y) for name, head in self.heads.items()}, new

    def initial_state(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        zeros = next(self.parameters()).new_zeros(batch, self.hidden)
        return [(zeros.clone(), zeros.clone()) for _ in self.cells]


class Counting(nn.Module):
    """A step counter of integers in the state, which the gate reads."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.cell = hidden, nn.GRUCell(inputs, hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, count = state
        h = self.cell(x, h) / (1 + count.to(x.dtype)).sqrt().unsqueeze(-1)
        return h, count + 1

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        weight = self.cell.weight_ih
        zeros = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return weight.new_zeros(batch, self.hidden), zeros
