"""How the graph of a step becomes a program with a library: the passes, in their order.

docs/design.md says what each of them does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .._front.flat_step import FlatStep
from .._front.refusals import CannotCompile, StepRaises
from .._front.step_graph import Given, StepGraph
from .._step.sequence_call import Names
from .._step.trees import Leaves
from . import program_operators, records
from .build import CannotBuild, build, capability_of, kind_of
from .compiled_step import CompiledStep, Generated
from .derive import DerivedPlan, derive
from .emit import emit
from .lower import lower
from .roundings import check_roundings
from .step_plan import make_plan
from .step_to_compile import StepToCompile
from .trace import of_graph, trace
from .trial import Numbers, Trial
from .verify import RunLibrary, library_is_close, verify, verify_library

MOST_ROWS = 64
"""Of a batch that a step is tried with."""


class Corner(NamedTuple):
    """What a step is tried with, too."""

    numbers: Numbers
    batch: int | None
    """None for that of the call."""


CORNERS = (
    Corner(torch.zeros_like, 2),
    Corner(lambda x: x[..., :1].expand_as(x).clone(), 5),
    Corner(lambda x: 100 * x, 2),
    Corner(torch.clone, 1),
    Corner(torch.clone, None),
)
"""Zeros, columns that are equal, and large numbers, where functions have limits and kinks; and
batches of other sizes, by which a step may decide."""


def find_or_compile(
    graph: StepGraph,
    given: Given,
    inputs: Leaves,
    state: Leaves,
    names: Names,
    run_library: RunLibrary,
) -> CompiledStep:
    """The program of a step, from a record or made anew. Of all threads, one is here at a time.

    Args:
        given, inputs, state, names: As of :class:`StepToCompile`.

    Raises:
        CannotCompile: It has none, or it cannot be built here.
        Busy: Another thread takes too long.
    """
    step = StepToCompile(graph, given, inputs, state, names)
    known = _from_record(step, run_library)
    return compile_step(step, run_library) if known is None else known


def compile_step(step: StepToCompile, run_library: RunLibrary) -> CompiledStep:
    """The program of a step, verified, with a library and a record.

    Raises:
        CannotCompile: It has none, or it cannot be built here.
        Busy: Another thread takes too long.
    """
    graph = trace(step.flat())  # operations of ATen
    columns = lower(graph, step.names)  # expressions over columns
    plan = make_plan(columns)  # products and stages, and what is kept
    check_roundings(plan)  # whether backward can make again what forward has made
    derived = derive(plan)  # each stage, forward and backward
    generated = emit(derived, step.dtype, kind_of(step.device))  # C++, and what weights are made of
    program = _program(step, generated, lambda: derived)
    graph.forget_weights()
    trial = step.trial()
    verify(program, trial)  # values and gradients of the plan, by the interpreter
    _verify_at_corners(program, step)
    add_library(program, step.device)
    verify_library(program, trial, step.device, run_library)  # the same of the library
    records.keep(program, graph.module)
    return program


def add_library(program: CompiledStep, device: torch.device) -> None:
    """Builds the library of a program, and makes both known to the operators.

    Raises:
        CannotCompile: It cannot be built here.
    """
    kind, weights = kind_of(device), program.generated.call_weights
    try:
        text, capability = program.generated.text, capability_of(device)
        program.library = build(text, device=kind, capability=capability)
    except CannotBuild as error:
        raise CannotCompile(str(error)) from error
    program.number = program_operators.add_program(
        program.form,
        program.library.function,
        dtype=program.dtype,
        constants=weights.numbers(program.sequence_shapes, program.state_shapes),
        is_for_gpu=kind == "cuda",
    )
    weights.prepare(device, program.dtype)


def computes_the_same(
    program: CompiledStep,
    graph: StepGraph,
    given: Given,
    inputs: Leaves,
    state: Leaves,
    run_library: RunLibrary,
) -> bool:
    """Whether a graph of one row is that of a program's step.

    Args:
        given: With the program's constants, in its order and the graph's.
    """
    rows, device = state[0].shape[0], state[0].device
    trained = [constant.requires_grad for constant in given.constants]
    try:
        trial = Trial.of_graph(graph, given, trained, inputs, state, batch=rows, is_known=True)
        if program.dtype.itemsize > 2 and library_is_close(program, trial, device, run_library):
            return True
        trial = Trial.of_graph(graph, given, trained, inputs, state, batch=rows)
        verify(program, trial)
    except CannotCompile:
        return False
    return True


def _derived_again(step: FlatStep, names: Names, record: records.Record) -> DerivedPlan:
    """The plan of a record's program, with the derivatives that the record has.

    Args:
        step: Which has run, and need not be able to run again.

    Raises:
        Exception: The record is damaged.
    """
    module, stages = record.graphs()
    assert module is not None and record.generated is not None
    graph = of_graph(module, step)
    plan = make_plan(lower(graph, names))
    graph.forget_weights()
    return DerivedPlan.of_record(plan, stages, record.generated.form)


def _from_record(step: StepToCompile, run_library: RunLibrary) -> CompiledStep | None:
    """The program that another process has made, if its library computes what the step does."""
    record = records.find(step.key)
    if record is None or record.generated is None:
        return None
    try:
        few = step.flat()
        with torch.no_grad():  # for shapes, and for what it draws
            few(*few.arguments, notes_lines=False)
        again = functools.partial(_derived_again, few.without_step(), step.names, record)
        program = _program(step, record.generated, functools.cache(again))
        add_library(program, step.device)
        _verify_known(program, step, run_library)
    except MemoryError:
        raise
    except Exception:  # of a record that is damaged
        return None
    return program


def _verify_known(program: CompiledStep, step: StepToCompile, run_library: RunLibrary) -> None:
    """Compares what the library of a record's program computes to the step.

    Raises:
        CannotCompile: They differ.
        Exception: The program is of other shapes.
    """
    device = step.device
    if step.dtype.itemsize > 2 and library_is_close(
        program, step.trial(is_known=True), device, run_library
    ):
        return
    trial = step.trial()
    verify(program, trial)
    verify_library(program, trial, device, run_library)


def _program(
    step: StepToCompile, generated: Generated, derived: Callable[[], DerivedPlan]
) -> CompiledStep:
    return CompiledStep(
        generated,
        derived,
        names=step.constant_names,
        output_shapes=step.output_shapes,
        state_shapes=step.state_shapes,
        dtype=step.dtype,
        key=step.key,
    )


def _verify_at_corners(program: CompiledStep, step: StepToCompile) -> None:
    """Compares a program to its step where functions have limits and kinks, and in other batches.

    Raises:
        CannotCompile: They differ.
    """

    @functools.cache
    def exact() -> CompiledStep:
        """The step's program in float64, with constants such as an eps as it has them there."""
        plan = make_plan(lower(trace(step.flat(in_float64=True)), step.names))
        derived = derive(plan)
        generated = emit(derived, torch.float64, kind_of(step.device))
        return replace(program, generated=generated, derived=lambda: derived, dtype=torch.float64)

    own = min(step.rows, MOST_ROWS)
    for corner in CORNERS:
        batch = own if corner.batch is None else corner.batch

        numbers = corner.numbers
        try:
            trial = step.trial(numbers, batch)
        except StepRaises:  # such numbers, as a distribution does a scale of 0
            if corner.batch is not None:
                continue
            numbers = torch.abs
            trial = step.trial(numbers, batch)  # the call's own batch is tried in any case

        def again(scale: float, numbers: Numbers = numbers, batch: int = batch) -> Trial | None:
            try:
                return step.trial(lambda x: scale * numbers(x), batch)
            except StepRaises:
                return None

        try:
            verify(program, trial, again)
        except CannotCompile:
            if step.dtype == torch.float64:
                raise
            verify(exact(), trial, again)
