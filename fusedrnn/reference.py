"""The cells in plain torch: what the kernels compute, written to be read.

This is the loop that one writes by hand, a few operators per step, with its gradient from autograd.
It runs in every dtype and on every device, and is the oracle of the tests and the baseline of the
benchmarks. It keeps every intermediate for backward, which the kernels do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10, a random function from a counter and a key to four words.

    Words are 32-bit unsigned numbers held in int64. Source: Salmon et al. 2011, "Parallel Random
    Numbers: As Easy as 1, 2, 3".

    Args:
        counter: int64 (..., 4), each in [0, 2**32).
        key: int64 (..., 2), each in [0, 2**32); leading dimensions broadcast with the counter's.

    Returns:
        int64 (..., 4), each in [0, 2**32).

    Example::

        >>> counter, key = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        >>> [hex(word) for word in philox4x32(counter, key).tolist()]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        high0, low0 = _wide_product(0xD2511F53, c0)
        high1, low1 = _wide_product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3], -1)


def _wide_product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 64-bit product, by halves of ``b``: int64 has a sign."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def philox_normal(
    seed: Tensor | int,
    seq_len: int,
    batch: int,
    latent_size: int,
    layer: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The standard normal noise that the kernels draw for one layer.

    Each number depends on the seed and on its own place (t, b, z, layer) only, so neither the
    device nor the way work is split changes a sample. Philox with counter ``(t, b, z // 4, layer)``
    and the two halves of the seed as key, low half first, gives the words w0..w3. The pair (w0, w1)
    gives the normals z % 4 = 0 and 1, (w2, w3) gives 2 and 3, by the transform of Box and Muller
    1958::

        radius = sqrt(-2 log u),  u = (floor(w / 2) + 1/2) / 2**31            of the first word
        angle  = pi * v / 2**31,  v = the word read as a signed number        of the second word
        normals: radius * cos(angle), radius * sin(angle)

    Args:
        seed: int64 tensor with one element, or a number in [-2**63, 2**63).
        seq_len, batch, latent_size: Sizes of the result.
        layer: Index of the layer.
        dtype: Dtype of the result; computed in float64.

    Returns:
        (seq_len, batch, latent_size), on the seed's device.

    Example::

        >>> philox_normal(7, seq_len=5, batch=3, latent_size=8).shape
        torch.Size([5, 3, 8])
    """
    seed = torch.as_tensor(seed, dtype=torch.int64).reshape(())
    key = torch.stack([seed & _WORD, (seed >> 32) & _WORD])
    groups = (latent_size + 3) // 4
    t, b, group = torch.meshgrid(
        *(torch.arange(n, device=seed.device) for n in (seq_len, batch, groups)), indexing="ij"
    )
    words = philox4x32(torch.stack([t, b, group, torch.full_like(t, layer)], -1), key)

    first, second = words[..., 0::2], words[..., 1::2]  # (T, B, groups, 2): the two pairs
    radius = torch.sqrt(-2 * torch.log(((first >> 1).double() + 0.5) * 2.0**-31))
    signed = torch.where(second < 2**31, second, second - 2**32)
    angle = signed.double() * (math.pi * 2.0**-31)
    normals = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return normals.reshape(seq_len, batch, groups * 4)[..., :latent_size].to(dtype)


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
    x_r, x_u, x_n = F.linear(input, weight_ih, bias_ih).chunk(3, -1)
    g_r, g_u, g_n = F.linear(z, weight_zh, bias_zh).chunk(3, -1)
    r = torch.sigmoid(x_r + g_r)
    u = torch.sigmoid(x_u + g_u)
    n = torch.tanh(x_n + r * g_n)
    return n + u * (h - n)


def stochastic_gru(
    input: Tensor,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    eps: Tensor | None = None,
    seed: Tensor | int | None = None,
    sample: bool = True,
) -> tuple[Tensor, Tensor]:
    """The twin of ``fusedrnn.stochastic_gru``: a loop over layers and steps.

    Args:
        input: (seq_len, batch, input_size), or (batch, seq_len, input_size) if ``batch_first``.
        weights: Per layer weight_ih, weight_zh, weight_hz and, if ``bias``, bias_ih, bias_zh,
            bias_hz.
        hx: (num_layers, batch, hidden_size); None for zeros.
        num_layers, bias, batch_first: As in the module.
        eps: (num_layers, seq_len, batch, latent_size) whatever ``batch_first``, the noise to use.
        seed: The seed of :func:`philox_normal`, used if ``eps`` is None. Without both, each step
            draws from torch's generator, as a loop written by hand does.
        sample: False takes the mean of the latent, without noise; ``eps`` and ``seed`` are then not
            used.

    Returns:
        output: (seq_len, batch, hidden_size), or (batch, seq_len, hidden_size) if ``batch_first``.
        h_n: (num_layers, batch, hidden_size).

    Example::

        >>> rnn = fusedrnn.StochasticGRU(4, 3)
        >>> output, h_n = stochastic_gru(torch.randn(7, 2, 4), list(rnn.parameters()))
        >>> output.shape, h_n.shape
        (torch.Size([7, 2, 3]), torch.Size([1, 2, 3]))
    """
    per_layer = 6 if bias else 3
    if len(weights) != num_layers * per_layer:
        raise ValueError(
            f"fusedrnn: weights must hold {num_layers * per_layer} tensors, got {len(weights)}"
        )
    x = input.transpose(0, 1) if batch_first else input
    seq_len, batch, _ = x.shape
    latent_size, hidden_size = weights[2].shape[0] // 2, weights[2].shape[1]
    if hx is None:
        hx = input.new_zeros(num_layers, batch, hidden_size)

    h_n = []
    for layer in range(num_layers):
        w_ih, w_zh, w_hz, *biases = weights[layer * per_layer : (layer + 1) * per_layer]
        b_ih, b_zh, b_hz = biases if bias else (None, None, None)
        noise = eps[layer] if eps is not None else None
        if noise is None and seed is not None:
            noise = philox_normal(seed, seq_len, batch, latent_size, layer, x.dtype).to(x.device)
        h = hx[layer]
        outputs = []
        for t in range(seq_len):
            eps_t = None
            if sample and noise is not None:
                eps_t = noise[t]
            elif sample:
                eps_t = torch.randn(batch, latent_size, dtype=x.dtype, device=x.device)
            h = stochastic_gru_step(x[t], h, w_ih, w_zh, w_hz, b_ih, b_zh, b_hz, eps_t)
            outputs.append(h)
        x = torch.stack(outputs)
        h_n.append(h)
    return x.transpose(0, 1) if batch_first else x, torch.stack(h_n)
