"""A sequence by a program, as one function of autograd.

Longer than 350 lines, because the gradients of one call come together here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._graphs import never_in_graphs
from .autograd import is_batched, warn_of_loop
from .gradients import Gradients, gradients_of
from .graph_loop import loop
from .noise import Seed
from .program_call import SEQUENCE, Arguments, Call, PartCall, Values
from .program_forward import Kept, forward, take
from .program_parts import Part, gradient_in
from .programs import without_unused
from .trees import Leaves

if TYPE_CHECKING:
    from .._compile.cell import Program


def run_program(call: Call, seed: Seed, tensors: Sequence[Tensor]) -> tuple[Leaves, Leaves]:
    """Outputs and the last state of a sequence.

    Args:
        tensors: In the order of :class:`Values`.
    """
    count = len(call.program.output_shapes)
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
        made = _Program.apply(call, seed, *tensors)
    else:
        results = forward(call, seed, tensors, for_backward=False)
        made = (*results.outputs, *results.last)
    return made[:count], made[count:]


class _Program(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, seed: Seed, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = forward(call, seed, tensors, for_backward=True)
        ctx.call, ctx.seed, ctx.count = call, seed, len(tensors)
        ctx.save_for_backward(*tensors, *results.for_backward)
        ctx.set_materialize_grads(False)
        return (*results.outputs, *results.last)

    @staticmethod
    @never_in_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        seed: Seed = ctx.seed
        saved = ctx.saved_tensors
        tensors, rest = saved[: ctx.count], saved[ctx.count :]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            warn_of_loop("Derivatives of gradients")
            return None, None, *_by_loop(call, seed, tensors, needs, gradients)
        if any([gradient is None for gradient in gradients]):
            program = _program_without_unused(call, tensors, needs, gradients)
            if program is None:
                warn_of_loop("Gradients of some results alone")
                return None, None, *_by_loop(call, seed, tensors, needs, gradients)
            call = call.with_program(program, tensors[sum(call.counts) :])
        return None, None, *backward(call, seed, tensors, rest, needs, gradients)


def backward(
    call: Call,
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
    if whole := call.whole:
        return whole.backward(call, seed, tensors, rest, gradients, needs)
    return _Backward(Arguments.of(call, seed, tensors), rest, needs).gradients(gradients)


def _by_loop(
    call: Call,
    seed: Seed,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> Gradients:
    """Gradients that may have gradients: of the steps' graph, under autograd."""
    from .._front.graph import Given

    # Aliases, so that hooks of the tensors themselves see only what comes out of here.
    with torch.enable_grad():
        aliases = [
            tensor.view_as(tensor) if need else tensor.detach()
            for tensor, need in zip(tensors, needs, strict=True)
        ]
        values = Values.of(call, aliases)
        sequence = call.sequence.with_values(
            tuple(values.inputs), tuple(values.state), tuple(values.reset_to), seed
        )
        given = Given(tuple(values.constants), call.numbers)
        assert call.graph is not None
        outputs, last = loop(call.graph, given, sequence)
    create_graph = torch.is_grad_enabled()
    return gradients_of([*outputs, *last], gradients, aliases, create_graph=create_graph)


def _program_without_unused(
    call: Call,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> Program | None:
    """One that takes no derivatives of results without gradients."""
    used = tuple(gradient is not None for gradient in gradients)
    trained = Values.of(call, needs).constants
    inputs, state, _, constants = (
        tuple([tensor.detach() for tensor in part]) for part in Values.of(call, tensors)
    )
    return without_unused(call.program, used, constants, trained, inputs, state)


class _Backward:
    """Gradients of one call: part by part from the last one on, and added up."""

    def __init__(self, arguments: Arguments, rest: Sequence[Tensor], needs: Sequence[bool]) -> None:
        self._arguments, self._call, self._rest = arguments, arguments.call, rest
        call = arguments.call
        self._sequence, self._program = call.sequence, call.program
        self._needs = Values.of(call, needs)
        self._nothing = arguments.state[0].new_empty(0)
        self._no_sums = self._nothing.to(arguments.sum_dtype)
        self._weights = _Weights(call, arguments, self._needs.constants)
        # What parts give: of weights and vectors, of constants through inputs that are made of
        # them, of the step's inputs, and of what carries become at resets.
        self._sums: dict[int, Tensor] = {}
        self._of_tables: dict[int, Tensor] = {}
        self._of_inputs: dict[int, Tensor] = {}
        self._of_resets: dict[int, Tensor] = {}

    def gradients(self, given: Sequence[Tensor | None]) -> Gradients:
        """In the order of the function's arguments."""
        count = len(self._program.output_shapes)
        of_state = [
            self._nothing if g is None else g.reshape(self._sequence.rows, -1).contiguous()
            for g in given[count:]
        ]
        for index in reversed(range(len(self._call.parts))):
            of_state = self._pass(index, given[:count], of_state)
        of_constants = self._weights.gradients([self._sums[i] for i in range(len(self._sums))])
        for i, table in self._of_tables.items():
            other = of_constants.get(i)
            of_constants[i] = table if other is None else table + other.to(table.dtype)
        return self._in_order(of_state, of_constants)

    def _pass(
        self, index: int, of_outputs: Sequence[Tensor | None], of_state: list[Tensor]
    ) -> list[Tensor]:
        """Gradients of the state before a part, from those of the state after it."""
        arguments, part = self._arguments, self._call.parts[index]
        own = [
            x.detach().requires_grad_() if need else x
            for x, need in zip(arguments.inputs(part), self._needs.inputs, strict=True)
        ]
        inputs = self._weights.inputs(own)
        state = self._state_before(index)
        now = arguments.of_part(
            part, [x.detach() for x in inputs], state, self._weights.weights, self._weights.vectors
        )
        kept = self._kept(now)
        of_inputs = [x.new_empty(x.shape) if x.requires_grad else self._nothing for x in inputs]
        weights, sums = self._weights.weights, self._weights.memory()
        of_before = [
            leaf.new_empty(leaf.shape) if need or index else self._nothing
            for leaf, need in zip(arguments.state, self._needs.state, strict=True)
        ]
        of_resets = self._memory_of_resets(part)
        now.backward(
            *kept,
            grad_sequences=self._of_sequences(of_outputs, now.of_rows(kept.sequences), part),
            grad_last=of_state,
            grad_inputs=of_inputs,
            grad_carries=of_before,
            grad_weights=sums[: len(weights)],
            grad_vectors=sums[len(weights) :],
            grad_reset_to=of_resets,
        )
        for i, gradient in enumerate(sums):
            _add(self._sums, i, gradient)
        for i, gradient in enumerate(of_resets) if arguments.kinds else ():
            if arguments.kinds[i] != SEQUENCE:  # else it is in its place
                _add(self._of_resets, i, gradient)
        self._through_inputs(part, own, inputs, of_inputs)
        return of_before

    def _state_before(self, index: int) -> Sequence[Tensor]:
        count = len(self._arguments.state)
        if index == 0:
            return self._arguments.state
        return self._rest[(index - 1) * count : index * count]

    def _kept(self, now: PartCall) -> Kept:
        if self._call.is_whole:
            return Kept.of(self._call, self._rest)
        return take(now, saves_sums=False)[0]

    def _of_sequences(
        self, given: Sequence[Tensor | None], sequences: Sequence[Tensor], part: Part
    ) -> list[Tensor]:
        """Of a part's sequences, from those of outputs; an output without one gives nothing."""
        found = [self._nothing] * len(sequences)
        for number, gradient in zip(self._program.printed.output_sequences, given, strict=True):
            if gradient is not None and not self._sequence.returns_sequence:
                gradient = gradient_in(self._sequence, part, gradient)
            if gradient is None:
                continue
            whole = gradient.reshape(sequences[number].shape)
            found[number] = whole if found[number] is self._nothing else found[number] + whole
        return found

    def _through_inputs(
        self, part: Part, own: Sequence[Tensor], made: Sequence[Tensor], of_made: Sequence[Tensor]
    ) -> None:
        """From the inputs that the program reads to those of the step, and to constants."""
        places = [i for i, x in enumerate(own) if x.requires_grad]
        read = self._weights.read_by_inputs()
        if len(made) == len(own) and all(a is b for a, b in zip(made, own, strict=True)):
            found: Sequence[Tensor | None] = [of_made[i] for i in places]
        else:
            found = _through(made, of_made, [*read.values(), *(own[i] for i in places)])
        for number, gradient in zip(read, found, strict=False):
            if gradient is not None:  # which autograd may have given another leaf, too
                total = self._of_tables.get(number)
                gradient = gradient.to(self._no_sums.dtype)
                self._of_tables[number] = gradient if total is None else total + gradient
        for i, gradient in zip(places, found[len(read) :], strict=True):
            if gradient is None:
                continue
            if self._call.is_whole:
                self._of_inputs[i] = gradient
                continue
            if i not in self._of_inputs:
                self._of_inputs[i] = own[i].new_empty(self._sequence.seq_len, *own[i].shape[1:])
            self._of_inputs[i][part.slice] = gradient

    def _memory_of_resets(self, part: Part) -> list[Tensor]:
        """For the gradients of what carries become at resets."""
        found = []
        if not self._arguments.kinds:
            return [self._no_sums] * len(self._arguments.state)
        needs = {i: need for i, _, need in self._resets()}
        reset_to, kinds = self._arguments.reset_to, self._arguments.kinds
        for i, (tensor, kind) in enumerate(zip(reset_to, kinds, strict=True)):
            if not needs.get(i):
                found.append(self._nothing if kind == SEQUENCE else self._no_sums)
            elif kind == SEQUENCE:
                if i not in self._of_resets:
                    self._of_resets[i] = tensor.new_empty(tensor.shape)
                found.append(self._of_resets[i][part.slice])
            else:
                shape = (self._sequence.rows, tensor.shape[1])
                found.append(tensor.new_empty(shape, dtype=self._no_sums.dtype))
        return found

    def _resets(self) -> list[tuple[int, int, bool]]:
        """For each carry that resets give a value: its number, the value's, and its need."""
        resets = self._sequence.resets
        if resets is None or not resets.has_values:
            return []
        return [(i, n, self._needs.reset_to[n]) for n, i in enumerate(resets.leaves)]

    def _in_order(self, of_state: Sequence[Tensor], of_constants: dict[int, Tensor]) -> Gradients:
        # As autograd does it, what unused results alone have read gets none, and no zeros.
        values, unread = self._arguments.values, self._program.unread
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
        for i, n, need in self._resets():
            if need:
                reset_to[n] = _of_rows(self._of_resets[i], values.reset_to[n])
        constants: Gradients = []
        for i, constant in enumerate(values.constants):
            gradient = None if i in unread.constants else of_constants.get(i)
            constants.append(None if gradient is None else gradient.to(constant.dtype))
        return _apart([*inputs, *state, *reset_to, *constants])


class _Weights:
    """Weights and vectors of a program in backward, and gradients of what they are made of."""

    def __init__(self, call: Call, arguments: Arguments, needs: Sequence[bool]) -> None:
        self._outside, self._needs = call.program.printed.outside, needs
        self._like, self._sum_dtype = arguments.state[0], arguments.sum_dtype
        given = zip(arguments.values.constants, needs, strict=True)
        self._constants = [c.detach().requires_grad_() if need else c for c, need in given]
        """Leaves of a graph of autograd."""
        with torch.enable_grad():
            weights, vectors = self._outside(self._constants, self._like)
        self._made = [*weights, *vectors]
        self.weights = [weight.detach() for weight in weights]
        self.vectors = [vector.detach() for vector in vectors]

    def inputs(self, own: Sequence[Tensor]) -> list[Tensor]:
        """What the program reads, of a part's own inputs."""
        with torch.enable_grad():
            return self._outside.inputs(self._constants, own, self._like)

    def read_by_inputs(self) -> dict[int, Tensor]:
        """The leaves that inputs may be made of, by their numbers."""
        if not self._outside.reads_tables:
            return {}
        return {i: c for i, c in enumerate(self._constants) if self._needs[i]}

    def memory(self) -> list[Tensor]:
        """For gradients of weights and vectors; those of a weight lie as the weight does."""
        found = []
        for tensor in self._made:
            if not tensor.requires_grad:
                found.append(self._like.new_empty(0, dtype=self._sum_dtype))
            elif tensor.dim() == 2:
                terms, columns = tensor.shape
                found.append(self._like.new_empty((columns, terms), dtype=self._sum_dtype).t())
            else:
                found.append(self._like.new_empty(tensor.shape, dtype=self._sum_dtype))
        return found

    def gradients(self, of_made: Sequence[Tensor]) -> dict[int, Tensor]:
        """Of constants, by their numbers, from those of weights and vectors."""
        places = [i for i, need in enumerate(self._needs) if need]
        found = _through(self._made, of_made, [self._constants[i] for i in places])
        return {i: g for i, g in zip(places, found, strict=True) if g is not None}


def _add(sums: dict[int, Tensor], i: int, gradient: Tensor) -> None:
    """Adds the gradient of a part, whose memory nobody else has."""
    if i in sums:
        sums[i] += gradient
    else:
        sums[i] = gradient


def _through(
    made: Sequence[Tensor], of_made: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of leaves from those of what has been made of them."""
    pairs = [(y, g.to(y.dtype)) for y, g in zip(made, of_made, strict=True) if y.requires_grad]
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
