"""Recurrent cells as people publish them, in plain torch, besides docs/examples.

Written as their authors write them: in-place operations, a Linear per gate or one for all, views,
distributions of torch. Longer than 350 lines, because it is a collection.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, OneHotCategorical, kl_divergence


class Cell(nn.Module):
    """A cell whose state is tensors of given widths, zeros at first."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = widths

    def initial_state(self, batch: int) -> Any:
        like = next(self.parameters())
        zeros = tuple(like.new_zeros(batch, width) for width in self.widths)
        return zeros[0] if len(zeros) == 1 else zeros


class ConcatenatedGRU(Cell):
    """Cho et al. 2014, as in tutorials: a Linear for each gate on [x, h], the reset before."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.r, self.u, self.n = (nn.Linear(inputs + hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        combined = torch.cat((x, h), 1)
        r, u = torch.sigmoid(self.r(combined)), torch.sigmoid(self.u(combined))
        n = torch.tanh(self.n(torch.cat((x, r * h), 1)))
        return (1 - u) * h + u * n


class SampledByHand(Cell):
    """A categorical latent without torch's straight-through class, as many ports write it."""

    def __init__(self, inputs: int, hidden: int, groups: int, classes: int) -> None:
        super().__init__(hidden)
        self.shape = (groups, classes)
        self.gru = nn.GRUCell(groups * classes, hidden)
        self.logits = nn.Linear(hidden + inputs, groups * classes)

    def forward(self, x: Tensor, h: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        logits = self.logits(torch.cat([h, x], -1)).view(-1, *self.shape)
        probs = F.softmax(logits, dim=-1)
        probs = 0.99 * probs + 0.01 / self.shape[-1]
        sample = OneHotCategorical(probs=probs).sample()
        z = sample + probs - probs.detach()
        h = self.gru(z.flatten(-2), h)
        return {"h": h, "z": z, "log_probs": torch.log(probs)}, h


class GumbelCell(Cell):
    """A relaxed categorical latent."""

    def __init__(self, inputs: int, hidden: int, classes: int, hard: bool) -> None:
        super().__init__(hidden)
        self.hard = hard
        self.gru = nn.GRUCell(inputs + classes, hidden)
        self.logits = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z = F.gumbel_softmax(self.logits(h), tau=0.8, hard=self.hard)
        h = self.gru(torch.cat([x, z], -1), h)
        return z, h


class VRNN(Cell):
    """Chung et al. 2015, as in its best-known port: two hidden layers, exp and softplus stds."""

    def __init__(self, x_dim: int, h_dim: int, z_dim: int) -> None:
        super().__init__(h_dim)
        self.phi_x = self._mlp(x_dim, h_dim, h_dim)
        self.phi_z = self._mlp(z_dim, h_dim)
        self.enc = self._mlp(h_dim + h_dim, h_dim, h_dim)
        self.enc_mean = nn.Linear(h_dim, z_dim)
        self.enc_std = nn.Sequential(nn.Linear(h_dim, z_dim), nn.Softplus())
        self.prior = self._mlp(h_dim, h_dim)
        self.prior_mean = nn.Linear(h_dim, z_dim)
        self.prior_std = nn.Sequential(nn.Linear(h_dim, z_dim), nn.Softplus())
        self.dec = self._mlp(h_dim + h_dim, h_dim, h_dim)
        self.dec_mean = nn.Sequential(nn.Linear(h_dim, x_dim), nn.Sigmoid())
        self.rnn = nn.GRUCell(h_dim + h_dim, h_dim)

    @staticmethod
    def _mlp(*sizes: int) -> nn.Module:
        layers = itertools.pairwise(sizes)
        return nn.Sequential(*(m for n in layers for m in (nn.Linear(*n), nn.ReLU())))

    def forward(self, x: Tensor, h: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        phi_x = self.phi_x(x)
        enc = self.enc(torch.cat([phi_x, h], 1))
        enc_mean, enc_std = self.enc_mean(enc), self.enc_std(enc)
        prior = self.prior(h)
        prior_mean, prior_std = self.prior_mean(prior), self.prior_std(prior)
        eps = torch.empty(enc_std.size(), device=x.device, dtype=x.dtype).normal_()
        z = eps.mul(enc_std).add_(enc_mean)
        phi_z = self.phi_z(z)
        dec_mean = self.dec_mean(self.dec(torch.cat([phi_z, h], 1)))
        h = self.rnn(torch.cat([phi_x, phi_z], 1), h)
        kld = 2 * torch.log(prior_std + 1e-5) - 2 * torch.log(enc_std + 1e-5)
        kld = kld + (enc_std.pow(2) + (enc_mean - prior_mean).pow(2)) / prior_std.pow(2) - 1
        nll = -torch.sum(x * torch.log(dec_mean) + (1 - x) * torch.log(1 - dec_mean), -1)
        return {"kld": 0.5 * kld.sum(-1), "nll": nll, "mean": dec_mean}, h


class VRNNByDistributions(Cell):
    """The same with torch's distributions and their divergence."""

    def __init__(self, x_dim: int, h_dim: int, z_dim: int) -> None:
        super().__init__(h_dim, h_dim)
        self.prior, self.post = nn.Linear(h_dim, 2 * z_dim), nn.Linear(h_dim + x_dim, 2 * z_dim)
        self.dec, self.rnn = nn.Linear(h_dim + z_dim, x_dim), nn.LSTMCell(x_dim + z_dim, h_dim)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h, _ = state
        mu, logvar = self.prior(h).chunk(2, -1)
        prior = Normal(mu, (0.5 * logvar.clamp(-5, 5)).exp())
        mu, logvar = self.post(torch.cat([x, h], -1)).chunk(2, -1)
        post = Normal(mu, (0.5 * logvar.clamp(-5, 5)).exp())
        z = post.rsample()
        likely = Normal(self.dec(torch.cat([z, h], -1)), 0.5).log_prob(x).sum(-1)
        state = self.rnn(torch.cat([x, z], -1), state)
        return (kl_divergence(post, prior).sum(-1), likely), state


class MogrifierLSTM(Cell):
    """Input and state gate each other in turn. Melis et al. 2020, "Mogrifier LSTM"."""

    def __init__(self, inputs: int, hidden: int, rounds: int = 3) -> None:
        super().__init__(hidden, hidden)
        self.lstm = nn.LSTMCell(inputs, hidden)
        sizes = [(hidden, inputs) if i % 2 == 0 else (inputs, hidden) for i in range(rounds)]
        self.rounds = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        for i, linear in enumerate(self.rounds):
            if i % 2 == 0:
                x = 2 * torch.sigmoid(linear(h)) * x
            else:
                h = 2 * torch.sigmoid(linear(x)) * h
        return self.lstm(x, (h, c))


class MultiplicativeLSTM(Cell):
    """Krause et al. 2016, "Multiplicative LSTM for sequence modelling"."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden, hidden)
        self.wmx, self.wmh = (nn.Linear(n, hidden, bias=False) for n in (inputs, hidden))
        self.wx, self.wh = nn.Linear(inputs, 4 * hidden, bias=False), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        m = self.wmx(x) * self.wmh(h)
        i, f, o, u = torch.chunk(self.wx(x) + self.wh(m), 4, dim=1)
        c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(u)
        return F.sigmoid(o) * F.tanh(c), c


class AntisymmetricRNN(Cell):
    """A stable Euler step by W - W^T. Chang et al. 2019, "AntisymmetricRNN"."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.v = nn.Linear(inputs, hidden)
        self.w = nn.Parameter(torch.randn(hidden, hidden) * hidden**-0.5)
        self.register_buffer("gamma", 0.01 * torch.eye(hidden))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        w = self.w - self.w.t() - self.gamma
        return h + 0.1 * torch.tanh(h @ w.t() + self.v(x))


class CoupledOscillators(Cell):
    """Rusch, Mishra 2021, "Coupled Oscillatory Recurrent Neural Network (coRNN)"."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden, hidden)
        self.i2h = nn.Linear(inputs + 2 * hidden, hidden)
        self.dt, self.gamma, self.epsilon = 0.1, 2.0, 3.0

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y, z = state
        force = torch.tanh(self.i2h(torch.cat((x, z, y), 1)))
        z = z + self.dt * (force - self.gamma * y - self.epsilon * z)
        return y + self.dt * z, z


class RecurrentHighway(Cell):
    """Several layers in each step. Zilly et al. 2017, "Recurrent Highway Networks"."""

    def __init__(self, inputs: int, hidden: int, depth: int = 3) -> None:
        super().__init__(hidden)
        self.x = nn.Linear(inputs, 2 * hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(depth))

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            both = layer(s)
            if i == 0:
                both += self.x(x)
            h, t = both.chunk(2, -1)
            t = t.sigmoid()
            s = h.tanh() * t + s * (1 - t)
        return s


class LegendreMemory(Cell):
    """A fixed linear memory of the past. Voelker et al. 2019, "Legendre Memory Units"."""

    def __init__(self, inputs: int, hidden: int, order: int = 4, theta: float = 8.0) -> None:
        super().__init__(hidden, order)
        q = torch.arange(order, dtype=torch.float64)
        r, (row, column) = (2 * q + 1)[:, None] / theta, torch.meshgrid(q, q, indexing="ij")
        sign = torch.where(row < column, -1.0, (-1.0) ** (row - column + 1))
        exact = torch.linalg.matrix_exp(r * sign)
        b = torch.linalg.solve(
            r * sign, (exact - torch.eye(order).double()) @ (r * (-1.0) ** q[:, None])
        )
        self.register_buffer("a", exact.float())
        self.register_buffer("b", b.float())
        self.e_x, self.e_h = (
            nn.Parameter(torch.randn(1, inputs)),
            nn.Parameter(torch.randn(1, hidden)),
        )
        self.e_m = nn.Parameter(torch.zeros(1, order))
        self.w_x, self.w_h = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden, bias=False)
        self.w_m = nn.Parameter(torch.randn(hidden, order) * order**-0.5)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, m = state
        u = F.linear(x, self.e_x) + F.linear(h, self.e_h) + F.linear(m, self.e_m)
        m = F.linear(m, self.a) + F.linear(u, self.b)
        return torch.tanh(self.w_x(x) + self.w_h(h) + F.linear(m, self.w_m)), m


class GRUD(Cell):
    """Missing values that decay to a mean. Che et al. 2018, "GRU-D"."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden)
        self.gamma_x = nn.Parameter(torch.rand(inputs))
        self.gamma_h = nn.Linear(inputs, hidden)
        self.register_buffer("x_mean", torch.randn(inputs))
        self.z, self.r, self.n = (nn.Linear(2 * inputs + hidden, hidden) for _ in range(3))

    def forward(self, x: dict[str, Tensor], h: Tensor) -> Tensor:
        value, mask, delta = x["value"], x["mask"], x["delta"].abs()
        decay_x = torch.exp(-torch.max(torch.zeros_like(delta), self.gamma_x * delta))
        decay_h = torch.exp(-F.relu(self.gamma_h(delta)))
        value = mask * value + (1 - mask) * (decay_x * value + (1 - decay_x) * self.x_mean)
        h = decay_h * h
        seen = torch.cat((value, h, mask), 1)
        z, r = torch.sigmoid(self.z(seen)), torch.sigmoid(self.r(seen))
        n = torch.tanh(self.n(torch.cat((value, r * h, mask), 1)))
        return (1 - z) * h + z * n


class LiquidTimeConstant(Cell):
    """A few semi-implicit Euler steps of an ODE. Hasani et al. 2021, "Liquid Time-constant"."""

    def __init__(self, inputs: int, hidden: int, unfolds: int = 2) -> None:
        super().__init__(hidden)
        self.unfolds = unfolds
        self.f = nn.Linear(inputs + hidden, hidden)
        self.tau, self.a = nn.Parameter(torch.rand(hidden)), nn.Parameter(torch.randn(hidden))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        dt = 1.0 / self.unfolds
        for _ in range(self.unfolds):
            f = torch.sigmoid(self.f(torch.cat([x, h], -1)))
            h = (h + dt * f * self.a) / (1.0 + dt * (1.0 / F.softplus(self.tau) + f))
        return h


class LinearRecurrence(Cell):
    """A diagonal recurrence with a gated output. De et al. 2024, "Griffin": RG-LRU."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.a, self.x = nn.Linear(width, width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        log_a = -8.0 * torch.sigmoid(self.a(x)) * F.softplus(self.decay)
        a = torch.exp(log_a)
        h = a * h + torch.sqrt(-torch.expm1(2 * log_a)) * (torch.sigmoid(self.x(x)) * x)
        return F.gelu(h), h


class HyperGRU(Cell):
    """A small RNN scales the rows of a larger one's products. Ha et al. 2017, "HyperNetworks"."""

    def __init__(self, inputs: int, hidden: int, hyper: int) -> None:
        super().__init__(hidden, hyper)
        self.small = nn.GRUCell(inputs + hidden, hyper)
        self.scale_x, self.scale_h = nn.Linear(hyper, 3), nn.Linear(hyper, 3)
        self.ih, self.hh = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, s = state
        s = self.small(torch.cat([x, h], -1), s)
        of_x = self.ih(x).view(x.size(0), 3, -1) * self.scale_x(s).unsqueeze(-1)
        of_h = self.hh(h).view(h.size(0), 3, -1) * self.scale_h(s).unsqueeze(-1)
        r, u = torch.sigmoid(of_x[:, :2] + of_h[:, :2]).unbind(1)
        n = torch.tanh(of_x[:, 2] + r * of_h[:, 2])
        return u * h + (1 - u) * n, s


class OrderedNeuronsLSTM(Cell):
    """Gates that open from one side on. Shen et al. 2019, "Ordered Neurons"; by cumsum."""

    def __init__(self, inputs: int, hidden: int, chunk: int) -> None:
        super().__init__(hidden, hidden)
        self.chunk, self.levels = chunk, hidden // chunk
        self.ih = nn.Linear(inputs, 4 * hidden + 2 * self.levels)
        self.hh = nn.Linear(hidden, 4 * hidden + 2 * self.levels)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = (s.view(-1, self.levels, self.chunk) for s in state)
        gates = self.ih(x) + self.hh(state[0])
        forget, enter = gates[:, : 2 * self.levels].chunk(2, 1)
        forget = torch.cumsum(F.softmax(forget, -1), -1)[:, :, None]
        enter = 1 - torch.cumsum(F.softmax(enter, -1), -1)[:, :, None]
        rest = gates[:, 2 * self.levels :].view(-1, 4 * self.levels, self.chunk)
        o, n, i, f = rest.chunk(4, 1)
        o, n, i, f = o.sigmoid(), n.tanh(), i.sigmoid(), f.sigmoid()
        overlap = forget * enter
        c = (f * overlap + forget - overlap) * c + (i * overlap + enter - overlap) * n
        h = o * c.tanh()
        return h.flatten(1), c.flatten(1)


class FastWeights(nn.Module):
    """A matrix as state, written by outer products. Schlag et al. 2021, "Linear Transformers"."""

    def __init__(self, inputs: int, key: int, value: int) -> None:
        super().__init__()
        self.key, self.value = key, value
        self.project = nn.Linear(inputs, 2 * key + value + 1)

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, beta = self.project(x).split([self.key, self.key, self.value, 1], -1)
        q, k = F.softmax(q, -1), F.softmax(k, -1)
        old = torch.einsum("bvk,bk->bv", w, k)
        w = w + torch.einsum("bv,bk->bvk", torch.sigmoid(beta) * (v - old), k)
        return torch.einsum("bvk,bk->bv", w, q), w

    def initial_state(self, batch: int) -> Tensor:
        return self.project.weight.new_zeros(batch, self.value, self.key)


class ConvGRU(nn.Module):
    """States that are images. Ballas et al. 2016, "Delving deeper into convolutional networks"."""

    def __init__(self, channels: int, hidden: int, size: int) -> None:
        super().__init__()
        self.hidden, self.size = hidden, size
        self.gates = nn.Conv2d(channels + hidden, 2 * hidden, 3, padding=1)
        self.new = nn.Conv2d(channels + hidden, hidden, 3, padding=1)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        image = x.view(len(x), -1, self.size, self.size)
        r, u = torch.sigmoid(self.gates(torch.cat([image, h], 1))).chunk(2, 1)
        n = torch.tanh(self.new(torch.cat([image, r * h], 1)))
        return u * h + (1 - u) * n

    def initial_state(self, batch: int) -> Tensor:
        return self.gates.weight.new_zeros(batch, self.hidden, self.size, self.size)


class PhasedLSTM(Cell):
    """Units that open now and then. Neil et al. 2016, "Phased LSTM"."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(hidden, hidden)
        self.lstm = nn.LSTMCell(inputs, hidden)
        self.tau = nn.Parameter(torch.exp(torch.rand(hidden) * math.log(8.0)))
        self.shift = nn.Parameter(torch.rand(hidden))

    def forward(self, x: dict[str, Tensor], state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        time = x["time"].unsqueeze(-1)
        phase = torch.fmod(time.abs() + self.shift.abs(), self.tau) / self.tau
        up, down = 2 * phase / 0.5, 2 - 2 * phase / 0.5
        k = torch.where(phase < 0.25, up, torch.where(phase < 0.5, down, 0.001 * phase))
        h, c = self.lstm(x["value"], state)
        return k * h + (1 - k) * state[0], k * c + (1 - k) * state[1]
