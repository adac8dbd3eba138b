"""Calls like one before: nothing of them is checked again, and nothing prepared.

For one cell and inputs with a batch, without lengths and resets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._graphs import is_alone
from .calls import OneCall, Settings, options_of
from .compiling import Compiling, Kind, NoProgram
from .initial_state import initial_state
from .noise import Seed
from .trees import Leaves, flatten

_MOST = 64
"""Kinds of calls that are remembered."""


class UsualCalls:
    """Those of one module."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Kind, Compiling]] = {}

    def __reduce__(self) -> Any:
        return UsualCalls, ()

    def __bool__(self) -> bool:
        return bool(self._known)

    def remember(self, one: OneCall, settings: Settings, batch_first: bool) -> None:
        """A call that a program has run."""
        call = one.call
        cells = [kind.user.step for kind, _ in self._known.values()]
        if len(cells) >= _MOST or one.user.step is not (cells or [one.user.step])[0]:
            self._known.clear()  # not to keep a cell that another has replaced
        inputs = _transposed(call.inputs) if batch_first else call.inputs
        forms = _form(one.user.input(inputs))[1], _form(one.user.state(call.state))[1]
        key = _key(settings, batch_first, call.returns_sequence, (*inputs, *call.state), forms)
        compiling = one.memory.compiling
        kind = compiling.kind_of(one.user, call, options_of(settings))
        self._known[key] = kind, compiling

    def run(
        self,
        cell: Any,
        settings: Settings,
        batch_first: bool,
        returns_sequence: bool,
        input: Any,
        state: Any,
        generator: torch.Generator | None,
    ) -> tuple[Any, Any] | None:
        """Output and state, if a call like it has been checked; else nothing."""
        try:
            inputs, form = _form(input)
            if state is None:
                state = initial_state(cell, inputs[0], inputs[0].shape[0 if batch_first else 1])
            states, form_of_state = _form(state)
            leaves, forms = (*inputs, *states), (form, form_of_state)
            key = _key(settings, batch_first, returns_sequence, leaves, forms)
        except (RuntimeError, TypeError, ValueError, IndexError):  # for which there are words
            return None
        known = self._known.get(key)
        if known is None or known[0].user.step is not cell or not is_alone():
            return None
        kind, compiling = known
        inputs = _transposed(inputs) if batch_first else inputs
        call = kind.call.with_values(inputs, states, (), Seed(generator))
        try:
            output, new = compiling.run(kind.user, call, kind.options, kind)
        except NoProgram:  # for which there are words elsewhere
            return None
        if batch_first and returns_sequence:
            leaves, tree = flatten(output, "output")
            output = tree.tree(_transposed(leaves))
        return output, new


def _transposed(leaves: Leaves) -> Leaves:
    return tuple([leaf.transpose(0, 1) for leaf in leaves])


def _form(tree: Any) -> tuple[Leaves, Any]:
    """The leaves of an input or a state, and what tells its structure from others."""
    if type(tree) is Tensor:
        return (tree,), 1
    if type(tree) is tuple and all([type(leaf) is Tensor for leaf in tree]):
        return tree, len(tree) + 2
    return flatten(tree, "input")


def _key(
    settings: Settings,
    batch_first: bool,
    returns_sequence: bool,
    leaves: Leaves,
    forms: tuple[Any, Any],
) -> Any:
    """All that checks look at."""
    kinds = [(type(t), t.shape, t.dtype, t.device, t.layout) for t in leaves]
    keeps_sums = not settings.recompute and torch.is_grad_enabled()
    return settings, keeps_sums, batch_first, returns_sequence, forms, tuple(kinds)
