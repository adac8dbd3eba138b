"""Steps that run as compiled programs: which do, and how.

Everything that traces, lowers and builds is imported when the first program is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._graphs import never_in_graphs
from ..options import text_of
from .autograd import is_batched, warn_of_loop, with_graph
from .forward import like_rows
from .gradients import Gradients
from .runs import Run
from .trees import Leaves
from .values import Layout, Values
from .variables import names_in

if TYPE_CHECKING:
    from .._compile.cell import Program
    from .steps import Resets

AUTO, REQUIRE, NEVER = COMPILE = ("auto", "require", "never")

_MOST_KINDS = 8
"""Programs of one cell that differ in nothing but what Python decides: more would be built anew in
each call."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def check_compile(value: Any) -> None:
    """
    Raises:
        ValueError: It is no value of ``compile``.
    """
    if not isinstance(value, str) or value not in COMPILE:
        names = ", ".join(map(repr, COMPILE))
        raise ValueError(f"fusedrnn: compile must be one of {names}, got {text_of(value)}")


@dataclass(frozen=True)
class Masks:
    """Rows that end, and rows that start anew, as programs take them."""

    inputs: int
    """Leaves of the input that are the step's own."""
    lengths: Tensor | None
    """int64 on the CPU."""
    reset: Tensor | None
    """(seq_len, batch)."""
    resets: Resets | None
    """Which leaves of the state are set, and whether a sequence of values is among the inputs."""


class Programs:
    """The programs of one cell, by all that makes its step another one."""

    def __init__(self) -> None:
        self._known: dict[Any, Program | str] = {}
        self._kinds: dict[Any, int] = {}

    def of(self, run: Run, inputs: Leaves, state: Leaves) -> Program | str:
        """The program of a run, or why there is none."""
        kind = _kind(run, inputs, state)
        key = (kind, _python(run))
        found = self._known.get(key)
        if found is None:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
            if self._kinds[kind] > _MOST_KINDS:
                return "attributes of its modules change from call to call"
            found = self._known[key] = _compiled(run, inputs, state)
        return found


def _compiled(run: Run, inputs: Leaves, state: Leaves) -> Program | str:
    from .._compile.cell import compiled
    from .._compile.trace import CannotCompile

    try:
        return compiled(run, inputs, state)
    except CannotCompile as error:
        return str(error)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of the compiler itself: the steps in Python are right
        return f"the compiler raises {type(error).__name__}: {error}"


def _kind(run: Run, inputs: Leaves, state: Leaves) -> Any:
    """Structure, widths and dtypes."""
    weights = run.weights.trained() | run.weights.frozen()
    return (
        run.signature[:2],
        tuple((leaf.shape[2:], leaf.dtype) for leaf in inputs),
        tuple((leaf.shape[1:], leaf.dtype) for leaf in state),
        tuple((name, w.shape, w.dtype, w.requires_grad) for name, w in weights.items()),
        run.device,
    )


def _python(run: Run) -> Any:
    """What Python may decide by: modes, attributes, and variables of classes and modules."""
    modules = list(run.weights.used.modules())
    kinds = tuple(
        (
            type(m),
            m.training,
            *map(id, m._forward_hooks.values()),
            *map(id, m._forward_pre_hooks.values()),
        )
        for m in modules
    )
    attributes = tuple(
        (key, _plain(value.value if value.entries is None else value.entries))
        for key, value in run.python.values().items()
    )
    around = tuple(part for kind in dict.fromkeys(map(type, modules)) for part in _around(kind))
    return kinds, attributes, around


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, dict):
        return tuple((repr(k), _plain(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_plain, value))
    return id(value)


_names: dict[type, tuple[tuple[Any, tuple[str, ...]], ...]] = {}


def _around(kind: type[nn.Module]) -> Iterator[Any]:
    """Plain values that a class of the user's has, or that its methods find around them."""
    if kind not in _names:
        found: list[tuple[Any, tuple[str, ...]]] = []
        for base in kind.__mro__:
            if base.__module__.startswith(("torch.", "fusedrnn.", "builtins")):
                continue
            found.append((base, tuple(n for n, v in vars(base).items() if isinstance(v, _PLAIN))))
            for function in vars(base).values():
                if isinstance(function, FunctionType):
                    found.append((function.__globals__, tuple(sorted(names_in(function.__code__)))))
        _names[kind] = tuple(found)
    for space, names in _names[kind]:
        variables = space if isinstance(space, dict) else vars(space)
        for name in names:
            value = variables.get(name)
            if isinstance(value, _PLAIN):
                yield name, repr(value)


def choose_program(
    run: Run, compile: str, others: str, programs: Programs, inputs: Leaves, state: Leaves
) -> Program | str:
    """The program that a call takes, or why it takes none.

    Args:
        others: Why other options exclude programs, or nothing.

    Raises:
        RuntimeError: ``compile`` is "require", and there is none.
    """
    found: Program | str
    if compile == NEVER:
        return "compile says so"
    found = others or _obstacle(run, inputs, state)
    if not found:
        assert run.masks is not None
        found = programs.of(run, inputs[: run.masks.inputs], state)
    if compile == REQUIRE and isinstance(found, str):
        raise RuntimeError(f"fusedrnn: the cell{run.place} cannot be compiled: {found}")
    return found


def _obstacle(run: Run, inputs: Leaves, state: Leaves) -> str:
    """Why a call takes no program, whatever its step is; or nothing."""
    if os.environ.get("FUSEDRNN_COMPILE") == "0":
        return "FUSEDRNN_COMPILE=0 says so"
    if run.masks is None:
        return "programs are for Recurrent"
    if run.autocast[0]:
        return "autocast is on"
    if run.device.type != "cpu":
        return f"programs run on a CPU so far, and the input is on {run.device}"
    if run.rows == 0 or run.seq_len == 0:
        return "there is nothing to compute"
    if torch._C._len_torch_dispatch_stack():
        return "a mode of torch looks at all operations"
    leaves = (*inputs, *state, *run.weights.trained().values(), *run.weights.frozen().values())
    for leaf in leaves:
        if type(leaf) not in (Tensor, nn.Parameter, nn.Buffer):
            return f"a tensor is a {type(leaf).__name__}"
        if leaf.device != run.device:
            return f"a weight is on {leaf.device}"
    return ""


# How programs run


@dataclass
class _Call:
    """What the function gets besides tensors that autograd is to see."""

    run: Run
    layout: Layout
    program: Program
    chunk: int


def run_program(
    run: Run, program: Program, chunk: int, inputs: Leaves, state: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """Outputs and last state. ``chunk``: the most steps of a chunk."""
    weights = run.weights
    values = Values(inputs, state, constants, weights.trained(), {})
    tensors = values.leaves()
    run.frozen, run.training = weights.frozen(), weights.training_flags()
    run.draws = bool(program.plan.draws)
    before = run.before()
    run.befores = [before, before]
    call = _Call(run, values.layout(), program, chunk)
    made = _Program.apply(call, *tensors, *run.frozen.values())
    count = len(program.output_shapes)
    return made[:count], made[count:]


class _Program(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        run, program = call.run, call.program
        arguments = _Arguments.of(call, tensors)
        like, plan = arguments.state[0], program.plan
        steps, rows = run.seq_len, run.rows
        has_ends = arguments.lengths is not None
        make = like.new_zeros if has_ends else like.new_empty
        sequences = [make(steps, rows, width) for width in plan.program.sequences]
        last = [like.new_empty(leaf.shape[0], leaf.shape[1]) for leaf in arguments.state]
        kept = arguments.new_kept()
        with torch.no_grad():
            weights, vectors = program.outside(arguments.constants, like.dtype)
        arguments.forward(weights, vectors, sequences, last, kept)
        ctx.call, ctx.count = call, len(tensors)
        ctx.save_for_backward(*tensors, *sequences, *kept)
        ctx.set_materialize_grads(False)
        return (*_outputs(call, sequences), *_shaped(last, program.state_shapes, rows))

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
        found = _Backward(call, tensors, rest, needs).gradients(gradients)
        return None, *found, *(None,) * frozen


def _outputs(call: _Call, sequences: Sequence[Tensor]) -> list[Tensor]:
    """What the user gets of sequences; each a tensor of its own."""
    run, program = call.run, call.program
    found, seen = [], set[int]()
    for number, shape in zip(program.plan.output_sequences, program.output_shapes, strict=True):
        sequence = sequences[number]
        if run.returns_sequence:
            made = sequence.reshape(run.seq_len, run.rows, *shape)
            found.append(made.clone() if number in seen else made)
            seen.add(number)
        elif run.last is None:
            found.append(sequence[run.time(run.seq_len - 1)].reshape(run.rows, *shape).clone())
        else:
            flags, rows = run.last, torch.arange(run.rows, device=sequence.device)
            picked = sequence[flags.int().argmax(0), rows]
            picked = torch.where(like_rows(flags.any(0), picked), picked, 0)
            found.append(picked.reshape(run.rows, *shape))
    return found


def _shaped(leaves: Sequence[Tensor], shapes: Sequence[torch.Size], rows: int) -> list[Tensor]:
    return [leaf.reshape(rows, *shape) for leaf, shape in zip(leaves, shapes, strict=True)]


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
    def of(cls, call: _Call, tensors: Sequence[Tensor]) -> _Arguments:
        from .._compile import operators

        run, program, masks = call.run, call.program, call.run.masks
        assert masks is not None
        frozen = list(run.frozen)
        tensors = [tensor.detach() for tensor in tensors]
        values = call.layout.values(tensors[: len(tensors) - len(frozen)])
        named = values.weights | dict(
            zip(frozen, tensors[len(tensors) - len(frozen) :], strict=True)
        )
        constants = [named[name] for name in program.names]
        dtype = values.state[0].dtype
        inputs = [_flat(values.inputs[i], 2, dtype) for i in program.plan.read_inputs]
        state = [_flat(leaf, 1, dtype) for leaf in values.state]
        reset_to, kinds = _reset_values(masks, values, dtype)
        chunk = operators.chunk(program.number, run.seq_len, run.rows, dtype, call.chunk, 0)[0]
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
        **gradients: list[Tensor],
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
        self, call: _Call, tensors: Sequence[Tensor], rest: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        self._call, self._arguments = call, _Arguments.of(call, tensors)
        count = len(call.program.plan.program.sequences)
        self._sequences, self._kept = list(rest[:count]), list(rest[count:])
        frozen = len(call.run.frozen)
        self._needs = call.layout.values(needs)  # type: ignore[arg-type]
        self._shapes = call.layout.values(tensors[: len(tensors) - frozen])
        like = self._arguments.state[0]
        self._nothing = like.new_empty(0)
        self._sums = torch.float64 if like.dtype == torch.float64 else torch.float32

    def gradients(self, given: Sequence[Tensor | None]) -> Gradients:
        call, arguments = self._call, self._arguments
        program, run = call.program, call.run
        constants, leaves = self._leaves()
        with torch.enable_grad():
            weights, vectors = program.outside(constants, arguments.state[0].dtype)
        like, count = arguments.state[0], len(program.output_shapes)
        of_inputs = [
            like.new_empty(x.shape) if self._needs.inputs[i] else self._nothing
            for i, x in zip(program.plan.read_inputs, arguments.inputs, strict=True)
        ]
        of_carries = [
            torch.empty_like(leaf, memory_format=torch.contiguous_format) if need else self._nothing
            for leaf, need in zip(arguments.state, self._needs.state, strict=True)
        ]
        of_weights = [self._of_weight(w) for w in weights]
        of_vectors = [
            v.new_empty(v.shape, dtype=self._sums)
            if v.requires_grad
            else self._nothing.to(self._sums)
            for v in vectors
        ]
        of_resets = self._of_resets()
        arguments.backward(
            [w.detach() for w in weights],
            [v.detach() for v in vectors],
            self._sequences,
            self._kept,
            grad_sequences=self._of_sequences(given[:count]),
            grad_last=[
                self._nothing if g is None else g.reshape(run.rows, -1).contiguous()
                for g in given[count:]
            ],
            grad_inputs=of_inputs,
            grad_carries=of_carries,
            grad_weights=of_weights,
            grad_vectors=of_vectors,
            grad_reset_to=of_resets,
        )
        pairs = [
            (made, g.to(made.dtype))
            for made, g in zip((*weights, *vectors), (*of_weights, *of_vectors), strict=True)
            if made.requires_grad
        ]
        of_leaves: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs and leaves:
            made, sums = zip(*pairs, strict=True)
            of_leaves = torch.autograd.grad(made, leaves, sums, allow_unused=True)
        return self._in_order(
            of_inputs, of_carries, dict(zip(self._named, of_leaves, strict=True)), of_resets
        )

    def _leaves(self) -> tuple[list[Tensor], list[Tensor]]:
        """The step's constants, and those of them that have a gradient."""
        constants, leaves = [], []
        self._named: list[str] = []
        for name, constant in zip(self._call.program.names, self._arguments.constants, strict=True):
            if self._needs.weights.get(name):
                constant = constant.detach().requires_grad_()
                leaves.append(constant)
                self._named.append(name)
            constants.append(constant)
        return constants, leaves

    def _of_weight(self, weight: Tensor) -> Tensor:
        """Memory for a gradient that lies as the weight does: its columns one after the other."""
        if not weight.requires_grad:
            return self._nothing.to(self._sums)
        terms, columns = weight.shape
        return weight.new_empty((columns, terms), dtype=self._sums).t()

    def _of_sequences(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        call = self._call
        run, plan = call.run, call.program.plan
        found = [self._nothing] * len(self._sequences)
        for number, gradient in zip(plan.output_sequences, given, strict=True):
            if gradient is None:
                continue
            whole = self._whole(gradient, self._sequences[number])
            found[number] = whole if found[number] is self._nothing else found[number] + whole
        return found

    def _whole(self, gradient: Tensor, sequence: Tensor) -> Tensor:
        """Of a whole sequence, from what the user got of it."""
        run = self._call.run
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
        found, needs = [], self._reset_needs()
        for tensor, kind, need in zip(
            self._arguments.reset_to, self._arguments.kinds, needs, strict=True
        ):
            if not need:
                found.append(self._nothing if kind == SEQUENCE else self._nothing.to(self._sums))
            elif kind == SEQUENCE:
                found.append(tensor.new_empty(tensor.shape))
            else:
                found.append(
                    tensor.new_empty(self._call.run.rows, tensor.shape[1], dtype=self._sums)
                )
        return found

    def _reset_needs(self) -> list[bool]:
        masks = self._call.run.masks
        assert masks is not None
        needs = [False] * len(self._arguments.state)
        if masks.resets is not None and masks.resets.has_values:
            for i, place in zip(masks.resets.leaves, self._reset_places(), strict=True):
                kind, number = place
                source = self._needs.inputs if kind == "input" else self._needs.constants
                needs[i] = bool(source[number])
        return needs

    def _reset_places(self) -> list[tuple[str, int]]:
        """Where the values of resets are among the arguments."""
        masks = self._call.run.masks
        assert masks is not None and masks.resets is not None
        first = masks.inputs + (masks.lengths is not None) + 1
        if masks.resets.is_sequence:
            return [("input", first + n) for n in range(len(masks.resets.leaves))]
        return [("constant", n) for n in range(len(masks.resets.leaves))]

    def _in_order(
        self,
        of_inputs: list[Tensor],
        of_carries: list[Tensor],
        of_weights: dict[str, Tensor | None],
        of_resets: list[Tensor],
    ) -> Gradients:
        """In the order of the function's arguments."""
        shapes, plan = self._shapes, self._call.program.plan
        masks = self._call.run.masks
        assert masks is not None
        inputs: Gradients = [None] * len(shapes.inputs)
        constants: Gradients = [None] * len(shapes.constants)
        for i, gradient in zip(plan.read_inputs, of_inputs, strict=True):
            if self._needs.inputs[i]:
                inputs[i] = gradient.reshape(shapes.inputs[i].shape)
        state = [
            gradient.reshape(leaf.shape) if need else None
            for leaf, gradient, need in zip(
                shapes.state, of_carries, self._needs.state, strict=True
            )
        ]
        if masks.resets is not None and masks.resets.has_values:
            for i, (kind, number) in zip(masks.resets.leaves, self._reset_places(), strict=True):
                target = inputs if kind == "input" else constants
                leaf = (shapes.inputs if kind == "input" else shapes.constants)[number]
                if self._reset_needs()[i]:
                    target[number] = _of_rows(of_resets[i], leaf)
        weights = [of_weights.get(name) for name in shapes.weights]
        return [*inputs, *state, *constants, *weights]


def _of_rows(gradient: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of what resets take, which may be one row for all."""
    if leaf.shape[0] == 1 and gradient.shape[0] != 1 and gradient.dim() == 2:
        gradient = gradient.sum(0, keepdim=True)
    return gradient.to(leaf.dtype).reshape(leaf.shape)
