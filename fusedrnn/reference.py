"""The cells in plain torch: what the kernels compute, written to be read.

This is the loop that one writes by hand, a few operators per step, with its gradient from autograd.
It runs in every dtype and on every device, and is the oracle of the tests and the baseline of the
benchmarks. It keeps every intermediate for backward, which the kernels do not.

Longer than 350 lines, because it is the definition of every cell and option, to be read from top
to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._philox import CELL_ZONEOUT, DROPOUT, ZONEOUT, mask_of
from ._philox import philox4x32 as philox4x32
from ._philox import philox_normal as philox_normal

States = tuple[Tensor, ...]  # h, and of an LSTM c
# input, states, weights in the module's order, eps or None -> states
Step = Callable[[Tensor, States, Sequence[Tensor], Tensor | None], States]


def gru_step(
    input: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Tensor:
    """One step of one layer, by the equations of :class:`fusedrnn.GRU`.

    Args:
        input: (batch, input_size).
        h: (batch, hidden_size), the state before the step.
        weight_ih, weight_hh: (3 * hidden_size, input_size) and (3 * hidden_size, hidden_size).
        bias_ih, bias_hh: (3 * hidden_size,), or None.

    Returns:
        (batch, hidden_size), the state after the step.

    Example::

        >>> gru_step(torch.ones(5, 4), torch.zeros(5, 3), torch.ones(9, 4), torch.ones(9, 3)).shape
        torch.Size([5, 3])
    """
    return _gates(F.linear(input, weight_ih, bias_ih), F.linear(h, weight_hh, bias_hh), h)


def _gates(input_gates: Tensor, hidden_gates: Tensor, h: Tensor) -> Tensor:
    """The state after a GRU's step, from the projections of its input and of its state."""
    x_r, x_u, x_n = input_gates.chunk(3, -1)
    g_r, g_u, g_n = hidden_gates.chunk(3, -1)
    r = torch.sigmoid(x_r + g_r)
    u = torch.sigmoid(x_u + g_u)
    n = torch.tanh(x_n + r * g_n)
    return n + u * (h - n)


def lstm_step(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    weight_hr: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of one layer, by the equations of :class:`fusedrnn.LSTM`.

    Args:
        input: (batch, input_size).
        h, c: (batch, P) and (batch, hidden_size), the state before the step.
        weight_ih, weight_hh: (4 * hidden_size, input_size) and (4 * hidden_size, P).
        bias_ih, bias_hh: (4 * hidden_size,), or None.
        weight_hr: (P, hidden_size), or None: P is then hidden_size.

    Returns:
        h, c after the step, shaped as before.

    Example::

        >>> h = c = torch.zeros(5, 3)
        >>> h, c = lstm_step(torch.ones(5, 4), h, c, torch.ones(12, 4), torch.ones(12, 3))
        >>> h.shape, c.shape
        (torch.Size([5, 3]), torch.Size([5, 3]))
    """
    gates = F.linear(input, weight_ih, bias_ih) + F.linear(h, weight_hh, bias_hh)
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h if weight_hr is None else F.linear(h, weight_hr), c


def stochastic_gru_step(
    input: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_zh: Tensor,
    weight_hz: Tensor,
    bias_ih: Tensor | None = None,
    bias_zh: Tensor | None = None,
    bias_hz: Tensor | None = None,
    eps: Tensor | None = None,
) -> Tensor:
    """One step of one layer, by the equations of :class:`fusedrnn.StochasticGRU`.

    Args:
        input: (batch, input_size).
        h: (batch, hidden_size), the state before the step.
        weight_ih, weight_zh, weight_hz: (3 * hidden_size, input_size), (3 * hidden_size,
            latent_size) and (2 * latent_size, hidden_size).
        bias_ih, bias_zh, bias_hz: (3 * hidden_size,), (3 * hidden_size,) and (2 * latent_size,), or
            None.
        eps: (batch, latent_size), standard normal noise; None takes the mean of the latent, without
            noise.

    Returns:
        (batch, hidden_size), the state after the step.

    Example::

        >>> shapes = (9, 4), (9, 2), (4, 3)
        >>> stochastic_gru_step(torch.ones(5, 4), torch.zeros(5, 3), *map(torch.ones, shapes)).shape
        torch.Size([5, 3])
    """
    loc, logvar = F.linear(h, weight_hz, bias_hz).chunk(2, -1)
    z = loc if eps is None else loc + eps * torch.exp(0.5 * logvar)
    return _gates(F.linear(input, weight_ih, bias_ih), F.linear(z, weight_zh, bias_zh), h)


def gru(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    mask_seed: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin of ``fusedrnn.gru``: a loop over layers, directions and steps.

    Args:
        input: (seq_len, batch, input_size), or (batch, seq_len, input_size) if ``batch_first``.
        weights: For each layer and direction weight_ih, weight_hh and, if ``bias``, bias_ih,
            bias_hh.
        hx: (num_layers * D, batch, hidden_size) with D directions; None for zeros.
        num_layers, bias, batch_first, bidirectional: As in the module.
        lengths: (batch,), steps of each row; None for all of them.
        reset: bool (seq_len, batch), or (batch, seq_len) if ``batch_first``: where the state is
            zeroed before the step.
        dropout: Probability with which an element of the input of layers after the first is zeroed.
        zoneout: Probability with which a unit keeps its state through a step.
        mask_seed: The seed that masks of dropout and zoneout are drawn from, as the kernels draw
            them. None is evaluation: no dropout, and of zoneout the expectation.

    Returns:
        output: (seq_len, batch, D * hidden_size), or (batch, seq_len, D * hidden_size) if
        ``batch_first``; zero from a row's length on.
        h_n: (num_layers * D, batch, hidden_size).

    Example::

        >>> rnn = fusedrnn.GRU(4, 3)
        >>> output, h_n = gru(torch.randn(7, 2, 4), list(rnn.parameters()))
        >>> output.shape, h_n.shape
        (torch.Size([7, 2, 3]), torch.Size([1, 2, 3]))
    """

    def step(x: Tensor, states: States, w: Sequence[Tensor], eps: Tensor | None) -> States:
        return (gru_step(x, *states, *w),)

    sizes = _Sizes(num_layers, bias, batch_first, bidirectional)
    per_row, widths = 4 if bias else 2, (weights[1].shape[1],)
    masks = _Masks(dropout, (zoneout,), mask_seed)
    output, (h_n,) = _loop(
        step, per_row, widths, sizes, masks, input, weights, (hx,), lengths, reset
    )
    return output, h_n


def lstm(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: tuple[Tensor, Tensor] | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    proj_size: int = 0,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0,
    mask_seed: Tensor | int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The twin of ``fusedrnn.lstm``: a loop over layers, directions and steps.

    Args:
        weights: For each layer and direction weight_ih, weight_hh, if ``bias`` bias_ih, bias_hh,
            and with ``proj_size`` weight_hr.
        hx: h (num_layers * D, batch, P) and c (num_layers * D, batch, hidden_size) before the first
            step; None for zeros.
        proj_size: P, the features of h, if it is projected, or 0: P is then hidden_size.
        zoneout: As for :func:`gru`, or a pair, of h and of c.
        input, num_layers, bias, batch_first, bidirectional, lengths, reset, dropout, mask_seed: As
            for :func:`gru`.

    Returns:
        output: As :func:`gru`.
        (h_n, c_n): (num_layers * D, batch, P) and (num_layers * D, batch, hidden_size).

    Example::

        >>> rnn = fusedrnn.LSTM(4, 3)
        >>> output, (h_n, c_n) = lstm(torch.randn(7, 2, 4), list(rnn.parameters()))
        >>> output.shape, h_n.shape, c_n.shape
        (torch.Size([7, 2, 3]), torch.Size([1, 2, 3]), torch.Size([1, 2, 3]))
    """

    def step(x: Tensor, states: States, w: Sequence[Tensor], eps: Tensor | None) -> States:
        biases = w[2:4] if bias else (None, None)
        return lstm_step(x, *states, *w[:2], *biases, *w[-1:] if proj_size else ())

    hidden_size = weights[0].shape[0] // 4
    widths = (proj_size or hidden_size, hidden_size)
    sizes = _Sizes(num_layers, bias, batch_first, bidirectional)
    states = (None, None) if hx is None else hx
    per_row = (4 if bias else 2) + (1 if proj_size else 0)
    pair = zoneout if isinstance(zoneout, tuple) else (zoneout, zoneout)
    masks = _Masks(dropout, pair, mask_seed)
    output, (h_n, c_n) = _loop(
        step, per_row, widths, sizes, masks, input, weights, states, lengths, reset
    )
    return output, (h_n, c_n)


def stochastic_gru(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    eps: Tensor | None = None,
    seed: Tensor | int | None = None,
    sample: bool = True,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    mask_seed: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin of ``fusedrnn.stochastic_gru``: a loop over layers, directions and steps.

    Args:
        weights: For each layer and direction weight_ih, weight_zh, weight_hz and, if ``bias``,
            bias_ih, bias_zh, bias_hz.
        eps: (num_layers * D, seq_len, batch, latent_size) whatever ``batch_first``, the noise to
            use; like ``input`` in the order of time for both directions.
        seed: The seed of :func:`philox_normal`, used if ``eps`` is None. Without both, each step
            draws from torch's generator, as a loop written by hand does.
        sample: False takes the mean of the latent, without noise; ``eps`` and ``seed`` are then not
            used.
        input, hx, num_layers, bias, batch_first, bidirectional, lengths, reset, dropout, zoneout,
            mask_seed: As for :func:`gru`.

    Returns:
        As :func:`gru`.

    Example::

        >>> rnn = fusedrnn.StochasticGRU(4, 3)
        >>> output, h_n = stochastic_gru(torch.randn(7, 2, 4), list(rnn.parameters()))
        >>> output.shape, h_n.shape
        (torch.Size([7, 2, 3]), torch.Size([1, 2, 3]))
    """
    latent_size = weights[2].shape[0] // 2
    batch, seq_len = input.shape[:2] if batch_first else (input.shape[1], input.shape[0])

    def step(x: Tensor, states: States, w: Sequence[Tensor], eps: Tensor | None) -> States:
        if sample and eps is None:
            eps = torch.randn(batch, latent_size, dtype=x.dtype, device=x.device)
        return (stochastic_gru_step(x, *states, *w, eps=eps),)  # type: ignore[misc]

    def noise(layer: int) -> Tensor | None:
        if not sample or (eps is None and seed is None):
            return None
        if eps is not None:
            return eps[layer]
        assert seed is not None
        drawn = philox_normal(seed, seq_len, batch, latent_size, layer, input.dtype)
        return drawn.to(input.device)

    sizes = _Sizes(num_layers, bias, batch_first, bidirectional)
    per_row, widths = 6 if bias else 3, (weights[2].shape[1],)
    masks = _Masks(dropout, (zoneout,), mask_seed)
    output, (h_n,) = _loop(
        step, per_row, widths, sizes, masks, input, weights, (hx,), lengths, reset, noise
    )
    return output, h_n


class _Masks(NamedTuple):
    dropout: float
    zoneout: tuple[float, ...]  # of each state
    seed: Tensor | int | None


class _Sizes(NamedTuple):
    num_layers: int
    bias: bool
    batch_first: bool
    bidirectional: bool


def _loop(
    step: Step,
    per_row: int,
    widths: Sequence[int],
    sizes: _Sizes,
    masks: _Masks,
    input: Tensor,
    weights: Sequence[Tensor],
    states: Sequence[Tensor | None],
    lengths: Tensor | Sequence[int] | None,
    reset: Tensor | None,
    noise: Callable[[int], Tensor | None] = lambda layer: None,
) -> tuple[Tensor, States]:
    """Any cell over layers, directions and steps -> output, last states.

    ``per_row``: weights of a layer and direction. ``widths``: of the states.
    """
    num_layers, _, batch_first, bidirectional = sizes
    directions = 2 if bidirectional else 1
    rows = num_layers * directions
    if len(weights) != rows * per_row:
        raise ValueError(
            f"fusedrnn: weights must hold {rows * per_row} tensors, got {len(weights)}"
        )
    x = input.transpose(0, 1) if batch_first else input
    if reset is not None and batch_first:
        reset = reset.transpose(0, 1)
    seq_len, batch, _ = x.shape
    initial = [
        input.new_zeros(rows, batch, width) if s is None else s
        for s, width in zip(states, widths, strict=True)
    ]
    active = None  # (seq_len, batch, 1): whether a row takes the step
    if lengths is not None:
        ends = torch.as_tensor(lengths, device=x.device)
        active = (torch.arange(seq_len, device=x.device)[:, None] < ends)[..., None]
        x = x.masked_fill(~active, 0)  # values there have no gradient, even if they are NaN

    last = []
    for layer in range(num_layers):
        if layer > 0 and masks.dropout > 0 and masks.seed is not None:
            stream = layer * directions | DROPOUT
            dropped = mask_of(masks.dropout, masks.seed, seq_len, batch, x.shape[-1], stream)
            x = x * (1 / (1 - masks.dropout) if masks.dropout < 1 else 0.0)
            x = x.masked_fill(dropped.to(x.device), 0)
        outputs = []
        for direction in range(directions):
            row = layer * directions + direction
            w = weights[row * per_row : (row + 1) * per_row]
            eps = noise(row)
            if eps is not None and active is not None:
                eps = eps.masked_fill(~active, 0)
            kept = [
                p
                if p == 0 or masks.seed is None
                else mask_of(p, masks.seed, seq_len, batch, width, row | bits).to(x.device)
                for p, width, bits in zip(
                    masks.zoneout, widths, (ZONEOUT, CELL_ZONEOUT), strict=False
                )
            ]
            now: States = tuple(s[row] for s in initial)
            output = [now[0]] * seq_len
            for t in range(seq_len) if direction == 0 else reversed(range(seq_len)):
                before = now
                if reset is not None:
                    now = tuple(s.masked_fill(reset[t][:, None], 0) for s in now)
                new = step(x[t], now, w, None if eps is None else eps[t])
                now = tuple(
                    zoned(k[t] if isinstance(k, Tensor) else k, a, b)
                    for k, a, b in zip(kept, now, new, strict=True)
                )
                output[t] = now[0]
                if active is not None:
                    output[t] = now[0].masked_fill(~active[t], 0)
                    now = tuple(
                        torch.where(active[t], a, b) for a, b in zip(now, before, strict=True)
                    )
            outputs.append(torch.stack(output))
            last.append(now)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    last_states = tuple(torch.stack(s) for s in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, last_states


def zoned(kept: Tensor | float, old: Any, new: Any) -> Any:
    """Zoneout: the old state where it is kept, or the average by a probability."""
    if isinstance(kept, Tensor):
        return torch.where(kept, old, new)
    if kept in (0, 1):
        return old if kept == 1 else new
    return kept * old + (1 - kept) * new
