"""The cells written once more, step by step with every option: the truth for tests of errors.

Independent of the package except for its random numbers. Products may be summed in another order,
which shows how much of an error is luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import Arguments, Case
from torch import Tensor

from fusedrnn._philox import CELL_ZONEOUT, DROPOUT, ZONEOUT, mask_of, philox_normal


@dataclass(frozen=True)
class Regularization:
    """The options of a call that drop or keep numbers at random."""

    dropout: float = 0.0
    zoneout: tuple[float, float] = (0.0, 0.0)  # of h and c
    training: bool = True
    seed: int = 5 << 33 | 3


def kept_at(p: float, layer: int, steps: int, batch: int, width: int, how: Regularization):
    """The share that zoneout keeps, (T, B, width): 0 or 1, or in evaluation the probability."""
    if p == 0 or not how.training:
        return torch.full((steps, batch, width), p, dtype=torch.float64)
    return mask_of(p, how.seed, steps, batch, width, layer).double()


def call(
    case: Case,
    a: Arguments,
    how: Regularization,
    order: torch.Generator | None = None,
    is_exact: bool = False,
    by_logarithm: bool = False,
) -> tuple[Tensor, ...]:
    """output, h_n, and c_n of an LSTM.

    Args:
        order: draws the order in which products are summed up; None takes it as it is.
        is_exact: derivatives of gates, and what a gate leaves of a number, without cancellation.
        by_logarithm: gates that are rounded otherwise than torch's.
    """
    directions = 2 if case.bidirectional else 1
    x, dtype = a.input, a.input.dtype
    (steps, batch), per_row = x.shape[:2], len(a.weights) // (case.num_layers * directions)
    lengths = torch.full((batch,), steps) if a.lengths is None else a.lengths
    active = (torch.arange(steps)[:, None] < lengths)[..., None]
    x = x.masked_fill(~active, 0)
    last = []
    for layer in range(case.num_layers):
        if layer > 0 and how.training and how.dropout > 0:
            stream = layer * directions | DROPOUT
            dropped = mask_of(how.dropout, how.seed, steps, batch, x.shape[-1], stream)
            x = (x / (1 - how.dropout)).masked_fill(dropped, 0)
        outputs = []
        for direction in range(directions):
            row = layer * directions + direction
            weights = a.weights[row * per_row : (row + 1) * per_row]
            cell = Cell(case, weights, order, is_exact, by_logarithm)
            states = [s[row] for s in (a.hx, a.cx) if s is not None]
            kept = [
                kept_at(p, row | stream, steps, batch, s.shape[-1], how).to(dtype)
                for p, stream, s in zip(how.zoneout, (ZONEOUT, CELL_ZONEOUT), states, strict=False)
            ]
            noise = None
            if a.eps is not None:
                noise = a.eps[row].masked_fill(~active, 0)
            elif a.seed is not None:
                noise = philox_normal(a.seed, steps, batch, case.latent_size, row, dtype)
            output = [x] * steps
            for t in reversed(range(steps)) if direction else range(steps):
                before = states
                # A finished row must not be computed with: it would get 0 * inf as a gradient.
                states = [s.masked_fill(~active[t], 0) for s in states]
                if a.reset is not None:
                    states = [s.masked_fill(a.reset[t][:, None], 0) for s in states]
                new = cell.step(x[t], states, None if noise is None else noise[t])
                new = [mixed(k[t], s, n) for k, s, n in zip(kept, states, new, strict=True)]
                output[t] = new[0].masked_fill(~active[t], 0)
                states = [torch.where(active[t], n, s) for n, s in zip(new, before, strict=True)]
            outputs.append(torch.stack(output))
            last.append(states)
        x = torch.cat(outputs, -1)
    return x, *(torch.stack(s) for s in zip(*last, strict=True))


def mixed(kept: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """kept * old + (1 - kept) * new; if kept is 0 or 1, the other value has no effect, even NaN."""
    both = kept * old + (1 - kept) * new
    return torch.where(kept == 1, old, torch.where(kept == 0, new, both))


class _Exact(torch.autograd.Function):
    """sigmoid (k = 1) or tanh (k = 2); torch's derivatives, y (1 - y) and 1 - y^2, cancel."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return torch.sigmoid(x) if k == 1 else torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        kx = ctx.k * ctx.saved_tensors[0]
        return grad * (ctx.k**2 * torch.sigmoid(kx) * torch.sigmoid(-kx)), None


class Cell:
    """One layer and direction."""

    def __init__(
        self,
        case: Case,
        weights: list[Tensor],
        order: torch.Generator | None,
        is_exact: bool,
        by_logarithm: bool,
    ):
        self.kind, self.order, self.is_exact = case.cell, order, is_exact
        self.sigmoid, self.tanh = torch.sigmoid, torch.tanh
        if is_exact:
            self.sigmoid, self.tanh = (lambda x: _Exact.apply(x, 1)), (lambda x: _Exact.apply(x, 2))
        elif by_logarithm:
            self.sigmoid = lambda x: torch.nn.functional.logsigmoid(x).exp()
        matrices = 3 if case.cell == "stochastic_gru" else 2
        self.weights = weights[:matrices]
        self.biases = weights[matrices : 2 * matrices] if case.bias else [None] * matrices
        self.weight_hr = weights[-1] if case.proj_size else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """torch's linear, perhaps in another order of summation."""
        linear = torch.nn.functional.linear
        if self.order is None:
            return linear(x, weight, bias)
        places = torch.randperm(x.shape[-1], generator=self.order)
        first, *others = places.chunk(2)
        product = linear(x[..., first], weight[:, first], bias)
        for some in others:
            product = product + linear(x[..., some], weight[:, some])
        return product

    def step(self, x: Tensor, states: list[Tensor], eps: Tensor | None) -> list[Tensor]:
        """The states after a step."""
        h, sigmoid, tanh = states[0], self.sigmoid, self.tanh
        side = self.linear(x, self.weights[0], self.biases[0])
        if self.kind == "lstm":
            gates = side + self.linear(h, self.weights[1], self.biases[1])
            i, f, g, o = gates.chunk(4, -1)
            c = sigmoid(f) * states[1] + sigmoid(i) * tanh(g)
            h = sigmoid(o) * tanh(c)
            return [h if self.weight_hr is None else self.linear(h, self.weight_hr), c]
        source = h
        if self.kind == "stochastic_gru":
            weight, bias = self.weights[2], self.biases[2]
            if eps is None:  # logvar is not used then, even if it is NaN
                half = len(weight) // 2
                source = self.linear(h, weight[:half], None if bias is None else bias[:half])
            else:
                loc, logvar = self.linear(h, weight, bias).chunk(2, -1)
                source = loc + eps * torch.exp(0.5 * logvar)
        x_r, x_u, x_n = side.chunk(3, -1)
        g_r, g_u, g_n = self.linear(source, self.weights[1], self.biases[1]).chunk(3, -1)
        u = sigmoid(x_u + g_u)
        n = tanh(x_n + sigmoid(x_r + g_r) * g_n)
        # n + u (h - n) loses the remaining share of n where u is near 1.
        return [u * h + sigmoid(-x_u - g_u) * n if self.is_exact else n + u * (h - n)]
