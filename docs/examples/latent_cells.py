"""Recurrent cells with latents that people publish, in plain torch, for published_cells.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, OneHotCategoricalStraightThrough, kl_divergence

from .gated_cells import LateResetGRUCell, zeros_like_weight


class Gaussian(nn.Module):
    """A diagonal normal distribution from features, through hidden layers."""

    def __init__(self, features: int, hidden: int, latent: int, layers: int = 1) -> None:
        super().__init__()
        sizes = [features, *layers * (hidden,)]
        self.hidden = nn.Sequential()
        for i in range(layers):
            self.hidden.extend([nn.Linear(sizes[i], sizes[i + 1]), nn.ELU()])
        self.out, self.least_scale = nn.Linear(hidden, 2 * latent), 0.1

    def forward(self, *features: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, latent) each: loc and scale."""
        loc, raw = self.out(self.hidden(torch.cat(features, -1))).chunk(2, -1)
        return loc, F.softplus(raw) + self.least_scale


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


class DreamerV1Cell(PlaNetCell):
    """PlaNet's core, which a new episode starts anew inside of the step, as in DreamerV1.

    Hafner et al. 2020, "Dream to Control: Learning Behaviors by Latent Imagination",
    arXiv:1912.01603. Input: a dict of "embedding", "action" and "is_first", (batch,) of bool.
    State and output: as those of :class:`PlaNetCell`.
    """

    def forward(
        self, x: dict[str, Tensor], state: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        keep = 1.0 - x["is_first"].unsqueeze(-1).to(x["action"].dtype)
        return super().forward(x, {name: leaf * keep for name, leaf in state.items()})


class DreamerV2Cell(nn.Module):
    """The recurrent state space model of DreamerV2, with categorical latents.

    As :class:`DreamerV1Cell`, with a layer-normed :class:`LateResetGRUCell` for the state, and a
    latent of ``groups`` one-hot vectors with the gradient of their probabilities (straight
    through). Hafner et al. 2021, "Mastering Atari with Discrete World Models", arXiv:2010.02193.
    Input: a dict of "embedding", "action" and "is_first", (batch,) of bool. State: (h, z), (batch,
    hidden_size) and (batch, groups * classes). Output: a dict of h, z, and the logits "prior" and
    "posterior", (batch, groups, classes).
    """

    def __init__(
        self, embedding: int, actions: int, hidden_size: int, groups: int, classes: int
    ) -> None:
        super().__init__()
        self.hidden_size, self.groups, self.classes = hidden_size, groups, classes
        latent = groups * classes
        self.enter = nn.Sequential(nn.Linear(latent + actions, hidden_size), nn.ELU())
        self.gru = LateResetGRUCell(hidden_size, hidden_size)
        self.prior, self.posterior = (
            nn.Sequential(
                nn.Linear(features, hidden_size), nn.ELU(), nn.Linear(hidden_size, latent)
            )
            for features in (hidden_size, hidden_size + embedding)
        )

    def _logits(self, raw: Tensor) -> Tensor:
        return raw.reshape(-1, self.groups, self.classes)

    def forward(
        self, x: dict[str, Tensor], state: tuple[Tensor, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        first, (h, z) = x["is_first"].unsqueeze(-1), state
        h, z = h.masked_fill(first, 0.0), torch.where(first, 0.0, z)
        h = self.gru(self.enter(torch.cat([z, x["action"]], -1)), h)
        posterior = self._logits(self.posterior(torch.cat([h, x["embedding"]], -1)))
        latents = Independent(OneHotCategoricalStraightThrough(logits=posterior), 1)
        z = latents.rsample().reshape(h.shape[0], -1)
        prior = self._logits(self.prior(h))
        return {"h": h, "z": z, "prior": prior, "posterior": posterior}, (h, z)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        z = zeros_like_weight(self, batch, self.groups * self.classes)
        return zeros_like_weight(self, batch, self.hidden_size), z


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

    Prior p(z | h), posterior q(z | x, h) of two hidden layers, decoder p(x | z, h), and h' =
    GRU([x, z], h), with features of x and z. Chung et al. 2015, "A Recurrent Latent Variable Model
    for Sequential Data", arXiv:1506.02216. State: (batch, hidden_size). Output: a dict of "kl" and
    "log_likelihood", (batch,) each, and of the decoder's "loc" and "scale".
    """

    def __init__(self, input_size: int, hidden_size: int, latent: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.of_x = nn.Sequential(nn.Linear(input_size, hidden_size), nn.ReLU())
        self.of_z = nn.Sequential(nn.Linear(latent, hidden_size), nn.ReLU())
        self.prior = Gaussian(hidden_size, hidden_size, latent)
        self.posterior = Gaussian(2 * hidden_size, hidden_size, latent, layers=2)
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
