"""A call on its way through torch.compile's guards, which find the graph of its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._compiler.compiled_step import CompiledStep
from .._compiler.pipeline import computes_the_same
from .._front.check_graph import difference
from .._front.refusals import CHANGING, CannotTrace
from .._front.step_graph import Given, StepGraph
from .._front.traced_step import TracedStep
from .._runtime.find_program import MOST_NUMBERS, ForNow, made_or_reason, program_of
from .._runtime.program_autograd import run_program
from .._runtime.program_call import ProgramCall
from .._runtime.sequence_parts import SequencePart, parts_of
from .._runtime.trial_by_operators import run_library
from .._step.noise import Seed
from .._step.sequence_call import Names, SequenceCall
from .._step.trees import Leaves, flatten
from .user_step import UserStep


class NoProgram(Exception):
    """Why a call has its steps taken in Python, a sentence without a stop."""


class NotCompiled(NoProgram):
    """The step cannot be compiled, whatever is around the call."""


class TooSmall(NoProgram):
    """``workspace_bytes`` is less than the program needs."""


class ProgramOptions(NamedTuple):
    """How a call runs its program."""

    chunk_size: int | None
    workspace_bytes: int | None
    saves_sums: bool
    """Whether forward saves the sums of products, and the whole sequence."""


class PlannedCall(NamedTuple):
    """A program, and how a call runs it."""

    program: CompiledStep
    parts: Sequence[SequencePart]
    """In the order of work."""
    chunk: int
    """The most steps of a chunk."""
    workspace_bytes: int
    """Of backward."""
    graph: StepGraph
    given: Given
    traces: int
    """That torch.compile has made."""
    order: Sequence[int] | None
    """Which tensor of the call's input each of the program's is, if it is not the same."""


class CallKind:
    """What calls of one kind share, so that it is looked at and prepared once."""

    def __init__(
        self, user: UserStep, call: SequenceCall, options: ProgramOptions, seen: Seen
    ) -> None:
        """
        Args:
            call: Without tensors.
            seen: The stand-ins of the calls.
        """
        self.user, self.call, self.options, self.seen = user, call, options, seen
        self.given = user.arguments(*seen)
        """What the wrapper of the step gets."""
        self.prepared: ProgramCall | None = None
        """That has run last."""


Seen = tuple[Leaves, Leaves]
"""Stand-ins of inputs and of states."""


class PlanFound(Exception):
    """Ends a call that was to be planned."""

    def __init__(self, planned: PlannedCall) -> None:
        self.planned = planned


class OneRowGraph(Exception):
    """A graph of one row, whose program is not yet known: that of several rows, or none."""

    def __init__(
        self,
        graph: StepGraph,
        kinds: Sequence[Given],
        call: SequenceCall,
        order: Sequence[int] | None,
    ) -> None:
        """
        Args:
            kinds: What the step gets, with floats as tensors, and then with floats as numbers.
            order: As of :class:`PlannedCall`.
        """
        self._graph, self._kinds, self._call = graph, kinds, call
        self._order, self._roles = order, graph.roles

    def find_program(self, many: PlannedCall | str) -> None:
        """
        Raises:
            NotCompiled: There is none for now.
        """
        if self._graph.roles is not self._roles:  # another thread has renumbered inputs
            return
        given, found = (self._kinds[0], many) if isinstance(many, str) else self._of(many)
        if isinstance(found, ForNow):
            raise NotCompiled(found)
        self._graph.programs["one row", given.numbers] = found

    def _of(self, many: PlannedCall) -> tuple[Given, CompiledStep | str]:
        graph, call, program = self._graph, self._call, many.program
        # The program may know the values that floats have for now.
        names = many.graph.names[: len(many.given.constants)]
        kinds = [given for given in self._kinds if graph.names[: len(given.constants)] == names]
        if not kinds:
            tensors = graph.names[: len(graph.constant_at)]
            is_other = tensors != many.graph.names[: len(many.graph.constant_at)]
            other = "with a batch of 1 the step reads different tensors than with larger ones"
            return self._kinds[0], other if is_other else ForNow(other)
        given, inputs = kinds[0], call.within_ends()
        if self._order != many.order:
            own, theirs = (list(o or range(len(inputs))) for o in (self._order, many.order))
            if sorted(own) != sorted(theirs) or graph.programs:
                return given, ForNow("the input has different keys than in earlier calls")
            graph.renumber_inputs([theirs.index(i) for i in own])
            inputs = in_order(inputs, [own.index(i) for i in theirs])
        is_same, is_lasting = made_or_reason(
            lambda: computes_the_same(program, graph, given, inputs, call.state, run_library)
        )
        if isinstance(is_same, str) and not is_lasting:
            return given, ForNow(is_same)
        other = "with a batch of 1 the step computes something different than with larger ones"
        return given, program if is_same is True else other


class RunningCall:
    """One call on its way through torch.compile's guards."""

    def __init__(
        self,
        user: UserStep,
        call: SequenceCall,
        options: ProgramOptions,
        step: TracedStep,
        seen: Seen,
        is_inference: bool,
        is_many: bool = False,
    ) -> None:
        self.user, self.call, self._options, self._step = user, call, options, step
        self.inputs_seen, self.states_seen = seen
        self.has_run = False
        self.made: list[Tensor] | None = None
        self._is_grad, self._is_inference = torch.is_grad_enabled(), is_inference
        self._order: Sequence[int] | None = None
        """Of the input's tensors, if it is not theirs."""
        self._is_many = is_many
        """Whether a program for several rows is wanted, also where the call has one."""

    def put_in_order(self, order: Sequence[int]) -> None:
        """Takes tensor ``order[i]`` of the input as number i from now on."""
        call, whole, count = self.call, self.user.input, len(self.call.inputs)
        self._order = order
        names = Names(call.names.state, in_order(call.names.input, order))
        self.call = call._replace(inputs=in_order(call.inputs, order), names=names)
        self.inputs_seen = in_order(self.inputs_seen, order)
        back = [order.index(j) for j in range(count)]
        self.user = self.user._replace(input=lambda leaves: whole(in_order(leaves, back)))

    def run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        if self._is_inference:
            with torch.inference_mode():
                return self._run(graph, args)
        torch._C._set_grad_enabled(self._is_grad)
        try:
            return self._run(graph, args)
        finally:
            torch._C._set_grad_enabled(True)

    def _run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        prepared, given = self.prepared(graph, args)
        call = self.call
        constants = on_device_of(call.state[0], given.constants)
        tensors = [*call.within_ends(), *call.state, *call.reset_to, *constants]
        return graph.results(*run_program(prepared, call.seed, tensors))

    def prepared(self, graph: StepGraph, args: Sequence[Any]) -> tuple[ProgramCall, Given]:
        """The call of a program for the graph."""
        planned = self._planned(graph, args)
        program, given = planned.program, planned.given
        call = self.call
        counts = len(call.inputs), len(call.state), len(call.reset_to)
        saves_sums, of_all = self._options.saves_sums, call.without_values()
        made = ProgramCall(
            of_all,
            counts,
            graph,
            given.numbers,
            program,
            program,
            planned.chunk,
            planned.parts,
            saves_sums,
        )
        return made.with_program(program), given

    def _planned(self, graph: StepGraph, args: Sequence[Any]) -> PlannedCall:
        call, options = self.call, self._options
        graph.check_states(pytree.tree_structure(self.user.state(self.states_seen)))
        program, given = self._program(graph, args)
        if isinstance(program, str):
            raise CannotTrace(program)
        parts = parts_of(call, call.returns_sequence or options.saves_sums)
        longest = max([part.steps for part in parts])
        limits = options.chunk_size or 0, options.workspace_bytes or 0
        try:
            chunk, _, workspace = program.chunk(longest, call.rows, *limits)
        except RuntimeError as error:
            raise TooSmall(str(error).split("\n")[0].removeprefix("fusedrnn: ")) from error
        traces, order = self._step.traces, self._order
        return PlannedCall(program, parts, chunk, workspace, graph, given, traces, order)

    def _program(self, graph: StepGraph, args: Sequence[Any]) -> tuple[CompiledStep | str, Given]:
        call = self.call
        if call.rows != 1 or self._is_many:
            return program_of(graph, args, call, self._asks)
        kinds = [graph.given(args, True)]
        if graph.has_floats:
            kinds.append(graph.given(args, False))
        for given in kinds:
            found = graph.programs.get(("one row", given.numbers))
            if found is not None:
                return found, given
        given = kinds[0]
        if len(graph.programs) >= MOST_NUMBERS:
            return CHANGING, given
        why, is_lasting = made_or_reason(lambda: self._asks(graph, given))
        if not why:
            raise OneRowGraph(graph, kinds, call, self._order)
        if is_lasting:
            graph.programs["one row", given.numbers] = why
        return why, given

    def _asks(self, graph: StepGraph, given: Given) -> str:
        """Says that the user's step does not compute what its graph does; or nothing."""

        def in_python(inputs: Leaves, state: Leaves) -> tuple[Leaves, Leaves]:
            y, new = self._step.function(*self.user.arguments(inputs, state))
            return flatten(new, "state")[0], flatten(y, "output")[0]

        step = self.user.step
        others: dict[str, Tensor] = {}
        if isinstance(step, nn.Module):
            others = {f"cell.{name}": weight for name, weight in step.named_parameters()}
            others |= {f"cell.{name}": buffer for name, buffer in step.named_buffers()}
        return difference(graph, given, in_python, self.inputs_seen, self.states_seen, others)


class RepeatedCall(RunningCall):
    """A call like one that has run."""

    def __init__(
        self,
        kind: CallKind,
        inputs: Leaves,
        state: Leaves,
        generator: torch.Generator | None,
        step: TracedStep,
        is_inference: bool,
    ) -> None:
        self._kind, self._inputs, self._state = kind, inputs, state
        self._generator, self._step = generator, step
        self.inputs_seen, self.states_seen = kind.seen
        self.has_run, self.made, self._order = False, None, None
        self._is_grad, self._is_inference = torch.is_grad_enabled(), is_inference

    def put_in_order(self, order: Sequence[int]) -> None:
        self._order = order

    def _run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        kind, generator, prepared = self._kind, self._generator, self._kind.prepared
        if graph.has_tensors_alone and prepared is not None and prepared.graph is graph:
            constants: Sequence[Any] = [args[i] for i in graph.constant_at]
        else:
            call = kind.call.with_values(self._inputs, self._state, (), Seed(generator))
            first = RunningCall(kind.user, call, kind.options, self._step, kind.seen, False)
            if self._order is not None:
                first.put_in_order(self._order)
            prepared, given = first.prepared(graph, args)
            kind.prepared, constants = prepared, given.constants
        is_needed = prepared.draws or generator is not None
        seed = Seed(generator) if is_needed else kind.call.seed
        order = self._order
        inputs = self._inputs if order is None else in_order(self._inputs, order)
        tensors = [*inputs, *self._state, *on_device_of(self._state[0], constants)]
        return graph.results(*run_program(prepared, seed, tensors))


class PlanningCall(RunningCall):
    """A call that ends when its program is known."""

    def _run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        raise PlanFound(self._planned(graph, args))


def on_device_of(like: Tensor, constants: Sequence[Tensor]) -> Sequence[Tensor]:
    """The constants where a tensor is. Numbers may be on the CPU, as in operations of torch."""
    if not like.is_cuda:
        return constants
    return [c if c.is_cuda else c.to(like.device, non_blocking=True) for c in constants]


def in_order(leaves: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """As number i the one that was ``order[i]``."""
    return tuple([leaves[i] for i in order])
