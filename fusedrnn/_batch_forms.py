"""The forms in which users give a batch, and the one form that layers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import _checks as checks
from ._checks import Packing
from ._ops import reshaped
from ._tracers import is_compiling


class Mask(NamedTuple):
    """Which rows of a batch take which steps, and where a row starts anew; see LayerTensors."""

    lengths: Tensor | None = None
    batch_sizes: Tensor | None = None
    reset: Tensor | None = None


class BatchForm(NamedTuple):
    """How the user's tensors show steps and rows.

    Layers take (seq_len, batch, features), or the data of a PackedSequence as it is; states have
    layers and directions first.
    """

    seq_len: int
    batch: int
    is_batched: bool
    """False for a single sequence, without a dimension for the batch."""
    is_step: bool
    """True for the tensors of a cell, without a dimension for steps and for layers."""
    batch_first: bool

    @classmethod
    def of(
        cls,
        input: Tensor,
        input_size: int,
        batch_first: bool,
        packing: Packing | None,
        is_step: bool,
    ) -> BatchForm:
        """The form of a call with this input, once it is known to have one.

        Raises:
            ValueError: ``input`` has a wrong number of dimensions.
            RuntimeError: It has not ``input_size`` features, no step, or too many rows.
        """
        most = 2 if is_step else 3
        if packing is not None:
            seq_len, batch = len(packing.batch_sizes), packing.batch()
        elif input.dim() not in (most - 1, most):
            raise ValueError(
                f"fusedrnn: input must have {most - 1} or {most} dimensions, got {input.dim()}"
            )
        else:
            # No list: torch.compile of torch 2.11 takes it for a tuple.
            steps = (1, *input.shape[:-1]) if is_step else input.shape[:-1]
            if batch_first and not is_step:
                steps = steps[::-1]
            seq_len, batch = (*steps, 1)[:2]
        if input.shape[-1] != input_size:
            raise RuntimeError(
                f"fusedrnn: input must have {input_size} features (input_size), "
                f"got shape {tuple(input.shape)}"
            )
        checks.rows(seq_len, batch, input.shape)
        is_batched = packing is not None or input.dim() == most
        return cls(seq_len, batch, is_batched, is_step, batch_first)

    def is_any(self) -> bool:
        """Whether the sizes are those of any call of a graph: to compute with them fixes them."""
        return is_compiling() or not (type(self.seq_len) is type(self.batch) is int)

    def sequence(self, input: Tensor, packing: Packing | None) -> Tensor:
        """The user's input, as layers take it."""
        if packing is not None:
            return input
        if not self.is_batched:
            input = input.unsqueeze(-2)
        if self.is_step:
            return input.unsqueeze(0)
        return input.transpose(0, 1) if self.batch_first and self.is_batched else input

    def output(self, output: Tensor, packing: Packing | None) -> Any:
        """A layer's output, in the form of the user's input."""
        if packing is not None:
            return packing.pack(output)
        if not self.is_batched:
            return output.squeeze(-2)
        return output.transpose(0, 1) if self.batch_first else output

    def state(self, tensor: Tensor, packing: Packing | None, dim: int = 1) -> Tensor:
        """The user's state or noise, as layers take it. ``dim``: of the batch, in batched ones."""
        if self.is_step:
            tensor = tensor[(None,) * dim]
        if packing is not None:
            return packing.sort(tensor, dim)
        return tensor if self.is_batched else tensor.unsqueeze(dim)

    def result_state(self, state: Tensor, packing: Packing | None, dim: int = 1) -> Tensor:
        """A layer's last state, in the form of the user's states."""
        if packing is not None:
            return packing.unsort(state, dim)
        if self.is_step:
            return reshaped(state, state.shape[1 if self.is_batched else 2 :])
        return state if self.is_batched else state.squeeze(dim)

    def mask(
        self,
        lengths: Tensor | Sequence[int] | None,
        reset: Tensor | None,
        input: Tensor,
        packing: Packing | None,
    ) -> Mask:
        """Lengths and resets, checked, as layers take them.

        Raises:
            TypeError, ValueError, RuntimeError: They do not fit the input.
        """
        if lengths is not None:
            if packing is not None:
                raise ValueError(
                    "fusedrnn: lengths must not be given with a PackedSequence, which has its own"
                )
            if not self.is_batched:
                raise ValueError(
                    "fusedrnn: lengths need a batch of sequences, got an input without a batch"
                )
            lengths = checks.lengths(lengths, self.seq_len, self.batch)
        if reset is not None:
            steps = (self.seq_len, self.batch) if self.is_batched else (self.seq_len,)
            checks.reset(reset, steps[::-1] if self.batch_first else steps, input.device)
            if self.batch_first and self.is_batched:
                reset = reset.t()
            reset = checks.own_copy(self.state(reset, packing))
        return Mask(lengths, None if packing is None else packing.batch_sizes, reset)
