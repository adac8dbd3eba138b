"""Calls like one before: nothing of them is checked again, and nothing prepared.

For one cell and inputs with a batch, without lengths and resets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._step.replicas import is_replica
from .._step.trees import Leaves, flatten
from .._tracers import is_transformed
from .compiled_calls import CompiledCalls
from .initial_state import initial_state
from .layer_call import OneLayerCall, options_of
from .running_call import CallKind

_MOST = 64
"""Kinds of calls that are remembered."""


class UsualCalls:
    """Those of one module."""

    def __init__(self) -> None:
        self._cell: Any = None
        self._known: dict[Any, dict[Any, tuple[CallKind, CompiledCalls]]] = {}
        """By inputs, and then by states."""

    def __reduce__(self) -> Any:
        return UsualCalls, ()

    def are_of(self, cell: Any) -> bool:
        """Whether some are known of a cell; those of another one are forgotten, not to keep it."""
        if cell is not self._cell:
            if is_replica(cell):
                return False
            self._cell, self._known = cell, {}
        return bool(self._known)

    def remember(self, module: Any, one: OneLayerCall) -> None:
        """A call that a program has run."""
        call = one.call
        if sum(map(len, self._known.values())) >= _MOST:
            self._known.clear()
        inputs = _transposed(call.inputs) if module.batch_first else call.inputs
        key = _key_of_input(module, *_form(one.user.input(inputs)))
        states = self._known.setdefault(key, {})
        kind = one.memory.compiling.kind_of(one.user, call, options_of(one.settings))
        states[_key_of_state(*_form(one.user.state(call.state)))] = kind, one.memory.compiling

    def run(
        self, module: Any, cell: Any, input: Any, state: Any, generator: torch.Generator | None
    ) -> tuple[tuple[Any, Any] | None, Any]:
        """Output and state, if a call like it has been checked, else nothing; and the state before,
        which the cell may have been asked for.
        """
        try:
            inputs, form = _form(input)
            known = self._known.get(_key_of_input(module, inputs, form))
        except (RuntimeError, TypeError, ValueError):  # for which there are words
            return None, state
        if known is None or is_transformed():
            return None, state
        if state is None:
            state = initial_state(cell, inputs[0], inputs[0].shape[0 if module.batch_first else 1])
        try:
            states, form = _form(state)
            kind, compiling = known[_key_of_state(states, form)]
        except (RuntimeError, TypeError, ValueError, KeyError):
            return None, state
        if kind.user.step is not cell:  # another thread has replaced it
            return None, state
        inputs = _transposed(inputs) if module.batch_first else inputs
        made = compiling.again(kind, inputs, states, generator)
        if made is not None and module.batch_first and module.return_sequence:
            leaves, tree = flatten(made[0], "output")
            made = tree.tree(_transposed(leaves)), made[1]
        return made, state


def _transposed(leaves: Leaves) -> Leaves:
    return tuple([leaf.transpose(0, 1) for leaf in leaves])


def _form(tree: Any) -> tuple[Leaves, Any]:
    """The leaves of an input or a state, and what tells its structure from others."""
    if type(tree) is Tensor:
        return (tree,), 1
    if type(tree) is tuple and all([type(leaf) is Tensor for leaf in tree]):
        return tree, len(tree) + 2
    if type(tree) is dict and all([type(leaf) is Tensor for leaf in tree.values()]):
        return tuple(tree.values()), tuple(tree)
    return flatten(tree, "input")


def _key_of_input(module: Any, leaves: Leaves, form: Any) -> Any:
    """All that checks look at, but the state."""
    settings = (
        module.compile_cell,
        module.recompute,
        module.chunk_size,
        module.workspace_bytes,
    )
    return (
        settings,
        *map(type, settings),  # for True is 1
        not module.recompute and torch.is_grad_enabled(),
        module.batch_first,
        module.return_sequence,
        module.bidirectional,
        form,
        *_kinds(leaves),
    )


def _key_of_state(leaves: Leaves, form: Any) -> Any:
    return (form, *_kinds(leaves))


def _kinds(leaves: Leaves) -> list[Any]:
    return [(type(t), t.shape, t.dtype, t.device, t.layout) for t in leaves]
