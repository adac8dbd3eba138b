"""Programs for calls in which some results have no gradient; unused.py says why there are any."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..recurrent.trees import Leaves
from . import ready, records
from .cell import Made, Program, Unread
from .trace import CannotCompile
from .turns import one_at_a_time
from .verify import Trial, verify


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
        inputs: (seq_len, batch, ...) each.
        state: (batch, ...) each.

    Raises:
        CannotCompile: There is none.
        Busy: Another thread takes too long.
    """
    others = [program.names, trained, outputs, last, program.form.numbers()]
    key = records.key_of(program.digest, *others, program.printed.text) if program.digest else ""
    known, device = records.find(key), state[0].device
    if known is not None:
        try:
            return _known(program, known, outputs, last, device)
        except MemoryError:
            raise
        except Exception:  # of a record that is damaged, or another compiler makes the library
            pass
    with one_at_a_time():
        made = _new(program, outputs, last, len(inputs), device)
        made.key = key
        if made.printed is program.printed:
            records.keep(made, is_same=True)
            return made
        trial = Trial.of_program(program, constants, trained, inputs, state, (*outputs, *last))
        verify(made, trial)
    ready.with_library(made, trial, device)
    records.keep(made)
    return made


def _new(
    program: Program,
    outputs: Sequence[bool],
    last: Sequence[bool],
    inputs: int,
    device: torch.device,
) -> Program:
    """The same without a record and a library. ``inputs``: how many there are.

    Raises:
        CannotCompile: There is none.
    """
    from .printing import printed
    from .unused import lowered_without

    lowered, read = lowered_without(program.made().plan.lowered, outputs, last)
    unread = Unread(
        frozenset(range(len(program.names))) - read.constants,
        frozenset(range(inputs)) - read.inputs,
        frozenset(range(len(last))) - read.carries,
    )
    made = replace(program, unread=unread, without={}, chunks={})
    if lowered is not None:
        made.printed, made.made = printed(lowered, program.dtype, device)
        _check_places(program, made)
    return made


def _check_places(program: Program, made: Program) -> None:
    if made.printed.places() != program.printed.places():
        raise CannotCompile("what backward reads is kept in other places")


def _known(
    program: Program,
    known: records.Record,
    outputs: Sequence[bool],
    last: Sequence[bool],
    device: torch.device,
) -> Program:
    """The same from a record, whose library was compared to its program when it was built.

    Raises:
        CannotCompile: This process has another library.
        Exception: The record is damaged.
    """
    made = replace(program, unread=known.unread, without={}, chunks={}, key="")
    found = known.printed
    if found is None:
        return made

    def again() -> Made:
        from .printing import made_again
        from .unused import lowered_without

        lowered, _ = lowered_without(program.made().plan.lowered, outputs, last)
        assert lowered is not None
        return made_again(lowered, known.graphs().derived, found)

    def check(made: Program, *_: object) -> None:
        if made.library is None or made.library.key != known.library:
            raise CannotCompile("the library is another one than that of the record")

    made.printed, made.made = found, functools.cache(again)
    _check_places(program, made)
    return ready.with_library(made, None, device, check)
