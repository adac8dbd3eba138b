"""Programs of steps: which graph has one, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from .._compiler.compiled_step import CompiledStep
from .._compiler.pipeline import find_or_compile
from .._compiler.unused_results import without_unused_results
from .._front.compile_lock import Busy, one_at_a_time
from .._front.refusals import CHANGING, CannotCompile
from .._front.step_graph import Given, StepGraph
from .._step.sequence_call import SequenceCall
from .._step.trees import Leaves
from .._step.unusual_tensors import unusual
from .trial_by_operators import run_library

MOST_NUMBERS = 8
"""Programs of one graph that differ in numbers alone: more would be built anew in each call."""


class ForNow(str):
    """A reason that may not hold for the next call."""


Check = Callable[[StepGraph, Given], str]
"""Says of a step's graph, before a program is made of it, why there can be none; or nothing."""

_known: WeakValueDictionary[Any, CompiledStep] = WeakValueDictionary()
"""All programs of the process, by what their steps do."""


def program_of(
    graph: StepGraph,
    args: Sequence[Any],
    call: SequenceCall,
    check: Check,
) -> tuple[CompiledStep | str, Given]:
    """The program of a step's graph, or why there is none; and what it gets.

    Args:
        args: What torch.compile gives to the graph.
        check: Called before a program is made; says why there can be none, or nothing.
    """
    found: CompiledStep | str = ""
    # Floats that have changed between calls are tensors, if the program can have them so.
    for are_tensors in (True, False) if graph.has_floats else (True,):
        given = graph.given(args, are_tensors)
        key = (are_tensors, given.numbers, tuple([leaf.shape[1:] for leaf in call.state]))
        known = graph.programs.get(key)
        found = _new(graph, key, given, call, check) if known is None else known
        if not isinstance(found, str):
            break
    return found, given


def _new(
    graph: StepGraph,
    key: Any,
    given: Given,
    call: SequenceCall,
    check: Check,
) -> CompiledStep | str:
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return ForNow("a CUDA graph is being captured: call the cell once before the capture")

    def find() -> CompiledStep | str:
        with one_at_a_time():
            found = graph.programs.get(key)
            if found is not None:  # another thread has made it
                return found
            if len(graph.programs) >= MOST_NUMBERS:
                return CHANGING
            if why := _unusual(graph, given, call) or check(graph, given):
                return why
            of_process = _key(graph, given, call)
            if of_process in _known:
                return _known[of_process]
            made = find_or_compile(
                graph, given, call.within_ends(), call.state, call.names, run_library
            )
            _known[of_process] = made
            return made

    found, is_lasting = made_or_reason(find)
    if isinstance(found, str) and (not is_lasting or found is CHANGING):
        return ForNow(found)
    graph.programs[key] = found
    return found


def _key(graph: StepGraph, given: Given, call: SequenceCall) -> Any:
    """All that makes a step another one."""
    kinds = [(leaf.shape[2:], leaf.dtype) for leaf in call.inputs]
    kinds += [(leaf.shape[1:], leaf.dtype) for leaf in call.state]
    constants = len(given.constants)
    around = torch.get_default_dtype(), call.device, len(call.inputs)
    return graph.text, str(graph.roles), constants, given.numbers, tuple(kinds), *around


def _unusual(graph: StepGraph, given: Given, call: SequenceCall) -> str:
    """Says of a tensor that it is no plain array on the device of the call; or nothing."""
    for name, constant in zip(graph.names, given.constants, strict=False):
        if what := unusual(constant):
            return f"{name} is on the device meta" if constant.is_meta else f"{name} is {what}"
        if constant.device != call.device and constant.dim():
            return f"{name} is on {constant.device}, the input on {call.device}"
    return ""


def without_unused(
    program: CompiledStep,
    used: tuple[bool, ...],
    constants: Leaves,
    trained: Sequence[bool],
    inputs: Leaves,
    state: Leaves,
) -> CompiledStep | None:
    """The program for backward of a call that used only some of its results; None if there is none.

    Args:
        used: Of each output, then of each leaf of the last state.
        trained: Which constants have gradients.
    """
    if used in program.without:
        return program.without[used]
    if state[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    count = len(program.output_shapes)
    found, is_lasting = made_or_reason(
        lambda: without_unused_results(
            program, used[:count], used[count:], constants, trained, inputs, state, run_library
        )
    )
    made = None if isinstance(found, str) else found
    if is_lasting:
        program.without[used] = made
    return made


T = TypeVar("T")


def made_or_reason(make: Callable[[], T]) -> tuple[T | str, bool]:
    """A program or why there is none, and whether that is so for the next call, too."""

    try:
        # What surrounds the call is not part of the step, and a trial needs gradients.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),  # which tracers do not pass
            _new_on_cpu(),
            _without_saved_hooks(),
        ):
            return make(), True
    except Busy as error:
        return str(error), False
    except CannotCompile as error:
        return str(error), True
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of the compiler itself: the steps in Python are right
        is_lasting = not isinstance(error, RecursionError)  # how deep the call was
        said = str(error).split("\n")[0][:200]
        return f"fusedrnn's compiler raises {type(error).__name__}: {said}", is_lasting


def _new_on_cpu() -> AbstractContextManager[Any]:
    """Within, new tensors are on the CPU. torch's own way of saying so slows every operation."""
    is_so = torch.empty(0).device.type == "cpu"
    return nullcontext() if is_so else torch.device("cpu")


@contextmanager
def _without_saved_hooks() -> Iterator[None]:
    """Within, tensors that autograd saves stay as they are, which torch.func asks for."""
    autograd, hooks = torch._C._autograd, []
    while (hook := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(hook)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hook in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*hook)
