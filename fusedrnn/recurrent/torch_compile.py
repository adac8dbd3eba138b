"""Steps by torch.compile."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .gradients import is_close
from .noise import Draw, Tape
from .reads import ClosedOver, Watch
from .runs import Mark, Run
from .trees import Leaves

_numbers = itertools.count()


class TorchCompiledStep:
    """A step by torch.compile, for any seq_len and batch.

    Weights and random numbers are arguments, so that its graphs hold no tensor.
    """

    def __init__(self, draws: Sequence[Draw]) -> None:
        self._draws = draws
        self._uses: dict[Any, Any] = {}
        """A function for each way to use the step, since the compiler makes few graphs of one."""
        self._is_given_up = False

    def take(self, run: Run, state: Leaves, x: Leaves, constants: Leaves) -> tuple[Leaves, Leaves]:
        """The step, with the noise and the values of weights that a run has.

        The compiler looks again at a cell whose attributes have changed. What it cannot compile
        then runs without it.
        """
        if not self._is_given_up:
            try:
                made = self.graph(run, state, x, constants)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if run.noise.is_given:  # while a graph is recorded, which may be the reason
                    raise
                warn(reason_of(error))
                self._is_given_up = True
            else:
                kinds = zip(made[0], state, strict=True)
                if all(a.dtype == b.dtype and a.shape == b.shape for a, b in kinds):
                    return made
        run.noise.restart()
        with Watch(run.noise):
            return run.weights.call_with(run.values, lambda: run.step(state, x, constants))

    def graph(self, run: Run, state: Leaves, x: Leaves, constants: Leaves) -> tuple[Leaves, Leaves]:
        """The step by its graphs alone. A step without them must have told its output."""
        numbers = [_in_one_form(run.noise.draw(draw)) for draw in self._draws]
        state, x = tuple(map(_in_one_form, state)), tuple(map(_in_one_form, x))
        if run.user_step.has_rows:  # else constants may be weights, of one size
            constants = tuple(map(_in_one_form, constants))
        needs = [leaf.requires_grad for leaf in (*state, *x, *constants)]
        step = run.user_step
        use = (step.output_name, step.keeps_order, torch.is_grad_enabled(), *needs)
        if use not in self._uses:
            self._uses[use] = _compile(run, self._draws)
        values = run.weights.in_slots(run.values)
        made: tuple[Leaves, Leaves] = self._uses[use](values, numbers, state, x, constants)
        return made


def _compile(run: Run, draws: Sequence[Draw]) -> Any:
    step, weights = run.step, run.weights

    def take(
        values: dict[str, Tensor],
        numbers: list[Tensor],
        state: Leaves,
        x: Leaves,
        constants: Leaves,
    ) -> tuple[Leaves, Leaves]:
        with Watch(Tape(draws, numbers)):
            made: tuple[Leaves, Leaves] = weights.call_in_slots(
                values, lambda: step(state, x, constants)
            )
        return made

    # The compiler counts how often it has compiled a code object, which all cells would share.
    take.__code__ = take.__code__.replace(co_name=f"take_{next(_numbers)}")
    _let_modes_see_draws()
    return torch.compile(take, fullgraph=True)


def reason_of(error: Exception) -> str:
    """Why there is no graph, in a line."""
    first_line = str(error).strip().split("\n")[0]
    return f"torch.compile raises {type(error).__name__}: {first_line}"


def _in_one_form(tensor: Tensor) -> Tensor:
    """No view, contiguous, and of any batch: else there would be a graph for each form."""
    if tensor._is_view() or not tensor.is_contiguous() or tensor.storage_offset():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dim():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


@torch.no_grad()
def torch_compile_step(
    run: Run, inputs: Leaves, state: Leaves, constants: Leaves
) -> TorchCompiledStep | str:
    """The step by torch.compile, or why not; it must give what the step gives without.

    All that it changes is afterwards as before.
    """
    run = run.for_trial(1)
    at_first = tuple(leaf[run.time(0)] for leaf in inputs)
    given = (_detached(state), _detached(at_first), _detached(constants))
    found = ClosedOver([*run.weights.tensors(), *(leaf for leaves in given for leaf in leaves)])

    def take() -> tuple[Any, str]:
        mark = run.mark()
        run.enter(run.chunks()[0])
        with run.watched(closed_over=found):
            results = run.take(run.time(0), *given)
        return results, obstacle_to_torch_compile(run, mark, found.with_gradient)

    expected, obstacle = run.aside(take)
    if obstacle:
        return obstacle
    compiled = TorchCompiledStep(run.noise.draws)
    run.values = run.weights.trained()
    try:
        with run.watched():
            run.noise.step(run.time(0))
            got = compiled.graph(run, *given)
    except Exception as error:
        return reason_of(error)
    pairs = zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True)
    if not all(bool(is_close(a, b)) for a, b in pairs):
        return "by torch.compile it gives other numbers"
    return compiled


def obstacle_to_torch_compile(run: Run, mark: Mark, closed_over: dict[int, Tensor]) -> str:
    """Why torch.compile cannot compile a step that has run since; "" for nothing."""
    if closed_over:
        return "it reads tensors of its own that need a gradient"
    if run.has_drawn(mark):
        return "it draws random numbers in a way that no graph can"
    return run.change(mark)


def _detached(leaves: Leaves) -> Leaves:
    return tuple(leaf.detach() for leaf in leaves)


def warn(reason: str) -> None:
    warnings.warn(f"fusedrnn: the step runs without torch.compile, because {reason}", stacklevel=2)


def _let_modes_see_draws() -> None:
    """The compiler asks modes about all functions but some; see torch.overrides."""
    from torch._dynamo.variables import torch as functions  # late: it takes most of a second

    known: set[Any] = getattr(functions, "get_overridable_functions", set)()
    known.update({torch.randn, torch.rand, torch.randn_like, torch.rand_like, torch.normal})
