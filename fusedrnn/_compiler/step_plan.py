"""From expressions to a program: products and stages in order, and what is kept where.

A stage computes all expressions of one width between the same two levels of products and
reductions, each as late as somebody needs it. Expressions that several stages need, and that cost
much, are computed once and handed on.

Longer than 350 lines, because what is kept, what is a stage and what is numbered depend on each
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .._front.flat_step import ROWS
from .._front.refusals import CannotCompile
from . import operations
from . import program as form
from .columns import name_of, place_of
from .expressions import Expression, PlannedProduct, ProductSum, Reduction, below, within
from .lower import Lowered
from .program import Carry, In, Operand, OperandSource, Out, Phase, Program, StageInput, StageOutput

aten = torch.ops.aten

MOST_INPUTS, MOST_RESULTS = 32, 16
"""Of a stage: csrc/program/stage.h has the same numbers."""

_OUT = {"column": Out.COLUMN, "sum": Out.SUM, "max": Out.MAX, "argmax": Out.ARG_MAX}

StageKey = tuple[Phase, int, int, int]
"""Of a stage: phase, level, width, and a number among those that were one too large."""


@dataclass(eq=False)
class PlannedValue:
    """What a stage makes for others, or for the user."""

    expression: Expression
    kind: str
    """"column", or the kind of a reduction."""
    group: int
    stage: StageKey
    index: int = -1
    sequence: int = -1
    offset: int = 0
    carry: int = -1
    carry_offset: int = 0
    is_operand: bool = False
    is_read: bool = False

    @property
    def columns(self) -> int:
        return self.expression.width // max(self.group, 1)


@dataclass(eq=False)
class PlannedStage:
    key: StageKey
    results: list[PlannedValue] = field(default_factory=list)
    inputs: list[Expression | PlannedValue] = field(default_factory=list)
    """Leaves, and values of other stages of the same width."""
    is_sequential: bool = False


def make_plan(lowered: Lowered) -> StepPlan:
    """
    Raises:
        CannotCompile: A stage would read too many values.
    """
    plan = StepPlan(lowered)
    plan._merge_arrays()
    plan._find_products()
    plan._keep_results()
    plan._make_values()
    while plan._find_stages():
        pass
    plan.program = plan._program()
    return plan


class StepPlan:
    """The program of a step, and what its weights and vectors are made of."""

    program: Program

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self._known_sources: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self.products: list[PlannedProduct] = []
        self._in_steps: list[PlannedProduct] = []
        """Those that the next step needs."""
        self._after: set[int] = set()
        """Those that need a carry and that no step needs, by id."""
        self.values: dict[tuple[int, str, int], PlannedValue] = {}
        self.stages: list[PlannedStage] = []
        self.sequences: list[int] = []
        self.output_sequences: list[int] = []
        self.carries: list[Carry] = []
        self.arrays: list[ProductSum] = []
        self.draws: list[int] = []
        self.read_inputs: list[int] = []
        self.vectors: dict[tuple[str, object, object], int] = {}
        """The width of each."""

    def _find_products(self) -> None:
        lowered = self.lowered
        self.products = self._reached(lowered.new_carries + lowered.outputs)
        self._in_steps = self._reached(lowered.new_carries)
        others = set(map(id, self.products)).difference(map(id, self._in_steps))
        self._after = {
            id(p) for p in self.products if id(p) in others and self.carries_of(p.operand)
        }

    # What reaches what

    def _reached(self, results: Iterable[list[Expression]]) -> list[PlannedProduct]:
        """The products that results need, in the order of their making."""
        found: dict[int, PlannedProduct] = {}
        for e in self._all([e for pieces in results for e in pieces]):
            if e.kind == "array":
                for product in e.at[0].products:
                    found[id(product)] = product
        return sorted(found.values(), key=lambda p: (p.level, p.operand.number))

    def _all(self, roots: Iterable[Expression]) -> list[Expression]:
        """Expressions that these need, themselves included, operands first."""
        found: dict[int, Expression] = {}
        left = list(roots)
        while left:
            e = left.pop()
            if id(e) not in found:
                found[id(e)] = e
                left += below(e)
        return sorted(found.values(), key=lambda e: e.number)

    def carries_of(self, e: Expression) -> frozenset[int]:
        """The carries that an expression depends on."""
        return self._sources(e)[0]

    def _sources(self, e: Expression) -> tuple[frozenset[int], frozenset[int]]:
        """The carries and the products, these by id, that an expression depends on."""
        known, left = self._known_sources, [e]
        while left:
            one = left[-1]
            # Not by number: what a product reads may have been made after it, see _copy_sums().
            others = below(one)
            missing = [other for other in others if id(other) not in known]
            if missing:
                left += missing
                continue
            left.pop()
            carries = [one.at[0]] if one.kind == "carry" else []
            products = [id(p) for p in one.at[0].products] if one.kind == "array" else []
            known[id(one)] = (
                frozenset(carries).union(*(known[id(other)][0] for other in others)),
                frozenset(products).union(*(known[id(other)][1] for other in others)),
            )
        return known[id(e)]

    def _phase(self, e: Expression) -> Phase:
        carries, products = self._sources(e)
        if not carries:
            return Phase.BEFORE
        return Phase.STEP if self._after.isdisjoint(products) else Phase.AFTER

    # Arrays

    def _merge_arrays(self) -> None:
        """Products that are read only as their sum add up in one array."""
        results = self.lowered.new_carries + self.lowered.outputs
        for product in self.lowered.expressions.products.values():
            product.array.products = [product]
        while True:
            parents: dict[int, list[Expression]] = {}
            leaves: dict[int, list[Expression]] = {}
            roots = [e for pieces in results for e in pieces]
            others = {id(e) for e in roots}
            arrays: dict[int, ProductSum] = {}
            for e in self._all(roots):
                for operand in e.operands:
                    parents.setdefault(id(operand), []).append(e)
                if e.kind == "array":
                    leaves.setdefault(id(e.at[0]), []).append(e)
                    arrays[id(e.at[0])] = e.at[0]
                    others |= {id(p.operand) for p in e.at[0].products}
                if e.kind == "reduced":
                    others.add(id(e.at[0].source))
                if e.kind == "value":
                    others.add(id(e.at[0]))
            if not any(self._merge(array, leaves, parents, others) for array in arrays.values()):
                return self._copy_sums()

    def _copy_sums(self) -> None:
        """A sum that is a product's operand as it is has to be made by a stage."""
        for product in self.lowered.expressions.products.values():
            e = product.operand
            if e.kind == "array":
                product.operand = self.lowered.expressions.operation(
                    aten.clone.default, e, width=e.width
                )

    def _merge(
        self,
        array: ProductSum,
        leaves: dict[int, list[Expression]],
        parents: dict[int, list[Expression]],
        others: set[int],
    ) -> bool:
        """Adds another array to one, if the two are read only as their sum."""
        pairs = []
        for leaf in leaves[id(array)]:
            above = parents.get(id(leaf), [])
            if leaf.group or id(leaf) in others or len(above) != 1:
                return False
            total = above[0]
            if total.target is not aten.add.Tensor or total.kwargs or len(total.operands) != 2:
                return False
            other = next((e for e in total.operands if e is not leaf), None)
            if other is None or other.kind != "array" or other.group or id(other) in others:
                return False
            if other.at[1] != leaf.at[1] or len(parents[id(other)]) != 1:
                return False
            pairs.append((leaf, other, total))
        second = pairs[0][1].at[0]
        same = all(other.at[0] is second for _, other, _ in pairs)
        if not same or second is array or len(leaves[id(second)]) != len(pairs):
            return False
        if second.columns != array.columns:
            return False
        for product in second.products:
            product.array = array
        array.products += second.products
        level = max(leaf.level for pair in pairs for leaf in pair[:2])
        for leaf, _, total in pairs:
            total.become(leaf)
            total.level = level
        return True

    # Results

    def _keep_results(self) -> None:
        lowered = self.lowered
        places: dict[tuple[int, ...], int] = {}
        for pieces in lowered.outputs:
            same = places.get(tuple(map(id, pieces)))
            if same is None:
                same = places[tuple(map(id, pieces))] = self._keep(pieces)
            self.output_sequences.append(same)
        kept = [self._kept_place(j, pieces) for j, pieces in enumerate(lowered.new_carries)]
        operands = [self.carries_of(product.operand) for product in self._in_steps]
        for j, pieces in enumerate(lowered.new_carries):
            width = sum(e.width for e in pieces)
            place = kept[j]
            if place is not None:
                self.carries.append(Carry(width, *place))
            elif any(j in carries for carries in operands):
                self.carries.append(Carry(width, self._keep(pieces, j), 0))
            else:
                at = 0
                for e in pieces:
                    value = self._own(e)
                    value.carry, value.carry_offset = j, at
                    at += e.width
                self.carries.append(Carry(width, -1, 0))

    def _keep(self, pieces: list[Expression], carry: int = -1) -> int:
        """A new sequence for these columns."""
        sequence, at = len(self.sequences), 0
        for e in pieces:
            value = self._own(e)
            value.sequence, value.offset = sequence, at
            if carry >= 0:
                value.carry, value.carry_offset = carry, at
            at += e.width
        self.sequences.append(at)
        return sequence

    def _kept_place(self, carry: int, pieces: list[Expression]) -> tuple[int, int] | None:
        """Where outputs keep a carry as it is, all columns side by side."""
        values = [self.values.get((id(e), "column", 0)) for e in pieces]
        first = values[0]
        if first is None:
            return None
        at, sequence = first.offset, first.sequence
        for value, e in zip(values, pieces, strict=True):
            if (
                value is None
                or value.carry >= 0
                or (value.sequence, value.offset) != (sequence, at)
            ):
                return None
            at += e.width
        if len({id(value) for value in values}) != len(values):
            return None
        at = 0
        for value, e in zip(values, pieces, strict=True):
            assert value is not None
            value.carry, value.carry_offset = carry, at
            at += e.width
        return sequence, first.offset

    def _own(self, e: Expression) -> PlannedValue:
        """A value that is kept nowhere else."""
        known = self.values.get((id(e), "column", 0))
        if e.kind != "op" or known is not None:
            number = len(self.values)
            e = self.lowered.expressions.operation(
                aten.clone.default, e, width=e.width, kwargs=(("copy", number),), is_mask=e.is_mask
            )
        return self._value(e)

    # Values

    def _value(self, e: Expression, kind: str = "column", group: int = 0) -> PlannedValue:
        key = (id(e), kind, group)
        if key not in self.values:
            self.values[key] = PlannedValue(e, kind, group, (self._phase(e), e.level, e.width, 0))
        return self.values[key]

    def _make_values(self) -> None:
        for product in self.products:
            if product.operand.kind == "op":
                value = self._value(product.operand)
                value.is_operand = value.is_read = True
        results = self.lowered.new_carries + self.lowered.outputs
        for e in self._all([e for pieces in results for e in pieces]):
            if e.kind == "reduced":
                reduction: Reduction = e.at[0]
                self._value(reduction.source, reduction.kind, reduction.group).is_read = True
            if e.kind == "value":
                self._value(e.at[0]).is_read = True

    # Stages

    def _find_stages(self) -> bool:
        """True if something is to be handed from stage to stage, and all is to be done again."""
        stages: dict[StageKey, PlannedStage] = {}
        used: dict[int, tuple[Expression, set[StageKey]]] = {}
        for value in sorted(self.values.values(), key=lambda v: v.expression.number):
            stage = stages.setdefault(value.stage, PlannedStage(value.stage))
            stage.results.append(value)
        for stage in stages.values():
            self._find_inputs(stage, used)
        for stage in stages.values():
            if len(stage.inputs) > MOST_INPUTS or len(stage.results) > MOST_RESULTS:
                self._split_in_halves(stage)
                return True
        for e, keys in used.values():
            natural = (self._phase(e), e.level, e.width, 0)
            if (
                len(keys) > 1
                and not e.is_mask
                and self._is_costly(e)
                and (id(e), "column", 0) not in self.values
                and natural in keys
            ):
                self._value(e)
                return True
        self.stages = sorted(stages.values(), key=lambda s: s.key)
        for stage in self.stages:
            for leaf in stage.inputs:
                if isinstance(leaf, PlannedValue):
                    leaf.is_read = True
        return any(map(self._split_by_waiting, self.stages))

    def _split_by_waiting(self, stage: PlannedStage) -> bool:
        """Splits a stage if backward makes some of its results later, and others are read."""
        waiting = [v for v in stage.results if self._waits(v)]
        others = [v for v in stage.results if not self._waits(v)]
        if not waiting or not any(v.is_read or v.is_operand for v in others):
            return False
        self._split(stage, waiting)
        return True

    def _waits(self, value: PlannedValue) -> bool:
        """Whether it depends on a carry that backward makes step by step."""
        return value.stage[0] == Phase.STEP and any(
            self.carries[j].sequence < 0 for j in self.carries_of(value.expression)
        )

    def _split_in_halves(self, stage: PlannedStage) -> None:
        if len(stage.results) == 1:
            made = [e.node for e in within(stage.results[0].expression) if e.node is not None]
            what, place = (name_of(made[0]), place_of(made[0])) if made else ("a value", "")
            raise CannotCompile(
                f"{what} is computed elementwise from more than {MOST_INPUTS} inputs{place}"
            )
        self._split(stage, stage.results[len(stage.results) // 2 :])

    def _split(self, stage: PlannedStage, last: list[PlannedValue]) -> None:
        """Makes another stage of some results, which comes next."""
        number = stage.key[3]
        later = {v.stage[3] for v in self.values.values() if v.stage[:3] == stage.key[:3]}
        shift = {n: n + (n > number) for n in later}
        for value in self.values.values():  # those behind it make room
            if value.stage[:3] == stage.key[:3]:
                value.stage = (*value.stage[:3], shift[value.stage[3]])
        for value in last:
            value.stage = (*stage.key[:3], number + 1)

    def _find_inputs(
        self, stage: PlannedStage, used: dict[int, tuple[Expression, set[StageKey]]]
    ) -> None:
        known: set[int] = set()
        seen: set[int] = set()
        left = [v.expression for v in reversed(stage.results)]
        while left:
            e = left.pop()
            if id(e) in seen:
                continue
            seen.add(id(e))
            value = self.values.get((id(e), "column", 0))
            if value is not None and value.stage != stage.key:
                if id(value) not in known:
                    known.add(id(value))
                    stage.inputs.append(value)
            elif e.kind == "op":
                used.setdefault(id(e), (e, set()))[1].add(stage.key)
                left += reversed(e.operands)
            elif e.kind != "constant":
                stage.inputs.append(e)

    def _is_costly(self, e: Expression) -> bool:
        return any(one.kind == "op" and operations.of(one.target).costly for one in within(e))

    # The program

    def _program(self) -> Program:
        self.draws = sorted(set(self._read("draw")))
        ordered = self.stages
        for stage in ordered:
            stage.is_sequential = any(map(self._waits, stage.results))
        values = [v for stage in ordered for v in stage.results]
        for i, value in enumerate(values):
            value.index = i
        for product in self.products:
            if product.array not in self.arrays:
                self.arrays.append(product.array)
        inputs = self._inputs()
        arrays = [form.Array(a.columns, self._bias(a)) for a in self.arrays]
        forms = [self._stage(stage) for stage in ordered]  # which asks for vectors
        written: set[int] = set()
        phases = [self._phase_of(product) for product in self.products]
        items = sorted(
            [((phases[i], p.level, 0, 0, i), False, i) for i, p in enumerate(self.products)]
            + [
                ((s.key[0], s.key[1], 1, s.key[2], s.key[3]), True, i)
                for i, s in enumerate(ordered)
            ]
        )
        adds = {}
        for _, is_stage, i in items:
            if not is_stage:
                adds[i] = id(self.products[i].array) in written
                written.add(id(self.products[i].array))
        return Program(
            inputs=inputs,
            sequences=self.sequences,
            vectors=list(self.vectors.values()),
            streams=[number << 16 for number in self.draws],
            carries=self.carries,
            values=[
                form.Value(
                    v.columns,
                    v.sequence,
                    v.offset,
                    v.carry,
                    v.carry_offset,
                    v.is_operand,
                    v.is_read,
                )
                for v in values
            ],
            arrays=arrays,
            products=[
                form.Product(
                    self._operand(p),
                    i,
                    p.terms,
                    p.columns,
                    self.arrays.index(p.array),
                    0,
                    adds[i],
                    phases[i],
                )
                for i, p in enumerate(self.products)
            ],
            stages=forms,
            order=[(is_stage, i) for _, is_stage, i in items],
        )

    def _phase_of(self, product: PlannedProduct) -> Phase:
        if not self.carries_of(product.operand):
            return Phase.BEFORE
        return Phase.AFTER if id(product) in self._after else Phase.STEP

    def _inputs(self) -> list[int]:
        """The widths of the inputs; those that nobody reads are left out."""
        lowered = self.lowered
        traced = lowered.traced
        read = set(self._read("input"))
        read |= {p.operand.at[0] for p in self.products if p.operand.kind == "input"}
        self.read_inputs = sorted(read)
        nodes = [*traced.inputs, *(lookup.node for lookup in lowered.lookups)]
        return [traced.values[nodes[i]].numel() // ROWS for i in self.read_inputs]

    def _read(self, kind: str) -> list[int]:
        """What the leaves of a kind that stages read are leaves of."""
        leaves = [leaf for stage in self.stages for leaf in stage.inputs]
        return [e.at[0] for e in leaves if isinstance(e, Expression) and e.kind == kind]

    def _bias(self, array: ProductSum) -> int:
        if all(part.bias is None for product in array.products for part in product.parts):
            return -1
        return self._vector(("bias", array, None), array.columns)

    def _vector(self, item: tuple[str, object, object], width: int) -> int:
        self.vectors.setdefault(item, width)
        return list(self.vectors).index(item)

    def _operand(self, product: PlannedProduct) -> Operand:
        e = product.operand
        if e.kind == "op":
            return Operand(OperandSource.VALUE, self._value(e).index, 0)
        if e.kind == "carry":
            return Operand(OperandSource.CARRY, e.at[0], e.at[1])
        return Operand(OperandSource.INPUT, self.read_inputs.index(e.at[0]), e.at[1])

    def _stage(self, stage: PlannedStage) -> form.Stage:
        return form.Stage(
            stage.key[2],
            stage.key[0],
            stage.is_sequential,
            [self._stage_input(leaf) for leaf in stage.inputs],
            [StageOutput(v.index, _OUT[v.kind], v.group) for v in stage.results],
        )

    def _stage_input(self, leaf: Expression | PlannedValue) -> StageInput:
        if isinstance(leaf, PlannedValue):
            return StageInput(Operand(OperandSource.VALUE, leaf.index, 0), In.COLUMN, 0)
        kind = In.GROUP if leaf.group else In.COLUMN
        first, at = leaf.at[0], leaf.at[-1]
        if leaf.kind == "index":
            return StageInput(Operand(OperandSource.NONE, 0, 0), In.INDEX, leaf.group)
        if leaf.kind == "draw":
            kind = In.UNIFORM if self.lowered.draws[first].distribution else In.NORMAL
            return StageInput(Operand(OperandSource.DRAW, self.draws.index(first), at), kind, 0)
        if leaf.kind == "vector":
            number = self._vector(("vector", first, at), leaf.width)
            return StageInput(Operand(OperandSource.VECTOR, number, 0), In.COLUMN, 0)
        if leaf.kind == "value":
            operand = Operand(OperandSource.VALUE, self._value(first).index, at)
        elif leaf.kind == "reduced":
            value = self._value(first.source, first.kind, first.group)
            operand = Operand(OperandSource.VALUE, value.index, at)
        elif leaf.kind == "array":
            operand = Operand(OperandSource.ARRAY, self.arrays.index(first), at)
        elif leaf.kind == "carry":
            operand = Operand(OperandSource.CARRY, first, at)
        else:
            operand = Operand(OperandSource.INPUT, self.read_inputs.index(first), at)
        return StageInput(operand, kind, leaf.group)
