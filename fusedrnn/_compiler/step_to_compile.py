"""A step's graph as the passes of the pipeline ask for it: as a function of lists, and on trial."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._front.flat_step import ROWS, FlatStep
from .._front.refusals import CannotCompile
from .._front.step_graph import Given, StepGraph
from .._front.traceable_graph import WithLines
from .._step.sequence_call import Names
from .._step.trees import Leaves
from . import records
from .build import kind_of
from .program_operators import CODES
from .trial import Trial


class StepToCompile:
    """The graph of a step, with the tensors of a call that it is to be compiled for."""

    def __init__(
        self, graph: StepGraph, given: Given, inputs: Leaves, state: Leaves, names: Names
    ) -> None:
        """
        Args:
            given: What the step gets besides input and state.
            inputs: (seq_len, batch, ...) each.
            state: (batch, ...) each.
            names: What messages call inputs and states.

        Raises:
            CannotCompile: Its dtypes have no program.
        """
        self.names, self.rows, self.device = names, state[0].shape[0], state[0].device
        self.dtype = _dtype(state)
        self._graph, self._given, self._inputs, self._state = graph, given, inputs, state
        self._trained = [constant.requires_grad for constant in given.constants]
        self._check_dtypes()
        self.constant_names = graph.names[: len(given.constants)]
        self.state_shapes = [leaf.shape[1:] for leaf in state]
        self.output_shapes: list[torch.Size] = []
        """Without the batch, when the step has run."""

    @functools.cached_property
    def key(self) -> str:
        """The name of its record; "" if its text does not say all of it."""
        if not self._graph.is_text_whole:
            return ""
        kinds = (
            [(leaf.shape[1:], leaf.dtype) for leaf in self._state],
            [(leaf.shape[2:], leaf.dtype) for leaf in self._inputs],
        )
        around = torch.get_default_dtype(), kind_of(self.device), kinds
        roles, numbers = str(self._graph.roles), self._given.numbers
        return records.key_of(self._graph.text, roles, numbers, *around)

    def flat(self, in_float64: bool = False) -> FlatStep:
        """The step on a few rows, as a function of lists of tensors."""
        dtype = torch.float64 if in_float64 else self.dtype

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

    def trial(self, *corner: Any, is_known: bool = False) -> Trial:
        """What the step computes on random numbers, or at a corner: see :meth:`Trial.of_graph`."""
        given = self._graph, self._given, self._trained, self._inputs, self._state
        return Trial.of_graph(*given, *corner, is_known=is_known)

    def _check_dtypes(self) -> None:
        dtype = self.dtype
        # Floats that are numbers in this program have names behind those of its constants.
        for name, constant in zip(self._graph.names, self._given.constants, strict=False):
            if constant.requires_grad and constant.dtype != dtype:
                raise CannotCompile(f"{name} is {constant.dtype}, but the state is {dtype}")
        for leaf in self._inputs:
            if leaf.is_floating_point() and torch.promote_types(leaf.dtype, dtype) != dtype:
                raise CannotCompile(f"an input is {leaf.dtype}, but the state is {dtype}")

    @functools.cached_property
    def _copies(self) -> list[Tensor]:
        """Of the constants, for steps that look at what is done and not at the numbers."""
        return [constant.detach().cpu().clone() for constant in self._given.constants]

    def _check_results(self, new: Leaves, y: Leaves, old: Sequence[Tensor]) -> None:
        pairs = zip(self.names.state, new, old, strict=True)
        for name, a, b in pairs:
            if a.shape != b.shape or a.dtype != b.dtype:
                raise CannotCompile(
                    f"the step must return {name} of the kind it receives, {b.dtype} of shape "
                    f"{tuple(b.shape)} with a batch of {ROWS}, got {a.dtype} of {tuple(a.shape)}"
                )
        for leaf in y:
            if leaf.shape[:1] != (ROWS,):
                raise CannotCompile("an output does not have the batch as its first dimension")
        self.output_shapes = [leaf.shape[1:] for leaf in y]


def _dtype(state: Leaves) -> torch.dtype:
    kinds = {leaf.dtype for leaf in state}
    if len(kinds) > 1 or not kinds <= CODES.keys():
        got = ", ".join(sorted(map(str, kinds)))
        raise CannotCompile(f"the state must have one floating-point dtype, got {got}")
    return kinds.pop()


def examples(leaves: Sequence[Tensor], rows: int, of_steps: bool) -> list[Tensor]:
    """Leaves of ``rows`` rows to trace with."""
    found: list[Any] = []
    for leaf in leaves:
        shape = (rows, *leaf.shape[(2 if of_steps else 1) :])
        if leaf.is_floating_point():
            random = torch.Generator().manual_seed(len(found))
            numbers = torch.rand(shape, generator=random) + 0.25
            found.append(numbers.to(leaf.dtype))
        else:
            flat = leaf.detach().reshape(-1, *shape[1:])
            found.append(flat[torch.arange(rows) % flat.shape[0]].cpu())
    return found
