"""Calls of one cell, or of steps of one code, by a program, as far as there is one.

Longer than 350 lines, because a call is followed from its step's guards to its results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _helpers as helpers
from .._compiler.compiled_step import CompiledStep
from .._compiler.pipeline import computes_the_same
from .._front import marked_step
from .._front.check_graph import difference
from .._front.class_contents import Contents, users_classes
from .._front.refusals import CHANGING, CannotTrace, ChangesPython
from .._front.stand_ins import StandIns
from .._front.step_graph import Given, StepGraph
from .._front.traced_step import TracedStep
from .._runtime.find_program import MOST_NUMBERS, ForNow, made_or_reason, program_of
from .._runtime.program_autograd import run_program
from .._runtime.program_call import ProgramCall
from .._runtime.sequence_parts import SequencePart, parts_of
from .._runtime.trial_by_operators import run_library
from .._step.held_modules import held_modules
from .._step.noise import Seed
from .._step.sequence_call import Names, SequenceCall
from .._step.trees import Leaves, flatten
from .obstacles import obstacle_around, obstacle_of, obstacle_to_programs, unusual_weight


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


class UserStep(NamedTuple):
    """A user's step."""

    wrapper: str
    """Which function of wrapped.py takes it."""
    step: Any
    """The cell, or the function of a scan."""
    input: Callable[[Leaves], Any]
    """The tree that the step gets."""
    state: Callable[[Leaves], Any]
    more: tuple[Any, ...] = ()
    """Further arguments of the wrapper."""

    def arguments(self, inputs: Leaves, state: Leaves) -> tuple[Any, ...]:
        return self.step, self.input(inputs), self.state(state), *self.more

    def modules(self) -> list[nn.Module]:
        """Those of a cell."""
        return list(self.step.modules()) if isinstance(self.step, nn.Module) else []

    def held(self) -> list[nn.Module]:
        """Those that are no cell, and no modules of one: in variables, lists and objects."""
        found: list[nn.Module] = held_modules(self.step).modules
        return [module for module in found if module is not self.step]


class CompiledCalls:
    """What calls of one cell, or of one code, have found out."""

    def __init__(self) -> None:
        self._step: TracedStep | None = None
        """Of the last call."""
        self._wrapper = ""
        self._is_own = False
        """Whether nobody shares it, since the one of all cells of the class is full."""
        self._guards: list[_Guard] = []
        """Of the modules that it may read, when it was found."""
        self._traces = -1
        """That it had then."""
        self._stand_ins: StandIns | None = None
        self._refused: Refusals = {}
        self._is_new = True
        self._was_compiled = self._has_warned = False

    def __reduce__(self) -> Any:
        return CompiledCalls, ()

    def run(self, user: UserStep, call: SequenceCall, options: ProgramOptions) -> tuple[Any, Any]:
        """Output and last state of a whole sequence, as the step returns them.

        Raises:
            NoProgram: Steps in Python are to be taken.
        """
        return self._through(user, call, options, _RunningCall)

    def again(
        self, kind: CallKind, inputs: Leaves, state: Leaves, generator: torch.Generator | None
    ) -> tuple[Any, Any] | None:
        """The same of a call like one that has run; None if everything is to be looked at."""
        step = self._step
        if self._refused or step is None or not self._is_as_before(step, kind.user):
            return None
        if obstacle_around(kind.call.device):
            return None
        is_inference = torch.is_inference_mode_enabled()
        running = _RepeatedCall(kind, inputs, state, generator, step, is_inference)
        try:
            if not is_inference:
                return step(running, *kind.given)
            with torch.inference_mode(False):
                return step(running, *kind.given)
        except (_refusal(), NoProgram, _OfOneRow):
            return None

    def kind_of(self, user: UserStep, call: SequenceCall, options: ProgramOptions) -> CallKind:
        """For calls like one that has run."""
        return CallKind(user, call.without_values(), options, self._seen(call, call.rows))

    def plan(self, user: UserStep, call: SequenceCall, options: ProgramOptions) -> PlannedCall:
        """The program of a call, which does not run.

        Raises:
            NoProgram: Steps in Python are to be taken.
        """
        self.forget_refusals()
        try:
            self._through(user, call, options, _PlanningCall)
        except _Found as found:
            self._was_compiled = True
            return found.planned
        raise AssertionError("planning ends with what it has found")

    def forget_refusals(self) -> None:
        """Has the next call look again."""
        self._is_new = False
        self._refused.clear()

    def is_to_warn(self) -> bool:
        """Whether to say that a cell is no longer compiled."""
        if not self._was_compiled or self._has_warned:
            return False
        self._has_warned = True
        return True

    def _through(
        self,
        user: UserStep,
        call: SequenceCall,
        options: ProgramOptions,
        way: type[_RunningCall],
    ) -> tuple[Any, Any]:
        if obstacle := obstacle_to_programs(call):
            raise NoProgram(obstacle)
        # A function that is defined anew in each call has what others of its code have found.
        known = _steps.refusals(user) if self._is_new else self._refused
        self._is_new = False
        if known:
            refused = known.get(_looks_of(user, call))
            if refused is not None and refused.is_still():
                raise NotCompiled(refused.reason)
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if is_inference else nullcontext():
            made = self._take(user, call, options, way, is_inference)
        self._was_compiled = True
        return made

    def _take(
        self,
        user: UserStep,
        call: SequenceCall,
        options: ProgramOptions,
        way: type[_RunningCall],
        is_inference: bool,
    ) -> tuple[Any, Any]:

        for _ in range(4):
            step = self._step_of(user)
            seen = self._seen(call, call.rows)
            running = way(user, call, options, step, seen, is_inference)
            try:
                return step(running, *user.arguments(*seen))
            except _OfOneRow as one:
                one.find_program(self._program_of_many(user, call, options, step))
            except CannotTrace as error:
                # A function may be another one in each call, which would be traced anew each time.
                is_module = isinstance(user.step, nn.Module)
                if step.is_full and is_module and not self._is_own:
                    self._renew(user)
                    continue
                raise self._not_compiled(running, error) from error
        raise NotCompiled(CHANGING)

    def _not_compiled(self, running: _RunningCall, error: Exception) -> NotCompiled:

        user, call = running.user, running.call
        reason = unusual_weight(user.modules(), call.device) or str(error)
        if not running.has_run:  # torch.compile would try again for a tenth of a second
            self._refuse(user, call, reason, isinstance(error, ChangesPython))
        return NotCompiled(reason)

    def _program_of_many(
        self, user: UserStep, call: SequenceCall, options: ProgramOptions, step: TracedStep
    ) -> PlannedCall | str:
        """The program of a batch of several rows, or why there is none."""
        refusal: Any = _refusal()
        seen = self._seen(call, 2)
        try:
            step(
                _PlanningCall(user, call, options, step, seen, False, True), *user.arguments(*seen)
            )
        except _Found as found:
            return found.planned
        except refusal as error:
            reason: str = error.args[0]
            return reason
        raise AssertionError("planning ends with what it has found")

    def _step_of(self, user: UserStep) -> TracedStep:
        """The step through torch.compile, if the cell has no hook, and no class has changed."""
        step = self._step
        if step is not None and self._is_as_before(step, user):
            return step
        modules = user.modules()
        if obstacle := obstacle_of(modules):
            raise NoProgram(obstacle)
        held = user.held()
        every = dict.fromkeys([*modules, *(inner for one in held for inner in one.modules())])
        if step is None or not (self._is_own and _steps.is_right(step, every)):
            step, self._is_own = _steps.of(user, every), False
            self._step, self._wrapper = step, user.wrapper
            if step.is_full and modules and not self._was_compiled:
                step = self._renew(user)
        self._guards = [_Guard(module, may_have_hooks=False) for module in modules[:1]]
        self._guards += [_Guard(module, may_have_hooks=True) for module in held]
        self._traces = step.traces
        return step

    def _is_as_before(self, step: TracedStep, user: UserStep) -> bool:
        if (self._wrapper, self._traces) != (user.wrapper, step.traces):
            return False
        if nn.modules.module._has_any_global_hook():
            return False
        return all([guard.is_as_before() for guard in self._guards])

    def _renew(self, user: UserStep) -> TracedStep:

        self._step, self._is_own = TracedStep(_wrapper(user), _name_of(user.step)), True
        return self._step

    def _seen(self, call: SequenceCall, rows: int) -> Seen:
        known = self._stand_ins
        if known is None:
            known = self._stand_ins = StandIns()
        return known.of(call.inputs, 1, rows, True), known.of(call.state, 0, rows, False)

    def _refuse(self, user: UserStep, call: SequenceCall, reason: str, is_of_call: bool) -> None:
        """
        Args:
            is_of_call: The next call may be another one already.
        """
        key, first = _looks_of(user, call), 1 if is_of_call else 16
        for known in (self._refused, _steps.refusals(user)):
            before = known.get(key)
            known[key] = _Refused(reason, first if before is None else 2 * before.calls)


class _Guard:
    """Whether a module's classes are as they were, of it and of those inside of it; and its hooks.

    torch.compile looks at hooks of modules that are not the cell's, and follows them.
    """

    def __init__(self, module: nn.Module, may_have_hooks: bool) -> None:
        self._module, self._allowed = weakref.ref(module), 2 if may_have_hooks else 0
        self._guard = helpers.ModuleGuard(module)

    def is_as_before(self) -> bool:
        module = self._module()
        return module is not None and self._guard.look(module) in (0, self._allowed)


class _Refused:
    """Why torch.compile does not take a step, and for how many calls nobody asks again."""

    def __init__(self, reason: str, calls: int) -> None:
        self.reason, self.calls, self._left = reason, calls, calls

    def is_still(self) -> bool:
        self._left -= 1
        return self._left >= 0


Refusals = dict[Any, _Refused]
"""By kinds of calls."""
Seen = tuple[Leaves, Leaves]
"""Stand-ins of inputs and of states."""


def _looks_of(user: UserStep, call: SequenceCall) -> Any:
    """Calls of which torch.compile may say the same."""
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in (*call.inputs, *call.state)]
    return tuple(kinds), tuple([module.training for module in user.modules()])


def _refusal() -> type[Exception]:

    return CannotTrace


class _Found(Exception):
    """Ends a call that was to be planned."""

    def __init__(self, planned: PlannedCall) -> None:
        self.planned = planned


class _OfOneRow(Exception):
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
            order: As of :class:`Planned`.
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
            other = "the step reads other tensors in a batch of one row"
            return self._kinds[0], other if is_other else ForNow(other)
        given, inputs = kinds[0], call.within_ends()
        if self._order != many.order:
            own, theirs = (list(o or range(len(inputs))) for o in (self._order, many.order))
            if sorted(own) != sorted(theirs) or graph.programs:
                return given, ForNow("the keys of the input are others than before")
            graph.renumber_inputs([theirs.index(i) for i in own])
            inputs = in_order(inputs, [own.index(i) for i in theirs])
        is_same, is_lasting = made_or_reason(
            lambda: computes_the_same(program, graph, given, inputs, call.state, run_library)
        )
        if isinstance(is_same, str) and not is_lasting:
            return given, ForNow(is_same)
        other = "the step does something else in a batch of one row"
        return given, program if is_same is True else other


class _RunningCall:
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
        constants = _where(call.state[0], given.constants)
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
            raise _refusal()(program)
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
            raise _OfOneRow(graph, kinds, call, self._order)
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


class _RepeatedCall(_RunningCall):
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
            first = _RunningCall(kind.user, call, kind.options, self._step, kind.seen, False)
            if self._order is not None:
                first.put_in_order(self._order)
            prepared, given = first.prepared(graph, args)
            kind.prepared, constants = prepared, given.constants
        is_needed = prepared.draws or generator is not None
        seed = Seed(generator) if is_needed else kind.call.seed
        order = self._order
        inputs = self._inputs if order is None else in_order(self._inputs, order)
        tensors = [*inputs, *self._state, *_where(self._state[0], constants)]
        return graph.results(*run_program(prepared, seed, tensors))


class _PlanningCall(_RunningCall):
    """A call that ends when its program is known."""

    def _run(self, graph: StepGraph, args: Sequence[Any]) -> list[Tensor]:
        raise _Found(self._planned(graph, args))


class _TracedSteps:
    """Steps through torch.compile, which all cells of a class share, or all functions of a code."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, dict[str, TracedStep]] = (
            weakref.WeakKeyDictionary()
        )
        self._contents: weakref.WeakKeyDictionary[TracedStep, Contents] = (
            weakref.WeakKeyDictionary()
        )
        self._refusals: weakref.WeakKeyDictionary[Any, Refusals] = weakref.WeakKeyDictionary()

    def refusals(self, user: UserStep) -> Refusals:
        """Of all functions of one code; cells have their own."""
        if isinstance(user.step, nn.Module):
            return {}
        return self._refusals.setdefault(code_of(user.step), {})

    def of(self, user: UserStep, modules: Iterable[nn.Module]) -> TracedStep:

        steps = self._of.setdefault(code_of(user.step), {})
        found = steps.get(user.wrapper)
        if found is None or not self.is_right(found, modules):
            found = steps[user.wrapper] = TracedStep(_wrapper(user), _name_of(user.step))
            self.is_right(found, modules)
        return found

    def is_right(self, step: TracedStep, modules: Iterable[nn.Module]) -> bool:
        """Whether classes of modules are as they were when a step was traced first."""

        classes = users_classes(modules)
        known = self._contents.get(step)
        if known is None:
            known = self._contents[step] = Contents()
        return known.are_as_before(classes)


_steps = _TracedSteps()


def _where(like: Tensor, constants: Sequence[Tensor]) -> Sequence[Tensor]:
    """The constants where a tensor is. Numbers may be on the CPU, as in operations of torch."""
    if not like.is_cuda:
        return constants
    return [c if c.is_cuda else c.to(like.device, non_blocking=True) for c in constants]


def in_order(leaves: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """As number i the one that was ``order[i]``."""
    return tuple([leaves[i] for i in order])


def _wrapper(user: UserStep) -> Any:

    return getattr(marked_step, user.wrapper)


def code_of(step: Any) -> Any:
    """What steps that are traced together have in common."""
    if isinstance(step, nn.Module):
        return type(step)
    return getattr(_function_of(step), "__code__", None) or type(step)


def _name_of(step: Any) -> str:
    """The same in words."""
    function = type(step) if isinstance(step, nn.Module) else _function_of(step)
    if not hasattr(function, "__qualname__"):
        function = type(step)
    return f"{function.__module__}.{function.__qualname__}"


def _function_of(step: Any) -> Any:
    function = getattr(step, "__func__", step)
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return function
