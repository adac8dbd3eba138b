"""The modules: sizes, options and named weights, declared as in torch.nn.

Constructors check what is theirs (sizes, flags, dtype). Every check of a tensor stands behind the
functional form, so that both forms refuse the same inputs with the same words.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from . import _library, functional
from .weights import FlatModule, Layout


class RNNBase(FlatModule):
    """What every recurrent module shares: checked sizes, weights, initialisation and repr.

    A cell's module names its cell in ``_cell`` and adds a ``forward``.
    """

    _cell: ClassVar[str]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        latent_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        *,
        recompute: bool,
        chunk_size: int | None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = _positive_int("input_size", input_size)
        self.hidden_size = _positive_int("hidden_size", hidden_size)
        self.latent_size = _positive_int("latent_size", latent_size)
        self.num_layers = _positive_int("num_layers", num_layers)
        self.bias = _flag("bias", bias)
        self.batch_first = _flag("batch_first", batch_first)
        self.recompute = _flag("recompute", recompute)
        self.chunk_size = None if chunk_size is None else _positive_int("chunk_size", chunk_size)
        self._make_weights(device, _dtype(dtype))
        self.reset_parameters()

    def _layout(self) -> Layout:
        layout: Layout = _library.layout(
            self._cell,
            self.input_size,
            self.hidden_size,
            self.latent_size,
            self.num_layers,
            self.bias,
        )
        return layout

    def reset_parameters(self) -> None:
        """Draws all weights anew from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        _init_uniform(self, self.hidden_size)

    def extra_repr(self) -> str:
        """Sizes, and what differs from the defaults."""
        return _repr(
            self,
            latent_size=self.hidden_size,
            num_layers=1,
            bias=True,
            batch_first=False,
            recompute=True,
            chunk_size=None,
        )


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

    The whole sequence is one operator. For backward it keeps only the states, which are the output
    itself; gates and latents are computed again.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the state and of the output.
        latent_size: Features of the latent; ``hidden_size`` if None.
        num_layers: Layers on top of each other.
        bias: False for a module without ``bias_*``.
        batch_first: True if input and output are (batch, seq_len, features). Does not change
            ``hx``, ``h_n``, ``eps``.
        recompute: False keeps the intermediates of the forward pass for backward instead of
            computing them again: more memory, less work.
        chunk_size: Time steps that are worked on at once, which bounds the workspace; chosen from
            the sizes if None. Has no influence on which noise is drawn.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    Attributes:
        weight_ih_l{k}: (3 * hidden_size, input_size), for k > 0 (3 * hidden_size, hidden_size);
            rows of r, u, n.
        weight_zh_l{k}: (3 * hidden_size, latent_size); rows of r, u, n.
        weight_hz_l{k}: (2 * latent_size, hidden_size); rows of loc, then of logvar.
        bias_ih_l{k}, bias_zh_l{k}: (3 * hidden_size,).
        bias_hz_l{k}: (2 * latent_size,).
        flat_weight: All of them as one 1-D tensor that shares their memory.

    All are drawn from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as in torch.nn.GRU. Save
    modules and state dicts with ``torch.save``, which writes the shared memory once; plain
    ``pickle`` writes it once for each weight.

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or dtype is not a torch.dtype.
        ValueError: A size is not positive, or the dtype is not supported.

    Example::

        >>> rnn = fusedrnn.StochasticGRU(12, 32, latent_size=8, num_layers=2)
        >>> output, h_n = rnn(torch.randn(50, 4, 12))
        >>> output.shape, h_n.shape
        (torch.Size([50, 4, 32]), torch.Size([2, 4, 32]))
    """

    _cell = "stochastic_gru"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        latent_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        *,
        recompute: bool = True,
        chunk_size: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            hidden_size if latent_size is None else latent_size,
            num_layers,
            bias,
            batch_first,
            recompute=recompute,
            chunk_size=chunk_size,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        eps: Tensor | None = None,
        generator: torch.Generator | None = None,
        sample: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Runs the cell over a sequence, with noise in train and in eval mode alike.

        Args:
            input: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``, or
                without a batch (seq_len, input_size).
            hx: State before the first step, (num_layers, batch, hidden_size) or without a batch
                (num_layers, hidden_size); zeros if None.
            eps: Noise to use instead of drawn noise, (num_layers, seq_len, batch, latent_size)
                whatever ``batch_first``, or (num_layers, seq_len, latent_size); differentiable.
            generator: Where the seed of the drawn noise comes from; the default generator of the
                input's device if None.
            sample: False takes the mean of the latent; neither eps nor generator may be given then.

        Returns:
            output: The state after every step of the last layer, (seq_len, batch, hidden_size),
            (batch, seq_len, hidden_size) if ``batch_first``, or (seq_len, hidden_size).

            h_n: The state after the last step of every layer, (num_layers, batch, hidden_size) or
            (num_layers, hidden_size).

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.stochastic_gru`.
        """
        return functional.stochastic_gru(
            input,
            self._weights(),
            hx,
            num_layers=self.num_layers,
            bias=self.bias,
            batch_first=self.batch_first,
            eps=eps,
            generator=generator,
            sample=sample,
            recompute=self.recompute,
            chunk_size=self.chunk_size,
        )


class StochasticGRUCell(FlatModule):
    """One step of :class:`StochasticGRU`, with the interface of torch.nn.GRUCell.

    Equations, initialisation and papers are those of :class:`StochasticGRU`. For a whole sequence
    use that module: it is faster, and keeps less for backward.

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

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or dtype is not a torch.dtype.
        ValueError: A size is not positive, or the dtype is not supported.

    Example::

        >>> cell = fusedrnn.StochasticGRUCell(12, 32)
        >>> h = torch.zeros(4, 32)
        >>> for x in torch.randn(50, 4, 12):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([4, 32])
    """

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
        super().__init__()
        self.input_size = _positive_int("input_size", input_size)
        self.hidden_size = _positive_int("hidden_size", hidden_size)
        self.latent_size = _positive_int(
            "latent_size", hidden_size if latent_size is None else latent_size
        )
        self.bias = _flag("bias", bias)
        self._make_weights(device, _dtype(dtype))
        if not bias:  # as in torch.nn.GRUCell, where the names exist in any case
            for name in ("bias_ih", "bias_zh", "bias_hz"):
                self.register_parameter(name, None)
        self.reset_parameters()

    def _layout(self) -> Layout:
        """The layout of a single layer, under names without its number."""
        layout: Layout = _library.layout(
            StochasticGRU._cell, self.input_size, self.hidden_size, self.latent_size, 1, self.bias
        )
        return [(name.removesuffix("_l0"), offset, shape) for name, offset, shape in layout]

    def reset_parameters(self) -> None:
        """Draws all weights anew from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        _init_uniform(self, self.hidden_size)

    def extra_repr(self) -> str:
        """Sizes, and what differs from the defaults."""
        return _repr(self, latent_size=self.hidden_size, bias=True)

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
            ValueError: A tensor has not the number of dimensions that it must have.
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.stochastic_gru`,
                which sees a sequence of one step: its messages speak of shapes with a leading 1.
        """
        if input.dim() not in (1, 2):
            raise ValueError(f"fusedrnn: input must have 1 or 2 dimensions, got {input.dim()}")
        for name, tensor in (("hx", hx), ("eps", eps)):
            if tensor is not None and tensor.dim() != input.dim():
                raise ValueError(
                    f"fusedrnn: {name} must have {input.dim()} dimensions, as input has, "
                    f"got {tensor.dim()}"
                )
        if input.dim() == 1:
            hx = None if hx is None else hx.unsqueeze(0)
            eps = None if eps is None else eps.unsqueeze(0)
            h = self.forward(input.unsqueeze(0), hx, eps=eps, generator=generator, sample=sample)
            return h.squeeze(0)
        _, h_n = functional.stochastic_gru(
            input.unsqueeze(0),
            self._weights(),
            None if hx is None else hx.unsqueeze(0),
            bias=self.bias,
            eps=None if eps is None else eps[None, None],
            generator=generator,
            sample=sample,
        )
        return h_n.squeeze(0)


def _positive_int(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"fusedrnn: {name} must be an int, got {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"fusedrnn: {name} must be a positive integer, got {value}")
    return value


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"fusedrnn: {name} must be a bool, got {type(value).__name__}")
    return value


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        dtype = torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"fusedrnn: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if dtype not in functional._DTYPES:
        names = ", ".join(str(d) for d in functional._DTYPES)
        raise ValueError(f"fusedrnn: dtype must be one of {names}, got {dtype}")
    return dtype


def _init_uniform(module: nn.Module, hidden_size: int) -> None:
    bound = 1 / math.sqrt(hidden_size)
    for weight in module.parameters():
        nn.init.uniform_(weight, -bound, bound)


def _repr(module: nn.Module, **defaults: object) -> str:
    parts = [str(getattr(module, name)) for name in ("input_size", "hidden_size")]
    for name, default in defaults.items():
        if getattr(module, name) != default:
            parts.append(f"{name}={getattr(module, name)}")
    return ", ".join(parts)
