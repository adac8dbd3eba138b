"""Functional forms of the recurrent layers: the modules without their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._call import Noise, S, run
from ._options import LayerOptions, Options, check_names, documented


@documented
def stochastic_gru(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    training: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    reset_to: Tensor | None = None,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    sample: bool = True,
    **options: Unpack[LayerOptions],
) -> tuple[S, Tensor]:
    """Stochastic GRU layers over a sequence; :class:`fusedrnn.StochasticGRU` has the equations.

    Args:
        input: (T, B, I), (B, T, I) if ``batch_first``, (T, I) for a sequence without batch, or a
            PackedSequence; float32, float64, bfloat16 or float16.
        weights: Of each layer, and of each direction in it: weight_ih (3H, I), weight_zh (3H, Z),
            weight_hz (2Z, H), and with ``bias`` bias_ih (3H), bias_zh (3H), bias_hz (2Z). Layers
            after the first have I = D * H, D being the number of directions.
        hx: Initial states (num_layers * D, B, H), or (num_layers * D, H) without batch; zeros if
            None.
        training: Whether dropout, zoneout and weight_dropout draw anything.
        lengths, reset, reset_to: As in :meth:`fusedrnn.GRU.forward`.
        eps: The noise, (num_layers * D, T, B, Z), or (num_layers * D, T, Z) without batch;
            differentiable.
        seed: One int64 on the device of ``input`` that eps is drawn from. The same seed gives the
            same eps on every device and for every chunk size.
        generator: Draws the seed if neither ``eps`` nor ``seed`` is given; the default generator of
            the device of ``input`` if None.
        sample: False takes z = loc; then eps, seed and generator must not be given.
        options: See :class:`fusedrnn._options.LayerOptions`.

    Returns:
        output: (T, B, D * H), (B, T, D * H), (T, D * H) or a PackedSequence, the states of the last
        layer. With ``return_sequence=False`` its last states, (B, D * H) or (D * H,).

        h_n: The last states of all layers, in the shape of ``hx``.

    Raises:
        ValueError: A rank or a dtype is wrong, or arguments exclude each other.
        RuntimeError: A shape or a device is wrong, the sequence is empty, or ``workspace_bytes``
            are too few for one step.
        TypeError: An argument has a wrong type.
    """
    check_names("stochastic_gru", options)
    noise = Noise(eps=eps, seed=seed, generator=generator, sample=sample)
    given = Options(cell="stochastic_gru", training=training, **options)
    output, h_n, _ = run(
        input,
        weights,
        hx,
        None,
        given,
        noise,
        lengths=lengths,
        reset=reset,
        reset_to=single(reset_to),
    )
    return output, h_n


@documented
def gru(
    input: S,
    weights: Sequence[Tensor],
    hx: Tensor | None = None,
    *,
    training: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    reset_to: Tensor | None = None,
    **options: Unpack[LayerOptions],
) -> tuple[S, Tensor]:
    """Gated recurrent units over a sequence; :class:`fusedrnn.GRU` has the equations.

    Args:
        weights: Of each layer, and of each direction in it: weight_ih (3H, I), weight_hh (3H, H),
            and with ``bias`` bias_ih (3H), bias_hh (3H). Layers after the first have I = D * H.
        input, hx, training, lengths, reset, reset_to: As in :func:`stochastic_gru`.
        options: See :class:`fusedrnn._options.LayerOptions`.

    Returns, Raises:
        As :func:`stochastic_gru`.
    """
    check_names("gru", options)
    given = Options(cell="gru", training=training, **options)
    output, h_n, _ = run(
        input, weights, hx, None, given, lengths=lengths, reset=reset, reset_to=single(reset_to)
    )
    return output, h_n


@documented
def lstm(
    input: S,
    weights: Sequence[Tensor],
    hx: tuple[Tensor, Tensor] | None = None,
    *,
    proj_size: int = 0,
    training: bool = True,
    lengths: Tensor | Sequence[int] | None = None,
    reset: Tensor | None = None,
    reset_to: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[LayerOptions],
) -> tuple[S, tuple[Tensor, Tensor]]:
    """Long short-term memories over a sequence; :class:`fusedrnn.LSTM` has the equations.

    Args:
        weights: Of each layer, and of each direction in it: weight_ih (4H, I), weight_hh (4H, P),
            with ``bias`` bias_ih (4H), bias_hh (4H), and with ``proj_size`` weight_hr (P, H). P is
            ``proj_size`` if that is not 0, and else H. Layers after the first have I = D * P.
        hx: Initial states h (num_layers * D, B, P) and cell states c (num_layers * D, B, H), both
            without their B if ``input`` has no batch; zeros if None.
        proj_size: Features of h if it is projected, or 0.
        input, training, lengths, reset: As in :func:`stochastic_gru`.
        reset_to: As there, a pair for h and c.
        options: See :class:`fusedrnn._options.LayerOptions`.

    Returns:
        output: (T, B, D * P), (B, T, D * P), (T, D * P) or a PackedSequence, the states h of the
        last layer. With ``return_sequence=False`` its last states, (B, D * P) or (D * P,).

        (h_n, c_n): The last states and cell states of all layers, in the shapes of ``hx``.

    Raises:
        As :func:`stochastic_gru`.
    """
    check_names("lstm", options)
    h_0, c_0 = split_lstm_state(hx)
    given = Options(cell="lstm", proj_size=proj_size, training=training, **options)
    to = None if reset_to is None else split_lstm_state(reset_to, "reset_to", "(h, c)")
    output, h_n, c_n = run(
        input, weights, h_0, c_0, given, lengths=lengths, reset=reset, reset_to=to
    )
    assert c_n is not None
    return output, (h_n, c_n)


def single(reset_to: Tensor | None) -> tuple[Tensor, None] | None:
    """What the state of a cell without cell state becomes at resets, as calls take it."""
    return None if reset_to is None else (reset_to, None)


def split_lstm_state(
    hx: tuple[Tensor, Tensor] | None, name: str = "hx", parts: str = "(h_0, c_0)"
) -> tuple[Tensor | None, Tensor | None]:
    """(h_0, c_0), both None if there are no initial states.

    Raises:
        TypeError: ``hx`` is not a pair of tensors.
    """
    if hx is None:
        return None, None
    if type(hx) is tuple and len(hx) == 2 and type(hx[0]) is type(hx[1]) is Tensor:
        return hx  # the usual case, in little time
    if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
        got = type(hx).__name__
        if isinstance(hx, tuple | list):
            got += f" of {', '.join(type(t).__name__ for t in hx[:9])}"
        raise TypeError(f"fusedrnn: {name} must be a pair of tensors {parts}, got {got}")
    h_0, c_0 = hx
    return h_0, c_0
