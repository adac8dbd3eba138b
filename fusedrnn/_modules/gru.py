"""The GRU: layers and single steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.types import Device
from typing_extensions import Unpack

from .._call import S, run
from .._options import FusedOptions, Options, check_names, documented
from ..functional import single
from .base import RNNBase, RNNCellBase, fx_node


@documented
class GRU(RNNBase):
    """Gated recurrent units over a sequence: a drop-in for torch.nn.GRU.

    Constructor, shapes, defaults, initialisation, parameter names and state dicts are
    torch.nn.GRU's. At each step::

        r  = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
        u  = sigmoid(W_iu x + b_iu + W_hu h + b_hu)          (torch calls it z)
        n  = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = n + u * (h - n)

    from Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
    Machine Translation". For backward only the output is saved; the gates are recomputed,
    unless ``recompute`` saves them.

    Args:
        input_size: Features of the input.
        hidden_size: Features of the state, and of the output for each direction.
        options: See :class:`fusedrnn._options.LayerOptions`.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    Dropout and zoneout are drawn from a seed, and drawn again in backward; no mask is saved. The
    seed comes from torch's default generator of the input's device.

    Attributes:
        weight_ih_l{k}: (3 * hidden_size, input_size), for k > 0 (3 * hidden_size, D * hidden_size),
            D being the number of directions; rows of r, u, n.
        weight_hh_l{k}: (3 * hidden_size, hidden_size); rows of r, u, n.
        bias_ih_l{k}, bias_hh_l{k}: (3 * hidden_size,).
        weight_ih_l{k}_reverse and so on: The same for the other direction.
        flat_weight: All weights as one 1-D tensor that shares their memory.
        flat_grad: All gradients as one 1-D tensor, where they lie side by side.

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
    mode = "GRU"

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
        **options: Unpack[FusedOptions],
    ) -> None:
        check_names("GRU", options)
        given = Options(
            cell="gru",
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **options,
        )
        super().__init__(input_size, hidden_size, given, device=device, dtype=dtype)

    def forward(
        self,
        input: S,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        reset_to: Tensor | None = None,
    ) -> tuple[S, Tensor]:
        """Runs the cell over a sequence.

        Args:
            input: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``,
                without a batch (seq_len, input_size), or a PackedSequence.
            hx: State before the first step, (D * num_layers, batch, hidden_size) or without a batch
                (D * num_layers, hidden_size); zeros if None.
            lengths: The number of steps of each sequence of a padded batch, (batch,) integers of
                any kind from 1 to seq_len: in a tensor on the CPU, an array or a list. After a
                sequence's end outputs are zero and ``input`` is not read; h_n is its last state.
                Sort the batch by decreasing length: finished rows at its end are skipped.
            reset: True where the state is zeroed before a step: bool of ``input``'s shape without
                its features. In reinforcement learning, where an episode begins.
            reset_to: The state there instead of zero: shaped as ``hx``, or with one row for the
                whole batch, and with a gradient, such as a learned initial state; or a state for
                each step, (D * num_layers, seq_len, batch, hidden_size), if ``batch_first``
                (D * num_layers, batch, seq_len, hidden_size), such as the stored states of a replay
                buffer; only states at resets are used. The sequences are cut at the resets and
                run as a packed batch of the pieces, which copies input and output, and waits for
                ``reset`` if that is on a GPU; zoneout and drawn noise then belong to a place in the
                pieces. torch.compile breaks its graph there.

        Returns:
            output: The states after every step of the last layer, (seq_len, batch, D *
            hidden_size), (batch, seq_len, D * hidden_size) if ``batch_first``, (seq_len, D *
            hidden_size), or a PackedSequence if ``input`` is one. With ``return_sequence=False``
            the last states of the last layer, (batch, D * hidden_size) or (D * hidden_size,).

            h_n: The state after the last step of every layer and direction, shaped as ``hx``.

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.gru`.
        """
        if isinstance(input, Proxy):
            return fx_node(self, input, hx, lengths=lengths, reset=reset, reset_to=reset_to)
        options, weights = self._options(), self._weights()
        output, h_n, _ = run(
            input,
            weights,
            hx,
            None,
            options,
            lengths=lengths,
            reset=reset,
            reset_to=single(reset_to),
            flat_version=self._version_of(weights),
        )
        return output, h_n


class GRUCell(RNNCellBase):
    """One step of :class:`GRU`: a drop-in for torch.nn.GRUCell.

    Equations, initialisation and papers are those of :class:`GRU`. For a whole sequence use that
    module: it is faster, and saves less for backward.

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
        flat_grad: All gradients as one 1-D tensor, where they lie side by side.

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
        if isinstance(input, Proxy):
            return fx_node(self, input, hx)
        return self._run(input, hx)[0]
