"""First uses: the graph of a step becomes a program that is verified and has a library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._front.traceable_graph import WithLines
from .._step.sequence_call import Names
from .._step.trees import Leaves
from . import ready, records
from .build import kind_of
from .compiled_step import Made, Printed, Program
from .program_operators import CODES
from .trace import ROWS, CannotCompile, FlatStep, Refused, of_graph, trace
from .verify import CORNERS, Numbers, Trial, examples, is_close, verify, verify_library

if TYPE_CHECKING:
    from .._front.step_graph import Given, StepGraph

MOST_ROWS = 64
"""Of a batch that a step is tried with."""


class _FirstUse:
    """A step that is to become a program."""

    def __init__(
        self, graph: StepGraph, given: Given, inputs: Leaves, state: Leaves, names: Names, key: str
    ) -> None:
        self._graph, self._given, self._names = graph, given, names
        self._inputs, self._state, self._device = inputs, state, state[0].device
        self._dtype = _dtype(state)
        self._trained = [constant.requires_grad for constant in given.constants]
        self._key = key
        self._output_shapes: list[torch.Size] = []
        """Without the batch, when the step has run."""

    def known(self) -> Program | None:
        """The program that another process has made of it; None if there is no record.

        Raises:
            CannotCompile: There is no program.
        """
        self._check_dtypes()
        known = records.find(self._key)
        if known is None or known.printed is None:
            return None
        step = self._flat()
        try:
            with torch.no_grad():  # for shapes, and for what it draws
                step(*step.arguments, notes_lines=False)
            few = step.without_step()
            again = functools.partial(_made_again, known, few, self._names)
            return self._program(known.printed, functools.cache(again))
        except Exception:  # of a record that is damaged
            return None

    def check_known(self, program: Program, _: Trial | None, device: torch.device) -> None:
        """Compares what a known program's library computes to the step.

        Raises:
            CannotCompile: They differ.
            Exception: The program is of other shapes.
        """
        if self._dtype.itemsize > 2 and is_close(program, self._trial(is_known=True), device):
            return
        trial = self._trial()
        verify(program, trial)
        verify_library(program, trial, device)

    def new(self) -> tuple[Program, Trial]:
        """A program, and the trial that it has passed. Comes after known().

        Raises:
            CannotCompile: There is none.
        """
        from .lower import Lowered
        from .printing import printed

        lowered = Lowered(trace(self._flat()), self._names)
        program = self._program(*printed(lowered, self._dtype, self._device))
        trial = self._trial()
        verify(program, trial)
        self._try_corners(program)
        return program, trial

    def _check_dtypes(self) -> None:
        dtype = self._dtype
        # Floats that are numbers in this program have names behind those of its constants.
        for name, constant in zip(self._graph.names, self._given.constants, strict=False):
            if constant.requires_grad and constant.dtype != dtype:
                raise CannotCompile(f"{name} is of {constant.dtype}, the state of {dtype}")
        for leaf in self._inputs:
            if leaf.is_floating_point() and torch.promote_types(leaf.dtype, dtype) != dtype:
                raise CannotCompile(f"an input is of {leaf.dtype}, the state of {dtype}")

    @functools.cached_property
    def _copies(self) -> list[Tensor]:
        """Of the constants, for steps that look at what is done and not at the numbers."""
        return [constant.detach().cpu().clone() for constant in self._given.constants]

    def _flat(self, in_float64: bool = False) -> FlatStep:
        """The step on a few rows."""
        dtype = torch.float64 if in_float64 else self._dtype

        def own(leaves: Sequence[Tensor]) -> list[Tensor]:
            return [x.double() if in_float64 and x.is_floating_point() else x for x in leaves]

        def step(
            constants: Sequence[Tensor], x: Sequence[Tensor], carries: Sequence[Tensor]
        ) -> tuple[Leaves, Leaves]:
            run = WithLines(self._graph.on_cpu(dtype))
            given = self._given._replace(constants=tuple(constants))
            new, y = self._graph.take(given, tuple(x), tuple(carries), ROWS, run)
            self._check_results(new, y, carries)
            return new, y

        inputs, state = examples(self._inputs, ROWS, True), examples(self._state, ROWS, False)
        names = self._graph.names
        return FlatStep(step, own(self._copies), own(inputs), own(state), names=names)

    def _check_results(self, new: Leaves, y: Leaves, old: Sequence[Tensor]) -> None:
        pairs = zip(self._names.state, new, old, strict=True)
        for name, a, b in pairs:
            if a.shape != b.shape or a.dtype != b.dtype:
                raise CannotCompile(
                    f"the step must return {name} as it gets it, {b.dtype} of shape "
                    f"{tuple(b.shape)} in a batch of {ROWS}, got {a.dtype} of {tuple(a.shape)}"
                )
        for leaf in y:
            if leaf.shape[:1] != (ROWS,):
                raise CannotCompile("an output has no row for each row of the batch")
        self._output_shapes = [leaf.shape[1:] for leaf in y]

    def _program(self, printed: Printed, made: Callable[[], Made]) -> Program:
        return Program(
            printed,
            made,
            names=self._graph.names[: len(self._given.constants)],
            output_shapes=self._output_shapes,
            state_shapes=[leaf.shape[1:] for leaf in self._state],
            dtype=self._dtype,
            key=self._key,
        )

    def _trial(self, *corner: Any, is_known: bool = False) -> Trial:
        given = self._graph, self._given, self._trained, self._inputs, self._state
        return Trial.of_graph(*given, *corner, is_known=is_known)

    def _try_corners(self, program: Program) -> None:
        from .lower import Lowered
        from .printing import printed

        @functools.cache
        def exact() -> Program:
            """The step's program in float64, with constants such as an eps as it has them there."""
            traced = trace(self._flat(in_float64=True))
            fields = printed(Lowered(traced), torch.float64, self._device)
            return replace(program, printed=fields[0], made=fields[1], dtype=torch.float64)

        own = min(self._state[0].shape[0], MOST_ROWS)
        for corner in CORNERS:
            batch = own if corner.batch is None else corner.batch

            numbers = corner.numbers
            try:
                trial = self._trial(numbers, batch)
            except Refused:  # such numbers, as a distribution does a scale of 0
                if corner.batch is not None:
                    continue
                numbers = torch.abs
                trial = self._trial(numbers, batch)  # the call's own batch is tried in any case

            def again(scale: float, numbers: Numbers = numbers, batch: int = batch) -> Trial | None:
                try:
                    return self._trial(lambda x: scale * numbers(x), batch)
                except Refused:
                    return None

            try:
                verify(program, trial, again)
            except CannotCompile:
                if self._dtype == torch.float64:
                    raise
                verify(exact(), trial, again)


def compiled(
    graph: StepGraph, given: Given, inputs: Leaves, state: Leaves, names: Names
) -> Program:
    """The program of a step, verified, with a library. Of all threads, one is here at a time.

    Args:
        inputs: (seq_len, batch, ...) each.
        state: (batch, ...) each.

    Raises:
        CannotCompile: It has none, or it cannot be built here.
        Busy: Another thread takes too long.
    """
    device = state[0].device
    kinds = (
        [(leaf.shape[1:], leaf.dtype) for leaf in state],
        [(leaf.shape[2:], leaf.dtype) for leaf in inputs],
    )
    around = str(graph.roles), given.numbers, torch.get_default_dtype(), kind_of(device), kinds
    key = records.key_of(graph.text, *around) if graph.is_text_whole else ""
    use = _FirstUse(graph, given, inputs, state, names, key)
    known = use.known()
    if known is not None:
        try:
            return ready.with_library(known, None, device, use.check_known)
        except MemoryError:
            raise
        except Exception:  # of a record that is damaged
            pass
    made = use.new()
    program = ready.with_library(*made, device)
    records.keep(program, program.made().plan.lowered.traced.module)
    return program


def computes_the_same(
    program: Program, graph: StepGraph, given: Given, inputs: Leaves, state: Leaves
) -> bool:
    """Whether a graph of one row is that of a program's step.

    Args:
        given: With the program's constants, in its order and the graph's.
    """
    rows, device = state[0].shape[0], state[0].device
    trained = [constant.requires_grad for constant in given.constants]
    try:
        trial = Trial.of_graph(graph, given, trained, inputs, state, batch=rows, is_known=True)
        if program.dtype.itemsize > 2 and is_close(program, trial, device):
            return True
        trial = Trial.of_graph(graph, given, trained, inputs, state, batch=rows)
        verify(program, trial)
    except CannotCompile:
        return False
    return True


def _dtype(state: Leaves) -> torch.dtype:
    kinds = {leaf.dtype for leaf in state}
    if len(kinds) > 1 or not kinds <= CODES.keys():
        raise CannotCompile(f"the state is of {', '.join(sorted(map(str, kinds)))}")
    return kinds.pop()


def _made_again(known: records.Record, step: FlatStep, names: Names) -> Made:
    """What a record's program was made by.

    Raises:
        Exception: The record is damaged.
    """
    from .lower import Lowered
    from .printing import made_again

    module, derived = known.graphs()
    assert module is not None and known.printed is not None
    return made_again(Lowered(of_graph(module, step), names), derived, known.printed)
