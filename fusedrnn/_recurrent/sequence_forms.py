"""The forms in which users give sequences: padded, packed, batch first, without a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_exporting
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from .. import _checks as checks
from .._options import check_positive, kind_of
from .._step.trees import Leaves, Structure, check_tensors, flatten
from .._tracers import is_traced


class Sequences(NamedTuple):
    """The input of a call in one form, and what must be done to give results in the user's."""

    leaves: Leaves
    """(seq_len, batch, ...) each, as far as the longest sequence goes."""
    structure: Structure
    names: list[str]
    padded_len: int
    """Of the user's input."""
    lengths: Tensor | None
    """int64 on the CPU."""
    batch_first: bool
    is_batched: bool
    packed: PackedSequence | None
    seq_len: int
    """As far as the longest sequence goes."""
    batch: int
    device: torch.device

    @classmethod
    def of(
        cls,
        input: Any,
        batch_first: bool,
        lengths: Tensor | Sequence[int] | None,
        length: int | None,
        state: Any,
    ) -> Sequences:
        """The input of a call.

        Args:
            length: The number of steps, which an input without tensors does not tell.
            state: Which tells rows and device then.

        Raises:
            TypeError, ValueError, RuntimeError: It is no sequence, or the lengths do not fit it.
        """
        packed = None
        if any(map(_is_packed, pytree.tree_leaves(input, is_leaf=_is_packed))):
            if lengths is not None:
                raise ValueError(
                    "fusedrnn: lengths must not be given with a PackedSequence, which has its own"
                )
            input, lengths, packed = _padded(input)
        leaves, structure = flatten(input, "input")
        names = structure.names("input")
        if length is not None:
            check_positive("length", length)
        if not leaves:
            return cls._without_input(structure, batch_first, lengths, length, state)
        check_tensors(names, leaves, names[0], leaves[0].device)
        is_batched = not (
            len(leaves) == 1 and leaves[0].dim() == 2 and leaves[0].is_floating_point()
        )
        batch_first = batch_first and is_batched  # of resets, even where the input is packed
        first = leaves[0].shape[:2] if is_batched else (leaves[0].shape[0], 1)
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.dim() < 2:
                raise ValueError(
                    f"fusedrnn: {name} must have steps and batch as its first two dimensions, "
                    f"got shape {tuple(leaf.shape)}"
                )
            if is_batched and leaf.shape[:2] != first:
                raise RuntimeError(
                    f"fusedrnn: {name} must have the first two dimensions of {names[0]}, "
                    f"{tuple(first)}, got shape {tuple(leaf.shape)}"
                )
        if not is_batched:
            leaves = (leaves[0].unsqueeze(1),)
        if batch_first and packed is None:
            leaves = tuple(leaf.transpose(0, 1) for leaf in leaves)
        seq_len, batch = leaves[0].shape[:2]
        if length not in (None, seq_len):
            raise ValueError(
                f"fusedrnn: length must be {seq_len}, the number of steps of {names[0]}, "
                f"got {length}"
            )
        checks.rows(seq_len, batch, first)
        if lengths is not None:
            if not is_batched:
                raise ValueError(
                    "fusedrnn: lengths need a batch of sequences, got an input without a batch"
                )
            if is_exporting() or (is_traced() and packed is None):
                raise RuntimeError(
                    "fusedrnn: a call with lengths cannot be exported or traced, since their "
                    "values decide the number of steps"
                )
            lengths = checks.lengths(lengths, seq_len, batch)
            if not batch:  # no row ends
                lengths = None
            elif lengths.max() < seq_len:
                leaves = tuple(leaf[: int(lengths.max())] for leaf in leaves)
        longest, device = leaves[0].shape[0], leaves[0].device
        form = batch_first, is_batched, packed, longest, batch, device
        return cls(leaves, structure, names, seq_len, lengths, *form)

    @classmethod
    def _without_input(
        cls,
        structure: Structure,
        batch_first: bool,
        lengths: Tensor | Sequence[int] | None,
        length: int | None,
        state: Any,
    ) -> Sequences:
        if length is None:
            raise ValueError(
                "fusedrnn: input must have at least one tensor unless length is given, got neither"
            )
        states = flatten(state, "state")[0]
        if not states or not states[0].dim():
            raise ValueError(
                "fusedrnn: an input without tensors needs a state, which gives the batch size"
            )
        batch = states[0].shape[0]
        checks.rows(length, batch, (length, batch))
        longest = length
        if lengths is not None:
            lengths = checks.lengths(lengths, length, batch)
            longest = int(lengths.max()) if batch else length
            lengths = lengths if batch else None
        form = batch_first, True, None, longest, batch, states[0].device
        return cls((), structure, [], length, lengths, *form)

    def last(self, backwards: bool) -> Tensor | None:
        """Where each row takes its last step, (seq_len, batch); None if all end together."""
        if self.lengths is None or backwards:  # in reverse, all end at the sequence's start
            return None
        device = self.device
        return torch.arange(self.seq_len, device=device)[:, None] == self.lengths.to(device) - 1

    def flags(self, reset: Tensor) -> Tensor:
        """Resets, (seq_len, batch), as the call's own copy.

        Raises:
            TypeError, ValueError, RuntimeError: They do not fit the input.
        """
        steps = (self.padded_len, self.batch) if self.is_batched else (self.padded_len,)
        checks.reset(reset, steps[::-1] if self.batch_first else steps, self.device)
        if not self.is_batched:
            return checks.own_copy(reset.unsqueeze(1))
        return checks.own_copy((reset.t() if self.batch_first else reset)[: self.seq_len])

    def state(self, leaves: Leaves) -> Leaves:
        """A user's state, with a batch."""
        return leaves if self.is_batched else tuple(leaf.unsqueeze(0) for leaf in leaves)

    def result_state(self, leaves: Leaves) -> Leaves:
        return leaves if self.is_batched else tuple(leaf.squeeze(0) for leaf in leaves)

    def states(self, leaf: Tensor) -> Tensor:
        """A leaf of a user's sequence of states, (seq_len, batch, ...)."""
        if not self.is_batched:
            return leaf.unsqueeze(1)
        return leaf.transpose(0, 1) if self.batch_first else leaf

    def output(self, leaves: Leaves, has_steps: bool) -> tuple[Any, ...]:
        """Outputs in the form of the user's input."""
        if not self.is_batched:
            return tuple(leaf.squeeze(1 if has_steps else 0) for leaf in leaves)
        if not has_steps:
            return leaves
        if self.packed is not None:
            return tuple(self._pack(leaf) for leaf in leaves)
        missing = self.padded_len - self.seq_len
        if missing:
            leaves = tuple(
                torch.cat([leaf, leaf.new_zeros(missing, *leaf.shape[1:])]) for leaf in leaves
            )
        return tuple(leaf.transpose(0, 1) for leaf in leaves) if self.batch_first else leaves

    def _pack(self, output: Tensor) -> PackedSequence:
        packed, lengths = self.packed, self.lengths
        assert packed is not None and lengths is not None
        if packed.sorted_indices is None:
            return pack_padded_sequence(output, lengths)
        sorted_output = output.index_select(1, packed.sorted_indices)
        sorted_lengths = lengths[packed.sorted_indices.cpu()]
        data, sizes, _, _ = pack_padded_sequence(sorted_output, sorted_lengths)
        return PackedSequence(data, sizes, packed.sorted_indices, packed.unsorted_indices)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def _padded(input: Any) -> tuple[Any, Tensor, PackedSequence]:
    """An input of PackedSequences as padded tensors, their lengths, and one of them."""
    leaves, spec = pytree.tree_flatten(input, is_leaf=_is_packed)
    padded, packed, lengths = [], list[PackedSequence](), None
    for leaf in leaves:
        if not _is_packed(leaf):
            raise TypeError(
                "fusedrnn: the tensors of an input must all be PackedSequences, or none of them; "
                f"got {kind_of(leaf)} beside a PackedSequence"
            )
        packed.append(checks.own_packing(leaf).pack(leaf.data))
        tensor, own = pad_packed_sequence(packed[-1])
        if lengths is not None and not torch.equal(own, lengths):
            raise ValueError(
                "fusedrnn: all PackedSequences of an input must have the same lengths, got "
                f"{lengths.tolist()} and {own.tolist()}"
            )
        lengths = own
        padded.append(tensor)
    assert lengths is not None
    return pytree.tree_unflatten(padded, spec), lengths, packed[0]
