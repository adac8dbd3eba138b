"""Whether backward may see two numbers as different that are equal by their making.

Outputs and states are kept as forward has made them. Backward makes the rest again, by products
over several steps at once, whose roundings may be others. So after

    new = pre.clamp(-1, 1)    # kept
    y = gate(new) * (new - pre).abs()

forward has ``new`` equal to ``pre``, and backward may not: there the derivative of ``abs`` is 1 or
-1, and not 0. In 16 bits what is kept is rounded, and what it is made of is not. Derivatives that
change little where their numbers do are right; so this looks for comparisons, kinks and poles of
what is kept and what that was made of. A step that has them is taken in Python.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .._front.refusals import CannotCompile
from . import operations
from .columns import place_of
from .expressions import Expression
from .step_plan import PlannedStage, PlannedValue, StepPlan

aten = torch.ops.aten

_LEAST_SHIFT = 1e-6
"""A number to which this much is added is far from a pole, as in the eps of norms."""


@dataclass(frozen=True)
class _Facts:
    """What an expression reads, as the stage sees it that has it."""

    kept: frozenset[Hashable] = frozenset()
    """Values that forward has kept, of this step or of the one before."""
    made: frozenset[Hashable] = frozenset()
    """What backward makes again."""
    has_difference: bool = False
    """Whether there is a difference of something kept and of what it is made of in it, which is
    near 0."""
    has_ratio: bool = False
    """Whether there is a quotient of the two in it, or the exponential of a difference."""


_NOTHING = _Facts()


def _all_of(facts: Sequence[_Facts]) -> _Facts:
    """What is made of several expressions reads all that they read."""
    return _Facts(
        frozenset[Hashable]().union(*(one.kept for one in facts)),
        frozenset[Hashable]().union(*(one.made for one in facts)),
        any(one.has_difference for one in facts),
        any(one.has_ratio for one in facts),
    )


def check_roundings(plan: StepPlan) -> None:
    """
    Raises:
        CannotCompile: The step compares what is kept to what it is made of, or the like.
    """
    found = _Roundings(plan).first_error()
    if found is not None:
        name = getattr(found.packet, "__name__", found.kind)
        where = place_of(found.node) if found.node is not None else ""
        raise CannotCompile(
            f"{name} compares a state or an output with a value that it was computed from, which "
            f"backward recomputes with another rounding{where}"
        )


class _Roundings:
    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._rounds = plan.lowered.dtype.itemsize == 2
        self._stages = [(stage, self._expressions(stage)) for stage in plan.stages]
        self._cuts = self._all_cuts()
        self._facts: dict[tuple[int, object], _Facts] = {}
        self._origins: dict[Hashable, frozenset[Hashable]] = {}
        """What each kept value is made of."""
        self._carries = [_NOTHING] * len(plan.carries)
        """Of states after a step."""

    def first_error(self) -> Expression | None:
        """An operation that backward may get wrong."""
        before: object = None
        while before != (before := (self._carries, dict(self._origins))):
            for stage, expressions in self._stages:
                for e in expressions:
                    self._facts[id(e), stage.key] = self._of(e, stage)
                for value in stage.results:
                    self._set_origins(value)
            self._carries = [self._after_step(j) for j in range(len(self._carries))]
        return next(
            (e for stage, several in self._stages for e in several if self._is_wrong(e, stage)),
            None,
        )

    def _expressions(self, stage: PlannedStage) -> list[Expression]:
        """Those of a stage with what they read of others, operands first."""
        found: dict[int, Expression] = {}
        left = [value.expression for value in stage.results]
        while left:
            e = left.pop()
            if id(e) not in found:
                found[id(e)] = e
                if self._handed(e, stage) is None:
                    left += e.operands
        return sorted(found.values(), key=lambda e: e.number)

    def _all_cuts(self) -> dict[int, list[int]]:
        """The columns of arrays at which something that reads them begins or ends."""
        cuts: dict[int, set[int]] = {}
        for _, expressions in self._stages:
            for e in expressions:
                if e.kind == "array":
                    array, first = e.at
                    count = e.width // max(e.group, 1)
                    cuts.setdefault(id(array), set()).update((first, first + count))
        return {array: sorted(places) for array, places in cuts.items()}

    def _handed(self, e: Expression, stage: PlannedStage) -> PlannedValue | None:
        """The value of another stage that an expression is read from."""
        values = self._plan.values
        if e.kind == "reduced":
            reduction = e.at[0]
            return values[id(reduction.source), reduction.kind, reduction.group]
        value = values.get((id(e.at[0] if e.kind == "value" else e), "column", 0))
        return None if value is None or value.stage == stage.key else value

    # Facts

    def _of(self, e: Expression, stage: PlannedStage) -> _Facts:
        value = self._handed(e, stage)
        if value is not None:
            return self._read(value)
        if e.kind == "op":
            return self._of_operation(e, stage)
        if e.kind == "array":
            return self._of_array(e)
        if e.kind == "carry":
            return self._of_carry(e.at[0])
        is_rounded = self._rounds and e.kind in ("input", "draw")
        return _Facts(made=frozenset([(e.kind, e.at[0])])) if is_rounded else _NOTHING

    def _read(self, value: PlannedValue) -> _Facts:
        own = self._facts.get((id(value.expression), value.stage), _NOTHING)
        if value.kind == "column":
            return self._kept([id(value)]) if self._is_kept(value) else own
        if value.kind == "argmax":  # a place: a ratio's last bit seldom decides about it
            return _Facts(has_difference=own.has_difference)
        if value.kind == "sum" and not _picks(value.expression):  # equal to none by its making
            return _Facts(has_difference=own.has_difference, has_ratio=own.has_ratio)
        return own

    def _is_kept(self, value: PlannedValue) -> bool:
        """Whether stages read a number from memory that is not as backward makes it again."""
        return value.sequence >= 0 or (self._rounds and value.is_operand)

    def _kept(self, values: Iterable[Hashable]) -> _Facts:
        kept = frozenset(values)
        return _Facts(kept, kept if self._rounds else frozenset())

    def _of_operation(self, e: Expression, stage: PlannedStage) -> _Facts:
        operands = [self._facts[id(a), stage.key] for a in e.operands]
        are_related = any(self._is_related(a, b) for a in operands for b in operands if a is not b)
        found = _all_of(operands)
        has_difference, has_ratio = found.has_difference, found.has_ratio
        if e.packet is aten.exp:  # near 1, where no pole is
            has_difference, has_ratio = False, has_ratio or has_difference
        elif e.packet is aten.log:
            has_difference, has_ratio = has_difference or has_ratio, False
        elif e.packet is aten.div:
            has_ratio = has_ratio or are_related
        elif not operations.of(e.target).apart:  # also of the number that a ratio is near to
            has_difference = has_difference or has_ratio or are_related
        return replace(found, has_difference=has_difference, has_ratio=has_ratio)

    def _of_array(self, e: Expression) -> _Facts:
        array, first = e.at
        cuts = self._cuts[id(array)]
        last = bisect_left(cuts, first + e.width // max(e.group, 1))
        columns = range(bisect_left(cuts, first), last)
        has_difference = False
        for product in array.products:
            operand = product.operand
            if operand.kind == "carry":
                has_difference |= self._of_carry(operand.at[0]).has_difference
            elif operand.kind == "op":
                has_difference |= self._read(
                    self._plan.values[id(operand), "column", 0]
                ).has_difference
        return _Facts(frozenset(), frozenset((id(array), i) for i in columns), has_difference)

    def _of_carry(self, j: int) -> _Facts:
        if self._plan.carries[j].sequence >= 0:
            return self._kept(_earlier(id(value)) for value in self._values_of_carry(j))
        after = self._carries[j]
        made = frozenset([("carry", j), *map(_earlier, after.made)])
        kept = frozenset(map(_earlier, after.kept))
        return _Facts(kept, made, after.has_difference, after.has_ratio)

    def _values_of_carry(self, j: int) -> list[PlannedValue]:
        return [value for value in self._plan.values.values() if value.carry == j]

    def _after_step(self, j: int) -> _Facts:
        """Of a state as backward makes it again."""
        values = self._values_of_carry(j)
        return _all_of([self._facts[id(value.expression), value.stage] for value in values])

    def _set_origins(self, value: PlannedValue) -> None:
        if not self._is_kept(value):
            return
        own = self._facts[id(value.expression), value.stage]
        made = own.made.union(*(self._origins.get(k, frozenset()) for k in own.kept))
        self._origins[id(value)] = made
        self._origins[_earlier(id(value))] = frozenset(map(_earlier, made))

    # What is wrong

    def _is_related(self, a: _Facts, b: _Facts) -> bool:
        """Whether one has something kept, and the other something that this is made of."""
        return any(
            self._origins.get(k, frozenset()) & other.made
            for one, other in ((a, b), (b, a))
            for k in one.kept
        )

    def _is_wrong(self, e: Expression, stage: PlannedStage) -> bool:
        facts = self._facts[id(e), stage.key]
        if e.kind == "reduced":
            return e.at[0].kind == "argmax" and facts.has_difference
        if e.kind != "op" or self._handed(e, stage) is not None:
            return False
        row = operations.of(e.target)
        if id(e) in self._plan.lowered.expressions.ties:
            return False
        if row.meets and self._is_related(facts, facts):
            return True
        if row.smooth or (e.packet is aten.pow and e.args[1] in (1, 2, 3)):
            return False
        operands = e.operands
        if e.packet is aten.div and isinstance(e.args[0], Expression):
            operands = operands[1:]
        has_pole = row.pole or e.packet is aten.div
        for a in operands:
            facts = self._facts[id(a), stage.key]
            if facts.has_ratio and not has_pole:
                return True
            if facts.has_difference and not (has_pole and _is_shifted(a)):
                return True
        return False


def _earlier(what: Hashable) -> Hashable:
    """The same of the step before; what is earlier still counts as that, too."""
    is_earlier = isinstance(what, tuple) and what[0] == "earlier"
    return what if is_earlier else ("earlier", what)


def _picks(e: Expression) -> bool:
    """Whether the sum of an expression may be one of its numbers, as that of one and of zeros."""
    return e.packet in (aten.where, aten.mul)


def _is_shifted(e: Expression) -> bool:
    if e.packet is not aten.add:
        return False
    shifts = [a.at[2] if isinstance(a, Expression) and a.kind == "constant" else a for a in e.args]
    return any(isinstance(s, int | float) and s >= _LEAST_SHIFT for s in shifts)
