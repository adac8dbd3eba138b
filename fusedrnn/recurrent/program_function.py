"""A sequence by a program, as one function of autograd.

Longer than 350 lines, because forward and backward share what tensors are to a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._graphs import never_in_graphs
from .autograd import is_batched, warn_of_loop, with_graph
from .forward import like_rows
from .gradients import Gradients
from .programs import Masks, without_unused
from .runs import Run
from .trees import Leaves
from .values import Layout, Values

if TYPE_CHECKING:
    from .._compile.cell import Program


@dataclass
class _Call:
    """What the function gets besides tensors that autograd is to see."""

    run: Run
    layout: Layout
    program: Program
    chunk: int


def ready_program(
    run: Run, program: Program, chunk: int, inputs: Leaves, state: Leaves, constants: Leaves
) -> Callable[[], tuple[Leaves, Leaves]]:
    """What computes outputs and the last state, of the weights that modules have now.

    Args:
        chunk: The most steps of a chunk.
    """
    weights, run.user_step.output = run.weights, program.output
    values = Values(inputs, state, constants, weights.trained(), {})
    tensors = values.leaves()
    run.frozen, run.training = weights.frozen(), weights.training_flags()
    run.draws = bool(program.plan.draws)
    before = run.before()
    run.befores = [before, before]
    call = _Call(run, values.layout(), program, chunk)

    def results() -> tuple[Leaves, Leaves]:
        made = _Program.apply(call, *tensors, *run.frozen.values())
        count = len(program.output_shapes)
        return made[:count], made[count:]

    return results


class _Program(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        run, program = call.run, call.program
        arguments = _Arguments.of(call, tensors)
        like, steps, rows = arguments.state[0], run.seq_len, run.rows
        has_ends = arguments.lengths is not None
        make = like.new_zeros if has_ends else like.new_empty
        sequences = [make(steps, rows, *shape) for shape in _shapes(call)]
        last = [like.new_empty(rows, *shape) for shape in program.state_shapes]
        kept = arguments.new_kept()
        with torch.no_grad():
            weights, vectors = program.outside(arguments.constants, like.dtype)
        flat_last = [leaf.view(rows, -1) for leaf in last]
        arguments.forward(weights, vectors, _of_rows_of_steps(call, sequences), flat_last, kept)
        ctx.call, ctx.count, ctx.chunk = call, len(tensors), arguments.chunk
        ctx.save_for_backward(*tensors, *sequences, *kept)
        ctx.set_materialize_grads(False)
        return (*_outputs(call, sequences), *last)

    @staticmethod
    @never_in_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        run, layout = call.run, call.layout
        saved = ctx.saved_tensors
        tensors, rest = saved[: ctx.count], saved[ctx.count :]
        frozen = len(run.frozen)
        own = tensors[: len(tensors) - frozen]
        needs = ctx.needs_input_grad[1 : 1 + len(own)]
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            warn_of_loop("Derivatives of gradients")
            return None, *with_graph(run, layout, own, needs, gradients), *(None,) * frozen
        program = _backward_program(call, tensors, gradients)
        if program is None:
            warn_of_loop("Gradients of some results alone")
            return None, *with_graph(run, layout, own, needs, gradients), *(None,) * frozen
        call = replace(call, program=program)
        found = _Backward(call, tensors, rest, needs, ctx.chunk).gradients(gradients)
        return None, *found, *(None,) * frozen


def _backward_program(
    call: _Call, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Program | None:
    """The program of forward, or one that takes no derivatives of results without gradients."""
    used = tuple(gradient is not None for gradient in gradients)
    if all(used):
        return call.program
    run, masks = call.run, call.run.masks
    assert masks is not None
    values, constants = _values(call, tensors)
    trained = [name not in run.frozen for name in call.program.names]
    own = values.inputs[: masks.inputs]
    return without_unused(call.program, used, constants, trained, own, values.state)


def _values(call: _Call, tensors: Sequence[Tensor]) -> tuple[Values, list[Tensor]]:
    """Tensors without their graphs as they are in a call, and the constants of the step."""
    frozen = list(call.run.frozen)
    tensors = [tensor.detach() for tensor in tensors]
    values = call.layout.values(tensors[: len(tensors) - len(frozen)])
    named = values.weights | dict(zip(frozen, tensors[len(tensors) - len(frozen) :], strict=True))
    return values, [named[name] for name in call.program.names]


def _shapes(call: _Call) -> list[Sequence[int]]:
    """Of sequences in a step, without the batch: as the first output has it that is one.

    What the user gets must be no view, which autograd would not let them change in place.
    """
    program = call.program
    shapes: list[Sequence[int]] = [(width,) for width in program.plan.program.sequences]
    pairs = zip(program.plan.output_sequences, program.output_shapes, strict=True)
    for number, shape in reversed(list(pairs)):
        shapes[number] = shape
    return shapes


def _of_rows_of_steps(call: _Call, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Sequences as operators take them, (seq_len, batch, width) each."""
    return [sequence.view(call.run.seq_len, call.run.rows, -1) for sequence in sequences]


def _outputs(call: _Call, sequences: Sequence[Tensor]) -> list[Tensor]:
    """What the user gets of sequences; each a tensor of its own."""
    run, program = call.run, call.program
    found, seen = [], set[int]()
    for number, shape in zip(program.plan.output_sequences, program.output_shapes, strict=True):
        sequence = sequences[number]
        if run.returns_sequence:
            is_taken = number in seen
            found.append(
                sequence.reshape(run.seq_len, run.rows, *shape).clone() if is_taken else sequence
            )
            seen.add(number)
        elif run.last is None:
            found.append(sequence[run.time(run.seq_len - 1)].reshape(run.rows, *shape).clone())
        else:
            flags, rows = run.last, torch.arange(run.rows, device=sequence.device)
            picked = sequence[flags.int().argmax(0), rows].reshape(run.rows, *shape)
            found.append(torch.where(like_rows(flags.any(0), picked), picked, 0))
    return found


@dataclass
class _Arguments:
    """Tensors of a call as operators take them."""

    call: _Call
    constants: list[Tensor]
    inputs: list[Tensor]
    """(seq_len, batch, width) each, those that the program reads."""
    state: list[Tensor]
    """(batch, width) each."""
    lengths: Tensor | None
    reset: Tensor | None
    reset_to: list[Tensor]
    kinds: list[int]
    chunk: int

    @classmethod
    def of(cls, call: _Call, tensors: Sequence[Tensor], chunk: int | None = None) -> _Arguments:
        """Of a call's tensors. ``chunk``: the steps of a chunk, if forward has chosen them."""
        from .._compile import operators

        run, program, masks = call.run, call.program, call.run.masks
        assert masks is not None
        values, constants = _values(call, tensors)
        dtype = values.state[0].dtype
        own = values.inputs[: masks.inputs]
        with torch.no_grad():
            inputs = program.outside.inputs(constants, own, dtype)
        state = [_flat(leaf, 1, dtype) for leaf in values.state]
        reset_to, kinds = _reset_values(masks, values, dtype)
        if chunk is None:
            most = call.chunk
            chunk = operators.chunk(program.number, run.seq_len, run.rows, dtype, most, 0)[0]
        return cls(
            call,
            constants,
            inputs,
            state,
            masks.lengths,
            None if masks.reset is None else masks.reset.contiguous(),
            reset_to,
            kinds,
            chunk,
        )

    def new_kept(self) -> list[Tensor]:
        """The carries before each chunk, of those that no sequence keeps."""
        run, like = self.call.run, self.state[0]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        chunks = -(-run.seq_len // self.chunk)
        return [
            like.new_empty(chunks, run.rows, carry.width, dtype=dtype)
            for carry in self.call.program.plan.carries
            if carry.sequence < 0
        ]

    def _options(self) -> dict[str, Any]:
        run, program = self.call.run, self.call.program
        draws = bool(program.plan.draws)
        return {
            "lengths": self.lengths,
            "reset": self.reset,
            "seed": run.noise.seed.on(run.device) if draws else None,
            "stream": run.noise.layer,
            "first_step": 0,
            "reverse": run.backwards,
            "chunk": self.chunk,
        }

    def forward(
        self,
        weights: list[Tensor],
        vectors: list[Tensor],
        sequences: list[Tensor],
        last: list[Tensor],
        kept: list[Tensor],
    ) -> None:
        from .._compile import operators

        operators.forward(
            self.call.program.number,
            self.inputs,
            self.state,
            weights,
            vectors,
            self.reset_to,
            self.kinds,
            sequences=sequences,
            last=last,
            kept=kept,
            saved=[],
            **self._options(),
        )

    def backward(
        self,
        weights: list[Tensor],
        vectors: list[Tensor],
        sequences: list[Tensor],
        kept: list[Tensor],
        **gradients: Any,
    ) -> None:
        from .._compile import operators

        operators.backward(
            self.call.program.number,
            self.inputs,
            self.state,
            weights,
            vectors,
            self.reset_to,
            self.kinds,
            sequences=sequences,
            kept=kept,
            saved=[],
            **gradients,
            **self._options(),
        )


def _flat(leaf: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """With one dimension of features after the first ``dims`` dimensions."""
    leaf = leaf.to(dtype)
    return leaf if leaf.dim() == dims + 1 else leaf.reshape(*leaf.shape[:dims], -1)


ZERO, STATE, SEQUENCE, KEEP = range(4)
"""What a carry becomes at a reset: zero, a state, that of a sequence of states, what it is."""


def _reset_values(
    masks: Masks, values: Values, dtype: torch.dtype
) -> tuple[list[Tensor], list[int]]:
    """For each carry what it becomes at a reset, a tensor that may be empty, and its kind."""
    nothing = torch.empty(0, dtype=dtype, device=values.state[0].device)
    count = len(values.state)
    resets = masks.resets
    if resets is None:
        return [nothing] * count, [ZERO] * count
    tensors, kinds = [nothing] * count, [KEEP] * count
    own = values.inputs[masks.inputs + (masks.lengths is not None) + 1 :]
    given = own if resets.is_sequence else values.constants
    for number, i in enumerate(resets.leaves):
        kinds[i] = ZERO
        if resets.has_values:
            kinds[i] = SEQUENCE if resets.is_sequence else STATE
            tensors[i] = _flat(given[number], 2 if resets.is_sequence else 1, dtype)
    return tensors, kinds


class _Backward:
    """Gradients of one call."""

    def __init__(
        self,
        call: _Call,
        tensors: Sequence[Tensor],
        rest: Sequence[Tensor],
        needs: Sequence[bool],
        chunk: int,
    ) -> None:
        assert call.run.masks is not None
        self._call, self._arguments = call, _Arguments.of(call, tensors, chunk)
        self._run, self._program, self._masks = call.run, call.program, call.run.masks
        count = len(call.program.plan.program.sequences)
        self._sequences, self._kept = _of_rows_of_steps(call, rest[:count]), list(rest[count:])
        frozen = len(call.run.frozen)
        self._needs = call.layout.values(needs)  # type: ignore[arg-type]
        self._given = call.layout.values(tensors[: len(tensors) - frozen])
        like = self._arguments.state[0]
        self._dtype, self._nothing = like.dtype, like.new_empty(0)
        self._sums = torch.float64 if like.dtype == torch.float64 else torch.float32
        self._no_sums = self._nothing.to(self._sums)

    def gradients(self, given: Sequence[Tensor | None]) -> Gradients:
        """In the order of the function's arguments."""
        outside = self._program.outside
        constants, named = self._constants()
        own = [
            x.detach().requires_grad_(bool(need))
            for x, need in zip(
                self._given.inputs[: self._masks.inputs], self._needs.inputs, strict=False
            )
        ]
        with torch.enable_grad():
            weights, vectors = outside(constants, self._dtype)
            inputs = outside.inputs(constants, own, self._dtype)
        made = [*weights, *vectors, *inputs]
        of_made = [
            *(self._of_weight(w) for w in weights),
            *(
                v.new_empty(v.shape, dtype=self._sums) if v.requires_grad else self._no_sums
                for v in vectors
            ),
            *(x.new_empty(x.shape) if x.requires_grad else self._nothing for x in inputs),
        ]
        ends = (len(weights), len(weights) + len(vectors))
        of_carries = [
            leaf.new_empty(leaf.shape) if need else self._nothing
            for leaf, need in zip(self._arguments.state, self._needs.state, strict=True)
        ]
        of_resets = self._of_resets()
        count = len(self._program.output_shapes)
        self._arguments.backward(
            [w.detach() for w in weights],
            [v.detach() for v in vectors],
            self._sequences,
            self._kept,
            grad_sequences=self._of_sequences(given[:count]),
            grad_last=[
                self._nothing if g is None else g.reshape(self._run.rows, -1).contiguous()
                for g in given[count:]
            ],
            grad_inputs=of_made[ends[1] :],
            grad_carries=of_carries,
            grad_weights=of_made[: ends[0]],
            grad_vectors=of_made[ends[0] : ends[1]],
            grad_reset_to=of_resets,
        )
        leaves = [*named.values(), *(x for x in own if x.requires_grad)]
        found = dict(zip(map(id, leaves), through(made, of_made, leaves), strict=True))
        return self._in_order(
            [found.get(id(x)) for x in own],
            of_carries,
            {name: found[id(leaf)] for name, leaf in named.items()},
            of_resets,
        )

    def _constants(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The step's constants, and by name those of them that need a gradient."""
        constants, named = [], {}
        for name, constant in zip(self._program.names, self._arguments.constants, strict=True):
            if self._needs.weights.get(name):
                constant = named[name] = constant.detach().requires_grad_()
            constants.append(constant)
        return constants, named

    def _of_weight(self, weight: Tensor) -> Tensor:
        """Memory for a gradient that lies as the weight does: its columns one after the other."""
        if not weight.requires_grad:
            return self._no_sums
        terms, columns = weight.shape
        return weight.new_empty((columns, terms), dtype=self._sums).t()

    def _of_sequences(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        found = [self._nothing] * len(self._sequences)
        for number, gradient in zip(self._program.plan.output_sequences, given, strict=True):
            if gradient is None:
                continue
            whole = self._whole(gradient, self._sequences[number])
            found[number] = whole if found[number] is self._nothing else found[number] + whole
        return found

    def _whole(self, gradient: Tensor, sequence: Tensor) -> Tensor:
        """Of a whole sequence, from what the user got of it."""
        run = self._run
        if run.returns_sequence:
            return gradient.reshape(sequence.shape)
        whole = torch.zeros_like(sequence)
        rows = gradient.reshape(run.rows, -1)
        if run.last is None:
            whole[run.time(run.seq_len - 1)] = rows
        else:
            here = torch.where(run.last.any(0)[:, None], rows, 0)
            whole[run.last.int().argmax(0), torch.arange(run.rows, device=rows.device)] = here
        return whole

    def _of_resets(self) -> list[Tensor]:
        """Memory for the gradients of what carries become at resets."""
        found = []
        needs = {i: need for i, _, need in self._resets()}
        for i, (tensor, kind) in enumerate(
            zip(self._arguments.reset_to, self._arguments.kinds, strict=True)
        ):
            if kind == SEQUENCE:
                found.append(tensor.new_empty(tensor.shape) if needs[i] else self._nothing)
            elif needs.get(i):
                shape = (self._run.rows, tensor.shape[1])
                found.append(tensor.new_empty(shape, dtype=self._sums))
            else:
                found.append(self._no_sums)
        return found

    def _resets(self) -> list[tuple[int, int, bool]]:
        """For each carry that resets give a value: its number, the value's, and its need."""
        resets = self._masks.resets
        if resets is None or not resets.has_values:
            return []
        first = self._masks.inputs + (self._masks.lengths is not None) + 1
        if resets.is_sequence:
            return [
                (i, first + n, bool(self._needs.inputs[first + n]))
                for n, i in enumerate(resets.leaves)
            ]
        return [(i, n, bool(self._needs.constants[n])) for n, i in enumerate(resets.leaves)]

    def _in_order(
        self,
        of_own: list[Tensor | None],
        of_carries: list[Tensor],
        of_weights: dict[str, Tensor | None],
        of_resets: list[Tensor],
    ) -> Gradients:
        shapes = self._given
        inputs: Gradients = [*of_own, *(None,) * (len(shapes.inputs) - len(of_own))]
        constants: Gradients = [None] * len(shapes.constants)
        state = [
            gradient.reshape(leaf.shape) if need else None
            for leaf, gradient, need in zip(
                shapes.state, of_carries, self._needs.state, strict=True
            )
        ]
        for i, n, need in self._resets():
            if need:
                assert self._masks.resets is not None
                is_sequence = self._masks.resets.is_sequence
                leaf = (shapes.inputs if is_sequence else shapes.constants)[n]
                (inputs if is_sequence else constants)[n] = _of_rows(of_resets[i], leaf)
        return [*inputs, *state, *constants, *(of_weights.get(name) for name in shapes.weights)]


def through(
    made: Sequence[Tensor], of_made: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of leaves from those of what has been made of them."""
    pairs = [(y, g.to(y.dtype)) for y, g in zip(made, of_made, strict=True) if y.requires_grad]
    if not pairs:
        return [None] * len(leaves)
    results, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(results, leaves, gradients, allow_unused=True)


def _of_rows(gradient: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of what resets take, which may be one row for all."""
    if gradient.dim() == 2 and leaf.shape[0] == 1 and gradient.shape[0] != 1:
        gradient = gradient.sum(0, keepdim=True)
    return gradient.to(leaf.dtype).reshape(leaf.shape)
