"""Calls of one cell, or of steps of one code, by a program, as far as there is one."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .. import _helpers as helpers
from .._front.refusals import CHANGING, CannotTrace, ChangesPython
from .._front.stand_ins import StandIns
from .._front.traced_step import TracedStep
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .obstacles import obstacle_around, obstacle_of, obstacle_to_programs, unusual_weight
from .running_call import (
    CallKind,
    NoProgram,
    NotCompiled,
    OneRowGraph,
    PlanFound,
    PlannedCall,
    PlanningCall,
    ProgramOptions,
    RepeatedCall,
    RunningCall,
    Seen,
)
from .shared_steps import Refusals, RefusedStep, looks_of, steps_of_process
from .user_step import UserStep, name_of, wrapper_of


class CompiledCalls:
    """What calls of one cell, or of one code, have found out."""

    def __init__(self) -> None:
        self._step: TracedStep | None = None
        """Of the last call."""
        self._wrapper = ""
        self._is_own = False
        """Whether nobody shares it, since the one of all cells of the class is full."""
        self._guards: list[ModuleGuard] = []
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
        return self._through(user, call, options, RunningCall)

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
        running = RepeatedCall(kind, inputs, state, generator, step, is_inference)
        try:
            if not is_inference:
                return step(running, *kind.given)
            with torch.inference_mode(False):
                return step(running, *kind.given)
        except (CannotTrace, NoProgram, OneRowGraph):
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
            self._through(user, call, options, PlanningCall)
        except PlanFound as found:
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
        way: type[RunningCall],
    ) -> tuple[Any, Any]:
        if obstacle := obstacle_to_programs(call):
            raise NoProgram(obstacle)
        # A function that is defined anew in each call has what others of its code have found.
        known = steps_of_process.refusals(user) if self._is_new else self._refused
        self._is_new = False
        if known:
            refused = known.get(looks_of(user, call))
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
        way: type[RunningCall],
        is_inference: bool,
    ) -> tuple[Any, Any]:
        for _ in range(4):
            step = self._step_of(user)
            seen = self._seen(call, call.rows)
            running = way(user, call, options, step, seen, is_inference)
            try:
                return step(running, *user.arguments(*seen))
            except OneRowGraph as one:
                one.find_program(self._program_of_many(user, call, options, step))
            except CannotTrace as error:
                # A function may be another one in each call, which would be traced anew each time.
                is_module = isinstance(user.step, nn.Module)
                if step.is_full and is_module and not self._is_own:
                    self._renew(user)
                    continue
                raise self._not_compiled(running, error) from error
        raise NotCompiled(CHANGING)

    def _not_compiled(self, running: RunningCall, error: Exception) -> NotCompiled:
        user, call = running.user, running.call
        reason = unusual_weight(user.modules(), call.device) or str(error)
        if not running.has_run:  # torch.compile would try again for a tenth of a second
            self._refuse(user, call, reason, isinstance(error, ChangesPython))
        return NotCompiled(reason)

    def _program_of_many(
        self, user: UserStep, call: SequenceCall, options: ProgramOptions, step: TracedStep
    ) -> PlannedCall | str:
        """The program of a batch of several rows, or why there is none."""
        seen = self._seen(call, 2)
        try:
            step(PlanningCall(user, call, options, step, seen, False, True), *user.arguments(*seen))
        except PlanFound as found:
            return found.planned
        except CannotTrace as error:
            return str(error)
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
        if step is None or not (self._is_own and steps_of_process.is_right(step, every)):
            step, self._is_own = steps_of_process.of(user, every), False
            self._step, self._wrapper = step, user.wrapper
            if step.is_full and modules and not self._was_compiled:
                step = self._renew(user)
        self._guards = [ModuleGuard(module, may_have_hooks=False) for module in modules[:1]]
        self._guards += [ModuleGuard(module, may_have_hooks=True) for module in held]
        self._traces = step.traces
        return step

    def _is_as_before(self, step: TracedStep, user: UserStep) -> bool:
        if (self._wrapper, self._traces) != (user.wrapper, step.traces):
            return False
        if nn.modules.module._has_any_global_hook():
            return False
        return all([guard.is_as_before() for guard in self._guards])

    def _renew(self, user: UserStep) -> TracedStep:
        self._step, self._is_own = TracedStep(wrapper_of(user), name_of(user.step)), True
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
        key, first = looks_of(user, call), 1 if is_of_call else 16
        for known in (self._refused, steps_of_process.refusals(user)):
            before = known.get(key)
            known[key] = RefusedStep(reason, first if before is None else 2 * before.calls)


class ModuleGuard:
    """Whether a module's classes are as they were, of it and of those inside of it; and its hooks.

    torch.compile looks at hooks of modules that are not the cell's, and follows them.
    """

    def __init__(self, module: nn.Module, may_have_hooks: bool) -> None:
        self._module, self._allowed = weakref.ref(module), 2 if may_have_hooks else 0
        self._guard = helpers.ModuleGuard(module)

    def is_as_before(self) -> bool:
        module = self._module()
        return module is not None and self._guard.look(module) in (0, self._allowed)
