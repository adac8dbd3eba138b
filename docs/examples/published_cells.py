"""Recurrent cells that people publish, in plain torch, for ``fusedrnn.Recurrent``.

A cell is a module with ``cell(input, state)`` that returns its state, or ``(output, state)``, and a
method ``initial_state(batch)``. Nothing in it knows of fusedrnn. Run this file to train each of
them for a step::

    python docs/examples/published_cells.py

Longer than 350 lines, because it is a collection to take cells from one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, OneHotCategoricalStraightThrough, kl_divergence
from torch.utils import _pytree as pytree


def zeros_like_weight(module: nn.Module, *shape: int) -> Tensor:
    """Zeros with dtype and device of a module's weights."""
    return next(module.parameters()).new_zeros(shape)


class Gaussian(nn.Module):
    """A diagonal normal distribution from features, through a hidden layer."""

    def __init__(self, features: int, hidden: int, latent: int, least_scale: float = 0.1) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(features, hidden), nn.Linear(hidden, 2 * latent)
        self.least_scale = least_scale

    def forward(self, *features: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, latent) each: loc and scale."""
        loc, raw = self.out(F.elu(self.hidden(torch.cat(features, -1)))).chunk(2, -1)
        return loc, F.softplus(raw) + self.least_scale


class LayerNormLSTMCell(nn.Module):
    """An LSTM with layer norm on both projections and on the cell state.

    i, f, g, o = split(LN(W_ih x) + LN(W_hh h) + b); c' = f c + i g; h' = o tanh(LN(c')). Ba, Kiros,
    Hinton 2016, "Layer Normalization", arXiv:1607.06450. State: (h, c), each (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.hh = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.norm_ih = nn.LayerNorm(4 * hidden_size)
        self.norm_hh = nn.LayerNorm(4 * hidden_size)
        self.norm_c = nn.LayerNorm(hidden_size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.norm_ih(self.ih(x)) + self.norm_hh(self.hh(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.norm_c(c)), c

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        zeros = zeros_like_weight(self, batch, self.hidden_size)
        return zeros, zeros.clone()


class PeepholeLSTMCell(nn.Module):
    """An LSTM whose gates see the cell state: i and f the old one, o the new one.

    Gers, Schmidhuber 2000, "Recurrent Nets that Time and Count". State: (h, c), each (batch,
    hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 4 * hidden_size)
        self.hh = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.peephole = nn.Parameter(torch.randn(3, hidden_size) * 0.1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, -1)
        p_i, p_f, p_o = self.peephole
        new = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
        return torch.sigmoid(o + p_o * new) * torch.tanh(new), new

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        zeros = zeros_like_weight(self, batch, self.hidden_size)
        return zeros, zeros.clone()


class LateResetGRUCell(nn.Module):
    """A GRU with one layer norm over all gates, the reset behind the product, and slow updates.

    r, n, u = split(LN(W [x, h])); n = tanh(sigmoid(r) n); u = sigmoid(u - 1); h' = u n + (1 - u) h.
    Hafner et al. 2021, "Mastering Atari with Discrete World Models", arXiv:2010.02193. State:
    (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = nn.Linear(input_size + hidden_size, 3 * hidden_size, bias=False)
        self.norm = nn.LayerNorm(3 * hidden_size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r, n, u = self.norm(self.linear(torch.cat([x, h], -1))).chunk(3, -1)
        n = torch.tanh(torch.sigmoid(r) * n)
        u = torch.sigmoid(u - 1)
        return u * n + (1 - u) * h

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class ResetBeforeGRUCell(nn.Module):
    """The GRU as it was first: the reset acts on the state, before the product.

    n = tanh(W_in x + W_hn (r h)); h' = u h + (1 - u) n. Cho et al. 2014, "Learning Phrase
    Representations using RNN Encoder-Decoder", arXiv:1406.1078. State: (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 3 * hidden_size)
        self.gates = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.new = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        x_r, x_u, x_n = self.ih(x).chunk(3, -1)
        h_r, h_u = self.gates(h).chunk(2, -1)
        r, u = torch.sigmoid(x_r + h_r), torch.sigmoid(x_u + h_u)
        n = torch.tanh(x_n + self.new(r * h))
        return u * h + (1 - u) * n

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class LFADSCell(nn.Module):
    """Controller and generator of LFADS, two clipped GRUs that feed each other.

    The controller sees the encoded data and the factors of the step before, and gives a posterior
    of the inferred input, which drives the generator; the factors are a projection of the
    generator's state. Pandarinath et al. 2018, "Inferring single-trial neural population dynamics
    using sequential auto-encoders", Nature Methods 15. State: a dict of "controller" and
    "generator", each (batch, hidden_size), and "factors", (batch, factors). Output: a dict of
    "factors" and of "loc" and "scale" of the inferred input.
    """

    clip = 5.0

    def __init__(self, input_size: int, hidden_size: int, factors: int, inputs: int) -> None:
        super().__init__()
        self.hidden_size, self.factors = hidden_size, factors
        self.controller = nn.GRUCell(input_size + factors, hidden_size)
        self.posterior = nn.Linear(hidden_size, 2 * inputs)
        self.generator = nn.GRUCell(inputs, hidden_size)
        self.to_factors = nn.Linear(hidden_size, factors, bias=False)

    def forward(
        self, x: Tensor, state: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        seen = torch.cat([x, state["factors"]], -1)
        controller = self.controller(seen, state["controller"]).clamp(-self.clip, self.clip)
        loc, log_variance = self.posterior(controller).chunk(2, -1)
        scale = torch.exp(0.5 * log_variance)
        inferred = Normal(loc, scale).rsample()
        generator = self.generator(inferred, state["generator"]).clamp(-self.clip, self.clip)
        factors = self.to_factors(generator)
        new = {"controller": controller, "generator": generator, "factors": factors}
        return {"factors": factors, "loc": loc, "scale": scale}, new

    def initial_state(self, batch: int) -> dict[str, Tensor]:
        zeros = zeros_like_weight(self, batch, self.hidden_size)
        factors = zeros_like_weight(self, batch, self.factors)
        return {"controller": zeros, "generator": zeros.clone(), "factors": factors}


class PlaNetCell(nn.Module):
    """The recurrent state space model of PlaNet, with posterior.

    h' = GRU(f(z, action), h); prior p(z' | h'); posterior q(z' | h', embedding), from which z' is
    drawn. Hafner et al. 2019, "Learning Latent Dynamics for Planning from Pixels",
    arXiv:1811.04551. Input: a dict of "embedding" and "action". State: a dict of "h", (batch,
    hidden_size), and "z", (batch, latent). Output: a dict of h, z, and "prior" and "posterior",
    each (loc, scale).
    """

    def __init__(self, embedding: int, actions: int, hidden_size: int, latent: int) -> None:
        super().__init__()
        self.hidden_size, self.latent = hidden_size, latent
        self.enter = nn.Linear(latent + actions, hidden_size)
        self.gru = nn.GRUCell(hidden_size, hidden_size)
        self.prior = Gaussian(hidden_size, hidden_size, latent)
        self.posterior = Gaussian(hidden_size + embedding, hidden_size, latent)

    def forward(
        self, x: dict[str, Tensor], state: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        entered = F.elu(self.enter(torch.cat([state["z"], x["action"]], -1)))
        h = self.gru(entered, state["h"])
        posterior = self.posterior(h, x["embedding"])
        z = Normal(*posterior).rsample()
        return {"h": h, "z": z, "prior": self.prior(h), "posterior": posterior}, {"h": h, "z": z}

    def initial_state(self, batch: int) -> dict[str, Tensor]:
        h = zeros_like_weight(self, batch, self.hidden_size)
        return {"h": h, "z": zeros_like_weight(self, batch, self.latent)}


class DreamerV3Cell(nn.Module):
    """The recurrent state space model of DreamerV3, with categorical latents.

    As :class:`PlaNetCell`, with a :class:`LateResetGRUCell` for the state and a latent of
    ``groups`` one-hot vectors. Each is drawn with 1% of uniform probability mixed in, and has the
    gradient of its probabilities (straight through). Hafner et al. 2023, "Mastering Diverse
    Domains through World Models", arXiv:2301.04104. Input: a dict of "embedding" and "action".
    State: a dict of "h", (batch, hidden_size), and "z", (batch, groups * classes). Output: a dict
    of h, z, and the logits "prior" and "posterior", (batch, groups, classes).
    """

    uniform = 0.01

    def __init__(
        self, embedding: int, actions: int, hidden_size: int, groups: int, classes: int
    ) -> None:
        super().__init__()
        self.hidden_size, self.groups, self.classes = hidden_size, groups, classes
        latent = groups * classes
        self.enter = self._layer(latent + actions, hidden_size)
        self.gru = LateResetGRUCell(hidden_size, hidden_size)
        self.prior = nn.Sequential(
            self._layer(hidden_size, hidden_size), nn.Linear(hidden_size, latent)
        )
        self.posterior = nn.Sequential(
            self._layer(hidden_size + embedding, hidden_size), nn.Linear(hidden_size, latent)
        )

    @staticmethod
    def _layer(features: int, hidden: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(features, hidden, bias=False), nn.RMSNorm(hidden, eps=1e-4), nn.SiLU()
        )

    def _logits(self, raw: Tensor) -> Tensor:
        probabilities = raw.unflatten(-1, (self.groups, self.classes)).softmax(-1)
        return torch.log((1 - self.uniform) * probabilities + self.uniform / self.classes)

    def forward(
        self, x: dict[str, Tensor], state: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        entered = self.enter(torch.cat([state["z"], x["action"]], -1))
        h = self.gru(entered, state["h"])
        posterior = self._logits(self.posterior(torch.cat([h, x["embedding"]], -1)))
        z = OneHotCategoricalStraightThrough(logits=posterior).rsample().flatten(1)
        prior = self._logits(self.prior(h))
        return {"h": h, "z": z, "prior": prior, "posterior": posterior}, {"h": h, "z": z}

    def initial_state(self, batch: int) -> dict[str, Tensor]:
        z = zeros_like_weight(self, batch, self.groups * self.classes)
        return {"h": zeros_like_weight(self, batch, self.hidden_size), "z": z}


class VRNNCell(nn.Module):
    """The variational recurrent network, with its loss in the output.

    Prior p(z | h), posterior q(z | x, h), decoder p(x | z, h), and h' = GRU([x, z], h), with
    features of x and z. Chung et al. 2015, "A Recurrent Latent Variable Model for Sequential
    Data", arXiv:1506.02216. State: (batch, hidden_size). Output: a dict of "kl" and
    "log_likelihood", (batch,) each, and of the decoder's "loc" and "scale".
    """

    def __init__(self, input_size: int, hidden_size: int, latent: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.of_x = nn.Sequential(nn.Linear(input_size, hidden_size), nn.ReLU())
        self.of_z = nn.Sequential(nn.Linear(latent, hidden_size), nn.ReLU())
        self.prior = Gaussian(hidden_size, hidden_size, latent)
        self.posterior = Gaussian(2 * hidden_size, hidden_size, latent)
        self.decoder = Gaussian(2 * hidden_size, hidden_size, input_size)
        self.gru = nn.GRUCell(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, h: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        x_features = self.of_x(x)
        prior = Independent(Normal(*self.prior(h)), 1)
        posterior = Independent(Normal(*self.posterior(x_features, h)), 1)
        z_features = self.of_z(posterior.rsample())
        loc, scale = self.decoder(z_features, h)
        output = {
            "kl": kl_divergence(posterior, prior),
            "log_likelihood": Independent(Normal(loc, scale), 1).log_prob(x),
            "loc": loc,
            "scale": scale,
        }
        return output, self.gru(torch.cat([x_features, z_features], -1), h)

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class AttentionDecoderCell(nn.Module):
    """A decoder that looks at all places of an encoded sequence at each step.

    Scores v tanh(W h + U m) of each place m of the memory give the weights of their mean, which
    goes into a GRU with x. Bahdanau, Cho, Bengio 2015, "Neural Machine Translation by Jointly
    Learning to Align and Translate", arXiv:1409.0473. The memory, (batch, places, features), is
    neither input nor state: the step reads the tensors that ``attend`` has set, and they get
    gradients. State: (batch, hidden_size). Output: a dict of "h" and "weights", (batch, places).
    """

    def __init__(self, input_size: int, hidden_size: int, memory_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(memory_size, hidden_size)
        self.score = nn.Linear(hidden_size, 1, bias=False)
        self.gru = nn.GRUCell(input_size + memory_size, hidden_size)
        self.memory: Tensor | None = None
        self.keys: Tensor | None = None

    def attend(self, memory: Tensor) -> AttentionDecoderCell:
        """Sets what the next call looks at."""
        self.memory, self.keys = memory, self.key(memory)
        return self

    def forward(self, x: Tensor, h: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        assert self.memory is not None and self.keys is not None, "call attend(memory) first"
        scores = self.score(torch.tanh(self.query(h).unsqueeze(1) + self.keys)).squeeze(-1)
        weights = scores.softmax(-1)
        context = torch.einsum("bs,bsm->bm", weights, self.memory)
        h = self.gru(torch.cat([x, context], -1), h)
        return {"h": h, "weights": weights}, h

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class ForumCell(nn.Module):
    """A GRU whose gates see a latent that is drawn from the state: what StochasticGRU computes.

    loc, logvar = split(W_hz h); z = loc + eps exp(logvar / 2); r, u and n from x and z. Weights
    have the names and shapes of :class:`fusedrnn.StochasticGRUCell`, whose docstring names the
    papers. State: (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int, latent: int | None = None) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        latent = hidden_size if latent is None else latent
        sizes = {"ih": (3 * hidden_size, input_size), "zh": (3 * hidden_size, latent)}
        sizes["hz"] = (2 * latent, hidden_size)
        bound = hidden_size**-0.5
        for name, size in sizes.items():
            for kind, shape in (("weight", size), ("bias", size[:1])):
                value = torch.empty(shape).uniform_(-bound, bound)
                self.register_parameter(f"{kind}_{name}", nn.Parameter(value))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        loc, logvar = F.linear(h, self.weight_hz, self.bias_hz).chunk(2, -1)
        z = loc + torch.randn_like(loc) * torch.exp(0.5 * logvar)
        x_r, x_u, x_n = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        z_r, z_u, z_n = F.linear(z, self.weight_zh, self.bias_zh).chunk(3, -1)
        u = torch.sigmoid(x_u + z_u)
        n = torch.tanh(x_n + torch.sigmoid(x_r + z_r) * z_n)
        return n + u * (h - n)

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


@dataclass(frozen=True)
class Case:
    """A cell at some width, and what it takes."""

    name: str
    make: Callable[[int], nn.Module]
    """From the width, a multiple of 8."""
    input: Callable[[int], Any]
    """Features of each tensor of the input, nested as it is."""

    def cell(
        self,
        width: int,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> nn.Module:
        """A new cell, whose memory of ``batch`` rows is set if it reads one."""
        cell = self.make(width).to(device, dtype)
        if isinstance(cell, AttentionDecoderCell):
            memory = torch.randn(batch, 6, width, dtype=dtype, device=device)
            cell.attend(memory.requires_grad_())
        return cell

    def inputs(
        self,
        seq_len: int,
        batch: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Any:
        """Random numbers with gradient, (seq_len, batch, features) each."""

        def drawn(features: int) -> Tensor:
            sizes = (seq_len, batch, features)
            return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)

        return pytree.tree_map(drawn, self.input(width))


def _width(width: int) -> int:
    return width


def _world(width: int) -> dict[str, int]:
    return {"embedding": width, "action": 4}


CASES = [
    Case("RNNCell", lambda n: nn.RNNCell(n, n), _width),
    Case("GRUCell", lambda n: nn.GRUCell(n, n), _width),
    Case("LSTMCell", lambda n: nn.LSTMCell(n, n), _width),
    Case("LayerNormLSTM", lambda n: LayerNormLSTMCell(n, n), _width),
    Case("PeepholeLSTM", lambda n: PeepholeLSTMCell(n, n), _width),
    Case("LateResetGRU", lambda n: LateResetGRUCell(n, n), _width),
    Case("ResetBeforeGRU", lambda n: ResetBeforeGRUCell(n, n), _width),
    Case("LFADS", lambda n: LFADSCell(n, n, n // 2, n // 8), _width),
    Case("PlaNet", lambda n: PlaNetCell(n, 4, n, n // 4), _world),
    Case("DreamerV3", lambda n: DreamerV3Cell(n, 4, n, n // 8, 8), _world),
    Case("VRNN", lambda n: VRNNCell(n, n, n // 4), _width),
    Case("AttentionDecoder", lambda n: AttentionDecoderCell(n, n, n), _width),
    Case("ForumCell", lambda n: ForumCell(n, n), _width),
]


def main() -> None:
    """A step of training of each cell."""
    import fusedrnn

    for case in CASES:
        cell = case.cell(width=32, batch=4)
        rnn = fusedrnn.Recurrent(cell)
        inputs = case.inputs(seq_len=50, batch=4, width=32)
        output, _ = rnn(inputs)
        loss = sum(leaf.square().mean() for leaf in pytree.tree_leaves(output))
        loss.backward()
        print(f"{case.name}: loss {loss.item():.3f}, {rnn.explain(inputs).mode}")


if __name__ == "__main__":
    main()
