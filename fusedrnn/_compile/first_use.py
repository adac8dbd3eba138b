"""First uses: a step becomes a program that is verified and has a library."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..recurrent.chunks import Names
from ..recurrent.programs import MOST_ROWS, described_by
from ..recurrent.runs import Run
from ..recurrent.trees import Leaves, Structure
from . import ready, records
from .build import kind_of
from .cell import Made, Printed, Program
from .log import log_of
from .operators import CODES
from .trace import ROWS, CannotCompile, FlatStep, Refused, check_held, of_graph, trace
from .turns import Busy, one_at_a_time
from .undrawn import undrawn
from .verify import (
    BATCH,
    CORNERS,
    ROWS_OF_KNOWN,
    Numbers,
    Trial,
    examples,
    is_close,
    look_like,
    verify,
    verify_library,
)

T = TypeVar("T")


class _FirstUse:
    """A step that is to become a program."""

    def __init__(self, run: Run, inputs: Leaves, state: Leaves) -> None:
        self._run, self._inputs, self._state = run, inputs, state
        self._dtype = _dtype(state)
        weights = run.weights.trained() | run.weights.frozen()
        self._names, self._constants = list(weights), tuple(weights.values())
        self._batch = min(run.rows, MOST_ROWS)
        self._output: tuple[Structure, list[torch.Size]] | None = None
        """Its structure, and shapes without the batch, when the step has run."""
        self._own_log = self._key = ""
        """What it does with the rows of the call, and the name of its record. See known()."""

    def known(self) -> Program | None:
        """The program that another process has made of it; None if there is no record.

        Raises:
            CannotCompile: There is no program.
        """
        self._check_dtypes()
        own = self._flat(self._batch)
        self._own_log = self._log_or_error(own)
        if self._output is None:  # it raises
            return None
        kind = kind_of(self._run.device)
        others = [self._names, list(self._run.weights.trained()), self._batch, kind]
        # Python may decide by what no key shows, so the log is a part of it.
        self._key = records.key_of(self._own_log, described_by(self._run), others)
        known = records.find(self._key)
        if known is None:
            return None
        try:
            if known.printed is None:
                return None
            few = own.without_step(self._flat().arguments)
            again = functools.partial(_made_again, known, few, self._run.names)
            return self._program(known.printed, functools.cache(again), known.log)
        except Exception:  # of a record that is damaged, or the step is another one after all
            return None

    def check_known(self, program: Program, _: Trial | None, device: torch.device) -> None:
        """Compares what a known program's library computes to the step.

        Raises:
            CannotCompile: They differ.
            Busy: Another thread takes too long.
            Exception: The program is of other shapes.
        """
        own_batch = self._batch not in program.logs or self._batch <= ROWS_OF_KNOWN
        batch = self._batch if own_batch else BATCH
        if self._dtype.itemsize > 2:
            with one_at_a_time():
                trial = self._trial(batch=batch, is_known=True)
            if is_close(program, trial, device):
                return
        with one_at_a_time():
            trial = self._trial(batch=batch)
        verify(program, trial)
        verify_library(program, trial, device)

    def new(self) -> tuple[Program, Trial]:
        """A program, and the trial that it has passed. Comes after known().

        Raises:
            CannotCompile: There is none.
        """
        from .lower import Lowered
        from .printing import printed

        step = self._flat()
        log = self._log_or_reason(step)
        if self._log(step) != log:
            raise CannotCompile("the step does not do the same each time")
        traced = self._aside(lambda: trace(step))
        check_held(self._run, traced.module)
        lowered = Lowered(traced, self._run.names)
        fields = printed(lowered, self._dtype, self._run.device)
        program = self._program(*fields, log)
        trial = self._trial()
        verify(program, trial)
        self._try_corners(program)
        program.key = self._key
        return program, trial

    def _check_dtypes(self) -> None:
        dtype = self._dtype
        for name, constant in zip(self._names, self._constants, strict=True):
            if constant.is_floating_point() and constant.dtype != dtype:
                raise CannotCompile(
                    f"{name.split('.', 2)[-1]} is of {constant.dtype}, the state of {dtype}"
                )
        for leaf in self._inputs:
            if leaf.is_floating_point() and torch.promote_types(leaf.dtype, dtype) != dtype:
                raise CannotCompile(f"an input is of {leaf.dtype}, the state of {dtype}")

    @functools.cached_property
    def _copies(self) -> list[Tensor]:
        """Of the constants, for steps that look at what is done and not at the numbers."""
        return [constant.detach().cpu().clone() for constant in self._constants]

    def _flat(self, count: int = ROWS, in_float64: bool = False) -> FlatStep:
        """The step on a few rows."""

        def own(leaves: Sequence[Tensor]) -> list[Tensor]:
            return [x.double() if in_float64 and x.is_floating_point() else x for x in leaves]

        inputs, state = examples(self._inputs, count, True), examples(self._state, count, False)
        return FlatStep(self._step, own(self._copies), own(inputs), own(state), count)

    def _step(
        self, constants: Sequence[Tensor], x: Sequence[Tensor], carries: Sequence[Tensor]
    ) -> tuple[Leaves, Leaves]:
        own = copy.copy(self._run.user_step)
        own.output, own._kinds = None, []
        look_like(self._constants, constants)
        values = dict(zip(self._names, constants, strict=True))
        made = self._run.weights.call_with(values, lambda: own(tuple(carries), tuple(x), ()))
        self._output = own.output_structure(), [y.shape[1:] for y in made[1]]
        return made

    def is_same(self, program: Program, device: torch.device) -> bool:
        """Whether the step is a program's: by its operations, and by what autograd makes of them,
        which no log shows.

        Raises:
            CannotCompile: The step raises.
            Busy: Another thread takes too long.
        """
        with one_at_a_time():
            log = self._log_or_reason(self._flat())
            own_log = self._log_or_error(self._flat(self._batch))
        if program.log != log or program.logs.get(self._batch, own_log) != own_log:
            return False
        try:
            self.check_known(program, None, device)
        except CannotCompile:
            return False
        program.logs[self._batch] = own_log
        return True

    def _aside(self, take: Callable[[], T]) -> T:
        """``take()``, which takes the step, after which all that it may change is as before.

        Raises:
            CannotCompile: The step draws from a generator of Python's or NumPy's.
        """
        return self._run.aside(lambda: undrawn(self._run, take))

    def _log(self, step: FlatStep) -> str:
        """A digest of what a step does.

        What it raises is that of the step.
        """
        log = self._aside(lambda: log_of(step))
        assert self._output is not None
        return hashlib.sha256(f"{log}\n{self._output[0]}".encode()).hexdigest()

    def _log_or_reason(self, step: FlatStep) -> str:
        """
        Raises:
            CannotCompile: The step raises.
        """
        try:
            return self._log(step)
        except CannotCompile:
            raise
        except Exception:
            self._aside(lambda: trace(step))  # which says why, with the line
            raise

    def _log_or_error(self, step: FlatStep) -> str:
        """
        Raises:
            CannotCompile: The step does what no program can do.
        """
        try:
            return self._log(step)
        except CannotCompile:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _program(self, printed: Printed, made: Callable[[], Made], log: str) -> Program:
        assert self._output is not None
        return Program(
            printed,
            made,
            names=self._names,
            output=self._output[0],
            output_shapes=self._output[1],
            state_shapes=[leaf.shape[1:] for leaf in self._state],
            dtype=self._dtype,
            log=log,
            logs={self._batch: self._own_log},
        )

    def _trial(
        self, corner: Numbers | None = None, batch: int = BATCH, is_known: bool = False
    ) -> Trial:
        given = self._names, self._constants, self._inputs, self._state
        return Trial.of_step(self._run, *given, corner, batch, is_known)

    def _try_corners(self, program: Program) -> None:
        from .lower import Lowered
        from .printing import printed

        @functools.cache
        def exact() -> Program:
            """The step's program in float64, with constants such as an eps as it has them there."""
            traced = self._aside(lambda: trace(self._flat(in_float64=True)))
            fields = printed(Lowered(traced), torch.float64, self._run.device)
            return replace(program, printed=fields[0], made=fields[1], dtype=torch.float64)

        for corner in CORNERS:
            batch = self._batch if corner.batch is None else corner.batch

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


def compiled(run: Run, inputs: Leaves, state: Leaves) -> Program:
    """The program of a run's step, verified, with a library.

    Args:
        inputs: (seq_len, batch, ...) each.
        state: (batch, ...) each.

    Raises:
        CannotCompile: It has none, or it cannot be built here.
        Busy: Another thread takes too long.
    """
    use = _FirstUse(run, inputs, state)
    with one_at_a_time():
        known = use.known()
    if known is not None:
        try:
            return ready.with_library(known, None, run.device, use.check_known)
        except (Busy, MemoryError):
            raise
        except Exception:  # of a record that is damaged, or the step is another one after all
            pass
    with one_at_a_time():
        made = use.new()
    program = ready.with_library(*made, run.device)
    records.keep(program, program.made().plan.lowered.traced.module)
    return program


def same_as(programs: Iterable[Program], run: Run, inputs: Leaves, state: Leaves) -> Program | None:
    """The one of these programs, of the same widths and dtypes, that a run's step does, too.

    Raises:
        CannotCompile: The step raises.
        Busy: Another thread takes too long.
    """
    use = _FirstUse(run, inputs, state)
    return next((program for program in programs if use.is_same(program, run.device)), None)


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
