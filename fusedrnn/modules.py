"""The modules: sizes, options and named weights, declared as in torch.nn.

Every check stands in checks.py, and those of tensors behind the functional form, so that both forms
refuse the same with the same words.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from . import _library, checks, functional
from .call import NO_NOISE, Noise, Options, S, run
from .weights import FlatModule, Layout


class RNNBase(FlatModule):
    """What every recurrent module shares: checked options, weights, initialisation and repr.

    A cell's module names its cell in ``_cell`` and adds a ``forward``.
    """

    _cell: ClassVar[str]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        *,
        latent_size: int | None = None,
        proj_size: int = 0,
        zoneout: float | tuple[float, float],
        weight_dropout: float,
        return_sequence: bool,
        recompute: bool,
        chunk_size: int | None,
        workspace_bytes: int | None,
        backend: str,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = checks.positive_int("input_size", input_size)
        self.hidden_size = checks.positive_int("hidden_size", hidden_size)
        if latent_size is not None:
            self.latent_size = checks.positive_int("latent_size", latent_size)
        self.proj_size = checks.proj_size(proj_size, hidden_size)
        checks.zoneout(zoneout, has_state=self._cell == "lstm")
        self.zoneout = zoneout
        self.weight_dropout = checks.probability("weight_dropout", weight_dropout)
        self.return_sequence = checks.flag("return_sequence", return_sequence)
        self.num_layers = checks.num_layers(num_layers)
        self.bias = checks.flag("bias", bias)
        self.batch_first = checks.flag("batch_first", batch_first)
        self.dropout = checks.probability("dropout", dropout)
        self.bidirectional = checks.flag("bidirectional", bidirectional)
        self.recompute = checks.flag("recompute", recompute)
        checks.chunks(chunk_size, workspace_bytes)
        self.chunk_size = chunk_size
        self.workspace_bytes = workspace_bytes
        checks.backend(backend)
        self.backend = backend
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"fusedrnn: dropout={dropout} stands between layers, so with num_layers=1 it does "
                "nothing",
                stacklevel=3,
            )
        checks.device(device)
        self._make_weights(device, checks.dtype(dtype))
        self.reset_parameters()

    @property
    def _table_name(self) -> str:
        """The cell's in csrc/layout.h."""
        return "projected_lstm" if self.proj_size else self._cell

    def _layout(self) -> Layout:
        layout: Layout = _library.layout(
            self._table_name,
            self.input_size,
            self.hidden_size,
            getattr(self, "latent_size", 0),
            self.proj_size or self.hidden_size,
            self.num_layers,
            2 if self.bidirectional else 1,
            self.bias,
        )
        return layout

    def _options(self) -> Options:
        return Options(
            self.num_layers,
            self.bias,
            self.batch_first,
            self.bidirectional,
            self.dropout,
            self.zoneout,
            self.weight_dropout,
            self.training,
            self.return_sequence,
            self.recompute,
            self.chunk_size,
            self.workspace_bytes,
            self.backend,
            self.proj_size,
        )

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, in a list of their own, as in torch.nn."""
        weights = self._weights()
        size = len(weights) // (self.num_layers * (2 if self.bidirectional else 1))
        return [weights[i : i + size] for i in range(0, len(weights), size)]

    def reset_parameters(self) -> None:
        """Draws all weights anew from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        _init_uniform(self, self.hidden_size)

    def extra_repr(self) -> str:
        """Sizes, and what differs from the defaults."""
        return _repr(
            self,
            latent_size=self.hidden_size,
            proj_size=0,
            num_layers=1,
            bias=True,
            batch_first=False,
            dropout=0.0,
            bidirectional=False,
            zoneout=0.0,
            weight_dropout=0.0,
            return_sequence=True,
            recompute=True,
            chunk_size=None,
            workspace_bytes=None,
            backend="auto",
        )


class GRU(RNNBase):
    """Gated recurrent units over a sequence: a drop-in for torch.nn.GRU.

    Constructor, shapes, defaults, initialisation, parameter names and state dicts are
    torch.nn.GRU's. At each step::

        r  = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
        u  = sigmoid(W_iu x + b_iu + W_hu h + b_hu)          (torch calls it z)
        n  = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = n + u * (h - n)

    from Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
    Machine Translation". For backward it keeps the output only, and computes the gates again.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the state, and of the output for each direction.
        num_layers: Layers on top of each other.
        bias: False for a module without ``bias_*``.
        batch_first: True if input and output are (batch, seq_len, features). Does not change ``hx``
            and ``h_n``.
        dropout: Probability with which, in training, an output of every layer but the last is
            zeroed.
        bidirectional: True for a second set of weights that reads the sequence from its end; the
            outputs of both stand side by side.
        zoneout: Probability with which, in training, a unit keeps its state through a step; in
            evaluation the state is the expectation of the old and the new one. Krueger et al. 2017,
            "Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations".
        weight_dropout: Probability with which, in training, an element of a recurrent weight matrix
            is zero, the same ones for all steps of a call. Wan et al. 2013, "Regularization of
            Neural Networks using DropConnect", as in Merity et al. 2018, "Regularizing and
            Optimizing LSTM Language Models".
        return_sequence: False gives only the last state in the place of the output, and takes
            memory for about the square root of seq_len steps: states are kept here and there, and
            backward goes through the steps between them again. With two directions and several
            layers this holds for the last layer; those below keep their output.
        recompute: False keeps the pre-activations for backward instead of computing them again,
            with the same output, and the same gradients up to rounding: 4 * hidden_size numbers of
            float32 for each step and row (float64 if that is the dtype). With the output that is 5
            times its memory in float32 and 9 times in 16 bits. It saves two sevenths of the matrix
            products of a training step with as many inputs as units, and pays where memory is not
            the limit and these are most of the time: on the CPU, a quarter of the time
            (bench/results/cpu.md), and on a GPU for large batches; for small ones most of the time
            goes into the steps, which stay. :func:`fusedrnn.plan` says both for given sizes.
        chunk_size: Time steps that are worked on at once, which bounds the workspace. If None, it
            is chosen from the sizes: about 256 rows (steps times batch) on the CPU, and on a GPU as
            many steps as make up for what a chunk costs besides them, as far as training takes no
            more than half or a quarter of the memory that torch.nn.LSTM takes, by count:
            :func:`fusedrnn.plan` says how many, and why. Longer chunks take less time and more
            memory, though an LSTM's states before each chunk are more with very short ones. Results
            are the same up to rounding: products of other sizes may be summed up in another order.
        workspace_bytes: The most bytes that forward, and backward, may take for the workspace of a
            layer and direction, one of which is at work at a time: chunks are as few as that
            allows, and never more is taken. If one step takes more, a call raises a RuntimeError
            that says how many bytes. Not counted are the output, what is saved for backward, and
            gradients. Not both this and ``chunk_size``.
        backend: How a GPU goes through the steps. "stepwise" is a matrix product and a kernel for
            each stage of each step; "persistent" is one kernel for a whole chunk, with the weights
            kept on chip, for tensors of 16 bits, and of float32 where torch allows TF32 in
            recurrent layers (``torch.backends.cudnn.rnn.fp32_precision``, which by default does,
            for torch.nn's too); "auto" is what :func:`fusedrnn.plan` chooses. Where
            "persistent" is not possible, a call raises a RuntimeError that says why.
            On the CPU there is "stepwise" alone.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    What dropout and zoneout leave out is drawn from a seed and drawn again in backward; no mask is
    kept. The seed comes from torch's default generator of the input's device.

    Attributes:
        weight_ih_l{k}: (3 * hidden_size, input_size), for k > 0 (3 * hidden_size, D * hidden_size),
            D being the number of directions; rows of r, u, n.
        weight_hh_l{k}: (3 * hidden_size, hidden_size); rows of r, u, n.
        bias_ih_l{k}, bias_hh_l{k}: (3 * hidden_size,).
        weight_ih_l{k}_reverse and so on: Those of the other direction.
        flat_weight: All of them as one 1-D tensor that shares their memory.

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or dtype is not a torch.dtype.
        ValueError: A size is not positive, dropout is no probability, or both chunk_size and
            workspace_bytes are given.
        RuntimeError: The dtype is not supported.

    Example::

        >>> rnn = fusedrnn.GRU(12, 32, num_layers=2, bidirectional=True)
        >>> output, h_n = rnn(torch.randn(50, 4, 12))
        >>> output.shape, h_n.shape
        (torch.Size([50, 4, 64]), torch.Size([4, 4, 32]))
    """

    _cell = "gru"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        zoneout: float = 0.0,
        weight_dropout: float = 0.0,
        return_sequence: bool = True,
        recompute: bool = True,
        chunk_size: int | None = None,
        workspace_bytes: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            zoneout=zoneout,
            weight_dropout=weight_dropout,
            return_sequence=return_sequence,
            recompute=recompute,
            chunk_size=chunk_size,
            workspace_bytes=workspace_bytes,
            backend=backend,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        input: S,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[S, Tensor]:
        """Runs the cell over a sequence.

        Args:
            input: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``,
                without a batch (seq_len, input_size), or a PackedSequence.
            hx: State before the first step, (D * num_layers, batch, hidden_size) or without a batch
                (D * num_layers, hidden_size); zeros if None.
            lengths: Steps of each sequence of a padded batch, (batch,) int64 on the CPU or ints,
                from 1 to seq_len. Outputs behind a sequence's end are zero, h_n is its last state,
                what ``input`` holds there is not looked at, and steps that no sequence of the rest
                of the batch takes cost nothing: sort by falling length for most of that.
            reset: Where the state is zeroed before a step, bool of ``input``'s shape without its
                features: in reinforcement learning, where an episode begins.

        Returns:
            output: The states after every step of the last layer, (seq_len, batch, D *
            hidden_size), (batch, seq_len, D * hidden_size) if ``batch_first``, (seq_len, D *
            hidden_size), or a PackedSequence if ``input`` is one. With ``return_sequence=False``
            the last states of the last layer, (batch, D * hidden_size) or (D * hidden_size,).

            h_n: The state after the last step of every layer and direction, shaped as ``hx``.

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.gru`.
        """
        weights, options = self._weights(), self._options()
        output, h_n, _ = run("gru", input, weights, hx, None, options, lengths=lengths, reset=reset)
        return output, h_n


class LSTM(RNNBase):
    """Long short-term memory over a sequence: a drop-in for torch.nn.LSTM.

    Constructor, shapes, defaults, initialisation, parameter names and state dicts are
    torch.nn.LSTM's. At each step::

        i, f, o = sigmoid(W_i. x + b_i. + W_h. h + b_h.)
        g       = tanh(W_ig x + b_ig + W_hg h + b_hg)
        c'      = f * c + i * g
        h'      = o * tanh(c')

    from Hochreiter & Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers,
    Schmidhuber & Cummins 2000, "Learning to Forget". For backward it keeps the output, and c once
    for each chunk of time; gates and the other c are computed again.

    With ``proj_size`` h has fewer features than c, h' = W_hr (o * tanh(c')), from Sak, Senior &
    Beaufays 2014, "Long Short-Term Memory Based Recurrent Neural Network Architectures for Large
    Vocabulary Speech Recognition".

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
        weight_dropout, return_sequence, chunk_size, workspace_bytes, backend, device, dtype: As for
        :class:`GRU`.
        recompute: As for :class:`GRU`, with the same numbers, for a quarter of the time on the CPU.
        proj_size: Features of h, fewer than hidden_size, if they are projected, or 0.
        zoneout: As for :class:`GRU`, of h and c alike, or a pair: of h, and of c.

    Attributes:
        weight_ih_l{k}: (4 * hidden_size, input_size), for k > 0 (4 * hidden_size, D * P), D being
            the number of directions, and P proj_size or, if that is 0, hidden_size; rows of i, f,
            g, o.
        weight_hh_l{k}: (4 * hidden_size, P); rows of i, f, g, o.
        bias_ih_l{k}, bias_hh_l{k}: (4 * hidden_size,).
        weight_hr_l{k}: (proj_size, hidden_size), if proj_size is not 0.
        weight_ih_l{k}_reverse and so on: Those of the other direction.
        flat_weight: All of them as one 1-D tensor that shares their memory.

    Raises:
        TypeError, ValueError: As :class:`GRU`; a ValueError too if proj_size is negative, or not
            smaller than hidden_size.

    Example::

        >>> rnn = fusedrnn.LSTM(12, 32, num_layers=2)
        >>> output, (h_n, c_n) = rnn(torch.randn(50, 4, 12))
        >>> output.shape, h_n.shape, c_n.shape
        (torch.Size([50, 4, 32]), torch.Size([2, 4, 32]), torch.Size([2, 4, 32]))
    """

    _cell = "lstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        zoneout: float | tuple[float, float] = 0.0,
        weight_dropout: float = 0.0,
        return_sequence: bool = True,
        recompute: bool = True,
        chunk_size: int | None = None,
        workspace_bytes: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size=proj_size,
            zoneout=zoneout,
            weight_dropout=weight_dropout,
            return_sequence=return_sequence,
            recompute=recompute,
            chunk_size=chunk_size,
            workspace_bytes=workspace_bytes,
            backend=backend,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        input: S,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[S, tuple[Tensor, Tensor]]:
        """Runs the cell over a sequence.

        Args:
            input, lengths, reset: As :meth:`GRU.forward`; a reset zeroes h and c.
            hx: (h_0, c_0), (D * num_layers, batch, P) and (D * num_layers, batch, hidden_size),
                both without their batch if ``input`` has none; zeros if None.

        Returns:
            output: As :meth:`GRU.forward`, with P in the place of hidden_size.

            (h_n, c_n): The states after the last step, shaped as ``hx``.

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.lstm`.
        """
        h_0, c_0 = functional.split_lstm_state(hx)
        weights, options = self._weights(), self._options()
        output, h_n, c_n = run(
            self._table_name, input, weights, h_0, c_0, options, lengths=lengths, reset=reset
        )
        assert c_n is not None
        return output, (h_n, c_n)


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
        dropout: Probability with which, in training, an output of every layer but the last is
            zeroed.
        bidirectional: True for a second set of weights that reads the sequence from its end; the
            outputs of both stand side by side.
        zoneout, weight_dropout, return_sequence: As for :class:`GRU`; recurrent are both
            ``weight_zh`` and ``weight_hz``.
        recompute: As for :class:`GRU`, with 4 * hidden_size + 2 * latent_size numbers: with the
            output and a latent of hidden_size, 7 times its memory in float32 and 13 times in 16
            bits, for a fifth of the time on the CPU.
        chunk_size, workspace_bytes, backend: As for :class:`GRU`. Neither has an influence on which
            noise is drawn.
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
        ValueError: A size is not positive, or both chunk_size and workspace_bytes are given.
        RuntimeError: The dtype is not supported.

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
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        zoneout: float = 0.0,
        weight_dropout: float = 0.0,
        return_sequence: bool = True,
        recompute: bool = True,
        chunk_size: int | None = None,
        workspace_bytes: int | None = None,
        backend: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            latent_size=hidden_size if latent_size is None else latent_size,
            zoneout=zoneout,
            weight_dropout=weight_dropout,
            return_sequence=return_sequence,
            recompute=recompute,
            chunk_size=chunk_size,
            workspace_bytes=workspace_bytes,
            backend=backend,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        input: S,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        eps: Tensor | None = None,
        generator: torch.Generator | None = None,
        sample: bool = True,
    ) -> tuple[S, Tensor]:
        """Runs the cell over a sequence, with noise in train and in eval mode alike.

        Args:
            input: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``, or
                without a batch (seq_len, input_size).
            hx: State before the first step, (num_layers, batch, hidden_size) or without a batch
                (num_layers, hidden_size); zeros if None.
            lengths, reset: As :meth:`GRU.forward`.
            eps: Noise to use instead of drawn noise, (num_layers, seq_len, batch, latent_size)
                whatever ``batch_first``, or (num_layers, seq_len, latent_size); differentiable.
            generator: Where the seed of the drawn noise comes from; the default generator of the
                input's device if None. Noise belongs to a place in the batch, in that of the sorted
                rows if ``input`` is a PackedSequence.
            sample: False takes the mean of the latent; neither eps nor generator may be given then.

        Returns:
            output: The state after every step of the last layer, (seq_len, batch, hidden_size),
            (batch, seq_len, hidden_size) if ``batch_first``, or (seq_len, hidden_size).

            h_n: The state after the last step of every layer, (num_layers, batch, hidden_size) or
            (num_layers, hidden_size).

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.stochastic_gru`.
        """
        checks.noise(eps, None, generator, sample)
        output, h_n, _ = run(
            self._cell,
            input,
            self._weights(),
            hx,
            None,
            self._options(),
            Noise(eps, None, generator, sample),
            lengths=lengths,
            reset=reset,
        )
        return output, h_n


class RNNCellBase(FlatModule):
    """One step of a cell, with the interface of torch.nn's: weights without a layer's number."""

    _cell: ClassVar[str]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        *,
        latent_size: int | None = None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = checks.positive_int("input_size", input_size)
        self.hidden_size = checks.positive_int("hidden_size", hidden_size)
        if latent_size is not None:
            self.latent_size = checks.positive_int("latent_size", latent_size)
        self.bias = checks.flag("bias", bias)
        checks.device(device)
        self._make_weights(device, checks.dtype(dtype))
        if not bias:  # as in torch.nn, where the names exist in any case
            for name, _, _ in self._layer_layout(bias=True):
                if name.startswith("bias_"):
                    self.register_parameter(name, None)
        self.reset_parameters()

    def _layer_layout(self, bias: bool) -> Layout:
        latent_size = getattr(self, "latent_size", 0)
        layout: Layout = _library.layout(
            self._cell, self.input_size, self.hidden_size, latent_size, self.hidden_size, 1, 1, bias
        )
        return [(name.removesuffix("_l0"), offset, shape) for name, offset, shape in layout]

    def _layout(self) -> Layout:
        return self._layer_layout(self.bias)

    def reset_parameters(self) -> None:
        """Draws all weights anew from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        _init_uniform(self, self.hidden_size)

    def extra_repr(self) -> str:
        """Sizes, and what differs from the defaults."""
        return _repr(self, latent_size=self.hidden_size, bias=True)

    def _run(
        self, input: Tensor, h: Tensor | None, c: Tensor | None = None, noise: Noise = NO_NOISE
    ) -> tuple[Tensor, Tensor | None]:
        """h and c after the step."""
        weights, options = self._weights(), Options(bias=self.bias)
        latent_size = getattr(self, "latent_size", 0)
        sizes = (self.input_size, self.hidden_size, latent_size, self.hidden_size)
        _, h, c = run(self._cell, input, weights, h, c, options, noise, step=sizes)
        return h, c


class GRUCell(RNNCellBase):
    """One step of :class:`GRU`: a drop-in for torch.nn.GRUCell.

    Equations, initialisation and papers are those of :class:`GRU`. For a whole sequence use that
    module: it is faster, and keeps less for backward.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the state.
        bias: False for a cell whose ``bias_*`` are None.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    Attributes:
        weight_ih: (3 * hidden_size, input_size); rows of r, u, n.
        weight_hh: (3 * hidden_size, hidden_size); rows of r, u, n.
        bias_ih, bias_hh: (3 * hidden_size,).
        flat_weight: All of them as one 1-D tensor that shares their memory.

    Raises:
        TypeError: A size is not an int, a flag is not a bool, or dtype is not a torch.dtype.
        ValueError: A size is not positive.
        RuntimeError: The dtype is not supported.

    Example::

        >>> cell = fusedrnn.GRUCell(12, 32)
        >>> h = torch.zeros(4, 32)
        >>> for x in torch.randn(50, 4, 12):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([4, 32])
    """

    _cell = "gru"
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Runs one step.

        Args:
            input: (batch, input_size), or (input_size,).
            hx: State before the step, (batch, hidden_size) or (hidden_size,); zeros if None.

        Returns:
            The state after the step, (batch, hidden_size) or (hidden_size,).

        Raises:
            ValueError, RuntimeError: A tensor has not the number of dimensions that it must have.
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.gru`.
        """
        return self._run(input, hx)[0]


class LSTMCell(RNNCellBase):
    """One step of :class:`LSTM`: a drop-in for torch.nn.LSTMCell.

    Equations, initialisation and papers are those of :class:`LSTM`. For a whole sequence use that
    module: it is faster, and keeps less for backward.

    Args:
        input_size, hidden_size, bias, device, dtype: As for :class:`GRUCell`.

    Attributes:
        weight_ih: (4 * hidden_size, input_size); rows of i, f, g, o.
        weight_hh: (4 * hidden_size, hidden_size); rows of i, f, g, o.
        bias_ih, bias_hh: (4 * hidden_size,).
        flat_weight: All of them as one 1-D tensor that shares their memory.

    Raises:
        TypeError, ValueError: As :class:`GRUCell`.

    Example::

        >>> cell = fusedrnn.LSTMCell(12, 32)
        >>> h, c = cell(torch.randn(4, 12))
        >>> h, c = cell(torch.randn(4, 12), (h, c))
        >>> h.shape, c.shape
        (torch.Size([4, 32]), torch.Size([4, 32]))
    """

    _cell = "lstm"
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device=device, dtype=dtype)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs one step.

        Args:
            input: (batch, input_size), or (input_size,).
            hx: (h, c) before the step, each (batch, hidden_size) or (hidden_size,); zeros if None.

        Returns:
            (h, c) after the step, each (batch, hidden_size) or (hidden_size,).

        Raises:
            ValueError, RuntimeError: A tensor has not the number of dimensions that it must have.
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.lstm`.
        """
        h, c = self._run(input, *functional.split_lstm_state(hx))
        assert c is not None
        return h, c


class StochasticGRUCell(RNNCellBase):
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
            input_size,
            hidden_size,
            bias,
            latent_size=hidden_size if latent_size is None else latent_size,
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
        checks.noise(eps, None, generator, sample)
        return self._run(input, hx, noise=Noise(eps, None, generator, sample))[0]


def _init_uniform(module: nn.Module, hidden_size: int) -> None:
    bound = 1 / math.sqrt(hidden_size)
    for weight in module.parameters():
        nn.init.uniform_(weight, -bound, bound)


def _repr(module: nn.Module, **defaults: object) -> str:
    parts = [str(getattr(module, name)) for name in ("input_size", "hidden_size")]
    for name, default in defaults.items():
        if getattr(module, name, default) != default:
            parts.append(f"{name}={getattr(module, name)}")
    return ", ".join(parts)
