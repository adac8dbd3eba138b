"""One layer and direction of a call: by a program, or by steps in Python."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._front.torch_refusals import way_out
from .._runtime.cuda_graph_probe import obstacle_to_graphs
from .._runtime.cuda_graphs import LEAST_CHUNKS, RECORDERS, Graphs
from .._runtime.loop_autograd import run_sequence, run_with_graph
from .._runtime.loop_chunks import chunk_steps, measure_step
from .._runtime.loop_run import Run, add_note
from .._runtime.loop_weights import Weights
from .._step.generators import RandomStates
from .._step.held_modules import held_modules
from .._step.leaf_step import LeafStep, with_masks
from .._step.noise import Noise, TrialSeed
from .._step.sequence_call import SequenceCall
from .._step.torch_draws import WAY_OUT, OtherDraws
from .._step.trees import Leaves
from .._tracers import is_alone
from .._warnings import warn
from .compiled_calls import CompiledCalls
from .obstacles import unusual_weight
from .running_call import NoProgram, NotCompiled, ProgramOptions, TooSmall
from .settings import NEVER, REQUIRE, Settings
from .user_step import UserStep, code_of


@dataclass
class Known:
    """What earlier calls with the same kinds of tensors have found out."""

    graphs: Graphs
    step_bytes: int | None = None


class CellMemory:
    """What calls of one cell have found out; copies of a module start without."""

    def __init__(self, owner: Any = None, compiling: CompiledCalls | None = None) -> None:
        """
        Args:
            owner: The cell or the function.
            compiling: What others have found, too.
        """
        self._owner = None if owner is None else weakref.ref(owner)
        self._known: dict[Any, Known] = {}
        self.compiling = CompiledCalls() if compiling is None else compiling

    def __reduce__(self) -> Any:
        return CellMemory, ()

    def is_of(self, owner: Any) -> bool:
        return self._owner is not None and self._owner() is owner

    def of(self, run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Known:
        shapes = [*(leaf.shape[1:] for leaf in inputs)]  # for any seq_len
        shapes += [leaf.shape for leaf in (*state, *constants)]
        dtypes = [leaf.dtype for leaf in (*inputs, *state, *constants)]
        kinds = (*shapes, *dtypes, *run.weights.training_flags())
        key = (run.signature, kinds, run.call.device, run.autocast, torch.is_grad_enabled())
        if key not in self._known:
            # Chunks are recorded from the second call on, also of a step that is defined anew.
            owner = self._owner and self._owner()
            is_anew = owner is not None and not isinstance(owner, torch.nn.Module)
            has_run = have_run.setdefault(code_of(owner), {}) if is_anew else {}
            self._known[key] = Known(Graphs(has_run=has_run.setdefault(key, set())))
        return self._known[key]


have_run: weakref.WeakKeyDictionary[Any, dict[Any, set[str]]] = weakref.WeakKeyDictionary()
"""What :class:`Graphs` of all functions of one code have run."""


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
        if obstacle and self.memory.compiling.is_to_warn():
            warn(
                f"fusedrnn: the cell{self.call.place} was compiled for earlier calls; calls like "
                f"this one run as steps in Python, because {obstacle}"
            )
        structure = steps.step.output
        assert structure is not None  # for a step has run
        return structure.tree(output), self.user.state(state)

    def _compiled(self) -> tuple[tuple[Any, Any] | None, str]:
        """The results by a program; or none, and why, if it is because of the step."""
        if why_no_program(self.settings):
            return None, ""
        compiling = self.memory.compiling
        if self.settings.compile == REQUIRE:
            compiling.forget_refusals()
        try:
            return compiling.run(self.user, self.call, options_of(self.settings)), ""
        except NoProgram as error:
            reason = self.refused(error)
            return None, reason if isinstance(error, NotCompiled) else ""

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
        step = self.make_step()
        flat, call, constants = with_masks(step, self.call)
        signature = (*step.structures(), call.backwards, call.lengths is not None, str(call.resets))
        weights, noise = Weights(held_modules(self.user.step)), Noise(call.seed, call.layer)
        run = Run(call.without_values(), flat, signature, weights, noise)
        given = (call.inputs, call.state, (*self.constants, *constants))
        return StepsInPython(run, given, step, self.settings, self.memory)


def options_of(settings: Settings) -> ProgramOptions:
    """Those of a program."""
    saves_sums = torch.is_grad_enabled() and not settings.recompute
    return ProgramOptions(settings.chunk_size, settings.workspace_bytes, saves_sums)


def why_no_program(settings: Settings) -> str:
    """Why a call takes its steps in Python, whatever they are; or nothing."""
    if settings.compile == NEVER:
        return "compile is 'never'"
    return "" if is_alone() else "the call is within a transform of torch.func or a tracer"


@dataclass
class StepsInPython:
    """The same by steps in Python."""

    run: Run
    given: tuple[Leaves, Leaves, Leaves]
    """Inputs, state and constants."""
    step: LeafStep
    settings: Settings
    memory: CellMemory

    @functools.cached_property
    def known(self) -> Known:
        return self.memory.of(self.run, *self.given)

    def take(self) -> tuple[Leaves, Leaves]:
        """Outputs and last state.

        Raises:
            RuntimeError: Even one step does not fit into ``workspace_bytes``, or a generator was
                given and the step draws from others.
        """
        run, seed = self.run, self.run.noise.seed
        # Where a tracer is at work, states have no values.
        looks = seed.generator is not None and not torch._C._len_torch_dispatch_stack()
        before = run.random_states(in_python=False).torch if looks else ()
        # Another thread may have exchanged the weights, in backward.
        try:
            with run.weights.locked() if torch.is_grad_enabled() else nullcontext():
                taken = self._take()
                if run.missed(before):
                    self._refuse_late_draws(before)
        finally:
            seed.give_back()
        return taken

    def take_aside(self) -> tuple[Leaves, Leaves]:
        """The same, after which all that the steps change is as before."""
        trial = self.run.for_trial(self.run.call.seq_len)
        return self.run.aside(lambda: run_sequence(trial, *self.given))

    def _refuse_late_draws(self, random: tuple[Tensor, ...]) -> None:
        """Refuses random numbers from torch's own generators, unless other threads drew them.

        For that it takes all steps again. All that they change is afterwards as before.

        Args:
            random: States of the generators before the steps.
        """
        draws = OtherDraws()
        with torch.no_grad(), draws:
            self.take_aside()
        if draws.found:
            self.run.set_random_states(RandomStates(random, ()))
            raise RuntimeError(
                f"fusedrnn: {draws.found} draws from torch's default generator, not from "
                f"generator=, after the first step or within torch.func; {WAY_OUT}"
            )

    def _take(self) -> tuple[Leaves, Leaves]:
        run = self.run
        if not is_alone():  # then a plain loop takes the steps, and there is nothing to choose
            run.chunk_size = run.call.seq_len
            return run_sequence(run, *self.given)
        if torch.is_grad_enabled() and not self.settings.recompute:
            run.chunk_size, _ = chunk_steps(run.call.seq_len, self.settings.chunk_size, None, 0)
            return run_with_graph(run, *self.given)
        run.chunk_size, _ = self.choose_chunk()
        if not self.obstacle_to_graphs():
            run.graphs = self.known.graphs
        return run_sequence(run, *self.given)

    def choose_chunk(self) -> tuple[int, str]:
        """Steps of a chunk, and why."""
        most, known = self.settings.workspace_bytes, self.known
        if most is not None and known.step_bytes is None:
            known.step_bytes = measure_step(self.run, *self.given)
        seq_len, step_bytes = self.run.call.seq_len, known.step_bytes or 0
        return chunk_steps(seq_len, self.settings.chunk_size, most, step_bytes)

    def obstacle_to_graphs(self) -> str:
        """Why the call does without CUDA graphs; "" for nothing. The run must have its chunk
        size."""
        run, graphs, (inputs, state, _) = self.run, self.known.graphs, self.given
        if not self.settings.cuda_graphs:
            return "cuda_graphs is False"
        if run.call.device.type not in RECORDERS:
            return f"the input is on {run.call.device}"
        if run.call.seq_len // run.chunk_size < LEAST_CHUNKS:
            return f"the sequence has fewer than {LEAST_CHUNKS} whole chunks"
        if any(leaf.numel() == 0 for leaf in (*inputs, *state)):
            return "a tensor of the input or the state is empty"
        if graphs.obstacle is not None:
            return graphs.obstacle
        reason, is_lasting = obstacle_to_graphs(run, *self.given)
        graphs.obstacle = reason if is_lasting else None
        return reason
