"""Programs for calls in which some results have no gradient.

torch takes no derivative of a result that nobody has used. A stage multiplies the derivatives of
all its results by their gradients, and where a derivative is infinite, as that of the square root
of 0, infinity times 0 is NaN. So if the way to an unused result has an operation whose derivative
may be infinite, the call takes a program in which that result is stopped. It is built when such a
backward comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from .._front.compile_lock import one_at_a_time
from .._front.flat_step import stop
from .._front.refusals import CannotCompile
from .._step.trees import Leaves
from . import operations, records
from .build import kind_of
from .compiled_step import CompiledStep, Unread
from .derive import DerivedPlan, derive
from .emit import emit
from .expressions import Expression, below, within
from .lower import Lowered
from .pipeline import add_library
from .roundings import check_roundings
from .step_plan import make_plan
from .trial import Trial
from .verify import RunLibrary, verify, verify_library

aten = torch.ops.aten


def without_unused_results(
    program: CompiledStep,
    outputs: Sequence[bool],
    last: Sequence[bool],
    constants: Leaves,
    trained: Sequence[bool],
    inputs: Leaves,
    state: Leaves,
    run_library: RunLibrary,
) -> CompiledStep:
    """What takes no derivatives of results without gradients.

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
    key = records.key_of(program.key, *others, program.generated.text) if program.key else ""
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
        if made.generated is program.generated:
            records.keep(made, is_same=True)
            return made
        trial = Trial.of_program(program, constants, trained, inputs, state, (*outputs, *last))
        verify(made, trial)
    add_library(made, device)
    verify_library(made, trial, device, run_library)
    records.keep(made)
    return made


def _new(
    program: CompiledStep,
    outputs: Sequence[bool],
    last: Sequence[bool],
    inputs: int,
    device: torch.device,
) -> CompiledStep:
    """The same without a record and a library. ``inputs``: how many there are.

    Raises:
        CannotCompile: There is none.
    """
    lowered, read = lowered_without(program.derived().plan.lowered, outputs, last)
    unread = Unread(
        frozenset(range(len(program.names))) - read.constants,
        frozenset(range(inputs)) - read.inputs,
        frozenset(range(len(last))) - read.carries,
    )
    made = replace(program, unread=unread, without={}, chunks={})
    if lowered is not None:
        plan = make_plan(lowered)
        check_roundings(plan)
        derived = derive(plan)
        made.generated = emit(derived, program.dtype, kind_of(device))
        made.derived = lambda: derived
        _check_places(program, made)
    return made


def _check_places(program: CompiledStep, made: CompiledStep) -> None:
    if made.generated.places() != program.generated.places():
        raise CannotCompile("what backward reads is kept in other places")


def _known(
    program: CompiledStep,
    known: records.Record,
    outputs: Sequence[bool],
    last: Sequence[bool],
    device: torch.device,
) -> CompiledStep:
    """The same from a record, whose library was compared to its program when it was built.

    Raises:
        CannotCompile: This process has another library.
        Exception: The record is damaged.
    """
    made = replace(program, unread=known.unread, without={}, chunks={})
    found = known.generated
    if found is None:
        return made

    def again() -> DerivedPlan:
        lowered, _ = lowered_without(program.derived().plan.lowered, outputs, last)
        assert lowered is not None
        return DerivedPlan.of_record(make_plan(lowered), known.graphs()[1], found.form)

    made.generated, made.derived = found, functools.cache(again)
    _check_places(program, made)
    add_library(made, device)
    if made.library is None or made.library.key != known.library:
        raise CannotCompile("the library is another one than that of the record")
    return made


class Read(NamedTuple):
    """What results with gradients depend on."""

    constants: set[int]
    inputs: set[int]
    carries: set[int]


def lowered_without(
    whole: Lowered, outputs: Sequence[bool], last: Sequence[bool]
) -> tuple[Lowered | None, Read]:
    """Expressions of a step in which results without gradient are stopped; None if none has to be.
    And what the other results depend on.

    Args:
        whole: All of the step, which is not changed.
        outputs, last: Whether each output, and each state after the last step, has a gradient.
    """
    lowered = whole.again()
    for product in lowered.expressions.products.values():
        product.array.products = [product]
    live = _live(lowered, outputs, last)
    results = [*lowered.outputs, *lowered.new_carries]
    dead = _needed([e for pieces in results for e in pieces], live)
    carries = {e.at[0] for e in live.values() if e.kind == "carry"}
    carries |= {j for j, is_used in enumerate(last) if is_used}  # as it is, if a row has no steps
    inputs = {e.at[0] for e in live.values() if e.kind == "input"}
    read = Read(_constants(lowered, live), inputs, carries)
    if not any(map(_is_unbounded, dead)):
        return None, read

    def stopped(e: Expression) -> Expression:
        if e.packet is stop or id(e) in live or not any(map(_is_unbounded, within(e))):
            return e
        made = lowered.expressions.operation(stop.default, e, width=e.width, is_mask=e.is_mask)
        made.number = e.number + 0.5  # before what has read the operand until now
        return made

    # Wherever a stage gets gradients, which are zeros for what is not live.
    for pieces in results:
        pieces[:] = map(stopped, pieces)
    for e in dead:
        if e.kind == "array":
            for product in e.at[0].products:
                product.operand = stopped(product.operand)
        elif e.kind == "reduced":
            e.at[0].source = stopped(e.at[0].source)
        elif e.kind == "value":
            e.at = (stopped(e.at[0]), *e.at[1:])
    return lowered, read


def _constants(lowered: Lowered, live: dict[int, Expression]) -> set[int]:
    """Which constants of the step these expressions are made of, also by products and tables."""
    left: list[fx.Node | None] = []
    count = len(lowered.traced.inputs)
    for e in live.values():
        if e.kind == "array":
            first = e.at[1]
            last = first + e.width // max(e.group, 1)
            parts = [
                part
                for product in e.at[0].products
                for part in product.parts
                if part.offset < last and first < part.offset + part.columns
            ]
            left += [node for part in parts for node in (part.weight, part.bias)]
        elif e.kind == "vector":
            left.append(e.at[0])
        elif e.kind == "input" and e.at[0] >= count:
            left.append(lowered.lookups[e.at[0] - count].table)
    seen: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return {i for i, node in enumerate(lowered.traced.constants) if node in seen}


def _live(lowered: Lowered, outputs: Sequence[bool], last: Sequence[bool]) -> dict[int, Expression]:
    """The expressions that get a gradient in some step: of used results, and of states that these
    depend on."""
    results = [
        *(y for y, is_used in zip(lowered.outputs, outputs, strict=True) if is_used),
        *(y for y, is_used in zip(lowered.new_carries, last, strict=True) if is_used),
    ]
    live: dict[int, Expression] = {}
    while results:
        found = _needed([e for pieces in results for e in pieces], live)
        live |= {id(e): e for e in found}
        read = {e.at[0] for e in found if e.kind == "carry"}
        results = [lowered.new_carries[j] for j in read]
    return live


def _needed(roots: Iterable[Expression], known: Container[int]) -> list[Expression]:
    """Expressions that these are made of, themselves included, without the known ones."""
    found: dict[int, Expression] = {}
    left = list(roots)
    while left:
        e = left.pop()
        if id(e) not in found and id(e) not in known:
            found[id(e)] = e
            if e.packet is not stop:
                left += below(e)
    return list(found.values())


def _is_unbounded(e: Expression) -> bool:
    if e.kind != "op" or e.packet is stop or operations.of(e.target).bounded:
        return False
    if e.packet is aten.div:
        divisor = e.args[1]
        return isinstance(divisor, Expression) and divisor.kind != "constant"
    return True
