"""Calls like one before: nothing of them is checked again, and nothing prepared.

For one cell and inputs with a batch, without lengths and resets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._graphs import is_transformed
from .calls import OneCall, options_of
from .compiling import Compiling, Kind
from .initial_state import initial_state
from .trees import Leaves, flatten

_MOST = 64
"""Kinds of calls that are remembered."""


class UsualCalls:
    """Those of one module."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Kind, Compiling]] = {}

    def __reduce__(self) -> Any:
        return UsualCalls, ()

    def remember(self, module: Any, one: OneCall) -> None:
        """A call that a program has run."""
        call = one.call
        cells = [kind.user.step for kind, _ in self.known.values()]
        if len(cells) >= _MOST or one.user.step is not (cells or [one.user.step])[0]:
            self.known.clear()  # not to keep a cell that another has replaced
        inputs = _transposed(call.inputs) if module.batch_first else call.inputs
        forms = _form(one.user.input(inputs))[1], _form(one.user.state(call.state))[1]
        compiling = one.memory.compiling
        kind = compiling.kind_of(one.user, call, options_of(one.settings))
        self.known[_key(module, (*inputs, *call.state), forms)] = kind, compiling

    def run(
        self, module: Any, input: Any, state: Any, generator: torch.Generator | None
    ) -> tuple[Any, Any] | None:
        """Output and state, if a call like it has been checked; else nothing."""
        cell = module.cell
        try:
            inputs, form = _form(input)
            if state is None:
                dim = 0 if module.batch_first else 1
                state = initial_state(cell, inputs[0], inputs[0].shape[dim])
            states, form_of_state = _form(state)
            known = self.known.get(_key(module, (*inputs, *states), (form, form_of_state)))
        except (RuntimeError, TypeError, ValueError, IndexError):  # for which there are words
            return None
        if known is None or known[0].user.step is not cell or is_transformed():
            return None
        kind, compiling = known
        inputs = _transposed(inputs) if module.batch_first else inputs
        made = compiling.again(kind, inputs, states, generator)
        if made is not None and module.batch_first and module.return_sequence:
            leaves, tree = flatten(made[0], "output")
            return tree.tree(_transposed(leaves)), made[1]
        return made


def _transposed(leaves: Leaves) -> Leaves:
    return tuple([leaf.transpose(0, 1) for leaf in leaves])


def _form(tree: Any) -> tuple[Leaves, Any]:
    """The leaves of an input or a state, and what tells its structure from others."""
    if type(tree) is Tensor:
        return (tree,), 1
    if type(tree) is tuple and all([type(leaf) is Tensor for leaf in tree]):
        return tree, len(tree) + 2
    return flatten(tree, "input")


def _key(module: Any, leaves: Leaves, forms: tuple[Any, Any]) -> Any:
    """All that checks look at."""
    return (
        module.compile_cell,
        module.recompute,
        not module.recompute and torch.is_grad_enabled(),
        module.chunk_size,
        module.workspace_bytes,
        module.cuda_graphs,
        module.batch_first,
        module.return_sequence,
        module.bidirectional,
        forms,
        *[(type(t), t.shape, t.dtype, t.device, t.layout) for t in leaves],
    )
