"""A user's step as one from leaves to leaves, with lengths and resets around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .sequence_call import Names, Resets, SequenceCall, like_rows
from .trees import NOTHING, Leaves, Structure, flatten

TreeStep = Callable[[Any, Any, Any], tuple[Any, Any]]
"""State, input and constants to the new state and the output, as trees."""


class LeafStep:
    """A step from leaves to leaves that checks what the user's step returns."""

    def __init__(
        self,
        call: TreeStep,
        state: Structure,
        input: Structure,
        constants: Structure = NOTHING,
        *,
        has_rows: bool,
    ) -> None:
        """``has_rows``: whether outputs must have the rows that the state has."""
        self._call, self.has_rows = call, has_rows
        self._state, self._input, self._constants = state, input, constants
        self.output: Structure | None = None
        """Known after the first step."""
        self._kinds: list[tuple[Any, ...]] = []

    def __call__(self, state: Leaves, x: Leaves, constants: Leaves) -> tuple[Leaves, Leaves]:
        new, y = self._call(
            self._state.tree(state), self._input.tree(x), self._constants.tree(constants)
        )
        # Questions about tensors are no functions of the step: no mode around it is asked.
        with torch._C.DisableTorchFunction():
            return self._checked(new, y, state)

    def _checked(self, new: Any, y: Any, state: Leaves) -> tuple[Leaves, Leaves]:
        new_leaves, structure = flatten(new, "the step's new state")
        if structure is not self._state and structure != self._state:
            in_order = self._state.leaves(new)
            if in_order is None:
                raise ValueError(
                    "fusedrnn: the step must return a state of the structure it receives, "
                    f"{self._state}, got {structure}"
                )
            new_leaves = in_order
        for i, (leaf, old) in enumerate(zip(new_leaves, state, strict=True)):
            if leaf.shape != old.shape or leaf.dtype != old.dtype or leaf.device != old.device:
                new_leaves = self._cast_or_refuse(new_leaves, i, old)
        return new_leaves, self._output_leaves(y, state)

    def structures(self) -> tuple[str, str, str]:
        """Of what it gets."""
        return str(self._state), str(self._input), str(self._constants)

    def _cast_or_refuse(self, new: Leaves, i: int, old: Tensor) -> Leaves:
        leaf, device = new[i], old.device.type
        is_same = leaf.shape == old.shape and leaf.device == old.device
        if is_same and torch.is_autocast_enabled(device) and leaf.is_floating_point():
            return (*new[:i], leaf.to(old.dtype), *new[i + 1 :])
        raise ValueError(
            f"fusedrnn: the step must return {self._state.names('state')[i]} of the kind it "
            f"receives, {_kind(old)}, got {_kind(leaf)}"
        )

    def _output_leaves(self, y: Any, state: Leaves) -> Leaves:
        leaves, structure = flatten(y, "the step's output")
        if self.has_rows:
            rows = state[0].shape[0]
            for i, leaf in enumerate(leaves):
                if not leaf.dim() or leaf.shape[0] != rows:
                    way = "" if leaf.dim() else f"; .expand({rows}) gives each row its number"
                    raise ValueError(
                        f"fusedrnn: {structure.names('output')[i]} must have the batch size, "
                        f"{rows}, as its first dimension, got shape {tuple(leaf.shape)}{way}"
                    )
        kinds = [(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves]
        if self.output is None:
            self.output, self._kinds = structure, kinds
        elif structure != self.output:
            in_order = self.output.leaves(y)
            if in_order is None:
                raise ValueError(
                    "fusedrnn: all steps must return outputs of the same structure: the first "
                    f"returned {self.output}, got {structure}"
                )
            return in_order
        elif kinds != self._kinds:
            i = [a == b for a, b in zip(kinds, self._kinds, strict=True)].index(False)
            raise ValueError(
                f"fusedrnn: all steps must return {structure.names('output')[i]} with the same "
                f"shape, dtype and device: the first returned {self._kinds[i]}, got {kinds[i]}; "
                "pad or cast it in the step"
            )
        return leaves


def _kind(leaf: Tensor) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)} on {leaf.device}"


def call_of_cell(cell: nn.Module, state: Structure) -> TreeStep:
    """Calls a cell that returns its state, or an output and its state."""

    def call(old: Any, x: Any, constants: Any) -> tuple[Any, Any]:
        result = as_it_runs(cell)(x, old)
        leaves, structure = flatten(result, "the cell's result")
        in_order = leaves if structure == state else state.leaves(result)
        if in_order is not None:
            return result, in_order[0]
        if isinstance(result, tuple | list) and len(result) == 2:
            output, new = result
            if len(leaves) == sum(state.has_tensor) and state.leaves(new) is None:
                raise ValueError(
                    f"fusedrnn: the cell must return a state of the structure it receives, "
                    f"{state}, got {structure}, which is taken as (output, state)"
                )
            return new, output
        raise ValueError(
            f"fusedrnn: the cell must return its state, of the structure {state}, or "
            f"(output, state), got {structure}"
        )

    return call


def as_it_runs(step: Any) -> Any:
    """A step by torch.compile as it is without, where random numbers are handed to its functions:
    within a TorchFunctionMode the compiler misses some of them."""
    if not torch._C._len_torch_function_stack():
        return step
    return getattr(step, "_orig_mod", None) or getattr(step, "_torchdynamo_orig_callable", step)


def with_masks(step: StepFunction, call: SequenceCall) -> tuple[StepFunction, SequenceCall, Leaves]:
    """A step with the rows of a call that end and that start anew; its call, and its constants.

    The inputs have after those of ``step``: if rows end, how many rows on the longest one is from
    those that have ended, else 0; with resets which rows start anew, and the states that those
    take, unless they are constants.
    """
    resets, has_ends, own_inputs = call.resets, call.lengths is not None, len(call.inputs)
    if not has_ends and resets is None:
        return step, call, ()
    inputs, names, constants = [*call.inputs], [*call.names.input], call.reset_to
    if call.lengths is not None:
        inputs.append(_strides_to_longest(call.lengths, call))
        names.append("lengths")
    if resets is not None:
        assert call.reset is not None
        inputs.append(call.reset)
        names.append("reset")
        if resets.is_sequence:
            inputs += call.reset_to
            names += ["reset_to"] * len(call.reset_to)
            constants = ()

    def masked(state: Leaves, x: Leaves, constants: Leaves) -> tuple[Leaves, Leaves]:
        rest = iter(x[own_inputs:])
        own, old = x[:own_inputs], state
        strides = next(rest) if has_ends else None
        if resets is not None:
            state = _reset(state, resets, next(rest), tuple(rest), constants)
        if strides is None:
            return step(state, own, ())
        # What stands behind the end may be NaN in the step, or in its derivative, and so may zeros
        # be, or a row's own state with the input of another: only what a row does take is safe.
        row = torch.arange(strides.shape[0], device=strides.device) + strides
        state, own = (tuple(leaf.index_select(0, row) for leaf in of) for of in (state, own))
        new, y = step(state, own, ())
        ended = strides != 0
        new = tuple(torch.where(like_rows(ended, a), b, a) for a, b in zip(new, old, strict=True))
        return new, tuple(leaf.masked_fill(like_rows(ended, leaf), 0) for leaf in y)

    names_of_all = Names(call.names.state, names)
    return masked, call._replace(inputs=tuple(inputs), names=names_of_all), constants


def _strides_to_longest(lengths: Tensor, call: SequenceCall) -> Tensor:
    """How many rows on the longest is from those that have ended, else 0: (seq_len, batch)."""
    to_longest = (lengths.argmax() - torch.arange(call.rows, device="cpu")).to(call.device)
    times = torch.arange(call.seq_len, device=call.device)[:, None]
    return to_longest * (times >= lengths.to(call.device))


def _reset(
    state: Leaves, resets: Resets, flags: Tensor, sequence: Leaves, constants: Leaves
) -> Leaves:
    made = list(state)
    values = sequence if resets.is_sequence else constants
    for number, i in enumerate(resets.leaves):
        here = like_rows(flags, made[i])
        if resets.has_values:
            made[i] = torch.where(here, values[number], made[i])
        else:
            made[i] = made[i].masked_fill(here, 0)
    return tuple(made)


StepFunction = Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]
"""State, input and constants of a step to its new state and its output. Constants are what all
steps of a sequence get."""
