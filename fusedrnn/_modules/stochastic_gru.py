"""The stochastic GRU: layers and single steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.types import Device
from typing_extensions import Unpack

from .._call import Noise, S, run
from .._options import FusedOptions, Options, check_names, documented
from ..functional import single
from .base import RNNBase, RNNCellBase, fx_node


@documented
class StochasticGRU(RNNBase):
    """A GRU whose gates see a random latent in the place of the state.

    At each step the state gives a normal distribution, and a latent is drawn from it for the
    gates::

        loc, logvar   = split(W_hz h + b_hz)
        z             = loc + eps * exp(logvar / 2),  eps ~ N(0, 1);   with sample=False, z = loc
        x_r, x_u, x_n = split(W_ih x + b_ih)
        g_r, g_u, g_n = split(W_zh z + b_zh)
        r  = sigmoid(x_r + g_r)
        u  = sigmoid(x_u + g_u)
        n  = tanh(x_n + r * g_n)
        h' = n + u * (h - n)

    The sample is reparametrised (Kingma & Welling 2014, "Auto-Encoding Variational Bayes"), so
    gradients reach ``W_hz``; the gates are those of Cho et al. 2014, "Learning Phrase
    Representations using RNN Encoder-Decoder for Statistical Machine Translation", in
    torch.nn.GRU's form; a latent inside of a recurrence is the idea of Chung et al. 2015, "A
    Recurrent Latent Variable Model for Sequential Data". With ``loc = h`` and no noise it is
    torch.nn.GRU. Layer k > 0 takes the output of layer k - 1 as its input.

    The whole sequence is one operator. For backward it saves only the states, which are the output
    itself; gates and latents are recomputed, or with little memory saved: ``recompute``.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the state, and of the output for each direction.
        latent_size: Features of the latent; ``hidden_size`` if None.
        options: See :class:`fusedrnn._options.LayerOptions`.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    Attributes:
        weight_ih_l{k}: (3 * hidden_size, input_size), for k > 0 (3 * hidden_size, D * hidden_size),
            D being the number of directions; rows of r, u, n.
        weight_zh_l{k}: (3 * hidden_size, latent_size); rows of r, u, n.
        weight_hz_l{k}: (2 * latent_size, hidden_size); rows of loc, then of logvar.
        bias_ih_l{k}, bias_zh_l{k}: (3 * hidden_size,).
        bias_hz_l{k}: (2 * latent_size,).
        weight_ih_l{k}_reverse and so on: The same for the other direction.
        flat_weight: All weights as one 1-D tensor that shares their memory.
        flat_grad: All gradients as one 1-D tensor, where they lie side by side.

    All are drawn from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as in torch.nn.GRU. Save
    modules and state dicts with ``torch.save``, which writes the shared memory once; plain
    ``pickle`` writes it once for each weight.

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or dtype is not a torch.dtype.
        ValueError: A size is not positive, or both chunk_size and workspace_bytes are given.
        RuntimeError: The dtype is not supported.

    Example::

        >>> rnn = fusedrnn.StochasticGRU(12, 32, latent_size=8, num_layers=2)
        >>> output, h_n = rnn(torch.randn(50, 4, 12))
        >>> output.shape, h_n.shape
        (torch.Size([50, 4, 32]), torch.Size([2, 4, 32]))
    """

    _cell = "stochastic_gru"
    mode = "STOCHASTIC_GRU"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        latent_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[FusedOptions],
    ) -> None:
        check_names("StochasticGRU", options)
        given = Options(
            cell="stochastic_gru",
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **options,
        )
        super().__init__(
            input_size, hidden_size, given, latent_size=latent_size, device=device, dtype=dtype
        )

    def forward(
        self,
        input: S,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        reset_to: Tensor | None = None,
        eps: Tensor | None = None,
        generator: torch.Generator | None = None,
        sample: bool = True,
    ) -> tuple[S, Tensor]:
        """Runs the cell over a sequence, with noise in train and in eval mode alike.

        Args:
            input: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``,
                without a batch (seq_len, input_size), or a PackedSequence.
            hx: State before the first step, (D * num_layers, batch, hidden_size) or without a batch
                (D * num_layers, hidden_size); zeros if None.
            lengths, reset, reset_to: As :meth:`GRU.forward`.
            eps: Noise to use instead of drawn noise, (D * num_layers, seq_len, batch, latent_size)
                whatever ``batch_first``, or (D * num_layers, seq_len, latent_size); differentiable.
            generator: Where the seed of the drawn noise comes from; the default generator of the
                input's device if None. Noise belongs to a place in the batch, in that of the sorted
                rows if ``input`` is a PackedSequence.
            sample: False takes the mean of the latent; neither eps nor generator may be given then.

        Returns:
            output: The states after every step of the last layer, (seq_len, batch, D *
            hidden_size), (batch, seq_len, D * hidden_size) if ``batch_first``, (seq_len, D *
            hidden_size), or a PackedSequence if ``input`` is one. With ``return_sequence=False``
            the last states of the last layer, (batch, D * hidden_size) or (D * hidden_size,).

            h_n: The state after the last step of every layer and direction, shaped as ``hx``.

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.stochastic_gru`.
        """
        if isinstance(input, Proxy):
            masks = {"lengths": lengths, "reset": reset, "reset_to": reset_to}
            noises = {"eps": eps, "generator": generator, "sample": sample}
            return fx_node(self, input, hx, **masks, **noises)
        noise = Noise(eps=eps, generator=generator, sample=sample)
        options, weights = self._options(), self._weights()
        output, h_n, _ = run(
            input,
            weights,
            hx,
            None,
            options,
            noise,
            lengths=lengths,
            reset=reset,
            reset_to=single(reset_to),
            flat_version=self._version_of(weights),
        )
        return output, h_n


class StochasticGRUCell(RNNCellBase):
    """One step of :class:`StochasticGRU`, with the interface of torch.nn.GRUCell.

    Equations, initialisation and papers are those of :class:`StochasticGRU`. For a whole sequence
    use that module: it is faster, and saves less for backward.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the state.
        latent_size: Features of the latent; ``hidden_size`` if None.
        bias: False for a cell whose ``bias_*`` are None.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    Attributes:
        weight_ih: (3 * hidden_size, input_size); rows of r, u, n.
        weight_zh: (3 * hidden_size, latent_size); rows of r, u, n.
        weight_hz: (2 * latent_size, hidden_size); rows of loc, then of logvar.
        bias_ih, bias_zh: (3 * hidden_size,).
        bias_hz: (2 * latent_size,).
        flat_weight: All of them as one 1-D tensor that shares their memory.
        flat_grad: All gradients as one 1-D tensor, where they lie side by side.

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or dtype is not a torch.dtype.
        ValueError: A size is not positive.
        RuntimeError: The dtype is not supported.

    Example::

        >>> cell = fusedrnn.StochasticGRUCell(12, 32)
        >>> h = torch.zeros(4, 32)
        >>> for x in torch.randn(50, 4, 12):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([4, 32])
    """

    _cell = "stochastic_gru"
    weight_ih: Tensor
    weight_zh: Tensor
    weight_hz: Tensor
    bias_ih: Tensor | None
    bias_zh: Tensor | None
    bias_hz: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        latent_size: int | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, latent_size=latent_size, device=device, dtype=dtype
        )

    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        eps: Tensor | None = None,
        generator: torch.Generator | None = None,
        sample: bool = True,
    ) -> Tensor:
        """Runs one step.

        Args:
            input: (batch, input_size), or (input_size,).
            hx: State before the step, (batch, hidden_size) or (hidden_size,); zeros if None.
            eps: Noise to use instead of drawn noise, (batch, latent_size) or (latent_size,).
            generator: Where the seed of the drawn noise comes from; the default generator of the
                input's device if None.
            sample: False takes the mean of the latent; neither eps nor generator may be given then.

        Returns:
            The state after the step, (batch, hidden_size) or (hidden_size,).

        Raises:
            ValueError, RuntimeError: A tensor has not the number of dimensions that it must have.
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.stochastic_gru`.
        """
        if isinstance(input, Proxy):
            return fx_node(self, input, hx, eps=eps, generator=generator, sample=sample)
        noise = Noise(eps=eps, generator=generator, sample=sample)
        return self._run(input, hx, noise=noise)[0]
