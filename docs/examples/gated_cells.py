"""Recurrent cells with gates that people publish, in plain torch, for published_cells.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def zeros_like_weight(module: nn.Module, *shape: int) -> Tensor:
    """Zeros with dtype and device of a module's weights."""
    return next(module.parameters()).new_zeros(shape)


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
    """A GRU with one norm over all gates, the reset behind the product, and slow updates.

    r, n, u = split(norm(W [x, h])); n = tanh(sigmoid(r) n); u = sigmoid(u - 1); h' = u n + (1 - u)
    h. Hafner et al. 2021, "Mastering Atari with Discrete World Models", arXiv:2010.02193. The norm
    is the layer norm of that paper; RMSNorm, as in DreamerV3; or None, and then W has a bias.
    State: (batch, hidden_size).
    """

    def __init__(
        self, input_size: int, hidden_size: int, norm: type[nn.Module] | None = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = nn.Linear(input_size + hidden_size, 3 * hidden_size, bias=norm is None)
        self.norm = nn.Identity() if norm is None else norm(3 * hidden_size, eps=1e-3)

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


class MinimalGatedUnitCell(nn.Module):
    """A GRU with one gate, which both resets and updates.

    f = sigmoid(W_f [x, h]); n = tanh(W_in x + W_hn (f h)); h' = h + f (n - h). Zhou et al. 2016,
    "Minimal Gated Unit for Recurrent Neural Networks", arXiv:1603.09420. State: (batch,
    hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 2 * hidden_size)
        self.gate = nn.Linear(hidden_size, hidden_size, bias=False)
        self.new = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        x_f, x_n = self.ih(x).chunk(2, -1)
        f = torch.sigmoid(x_f + self.gate(h))
        return h + f * (torch.tanh(x_n + self.new(f * h)) - h)

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class SLSTMCell(nn.Module):
    """An LSTM with exponential gates, a normalizer n, and a stabilizer m of the exponents.

    m' = max(log f + m, i); c' = exp(log f + m - m') c + exp(i - m') tanh(z), n' the same of 1;
    h' = sigmoid(o) c' / n'. Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory",
    arXiv:2405.04517. State: (h, c, n, m), each (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih = nn.Linear(input_size, 4 * hidden_size)
        self.hh = nn.Linear(hidden_size, 4 * hidden_size, bias=False)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, c, n, m = state
        i, f, z, o = (self.ih(x) + self.hh(h)).chunk(4, -1)
        log_f = F.logsigmoid(f)
        m_new = torch.maximum(log_f + m, i)
        i, f = torch.exp(i - m_new), torch.exp(log_f + m - m_new)
        c = f * c + i * torch.tanh(z)
        n = f * n + i
        return torch.sigmoid(o) * c / n, c, n, m_new

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(zeros_like_weight(self, batch, self.hidden_size) for _ in range(4))


class IndRNNCell(nn.Module):
    """An RNN with one recurrent weight per unit: h' = relu(W x + u h).

    Li et al. 2018, "Independently Recurrent Neural Network (IndRNN)", arXiv:1803.04831. State:
    (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih, self.u = nn.Linear(input_size, hidden_size), nn.Parameter(torch.rand(hidden_size))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return F.relu(self.ih(x) + self.u * h)

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class BlockGRUCell(nn.Module):
    """A late-reset GRU whose state is in blocks, which see the input and themselves, by bmm.

    The block-diagonal GRU of Hafner et al. 2023, "Mastering Diverse Domains through World Models",
    arXiv:2301.04104. State: (batch, hidden_size); ``blocks`` divides hidden_size.
    """

    def __init__(self, input_size: int, hidden_size: int, blocks: int) -> None:
        super().__init__()
        self.hidden_size, self.blocks = hidden_size, blocks
        block = hidden_size // blocks
        size = (blocks, block + input_size, 3 * block)
        self.weight = nn.Parameter(torch.randn(size) * size[1] ** -0.5)
        self.bias = nn.Parameter(torch.zeros(3 * hidden_size))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        groups = h.unflatten(-1, (self.blocks, -1))
        seen = torch.cat([groups, x[:, None].expand(-1, self.blocks, -1)], -1)
        out = torch.bmm(seen.transpose(0, 1), self.weight).transpose(0, 1)
        gates = (out.flatten(1) + self.bias).unflatten(-1, (self.blocks, -1)).chunk(3, -1)
        r, n, u = (gate.flatten(1) for gate in gates)
        n = torch.tanh(torch.sigmoid(r) * n)
        u = torch.sigmoid(u - 1)
        return u * n + (1 - u) * h

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class LFADSGeneratorCell(nn.Module):
    """The GRU of LFADS: the reset before the product, a forget bias of 1, and a clipped state.

    Pandarinath et al. 2018, "Inferring single-trial neural population dynamics using sequential
    auto-encoders", Nature Methods 15. State: (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int, clip: float = 5.0) -> None:
        super().__init__()
        self.hidden_size, self.clip = hidden_size, clip
        self.x_gates = nn.Linear(input_size, 2 * hidden_size, bias=False)
        self.h_gates = nn.Linear(hidden_size, 2 * hidden_size)
        self.x_new = nn.Linear(input_size, hidden_size, bias=False)
        self.h_new = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r_x, u_x = torch.split(self.x_gates(x), split_size_or_sections=h.shape[1], dim=1)
        r_h, u_h = torch.split(self.h_gates(h), split_size_or_sections=h.shape[1], dim=1)
        r, u = torch.sigmoid(r_x + r_h), torch.sigmoid(u_x + u_h + 1.0)
        n = torch.tanh(self.x_new(x) + self.h_new(r * h))
        return torch.clamp(u * h + (1.0 - u) * n, min=-self.clip, max=self.clip)

    def initial_state(self, batch: int) -> Tensor:
        return zeros_like_weight(self, batch, self.hidden_size)


class RecurrentDropoutLSTMCell(nn.Module):
    """An LSTM with dropout of what is written into the cell state, with a new mask at each step.

    c' = f c + i dropout(tanh(g)). Semeniuta et al. 2016, "Recurrent Dropout without Memory Loss",
    arXiv:1603.05118. State: (h, c), each (batch, hidden_size).
    """

    def __init__(self, input_size: int, hidden_size: int, p: float = 0.25) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.ih, self.hh = (nn.Linear(n, 4 * hidden_size) for n in (input_size, hidden_size))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * self.dropout(torch.tanh(g))
        return torch.sigmoid(o) * torch.tanh(c), c

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        zeros = zeros_like_weight(self, batch, self.hidden_size)
        return zeros, zeros.clone()


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
