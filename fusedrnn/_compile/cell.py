"""A step as a program that is compiled, verified and ready to run."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..recurrent.runs import Run
from ..recurrent.trees import Leaves, Structure
from . import operators
from .build import CannotBuild, Library, build
from .derive import Derived, derive
from .emit import STORAGE, source
from .interpret import Interpreter
from .lower import Lowered
from .outside import Outside
from .plan import Plan
from .program import Out
from .trace import ROWS, CannotCompile, trace
from .unused import lowered_without
from .verify import CORNERS, MOST_ROWS, Trial, examples, verify, verify_library

_tracing = threading.RLock()
"""Tracers exchange functions of torch for the time of a trace, so there is one at a time."""
_LONGEST_WAIT = 60.0
"""Seconds, which no trace takes: another thread's may need a module that this one has locked."""


def _renew_lock() -> None:
    """In a process that was forked while another thread had it."""
    global _tracing
    _tracing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Busy(Exception):
    """Why there is no program now, though there may be one later."""


@dataclass
class Program:
    """What runs a step of one kind: structure, widths, dtype, and all that Python decided."""

    plan: Plan
    derived: list[Derived]
    outside: Outside
    text: str
    """Of its library."""
    names: list[str]
    """Of the weights and buffers that the step reads, in the order of its constants."""
    output: Structure
    output_shapes: list[torch.Size]
    """Without the batch."""
    state_shapes: list[torch.Size]
    dtype: torch.dtype
    number: int = -1
    """Of the operators."""
    library: Library | None = None
    unread: frozenset[str] = frozenset()
    """Names of weights that have no part in results with gradients."""
    without: dict[tuple[bool, ...], Program | None] = field(default_factory=dict)
    """Programs for backward where some results have no gradients, by which have one; None where
    there is none."""

    @property
    def interpreter(self) -> Interpreter:
        return Interpreter(self.plan, self.derived)

    def has_choices(self) -> bool:
        """Whether a rounding may change its results altogether."""
        places = {Out.MAX, Out.ARG_MAX}
        return any(one.has_choices() for one in self.derived) or any(
            output.kind in places for stage in self.plan.program.stages for output in stage.outputs
        )

    def summary(self) -> str:
        """For users: its size, what it keeps, and its library."""
        form, library = self.plan.program, self.library
        assert library is not None
        outputs = set(self.plan.output_sequences)
        kept = [
            f"state {j} "
            + (
                "before each chunk"
                if carry.sequence < 0
                else "in the output"
                if carry.sequence in outputs
                else "of each step"
            )
            for j, carry in enumerate(form.carries)
        ]
        origin = "cached" if library.is_cached else f"built in {library.seconds:.1f} s"
        return (
            f"{_count(len(form.stages), 'stage')}, {_count(len(form.products), 'product')}, "
            f"kept: {', '.join(kept)}; library of {library.bytes / 1e3:.0f} kB, {origin}"
        )

    def kept_bytes_per_step(
        self, rows: int, chunk: int, *, returns_sequence: bool = True, saves_sums: bool = False
    ) -> int:
        """Of a whole sequence besides outputs, on average over the steps of a chunk."""
        form, plan = self.plan.program, self.plan
        outputs = set(plan.output_sequences) if returns_sequence else ()
        own = [w for i, w in enumerate(form.sequences) if i not in outputs]
        size = self.dtype.itemsize
        of_chunks = [c.width for c in form.carries if c.sequence < 0]
        sums = sum(array.columns for array in form.arrays) if saves_sums else 0
        wide = sums * max(size, 4) + -(-sum(of_chunks) * max(size, 4) // chunk)
        return rows * (sum(own) * size + wide)


def lower(run: Run, inputs: Leaves, state: Leaves) -> Program:
    """The program of a run's step, verified, but not compiled.

    Args:
        inputs: (seq_len, batch, ...) each.
        state: (batch, ...) each.

    Raises:
        CannotCompile: It has none.
    """
    return _lowered(run, inputs, state)[0]


def _lowered(run: Run, inputs: Leaves, state: Leaves) -> tuple[Program, Trial]:
    dtype = _dtype(state)
    weights = run.weights.trained() | run.weights.frozen()
    names, constants = list(weights), tuple(weights.values())
    for name, constant in weights.items():
        if constant.is_floating_point() and constant.dtype != dtype:
            raise CannotCompile(
                f"{name.split('.', 2)[-1]} is of {constant.dtype}, the state of {dtype}"
            )

    for leaf in inputs:
        if leaf.is_floating_point() and torch.promote_types(leaf.dtype, dtype) != dtype:
            raise CannotCompile(f"an input is of {leaf.dtype}, the state of {dtype}")

    structures: list[Structure] = []

    def step(
        given: Sequence[Tensor], x: Sequence[Tensor], carries: Sequence[Tensor]
    ) -> tuple[Leaves, Leaves]:
        own = copy.copy(run.user_step)
        own.output, own._kinds = None, []
        values = dict(zip(names, given, strict=True))
        made = run.weights.call_with(values, lambda: own(tuple(carries), tuple(x), ()))
        structures.append(own.output_structure())
        return made

    given = [c.detach().cpu() for c in constants]
    rows, carries = examples(inputs, ROWS, True), examples(state, ROWS, False)
    own = given, rows, carries
    traced = run.aside(lambda: trace(step, *own))
    again = run.aside(lambda: trace(step, *own))
    if traced.module.code != again.module.code:
        raise CannotCompile("the step does not do the same each time")
    _check_held(run, traced.module)
    shapes = [traced.values[node].shape[1:] for node in traced.outputs]
    program = Program(
        **_printed(Lowered(traced), dtype, run.device),
        names=names,
        output=structures[0],
        output_shapes=shapes,
        state_shapes=[leaf.shape[1:] for leaf in state],
        dtype=dtype,
    )
    trial = Trial.of_step(run, names, constants, inputs, state)
    verify(program, trial)

    @functools.cache
    def exact() -> Program:
        """The program of the same step in float64, with constants such as an eps as it has them."""
        doubles = [[x.double() if x.is_floating_point() else x for x in leaves] for leaves in own]
        traced = run.aside(lambda: trace(step, *doubles))
        printed = _printed(Lowered(traced), torch.float64, run.device)
        return replace(program, **printed, dtype=torch.float64)

    for corner in CORNERS:
        batch = min(run.rows, MOST_ROWS) if corner.batch is None else corner.batch
        try:
            special = Trial.of_step(run, names, constants, inputs, state, corner.numbers, batch)
        except CannotCompile:
            continue  # a step may refuse such numbers, as a distribution does a scale of 0
        try:
            verify(program, special)
        except CannotCompile:
            if dtype == torch.float64:
                raise
            verify(exact(), special)
    return program, trial


def _printed(lowered: Lowered, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Fields of a program."""
    plan = Plan(lowered)
    derived = [derive(plan, stage) for stage in plan.stages]
    text = source(plan, derived, dtype, kind_of(device))
    return {"plan": plan, "derived": derived, "outside": Outside(plan), "text": text}


def kind_of(device: torch.device) -> str:
    """The kind of library that computes on a device: "cpu" or "cuda"."""
    return device.type


def compiled(run: Run, inputs: Leaves, state: Leaves) -> Program:
    """The same, with a library.

    Raises:
        CannotCompile: It has none, or it cannot be built here.
        Busy: Another thread takes too long.
    """
    with _one_at_a_time():
        program, trial = _lowered(run, inputs, state)
    return _ready(program, trial, run.device)


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
    with _one_at_a_time():
        lowered, read = lowered_without(program.plan.lowered.traced, outputs, last)
        unread = {name for i, name in enumerate(program.names) if i not in read}
        made = replace(program, unread=frozenset(unread), without={})
        if lowered is None:
            return made
        device = state[0].device
        made = replace(made, **_printed(lowered, program.dtype, device))
        if made.plan.places() != program.plan.places():
            raise CannotCompile("what backward reads is kept in other places")
        trial = Trial.of_program(program, constants, trained, inputs, state, (*outputs, *last))
        verify(made, trial)
    return _ready(made, trial, device)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock = _tracing
    if not lock.acquire(timeout=_LONGEST_WAIT):
        raise Busy("another thread is compiling a cell")
    try:
        yield
    finally:
        lock.release()


def _ready(program: Program, trial: Trial, device: torch.device) -> Program:
    """The program with its library.

    Raises:
        CannotCompile: It cannot be built here.
    """
    kind = kind_of(device)
    try:
        program.library = build(program.text, device=kind, capability=_capability(device))
    except CannotBuild as error:
        raise CannotCompile(str(error)) from error
    program.number = operators.add_program(
        program.plan.program,
        program.library.function,
        dtype=program.dtype,
        is_for_gpu=kind == "cuda",
    )
    verify_library(program, trial, device)
    return program


def _capability(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return "{}{}".format(*torch.cuda.get_device_capability(device))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _dtype(state: Leaves) -> torch.dtype:
    kinds = {leaf.dtype for leaf in state}
    if len(kinds) > 1 or not kinds <= STORAGE.keys():
        raise CannotCompile(f"the state is of {', '.join(sorted(map(str, kinds)))}")
    return kinds.pop()


def _check_held(run: Run, module: torch.fx.GraphModule) -> None:
    """Refuses tensors that the trace has found in attributes: the next call may have others."""
    held = {
        tensor.untyped_storage().data_ptr()
        for value in run.python.values().values()
        for tensor in value.tensors()
        if tensor.numel()
    }
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(module, node.target)
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in held:
                raise CannotCompile(
                    f"the step reads a tensor of shape {tuple(tensor.shape)} from an attribute; "
                    "register it as a buffer"
                )
