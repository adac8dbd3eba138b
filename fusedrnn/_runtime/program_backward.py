"""Backward of a program: a whole sequence at once, or part by part, whose gradients add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._step.gradients import Gradients
from .._step.noise import Seed
from .program_call import ProgramCall, ProgramValues
from .sequence_parts import SequencePart, gradient_in


def backward(
    call: ProgramCall,
    seed: Seed,
    tensors: Sequence[Tensor],
    rest: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> Gradients:
    """Gradients of what the function of autograd got.

    Args:
        rest: What forward has kept for backward.
        gradients: Of outputs and of the last state.
    """
    steps = call.steps
    if steps is None:
        return _Backward(call, seed, tensors, rest, needs).gradients(gradients)
    part, values = call.parts[0], ProgramValues.of(call, tensors)
    nothing = values.state[0].new_empty(0)
    needed = ProgramValues.of(call, call.program.unread.without(needs, call.counts))
    weights = _Weights(call, values, needed.constants)
    found = steps.backward(
        [*values.inputs, *values.state, *weights.tensors],
        values.resets(call, part, nothing),
        seed.on(call.sequence.device) if call.draws else None,
        list(rest),
        _gradients(call, part, gradients, nothing),
        [
            *needed.inputs,
            *needed.state,
            *weights.needs,
            *needed.resets(call, part, False),
        ],
        is_part=False,
    )
    states, end = sum(call.counts[:2]), sum(call.counts[:2]) + len(weights.tensors)
    made: Gradients = [one if one.numel() else None for one in found[:end]]
    resets = call.sequence.resets
    of_resets: Gradients = [None] * len(values.reset_to)
    for n, i in enumerate(resets.leaves) if resets and resets.has_values else ():
        if needed.reset_to[n]:
            of_resets[n] = _of_rows(found[end + i], values.reset_to[n])
    return [*made[:states], *of_resets, *weights.gradients(made[states:])]


def _gradients(
    call: ProgramCall, part: SequencePart, given: Sequence[Tensor | None], nothing: Tensor
) -> list[Tensor]:
    """Of a part's sequences and of the state after it; an output without one gives nothing."""
    numbers, sequence = call.program.generated.output_sequences, call.sequence
    found = [nothing] * len(call.program.form.sequences)
    for number, gradient in zip(numbers, given, strict=False):
        if gradient is not None and not sequence.returns_sequence:
            gradient = gradient_in(sequence, part, gradient)
        if gradient is None:
            continue
        if found[number] is not nothing:  # two outputs are the same sequence
            sizes = part.steps, sequence.rows, -1
            gradient = found[number].reshape(sizes) + gradient.reshape(sizes)
        found[number] = gradient
    return found + [nothing if g is None else g for g in given[len(numbers) :]]


class _Backward:
    """Gradients of one call: part by part from the last one on, and added up."""

    def __init__(
        self,
        call: ProgramCall,
        seed: Seed,
        tensors: Sequence[Tensor],
        rest: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> None:
        self._call, self._rest = call, rest
        self._seed = seed.on(call.sequence.device) if call.draws else None
        self._values, self._needs = ProgramValues.of(call, tensors), ProgramValues.of(call, needs)
        self._nothing = self._values.state[0].new_empty(0)
        self._weights = _Weights(call, self._values, self._needs.constants)
        # What parts give: of what weights and inputs are made of, of the step's inputs, and of what
        # carries become at resets.
        self._sums: dict[int, Tensor] = {}
        self._of_inputs: dict[int, Tensor] = {}
        self._of_resets: dict[int, Tensor] = {}

    def gradients(self, given: Sequence[Tensor | None]) -> Gradients:
        """In the order of the function's arguments."""
        count = len(self._call.program.output_shapes)
        of_state: list[Any] = list(given[count:])
        for index in reversed(range(len(self._call.parts))):
            of_state = self._pass(index, [*given[:count], *of_state])
        sums = [self._sums.get(i) for i in range(len(self._weights.tensors))]
        return self._in_order(of_state, self._weights.gradients(sums))

    def _pass(self, index: int, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients of the state before a part.

        Args:
            given: Those of outputs, and of the state after the part.
        """
        call, part = self._call, self._call.parts[index]
        values, needs, weights = self._values, self._needs, self._weights
        own = [
            x.detach().requires_grad_() if need else x
            for x, need in zip(values.inputs_of(call, part), needs.inputs, strict=True)
        ]
        inputs, tables = self._inputs(own)
        states = len(values.state)
        tensors = [
            *(x.detach() for x in inputs),
            *self._state_before(index),
            *weights.tensors,
        ]
        steps, reset_to = call.arguments(part), values.resets(call, part, self._nothing)
        kept = list(self._rest)
        if not call.is_whole:
            kept = steps.forward(tensors, reset_to, self._seed, 1)
            del kept[steps.sequences : steps.sequences + states]
        found = iter(
            steps.backward(
                tensors,
                reset_to,
                self._seed,
                kept,
                _gradients(call, part, given, self._nothing),
                [
                    *(x.requires_grad for x in inputs),
                    *(need or index > 0 for need in needs.state),
                    *weights.needs,
                    *needs.resets(call, part, False),
                ],
                is_part=True,
            )
        )
        of_inputs = [next(found) for _ in inputs]
        of_before = [next(found) for _ in range(states)]
        for i in range(len(weights.tensors)):
            _add(self._sums, i, next(found))
        for i, (gradient, to) in enumerate(zip(found, reset_to, strict=True)):
            self._add_reset(i, part, gradient, to)
        self._through_inputs(part, own, tables, inputs, of_inputs)
        return of_before

    def _inputs(self, own: list[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """What the program reads, of a part's own inputs; and what else that is made of."""
        call_weights, weights = self._call.program.generated.call_weights, self._weights
        if not call_weights.makes_inputs:
            return own, {}
        tables = {
            i: weights.tensors[i].detach().requires_grad_(weights.needs[i])
            for i in call_weights.tables
        }
        tensors = [tables.get(i, tensor) for i, tensor in enumerate(weights.tensors)]
        with torch.enable_grad():
            return call_weights.inputs(tensors, own, self._values.state[0]), tables

    def _state_before(self, index: int) -> Sequence[Tensor]:
        state = self._values.state
        if index == 0:
            return state
        return self._rest[(index - 1) * len(state) : index * len(state)]

    def _add_reset(self, i: int, part: SequencePart, gradient: Tensor, to: Tensor) -> None:
        """The gradient of what a carry becomes at resets of a part."""
        resets = self._call.sequence.resets
        if resets is None or not gradient.numel():
            return
        if not resets.is_sequence:
            _add(self._of_resets, i, gradient)
            return
        if i not in self._of_resets:
            sizes = self._call.sequence.seq_len, *to.shape[1:]
            self._of_resets[i] = gradient.new_empty(sizes)
        self._of_resets[i][part.slice] = gradient

    def _through_inputs(
        self,
        part: SequencePart,
        own: Sequence[Tensor],
        tables: dict[int, Tensor],
        made: Sequence[Tensor],
        of_made: Sequence[Tensor],
    ) -> None:
        """From the inputs that the program reads to those of the step, and to tables."""
        places = [i for i, x in enumerate(own) if x.requires_grad]
        if made is own:
            found: Sequence[Tensor | None] = [of_made[i] for i in places]
        else:
            read = {i: table for i, table in tables.items() if table.requires_grad}
            leaves = [*read.values(), *(own[i] for i in places)]
            found = _through(made, of_made, leaves)
            for i, gradient in zip(read, found, strict=False):
                if gradient is not None:
                    _add(self._sums, i, gradient.to(self._call.sum_dtype))
            found = found[len(read) :]
        for i, gradient in zip(places, found, strict=True):
            if gradient is None or not gradient.numel():
                continue
            if self._call.is_whole:
                self._of_inputs[i] = gradient
                continue
            if i not in self._of_inputs:
                self._of_inputs[i] = own[i].new_empty(
                    self._call.sequence.seq_len, *own[i].shape[1:]
                )
            self._of_inputs[i][part.slice] = gradient

    def _in_order(
        self, of_state: Sequence[Tensor], of_constants: Sequence[Tensor | None]
    ) -> Gradients:
        # As autograd does it, what unused results alone have read gets none, and no zeros.
        values, unread = self._values, self._call.program.unread
        inputs: Gradients = [
            None if i in unread.inputs else self._of_inputs.get(i)
            for i in range(len(values.inputs))
        ]
        reset_to: Gradients = [None] * len(values.reset_to)
        state = [
            gradient.reshape(leaf.shape) if need and j not in unread.state else None
            for j, (leaf, gradient, need) in enumerate(
                zip(values.state, of_state, self._needs.state, strict=True)
            )
        ]
        resets = self._call.sequence.resets
        for n, i in enumerate(resets.leaves) if resets and resets.has_values else ():
            if self._needs.reset_to[n]:
                reset_to[n] = _of_rows(self._of_resets[i], values.reset_to[n])
        constants = [
            None if gradient is None or i in unread.constants else gradient.to(constant.dtype)
            for i, (constant, gradient) in enumerate(
                zip(values.constants, of_constants, strict=True)
            )
        ]
        return _apart([*inputs, *state, *reset_to, *constants])


class _Weights:
    """What a program's weights are made of, in backward, and gradients of the constants."""

    def __init__(self, call: ProgramCall, values: ProgramValues, needs: Sequence[bool]) -> None:
        call_weights = call.program.generated.call_weights
        self._constants: Sequence[Tensor] = values.constants
        self._has_derived = call_weights.has_derived
        if call_weights.has_derived:
            given = zip(values.constants, needs, strict=True)
            self._constants = [c.detach().requires_grad_(need) for c, need in given]
        with torch.set_grad_enabled(call_weights.has_derived):
            self._every = call_weights.tensors(self._constants, values.state[0])
        self.tensors: Sequence[Tensor] = self._every
        self.needs: Sequence[bool] = [*needs, *[False] * (len(self._every) - len(needs))]
        if call_weights.has_derived:
            self.tensors = [tensor.detach() for tensor in self._every]
            self.needs = [tensor.requires_grad for tensor in self._every]

    def gradients(self, found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Of constants, from those of all tensors."""
        count = len(self._constants)
        own = list(found[:count])
        places = [i for i, need in enumerate(self.needs[:count]) if need]
        if not self._has_derived or not places:
            return own
        leaves = [self._constants[i] for i in places]
        more = _through(self._every[count:], found[count:], leaves)
        for i, gradient in zip(places, more, strict=True):
            before = own[i]
            if before is None or gradient is None:
                own[i] = gradient if before is None else before
            else:
                own[i] = before + gradient.to(before.dtype)
        return _apart(own)


def _add(sums: dict[int, Tensor], i: int, gradient: Tensor) -> None:
    """Adds the gradient of a part, whose memory nobody else has; an empty one is none."""
    if not gradient.numel():
        return
    if i in sums:
        sums[i] += gradient
    else:
        sums[i] = gradient


def _through(
    made: Sequence[Tensor], of_made: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of leaves from those of what has been made of them."""
    pairs = [
        (y, g.to(y.dtype))
        for y, g in zip(made, of_made, strict=True)
        if y.requires_grad and g is not None
    ]
    if not pairs:
        return [None] * len(leaves)
    results, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(results, leaves, gradients, allow_unused=True)


def _apart(gradients: Gradients) -> Gradients:
    """The same numbers, each in memory of its own.

    autograd has one tensor for both terms of a sum. A leaf's ``grad`` is what comes here, and is
    changed in place when gradients are accumulated or clipped.
    """
    memory = [0 if g is None else g.untyped_storage().data_ptr() for g in gradients]
    times = Counter(memory)
    taken: dict[int, list[tuple[int, int]]] = {}
    made: Gradients = []
    for gradient, start in zip(gradients, memory, strict=True):
        if gradient is not None and times[start] > 1 and gradient.numel():
            first = int(gradient.storage_offset())
            steps = zip(gradient.shape, gradient.stride(), strict=True)
            last = first + sum(int((size - 1) * stride) for size, stride in steps)
            places = taken.setdefault(start, [])
            if any(a <= last and first <= b for a, b in places):
                gradient = gradient.clone()
            else:
                places.append((first, last))
        made.append(gradient)
    return made


def _of_rows(gradient: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of what resets take, which may be one row for all."""
    if gradient.dim() == 2 and leaf.shape[0] == 1 and gradient.shape[0] != 1:
        gradient = gradient.sum(0, keepdim=True)
    return gradient.to(leaf.dtype).reshape(leaf.shape)
