"""The random numbers that the kernels draw, in plain torch: words, normals and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
# Bits of the noise stream that tell masks from a layer's noise, as in csrc/step/step.h.
ZONEOUT, CELL_ZONEOUT, DROPOUT = 2 << 29, 3 << 29, 4 << 29


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
    first_step: int = 0,
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
        layer: Index of the layer, and with two directions layer * 2 + direction.
        dtype: Dtype of the result; computed in float64.
        first_step: t of the first step, if these steps are a part of a longer sequence.

    Returns:
        (seq_len, batch, latent_size), on the seed's device.

    Example::

        >>> philox_normal(7, seq_len=5, batch=3, latent_size=8).shape
        torch.Size([5, 3, 8])
    """
    words = _words(seed, seq_len, batch, latent_size, layer, first_step)
    first, second = words[..., 0::2], words[..., 1::2]  # (T, B, groups, 2): the two pairs
    radius = torch.sqrt(-2 * torch.log(((first >> 1).double() + 0.5) * 2.0**-31))
    signed = torch.where(second < 2**31, second, second - 2**32)
    angle = signed.double() * (math.pi * 2.0**-31)
    normals = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return normals.reshape(seq_len, batch, words.shape[2] * 4)[..., :latent_size].to(dtype)


def mask_of(
    probability: float,
    seed: Tensor | int,
    seq_len: int,
    batch: int,
    width: int,
    stream: int,
    first_step: int = 0,
) -> Tensor:
    """The mask that the kernels draw: bool (seq_len, batch, width), true with ``probability``.

    An element is true if its word, Philox with counter ``(t, b, column // 4, stream)``, is less
    than ``probability * 2**32``.

    Args:
        seed: As for :func:`philox_normal`.
        stream: The noise stream of the layer and direction, with the bits of ``ZONEOUT``,
            ``CELL_ZONEOUT`` or ``DROPOUT``.
        first_step: t of the first step, if these steps are a part of a longer sequence.
    """
    words = _words(seed, seq_len, batch, width, stream, first_step)
    return words.flatten(-2)[..., :width] < int(probability * 2.0**32)


def _words(
    seed: Tensor | int, seq_len: int, batch: int, width: int, stream: int, first_step: int
) -> Tensor:
    """The words of steps, rows and groups of four columns: (T, B, groups, 4)."""
    seed = torch.as_tensor(seed, dtype=torch.int64).reshape(())
    key = torch.stack([seed & _WORD, (seed >> 32) & _WORD])
    t, b, group = torch.meshgrid(
        *(torch.arange(n, device=seed.device) for n in (seq_len, batch, (width + 3) // 4)),
        indexing="ij",
    )
    t = (t + first_step) & _WORD
    return philox4x32(torch.stack([t, b, group, torch.full_like(t, stream & _WORD)], -1), key)
