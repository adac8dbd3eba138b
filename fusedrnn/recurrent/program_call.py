"""A call of a program, and its tensors as the operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _compile
from .noise import Seed
from .program_parts import Part
from .sequence_call import SequenceCall
from .trees import Leaves
from .whole_call import WholeCall

if TYPE_CHECKING:
    from .._compile.cell import Program
    from .._front.graph import StepGraph

ZERO, STATE, SEQUENCE, KEEP = range(4)
"""What a carry becomes at a reset: zero, a state, that of a sequence of states, what it is."""


@dataclass
class Call:
    """What the function of autograd gets besides tensors that autograd is to see, and the seed.

    Calls of one kind share it.
    """

    sequence: SequenceCall
    """Without its tensors, and without a seed of its own."""
    counts: tuple[int, int, int]
    """Of inputs, states, and what resets set these to; constants come behind them."""
    graph: StepGraph | None
    """For derivatives of gradients, of which a trial takes none."""
    numbers: tuple[Any, ...]
    """That the step gets besides tensors."""
    program: Program
    origin: Program
    """The program of forward, by which chunks are chosen in backward too."""
    chunk: int
    """The most steps of a chunk."""
    parts: Sequence[Part]
    """In the order of work. If there are several, their sequences are made again in backward."""
    saves_sums: bool
    """Whether forward saves the sums of products, which backward then need not multiply again."""
    whole: WholeCall | None = None
    """How the operators take it at once, if they can."""
    draws: bool = True
    """Whether the program draws random numbers."""

    def with_program(self, program: Program, constants: Sequence[Tensor]) -> Call:
        """The same of a program, which may be another one for backward."""
        made = replace(self, program=program, draws=bool(program.form.streams))
        made.whole = WholeCall.of(made, constants)
        return made

    def kinds_of_resets(self) -> list[int]:
        """What each carry becomes at a reset; nothing without resets."""
        resets = self.sequence.resets
        if resets is None:
            return []
        kinds, kind = [KEEP] * self.counts[1], ZERO
        if resets.has_values:
            kind = SEQUENCE if resets.is_sequence else STATE
        for i in resets.leaves:
            kinds[i] = kind
        return kinds

    @property
    def is_whole(self) -> bool:
        """Whether sequences of all steps are kept for backward."""
        return len(self.parts) == 1


class Values(NamedTuple):
    """What the function of autograd gets or gives, by what it is to the step."""

    inputs: Sequence[Any]
    state: Sequence[Any]
    reset_to: Sequence[Any]
    constants: Sequence[Any]

    @classmethod
    def of(cls, call: Call, given: Sequence[Any]) -> Values:
        inputs, states, resets = call.counts
        a, b, c = inputs, inputs + states, inputs + states + resets
        return cls(given[:a], given[a:b], given[b:c], given[c:])


@dataclass
class Arguments:
    """The tensors of a call, in a mode in which autograd records nothing."""

    call: Call
    seed: Seed
    values: Values
    state: list[Tensor]
    """(batch, width) each."""
    reset_to: list[Tensor]
    """Of each carry what it becomes at a reset, or an empty tensor; none without resets."""
    kinds: list[int]

    @classmethod
    def of(cls, call: Call, seed: Seed, tensors: Sequence[Tensor]) -> Arguments:
        """Of the tensors that the function of autograd gets."""
        values = Values.of(call, tensors)
        dtype = values.state[0].dtype
        state = [_flat(leaf, 1, dtype) for leaf in values.state]
        reset_to = _reset_values(call.sequence, values, dtype)
        return cls(call, seed, values, state, reset_to, call.kinds_of_resets())

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which gradients of all steps are added up, and in which sums of products are saved."""
        return torch.float64 if self.state[0].dtype == torch.float64 else torch.float32

    def inputs(self, part: Part) -> Leaves:
        """Those of the step itself."""
        if self.call.is_whole:
            return tuple(self.values.inputs)
        return tuple([leaf[part.slice] for leaf in self.values.inputs])

    def of_part(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        state: Sequence[Tensor],
        weights: Sequence[Tensor],
        vectors: Sequence[Tensor],
    ) -> PartCall:
        """A call of the operators.

        Args:
            inputs: That the program reads, (steps, batch, width) each.
            state: Before the part, (batch, width) each.
        """
        call, sequence = self.call, self.call.sequence
        program, lengths, reset, chunk = call.program, sequence.lengths, sequence.reset, call.chunk
        reset_to = self.reset_to
        if not call.is_whole:
            if lengths is not None:
                lengths = (lengths - part.begin).clamp(0, part.steps)
            reset_to = [
                tensor[part.slice] if kind == SEQUENCE else tensor
                for tensor, kind in zip(reset_to, self.kinds, strict=True)
            ]
            chunk, _, _ = call.origin.chunk(part.steps, sequence.rows, chunk, 0)
        options = {
            "lengths": lengths,
            "reset": None if reset is None else reset[part.slice].contiguous(),
            "seed": self.seed.on(sequence.device) if program.form.streams else None,
            "stream": sequence.layer,
            "first_step": part.begin,
            "reverse": sequence.backwards,
            "chunk": chunk,
        }
        given = (program.number, inputs, state, weights, vectors, reset_to, self.kinds)
        return PartCall(self, part, given, options)


@dataclass
class PartCall:
    """A call of the operators for some steps."""

    arguments: Arguments
    part: Part
    given: tuple[Any, ...]
    options: dict[str, Any]

    def new_sequences(self) -> list[Tensor]:
        """(steps, batch, ...) each."""
        call, like = self.arguments.call, self.arguments.state[0]
        make = like.new_empty if self.options["lengths"] is None else like.new_zeros
        sizes = self.part.steps, call.sequence.rows
        return [make((*sizes, *shape)) for shape in call.program.sequence_shapes]

    def new_last(self) -> list[Tensor]:
        """The state after the steps, (batch, ...) each."""
        call, like = self.arguments.call, self.arguments.state[0]
        rows = call.sequence.rows
        return [like.new_empty((rows, *shape)) for shape in call.program.state_shapes]

    def new_kept(self) -> list[Tensor]:
        """The carries before each chunk, of those that no sequence keeps."""
        chunks, call = -(-self.part.steps // self.options["chunk"]), self.arguments.call
        widths = call.program.kept_widths
        return [self._new(chunks, call.sequence.rows, width) for width in widths]

    def new_sums(self) -> list[Tensor]:
        """The sums of products, of all rows."""
        arrays, rows = self.arguments.call.program.form.arrays, self.arguments.call.sequence.rows
        return [self._new(self.part.steps * rows, array.columns) for array in arrays]

    def _new(self, *shape: int) -> Tensor:
        return self.arguments.state[0].new_empty(shape, dtype=self.arguments.sum_dtype)

    def forward(
        self,
        sequences: Sequence[Tensor],
        last: Sequence[Tensor],
        kept: Sequence[Tensor],
        sums: Sequence[Tensor],
    ) -> None:
        """Writes all of these. ``kept`` and ``sums`` may be empty lists."""
        _compile.operators.forward(
            *self.given,
            sequences=self.of_rows(sequences),
            last=[leaf if leaf.dim() == 2 else leaf.view(leaf.shape[0], -1) for leaf in last],
            kept=kept,
            saved=sums,
            **self.options,
        )

    def backward(
        self,
        sequences: Sequence[Tensor],
        kept: Sequence[Tensor],
        sums: Sequence[Tensor],
        **gradients: Any,
    ) -> None:
        _compile.operators.backward(
            *self.given,
            sequences=self.of_rows(sequences),
            kept=kept,
            saved=sums,
            **(gradients | self.options),
        )

    def of_rows(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Sequences as operators take them, (steps, batch, width) each."""
        shape = self.part.steps, self.arguments.call.sequence.rows, -1
        return [one if one.dim() == 3 else one.view(shape) for one in sequences]


def _flat(leaf: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """With one dimension of features after the first ``dims`` dimensions."""
    if leaf.dtype != dtype:
        leaf = leaf.to(dtype)
    return leaf if leaf.dim() == dims + 1 else leaf.reshape(*leaf.shape[:dims], -1)


def _reset_values(call: SequenceCall, values: Values, dtype: torch.dtype) -> list[Tensor]:
    """For each carry what it becomes at a reset, a tensor that may be empty."""
    resets = call.resets
    if resets is None:
        return []
    nothing = torch.empty(0, dtype=dtype, device=values.state[0].device)
    tensors = [nothing] * len(values.state)
    for value, i in zip(values.reset_to, resets.leaves, strict=False):
        tensors[i] = _flat(value, 2 if resets.is_sequence else 1, dtype)
    return tensors
