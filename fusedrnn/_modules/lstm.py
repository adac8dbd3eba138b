"""The LSTM: layers and single steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.types import Device
from typing_extensions import Unpack

from .._call import S, run
from .._options import FusedOptions, Options, check_names, documented
from ..functional import split_lstm_state
from .base import RNNBase, RNNCellBase, fx_node


@documented
class LSTM(RNNBase):
    """Long short-term memory over a sequence: a drop-in for torch.nn.LSTM.

    Constructor, shapes, defaults, initialisation, parameter names and state dicts are
    torch.nn.LSTM's. At each step::

        i, f, o = sigmoid(W_i. x + b_i. + W_h. h + b_h.)
        g       = tanh(W_ig x + b_ig + W_hg h + b_hg)
        c'      = f * c + i * g
        h'      = o * tanh(c')

    from Hochreiter & Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers,
    Schmidhuber & Cummins 2000, "Learning to Forget". For backward it saves the output, and c once
    for each chunk of time; gates, unless ``recompute`` saves them, and all other c are recomputed.

    With ``proj_size`` h has fewer features than c, h' = W_hr (o * tanh(c')), from Sak, Senior &
    Beaufays 2014, "Long Short-Term Memory Based Recurrent Neural Network Architectures for Large
    Vocabulary Speech Recognition".

    Args:
        input_size: Features of the input.
        hidden_size: Features of the cell state, and of h unless ``proj_size`` is given.
        proj_size: Features of h, fewer than hidden_size, if it is projected, or 0.
        options: See :class:`fusedrnn._options.LayerOptions`.
        device, dtype: Of the weights: float32, float64, bfloat16 or float16; torch's defaults if
            None.

    Attributes:
        weight_ih_l{k}: (4 * hidden_size, input_size), for k > 0 (4 * hidden_size, D * P), D being
            the number of directions, and P proj_size or, if that is 0, hidden_size; rows of i, f,
            g, o.
        weight_hh_l{k}: (4 * hidden_size, P); rows of i, f, g, o.
        bias_ih_l{k}, bias_hh_l{k}: (4 * hidden_size,).
        weight_hr_l{k}: (proj_size, hidden_size), if proj_size is not 0.
        weight_ih_l{k}_reverse and so on: The same for the other direction.
        flat_weight: All weights as one 1-D tensor that shares their memory.
        flat_grad: All gradients as one 1-D tensor, where they lie side by side.

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
    mode = "LSTM"

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
        **options: Unpack[FusedOptions],
    ) -> None:
        check_names("LSTM", options)
        given = Options(
            cell="lstm",
            num_layers=num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            proj_size=proj_size,
            **options,
        )
        super().__init__(input_size, hidden_size, given, device=device, dtype=dtype)

    def forward(
        self,
        input: S,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        reset_to: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[S, tuple[Tensor, Tensor]]:
        """Runs the cell over a sequence.

        Args:
            input, lengths, reset: As :meth:`GRU.forward`; a reset is of h and c.
            reset_to: As there, a pair for h and c.
            hx: (h_0, c_0), (D * num_layers, batch, P) and (D * num_layers, batch, hidden_size),
                both without their batch if ``input`` has none; zeros if None.

        Returns:
            output: As :meth:`GRU.forward`, with P in the place of hidden_size.

            (h_n, c_n): The states after the last step, shaped as ``hx``.

        Raises:
            TypeError, ValueError, RuntimeError: As :func:`fusedrnn.functional.lstm`.
        """
        if isinstance(input, Proxy):
            return fx_node(self, input, hx, lengths=lengths, reset=reset, reset_to=reset_to)
        h_0, c_0 = split_lstm_state(hx)
        to = None if reset_to is None else split_lstm_state(reset_to, "reset_to", "(h, c)")
        options, weights = self._options(), self._weights()
        output, h_n, c_n = run(
            input,
            weights,
            h_0,
            c_0,
            options,
            lengths=lengths,
            reset=reset,
            reset_to=to,
            flat_version=self._version_of(weights),
        )
        assert c_n is not None
        return output, (h_n, c_n)


class LSTMCell(RNNCellBase):
    """One step of :class:`LSTM`: a drop-in for torch.nn.LSTMCell.

    Equations, initialisation and papers are those of :class:`LSTM`. For a whole sequence use that
    module: it is faster, and saves less for backward.

    Args:
        input_size, hidden_size, bias, device, dtype: As for :class:`GRUCell`.

    Attributes:
        weight_ih: (4 * hidden_size, input_size); rows of i, f, g, o.
        weight_hh: (4 * hidden_size, hidden_size); rows of i, f, g, o.
        bias_ih, bias_hh: (4 * hidden_size,).
        flat_weight: All of them as one 1-D tensor that shares their memory.
        flat_grad: All gradients as one 1-D tensor, where they lie side by side.

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
        if isinstance(input, Proxy):
            return fx_node(self, input, hx)
        h, c = self._run(input, *split_lstm_state(hx))
        assert c is not None
        return h, c
