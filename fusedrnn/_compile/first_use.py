"""First uses: a step becomes a program that is verified and has a library."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from ..recurrent.programs import described_by
from ..recurrent.runs import Run
from ..recurrent.trees import Leaves, Structure
from . import operators, records
from .build import CannotBuild, build, capability_of, kind_of
from .cell import Program, Unread, printed
from .derive import Derived
from .emit import STORAGE
from .log import log_of
from .lower import Lowered
from .trace import ROWS, CannotCompile, FlatStep, Traced, check_held, of_graph, trace
from .turns import one_at_a_time
from .unused import lowered_without
from .verify import (
    BATCH,
    CORNERS,
    MOST_ROWS,
    Corner,
    Numbers,
    Trial,
    examples,
    look_like,
    verify,
    verify_known,
    verify_library,
)

_OTHER_ROWS = sorted({BATCH, *(corner.batch for corner in CORNERS if corner.batch is not None)})


class _FirstUse:
    """A step that is to become a program."""

    def __init__(self, run: Run, inputs: Leaves, state: Leaves) -> None:
        self._run, self._inputs, self._state = run, inputs, state
        self._dtype = _dtype(state)
        weights = run.weights.trained() | run.weights.frozen()
        self._names, self._constants = list(weights), tuple(weights.values())
        self._batch = min(run.rows, MOST_ROWS)
        self._structure: Structure | None = None
        """Of the output, when the step has run."""
        self._first_log = self._key = ""
        """What it does with a few rows, and the name of its record; see known()."""

    def known(self) -> tuple[Program, Trial] | None:
        """The program that another process has made of it, and a trial of the step; None if there
        is no record.

        Raises:
            CannotCompile: There is no program.
        """
        self._check_dtypes()
        step = self._flat()
        self._first_log = self._log(step)
        others = [self._names, list(self._run.weights.trained()), self._batch]
        self._key = records.key_of(self._first_log, described_by(self._run), others)
        known = records.find(self._key)
        if known is None:
            return None
        try:
            traced = of_graph(known.module, step)
            return self._program(traced, known.log, known.derived), self._trial()
        except Exception:  # of a record that is damaged, or the step is another one after all
            return None

    def new(self) -> tuple[Program, Trial]:
        """A program, and the trial that it has passed. Comes after known().

        Raises:
            CannotCompile: There is none.
        """
        step = self._flat()
        if self._log(step) != self._first_log:
            raise CannotCompile("the step does not do the same each time")
        log = self._with_other_rows(self._first_log)
        program = self._program(self._run.aside(lambda: trace(step)), log)
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
        self._structure = own.output_structure()
        return made

    def log(self) -> str:
        """What the step does, and the structure of its output.

        Raises:
            CannotCompile: The step raises.
        """
        return self._with_other_rows(self._log(self._flat()))

    def is_in_its_batch(self, program: Program) -> bool:
        """Whether the step is a program's with as many rows as the call has, too."""
        batch = self._batch
        if batch in (ROWS, *_OTHER_ROWS):
            return True
        log = self._log_of_rows(batch)
        if batch not in program.logs:
            try:
                verify(program, self._trial(batch=batch))
            except CannotCompile:
                return False
            program.logs[batch] = log
        return program.logs[batch] == log

    def _log(self, step: FlatStep) -> str:
        """The same of a step on a few rows.

        Raises:
            CannotCompile: The step raises.
        """
        run = self._run
        try:
            log = run.aside(lambda: log_of(step))
        except CannotCompile:
            raise
        except Exception:
            run.aside(lambda: trace(step))  # which says why, with the line
            raise
        return f"{log}\n{self._structure}"

    def _with_other_rows(self, log: str) -> str:
        """What it does with other numbers of rows, too, by which it may decide."""
        structure = self._structure
        others = [self._log_of_rows(count) for count in _OTHER_ROWS]
        self._structure = structure
        return "\n".join([log, *others])

    def _log_of_rows(self, count: int) -> str:
        try:
            return self._run.aside(lambda: log_of(self._flat(count)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _program(self, traced: Traced, log: str, derived: list[Derived] | None = None) -> Program:
        check_held(self._run, traced.module)
        assert self._structure is not None
        return Program(
            **printed(
                Lowered(traced, self._run.names), self._dtype, kind_of(self._run.device), derived
            ),
            names=self._names,
            output=self._structure,
            output_shapes=[traced.values[node].shape[1:] for node in traced.outputs],
            state_shapes=[leaf.shape[1:] for leaf in self._state],
            dtype=self._dtype,
            log=log,
        )

    def _trial(self, corner: Numbers | None = None, batch: int = BATCH) -> Trial:
        given = self._names, self._constants, self._inputs, self._state
        return Trial.of_step(self._run, *given, corner, batch)

    def _try_corners(self, program: Program) -> None:
        @functools.cache
        def exact() -> Program:
            """The step's program in float64, with constants such as an eps as it has them there."""
            traced = self._run.aside(lambda: trace(self._flat(in_float64=True)))
            fields = printed(Lowered(traced), torch.float64, kind_of(self._run.device))
            return replace(program, **fields, dtype=torch.float64)

        for corner in CORNERS:
            batch = self._batch if corner.batch is None else corner.batch

            def again(scale: float, corner: Corner = corner, batch: int = batch) -> Trial | None:
                try:
                    return self._trial(lambda x: scale * corner.numbers(x), batch)
                except CannotCompile:
                    return None  # a step may refuse such numbers, as a distribution a scale of 0

            trial = again(1.0)
            if trial is None:
                continue
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
        made = use.known()
    if made is not None:
        try:
            return _ready(*made, run.device, verify_known)
        except MemoryError:
            raise
        except Exception:  # of a record that is damaged, or the step is another one after all
            pass
    with one_at_a_time():
        made = use.new()
    return _ready(*made, run.device)


def same_as(programs: Iterable[Program], run: Run, inputs: Leaves, state: Leaves) -> Program | None:
    """The one of these programs, of the same widths and dtypes, that a run's step does, too.

    Raises:
        CannotCompile: The step raises.
        Busy: Another thread takes too long.
    """
    with one_at_a_time():
        use = _FirstUse(run, inputs, state)
        log = use.log()
        return next((p for p in programs if p.log == log and use.is_in_its_batch(p)), None)


def without(
    program: Program,
    outputs: Sequence[bool],
    last: Sequence[bool],
    constants: Leaves,
    trained: Sequence[bool],
    inputs: Leaves,
    state: Leaves,
) -> Program:
    """What takes no derivatives of results without gradients; see unused.py.

    It reads what forward by ``program`` has kept.

    Args:
        outputs, last: Whether each output, and each state after the last step, has a gradient.
        trained: Which constants have gradients.
        inputs, state: As in :func:`lower`.

    Raises:
        CannotCompile: There is none.
        Busy: Another thread takes too long.
    """
    with one_at_a_time():
        lowered, read = lowered_without(program.plan.lowered, outputs, last)
        unread = Unread(
            frozenset(name for i, name in enumerate(program.names) if i not in read.constants),
            frozenset(range(len(inputs))) - read.inputs,
            frozenset(range(len(state))) - read.carries,
        )
        made = replace(program, unread=unread, without={}, key="")
        if lowered is None:
            return made
        device, kind = state[0].device, kind_of(state[0].device)
        key = records.key_of(program.log, None, [program.names, trained, outputs, last])
        known, fields = records.find(key), None
        if known is not None:
            with suppress(ValueError, LookupError):  # of a record that is damaged
                fields = printed(lowered, program.dtype, kind, known.derived)
        made = replace(made, **(fields or printed(lowered, program.dtype, kind)))
        if made.plan.places() != program.plan.places():
            raise CannotCompile("what backward reads is kept in other places")
        trial = Trial.of_program(program, constants, trained, inputs, state, (*outputs, *last))
        verify(made, trial)
        made.key = "" if fields else key
    return _ready(made, trial, device)


def _ready(
    program: Program,
    trial: Trial,
    device: torch.device,
    check: Callable[[Program, Trial, torch.device], None] = verify_library,
) -> Program:
    """The program with its library, which has passed a check.

    Raises:
        CannotCompile: It cannot be built here, or what the check raises.
    """
    kind = kind_of(device)
    try:
        program.library = build(program.text, device=kind, capability=capability_of(device))
    except CannotBuild as error:
        raise CannotCompile(str(error)) from error
    program.number = operators.add_program(
        program.plan.program,
        program.library.function,
        dtype=program.dtype,
        is_for_gpu=kind == "cuda",
    )
    check(program, trial, device)
    if program.key:
        module = program.plan.lowered.traced.module
        records.keep(program.key, records.Record(module, program.derived, program.log))
    return program


def _dtype(state: Leaves) -> torch.dtype:
    kinds = {leaf.dtype for leaf in state}
    if len(kinds) > 1 or not kinds <= STORAGE.keys():
        raise CannotCompile(f"the state is of {', '.join(sorted(map(str, kinds)))}")
    return kinds.pop()
