"""Functional forms of the recurrent layers; checks.py says what they refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .call import Noise, Options, S, run


def stochastic_gru(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    weight_dropout: float = 0.0,
    training: bool = True,
    return_sequence: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    sample: bool = True,
    recompute: bool = True,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> tuple[S, Tensor]:
    r"""Applies a stack of stochastic GRU layers; see :class:`fusedrnn.StochasticGRU`.

    Each step draws a latent from the state and updates the state from input and latent::

        loc, logvar = W_hz h + b_hz
        z = loc + eps * exp(logvar / 2)                    eps ~ N(0, 1)
        r = sigmoid(x_r + z_r)       x_r, x_u, x_n = W_ih x + b_ih
        u = sigmoid(x_u + z_u)       z_r, z_u, z_n = W_zh z + b_zh
        n = tanh(x_n + r * z_n)
        h' = n + u * (h - n)

    Only the arguments, the output and the seed are saved for backward.

    Args:
        input: (T, B, I), (B, T, I) if ``batch_first``, or (T, I) for a sequence without batch;
            float32, float64, bfloat16 or float16.
        weights: for each layer weight_ih (3H, I), weight_zh (3H, Z), weight_hz (2Z, H), and with
            ``bias`` bias_ih (3H), bias_zh (3H), bias_hz (2Z).  Layers after the first have I = H.
        hx: initial states (num_layers, B, H), or (num_layers, H) without batch.  Zeros if None.
        num_layers: number of stacked layers.
        bias: whether ``weights`` holds biases.
        batch_first: whether ``input`` and ``output`` are (B, T, ...).  Never changes hx and eps.
        bidirectional, dropout, zoneout, weight_dropout, return_sequence: see :class:`fusedrnn.GRU`.
            With D = 2 directions, weights, hx, eps and h_n have those of each layer one after the
            other, and output has 2H features.
        training: whether dropout, zoneout and weight_dropout draw anything.
        lengths, reset: see :meth:`fusedrnn.GRU.forward`.
        eps: the noise, (num_layers, T, B, Z), or (num_layers, T, Z) without batch; differentiable.
        seed: one int64 on ``input``'s device that determines eps; see ``generator``.
        generator: draws the seed if neither ``eps`` nor ``seed`` is given.  None is the default
            generator of ``input``'s device.  The same seed gives the same eps on every device and
            for every chunk size.
        sample: if False, z = loc, and no eps, seed or generator may be given.
        recompute: if False, pre-activations (4H + 2Z numbers per step and batch entry) are kept
            for backward rather than computed again: more memory, less time, and the same gradients
            up to rounding.  See :class:`fusedrnn.GRU` for when that pays.
        chunk_size: steps per chunk of workspace.  None chooses; see :class:`fusedrnn.GRU`.  Results
            are the same up to rounding.
        workspace_bytes: most bytes of workspace, in the place of ``chunk_size``; see
            :class:`fusedrnn.GRU`.
        backend: see :class:`fusedrnn.GRU`.

    Returns:
        output: (T, B, H), (B, T, H) or (T, H), the states of the last layer.
        h_n: (num_layers, B, H) or (num_layers, H), the last states of all layers.

    Raises:
        ValueError: for a wrong rank or dtype, or arguments that exclude each other.
        RuntimeError: for a wrong shape or device, an empty sequence, or ``workspace_bytes`` that
            are too few for one step.
        TypeError: for an argument of a wrong type.
    """
    checks.noise(eps, seed, generator, sample)
    noise = Noise(eps, seed, generator, sample)
    options = Options(
        num_layers,
        bias,
        batch_first,
        bidirectional,
        dropout,
        zoneout,
        weight_dropout,
        training,
        return_sequence,
        recompute,
        chunk_size,
        workspace_bytes,
        backend,
    )
    output, h_n, _ = run(
        "stochastic_gru", input, weights, hx, None, options, noise, lengths=lengths, reset=reset
    )
    return output, h_n


def gru(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    weight_dropout: float = 0.0,
    training: bool = True,
    return_sequence: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    recompute: bool = True,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> tuple[S, Tensor]:
    r"""Applies a stack of gated recurrent units, as torch.nn.GRU; see :class:`fusedrnn.GRU`.

    Args:
        weights: for each layer and direction weight_ih (3H, I), weight_hh (3H, H), and with
            ``bias`` bias_ih (3H), bias_hh (3H).  Layers after the first have I = D * H.

    The other arguments, the results and the errors are those of :func:`stochastic_gru`.
    """
    options = Options(
        num_layers,
        bias,
        batch_first,
        bidirectional,
        dropout,
        zoneout,
        weight_dropout,
        training,
        return_sequence,
        recompute,
        chunk_size,
        workspace_bytes,
        backend,
    )
    output, h_n, _ = run("gru", input, weights, hx, None, options, lengths=lengths, reset=reset)
    return output, h_n


def lstm(
    input: S,
    weights: Sequence[Tensor],
    hx: tuple[Tensor, Tensor] | None = None,
    *,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    bidirectional: bool = False,
    dropout: float = 0.0,
    zoneout: float | tuple[float, float] = 0.0,
    weight_dropout: float = 0.0,
    training: bool = True,
    return_sequence: bool = True,
    proj_size: int = 0,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    recompute: bool = True,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> tuple[S, tuple[Tensor, Tensor]]:
    r"""Applies a stack of long short-term memories, as torch.nn.LSTM; see :class:`fusedrnn.LSTM`.

    Args:
        weights: for each layer and direction weight_ih (4H, I), weight_hh (4H, P), with ``bias``
            bias_ih (4H), bias_hh (4H), and with ``proj_size`` weight_hr (P, H).  P is
            ``proj_size`` if that is not 0, and else H.  Layers after the first have I = D * P.
        hx: initial states h (num_layers * D, B, P) and cell states c (num_layers * D, B, H), both
            without their B for input without batch.  Zeros if None.
        proj_size: features of h if they are projected, or 0.

    Returns:
        output: (T, B, D * P), (B, T, D * P) or (T, D * P), the states h of the last layer.
        (h_n, c_n): the last states and cell states of all layers, shaped as ``hx``.

    The other arguments and the errors are those of :func:`stochastic_gru`.
    """
    checks.proj_size(proj_size)
    h_0, c_0 = split_lstm_state(hx)
    options = Options(
        num_layers,
        bias,
        batch_first,
        bidirectional,
        dropout,
        zoneout,
        weight_dropout,
        training,
        return_sequence,
        recompute,
        chunk_size,
        workspace_bytes,
        backend,
        proj_size,
    )
    cell = "projected_lstm" if proj_size else "lstm"
    output, h_n, c_n = run(cell, input, weights, h_0, c_0, options, lengths=lengths, reset=reset)
    assert c_n is not None
    return output, (h_n, c_n)


def split_lstm_state(hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """(h_0, c_0), both None for none.

    Raises:
        TypeError: ``hx`` is not a pair of tensors.
    """
    if hx is None:
        return None, None
    if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
        got = type(hx).__name__
        if isinstance(hx, tuple | list):
            got += f" of {', '.join(type(t).__name__ for t in hx[:9])}"
        raise TypeError(f"fusedrnn: hx must be a pair of tensors (h_0, c_0), got {got}")
    h_0, c_0 = hx
    return h_0, c_0
