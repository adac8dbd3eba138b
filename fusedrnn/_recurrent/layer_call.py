"""One layer and direction of a call: by a program, or by steps in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from .._front.torch_refusals import way_out
from .._runtime.carried_attributes import check_nothing_is_carried
from .._runtime.chunk_size import chunk_steps, measure_step
from .._runtime.chunked_steps import CannotCheckpoint, refuses_checkpoints, take_all
from .._runtime.plain_loop import plain_loop, warn_of_loop
from .._runtime.python_steps import PythonSteps, add_note
from .._runtime.python_variables import Variables
from .._runtime.step_changes import aside
from .._step.generators import Generators
from .._step.held_modules import held_modules
from .._step.leaf_step import LeafStep, with_masks
from .._step.noise import TrialSeed
from .._step.sequence_call import SequenceCall
from .._step.torch_draws import Lending
from .._step.torchscript import uses_torchscript
from .._step.trees import Leaves
from .._tracers import is_alone, is_compiling, is_rewritten
from .._warnings import warn
from .compiled_calls import CompiledCalls
from .obstacles import PASSING, unusual_weight
from .running_call import NoProgram, NotCompiled, ProgramOptions, TooSmall
from .settings import NEVER, REQUIRE, Settings
from .shared_steps import steps_of_process
from .user_step import UserStep, name_of


class CellMemory:
    """What calls of one cell have found out; copies of a module start without."""

    def __init__(self, owner: Any = None, compiling: CompiledCalls | None = None) -> None:
        """
        Args:
            owner: The cell or the function.
            compiling: What others have found, too.
        """
        self._owner = None if owner is None else weakref.ref(owner)
        self.step_bytes: dict[Any, int] = {}
        """What autograd keeps of a step, by kinds of calls."""
        self.keeps_graph = False
        """Whether a step takes gradients itself: checkpoints would take it again for each."""
        self.carries_nothing = False
        """Whether a trial has shown that a step reads no attribute that the last one has set."""
        self.compiling = CompiledCalls() if compiling is None else compiling

    def __reduce__(self) -> Any:
        return CellMemory, ()

    def is_of(self, owner: Any) -> bool:
        return self._owner is not None and self._owner() is owner


def cell_memory_of(step: Callable[..., Any]) -> CellMemory:
    """Of a step of scan: kept by the function, or by the object whose method it is. A function that
    is defined anew in each call has a new one."""
    owner, function = getattr(step, "__self__", step), getattr(step, "__func__", step)
    name = f"_fusedrnn_{getattr(step, '__name__', 'forward')}"
    try:
        found: CellMemory | None = vars(owner).get(name)
        if found is None or not found.is_of(function):  # functools.wraps copies attributes
            found = vars(owner)[name] = CellMemory(function)
        return found
    except (TypeError, AttributeError):  # it has no attributes of its own
        return CellMemory()


@dataclass
class OneLayerCall:
    """One layer and direction of a call."""

    user: UserStep
    call: SequenceCall
    settings: Settings
    memory: CellMemory
    make_step: Callable[[], LeafStep]
    """Gives the step that Python takes, which knows nothing yet of its outputs."""
    constants: Leaves = ()
    """What each step gets besides."""
    was_compiled: bool = False

    def results(self, aside: bool = False) -> tuple[Any, Any]:
        """Output and last state, as the step returns them.

        Args:
            aside: Whether all that steps in Python may change is to be as before.

        Raises:
            RuntimeError: There is no program, and ``compile`` is "require"; or as :meth:`take` of
                steps in Python says.
        """
        made, obstacle = self._compiled()
        if made is not None:
            self.was_compiled = True
            return made
        steps = self.in_python()
        output, state = steps.take_aside() if aside else steps.take()
        if obstacle:
            self._warn_of_fallback(obstacle)
        structure = steps.step.output
        assert structure is not None  # for a step has run
        return structure.tree(output), self.user.state(state)

    def _warn_of_fallback(self, obstacle: str) -> None:
        """Once for each cell or code, and once again where earlier calls were compiled."""
        cell, place, step = self.memory.compiling, self.call.place, self.user.step
        is_news = self.call.device.type == "cpu" and steps_of_process.is_news(self.user)
        if cell.is_to_warn():
            warn(
                f"fusedrnn: the cell{place} was compiled for earlier calls; calls like this one "
                f"run as steps in Python, because {obstacle}"
            )
        elif is_news:
            advice = " explain() says what would change that;" if way_out(obstacle) else ""
            warn(
                f"fusedrnn: {name_of(step)}{place} is not compiled, because {obstacle}. Results "
                f"are those of a loop, in less memory but more time.{advice} compile='never' "
                "silences this warning"
            )

    def _compiled(self) -> tuple[tuple[Any, Any] | None, str]:
        """The results by a program; or none, and why, if it is because of the step."""
        if why_no_program(self.settings):
            if self.settings.compile != NEVER and not (is_compiling() or is_rewritten()):
                warn("fusedrnn: forward-mode derivatives take the steps in Python")
            return None, ""
        compiling = self.memory.compiling
        if self.settings.compile == REQUIRE:
            compiling.forget_refusals()
        try:
            return compiling.run(self.user, self.call, options_of(self.settings)), ""
        except NoProgram as error:
            reason = self.refused(error)
            return None, "" if reason in PASSING else reason

    def refused(self, error: NoProgram) -> str:
        """Why the call has no program.

        Raises:
            RuntimeError: ``compile`` is "require".
            Exception: It is, and the cell itself raises this.
        """
        reason = str(error)
        if self.settings.compile == REQUIRE:
            if isinstance(error, TooSmall):
                raise RuntimeError(f"fusedrnn: {reason}") from None
            is_of_weights = unusual_weight(self.user.modules(), self.call.device)
            if isinstance(error, NotCompiled) and not is_of_weights:
                # It may be a mistake, of which Python says more.
                self.of_first_steps(1).in_python().take_aside()

            refusal = RuntimeError(
                f"fusedrnn: the cell{self.call.place} cannot be compiled: {reason}"
            )
            if way := way_out(reason):
                add_note(refusal, f"fusedrnn: to have it compiled, {way}")
            raise refusal from error
        return reason

    def of_first_steps(self, count: int) -> OneLayerCall:
        """The same of a few steps of whole rows, with random numbers of its own."""
        return replace(self, call=self.call.of_first_steps(count, TrialSeed()))

    def in_python(self) -> StepsInPython:
        """The steps in Python."""
        step, held = self.make_step(), held_modules(self.user.step)
        flat, call, constants = with_masks(step, self.call)
        modules = [*dict.fromkeys(m for module in held.modules for m in module.modules())]
        weights: list[Tensor] = [
            p for module in modules for p in module._parameters.values() if p is not None
        ]
        steps = PythonSteps(
            call.without_values()._replace(seed=call.seed),
            flat,
            Variables(modules, held),
            Generators(call.device, held.generators),
            draws=call.seed.misses(call.device),
        )
        is_scripted = uses_torchscript(held, modules)
        given = call.inputs, call.state, (*self.constants, *constants)
        weights = [*dict.fromkeys([*weights, *held.parameters])]
        is_reset = call.resets is not None or (call.lengths is not None and call.backwards)
        return StepsInPython(
            steps, given, weights, step, self.settings, self.memory, is_reset, is_scripted
        )


def options_of(settings: Settings) -> ProgramOptions:
    """Those of a program."""
    saves_sums = torch.is_grad_enabled() and not settings.recompute
    return ProgramOptions(settings.chunk_size, settings.workspace_bytes, saves_sums)


def why_no_program(settings: Settings) -> str:
    """Why a call takes its steps in Python, whatever they are; or nothing."""
    if settings.compile == NEVER:
        return "compile is 'never'"
    return "" if is_alone() else "the call is within forward mode, torch.func or a tracer"


@dataclass
class StepsInPython:
    """The same by steps in Python."""

    steps: PythonSteps
    given: tuple[Leaves, Leaves, Leaves]
    """Inputs, state and constants."""
    weights: Sequence[Tensor]
    """Of the step's modules, and others that it reads."""
    step: LeafStep
    settings: Settings
    memory: CellMemory
    is_reset: bool
    """Whether rows start anew, at resets, or in reverse at the ends of sequences."""
    is_scripted: bool
    """Whether they run TorchScript, of which checkpoints may give wrong gradients."""

    def take(self) -> tuple[Leaves, Leaves]:
        """Outputs and last state.

        Raises:
            RuntimeError: Even one step does not fit into ``workspace_bytes``, or a generator was
                given and the step draws from others.
        """
        seed, device = self.steps.call.seed, self.steps.call.device
        # Where a tracer is at work, numbers are not drawn.
        lends = seed.misses(device) and not torch._C._len_torch_dispatch_stack()
        try:
            with Lending(seed) if lends else nullcontext():
                return self._take()
        finally:
            seed.give_back()

    def take_aside(self) -> tuple[Leaves, Leaves]:
        """The same, after which all that the steps change is as before."""
        generators = self.steps.generators
        random = generators.states()
        with aside(self.steps.variables):
            try:
                return self._take()
            finally:
                generators.put_back(random)

    def _take(self) -> tuple[Leaves, Leaves]:
        if is_compiling() or is_rewritten():
            if torch.is_grad_enabled():
                warn_of_loop("torch.func and tracing")
            return plain_loop(self.steps.step, self.steps.call, *self.given)
        if self.is_reset and not self.memory.carries_nothing:
            check_nothing_is_carried(self.steps, *self.given)
            self.memory.carries_nothing = True
        recompute = torch.is_grad_enabled() and not self.keeps_graph
        chunk, _ = self.choose_chunk() if recompute else chunk_steps(self._seq_len, None, None, 0)
        try:
            return take_all(self.steps, *self.given, self.weights, chunk, recompute)
        except CannotCheckpoint:
            self.memory.keeps_graph = True
            return take_all(self.steps, *self.given, self.weights, chunk, recompute=False)

    @property
    def keeps_graph(self) -> str:
        """Why autograd keeps the graph of all steps; or nothing."""
        if not self.settings.recompute:
            return "recompute=False"
        if self.is_scripted:
            return "it runs TorchScript"
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return "hooks of saved tensors are disabled, which checkpoints need"
        if any(map(is_lazy, self.weights)):
            return "lazy modules get their weights"
        if forward_ad._current_level >= 0 and hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):
            return "torch 2.11 takes no forward derivatives through its checkpoints"
        return "it takes gradients itself" if self.memory.keeps_graph else ""

    @property
    def _seq_len(self) -> int:
        return self.steps.call.seq_len

    def step_bytes(self) -> int:
        """What autograd keeps of a step, measured once for calls of a kind."""
        leaves, known = (*self.given[0], *self.given[1]), self.memory.step_bytes
        kind = tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        key = kind, leaves[-1].shape, torch.is_autocast_enabled(self.steps.call.device.type)
        if key not in known:
            try:
                known[key] = measure_step(self.steps, *self.given)
            except RuntimeError as error:
                if not refuses_checkpoints(error):
                    raise
                self.memory.keeps_graph, known[key] = True, 0
        return known[key]

    def choose_chunk(self) -> tuple[int, str]:
        """Steps of a chunk, and why."""
        most, size = self.settings.workspace_bytes, self.settings.chunk_size
        step_bytes = 0 if most is None else self.step_bytes()
        return chunk_steps(self._seq_len, size, most, step_bytes)
