"""All layers and directions of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._options import kind_of
from .._step.leaf_step import LeafStep, call_of_cell
from .._step.noise import Seed
from .._step.replicas import is_replica
from .._step.sequence_call import Names, Resets, SequenceCall
from .._step.trees import Leaves, Structure, check_tensors, flatten
from .initial_state import initial_state
from .layer_call import CellMemory, OneLayerCall
from .sequence_forms import Sequences
from .settings import Settings
from .user_step import UserStep


@dataclass
class LayersCall:
    """One call of a Recurrent."""

    cells: Sequence[nn.Module]
    is_list: bool
    """Whether states are tuples with one for each cell."""
    directions: int
    returns_sequence: bool
    settings: Settings
    memories: list[CellMemory]
    sequence: Sequences
    state: Any
    reset: Tensor | None
    """(seq_len, batch)."""
    reset_to: Any
    seed: Seed
    usual: OneLayerCall | None = None
    """The call itself, if later calls like it need not be checked."""

    def __post_init__(self) -> None:
        for name, value in (("state", self.state), ("reset_to", self.reset_to)):
            is_wrong = not isinstance(value, tuple | list) or len(value) != len(self.cells)
            if self.is_list and value is not None and is_wrong:
                got = f" of {len(value)}" if isinstance(value, tuple | list) else ""
                raise ValueError(
                    f"fusedrnn: {name} must be a tuple with one state for each of the "
                    f"{len(self.cells)} cells, got {kind_of(value)}{got}"
                )

    def results(self) -> tuple[Any, Any]:
        """Output and state, in the user's form."""
        sequence = self.sequence
        leaves, structure, names = sequence.leaves, sequence.structure, sequence.names
        states: list[Any] = []
        layers = len(self.cells) // self.directions
        for layer in range(layers):
            outputs: list[tuple[Leaves, Structure]] = []
            for i in range(layer * self.directions, (layer + 1) * self.directions):
                one = self.cell(i, leaves, structure, names)
                output, state = one.results()
                outputs.append(flatten(output, "output"))
                state_leaves = sequence.result_state(flatten(state, "state")[0])
                states.append(one.user.state(state_leaves))
                if self._is_usual(one):
                    self.usual = one
            leaves, structure = joined(layer, outputs, one.call.returns_sequence)
            names = structure.names(f"output of layer {layer}")
        output_leaves = sequence.output(leaves, self.returns_sequence)
        return structure.tree(output_leaves), tuple(states) if self.is_list else states[0]

    def _is_usual(self, one: OneLayerCall) -> bool:
        """Whether a later call like this one need not be checked."""
        is_plain = self.sequence.is_batched and self.sequence.packed is None
        has_masks = self.sequence.lengths is not None or self.reset is not None
        is_one = not self.is_list and one.was_compiled and not is_replica(one.user.step)
        return bool(one.call.inputs) and is_plain and is_one and not has_masks

    def cell(
        self, i: int, leaves: Leaves, structure: Structure, names: Sequence[str]
    ) -> OneLayerCall:
        """Cell number i, whose input has these leaves."""
        cell, sequence = self.cells[i], self.sequence
        memory = self._memory(i)
        place = f"[{i}]" if self.is_list else ""
        state, state_structure, state_names = self._state(i, leaves, f"state{place}")
        resets, values = self._resets(i, state, state_structure, f"reset_to{place}")
        backwards = self.directions == 2 and i % 2 == 1
        layer = f" of layer {i // self.directions}" if len(self.cells) > 1 else ""
        way = (
            f" of the {'reverse' if backwards else 'forward'} cell" if self.directions == 2 else ""
        )
        is_last_layer = i >= len(self.cells) - self.directions
        returns_sequence = self.returns_sequence or not is_last_layer
        call = SequenceCall(
            leaves,
            state,
            Names(state_names, names),
            seq_len=sequence.seq_len,
            rows=sequence.batch,
            device=sequence.device,
            seed=self.seed,
            layer=i,
            backwards=backwards,
            returns_sequence=returns_sequence,
            last=None if returns_sequence else sequence.last(backwards),
            lengths=sequence.lengths,
            reset=self.reset,
            resets=resets,
            reset_to=values,
            place=way + layer,
        )

        def make_step() -> LeafStep:
            own = call_of_cell(cell, state_structure)
            return LeafStep(own, state_structure, structure, has_rows=True)

        user = UserStep("cell_step", cell, structure.tree, state_structure.tree)
        return OneLayerCall(user, call, self.settings, memory, make_step)

    def _memory(self, i: int) -> CellMemory:
        """What calls of cell number i have found out."""
        cell = self.cells[i]
        if is_replica(cell):  # each call has others, which share the list and its memories
            return CellMemory(cell, self.memories[i].compiling)
        if not self.memories[i].is_of(cell):
            self.memories[i] = CellMemory(cell)
        return self.memories[i]

    def _state(self, i: int, input: Leaves, name: str) -> tuple[Leaves, Structure, list[str]]:
        """The state before the first step of a cell: leaves, structure and names."""
        given = self.state[i] if self.is_list and self.state is not None else self.state
        rows = self.sequence.batch
        if given is None:
            given, is_users = initial_state(self.cells[i], input[0], rows), False
        else:
            is_users = True
        leaves, structure = flatten(given, name)
        names = structure.names(name)
        if is_users:
            leaves = self.sequence.state(leaves)
        if not leaves:
            raise ValueError(f"fusedrnn: {name} must have at least one tensor, got none")
        for leaf_name, leaf in zip(names, leaves, strict=True):
            if not leaf.dim() or leaf.shape[0] != rows:
                raise RuntimeError(
                    f"fusedrnn: {leaf_name} must have the batch size, {rows}, as its first "
                    f"dimension, got shape {tuple(leaf.shape)}; fusedrnn.scan takes states of any "
                    "shape"
                )
        check_tensors(names, leaves, "input", self.sequence.device)
        return leaves, structure, names

    def _resets(
        self, i: int, state: Leaves, structure: Structure, name: str
    ) -> tuple[Resets | None, Leaves]:
        """What becomes of a state at resets, and the tensors that it takes values from."""
        value = self.reset_to[i] if self.is_list and self.reset_to is not None else self.reset_to
        if self.reset is None:
            return None, ()
        if value is None:
            return Resets(range(len(state)), has_values=False, is_sequence=False), ()
        places: Sequence[int] = range(len(state))
        if isinstance(value, dict):
            places, structure = _places_of_keys(value, structure, name)
            value = dict(value)  # of whatever kind
        leaves, given = flatten(value, name)
        if not leaves:
            raise ValueError(f"fusedrnn: {name} must have at least one tensor, got none")
        if given != structure:
            raise ValueError(
                f"fusedrnn: {name} must have the structure of the state, {structure}, got {given}"
            )
        check_tensors(structure.names(name), leaves, "the state", state[0].device)
        sequence, kinds, made = self.sequence, set(), []
        for leaf_name, leaf, place in zip(structure.names(name), leaves, places, strict=True):
            old = state[place]
            is_sequence = leaf.dim() == old.dim() + sequence.is_batched
            leaf = sequence.states(leaf) if is_sequence else sequence.state((leaf,))[0]
            steps = (sequence.padded_len,) if is_sequence else ()
            allowed = [(*steps, *old.shape), (1, *old.shape[1:])][: 1 if is_sequence else 2]
            if tuple(leaf.shape) not in allowed:
                raise RuntimeError(
                    f"fusedrnn: {leaf_name} must have the shape of a state, {tuple(old.shape)} or "
                    f"{(1, *old.shape[1:])}, or of a sequence of states, written with steps first: "
                    f"{(sequence.padded_len, *old.shape)}; got {tuple(leaf.shape)}"
                )
            if leaf.dtype != old.dtype:
                raise RuntimeError(
                    f"fusedrnn: {leaf_name} must be {old.dtype} as the state is, got {leaf.dtype}"
                )
            kinds.add(is_sequence)
            made.append(leaf[: sequence.seq_len] if is_sequence else leaf)
        if len(kinds) > 1:
            raise ValueError(
                f"fusedrnn: the tensors of {name} must all be states or all be sequences of "
                "states, got both"
            )
        return Resets(places, has_values=True, is_sequence=kinds.pop()), tuple(made)


def _places_of_keys(
    value: dict[Any, Any], structure: Structure, name: str
) -> tuple[Sequence[int], Structure]:
    """Which leaves of a dict of states these keys have, and the structure of that part."""
    whole = structure.tree(range(sum(structure.has_tensor)))
    unknown = [key for key in value if not isinstance(whole, dict) or key not in whole]
    if unknown:
        raise ValueError(
            f"fusedrnn: the keys of {name} must be keys of the state, {structure}, "
            f"got {unknown[0]!r}"
        )
    part = {key: whole[key] for key in value}
    leaves, spec = pytree.tree_flatten(part)
    return [leaf for leaf in leaves if leaf is not None], Structure(
        spec, tuple(leaf is not None for leaf in leaves)
    )


def joined(
    layer: int, directions: Sequence[tuple[Leaves, Structure]], has_steps: bool
) -> tuple[Leaves, Structure]:
    """Outputs of both directions, in the last dimension.

    Args:
        has_steps: Whether their first dimension is that of the steps.

    Raises:
        ValueError: They have no other dimension than those of steps and batch, or not one form.
    """
    leaves, structure = directions[0]
    if len(directions) == 1:
        return leaves, structure
    others, other_structure = directions[1]
    in_order = structure.leaves(other_structure.tree(others))
    if in_order is None:
        raise ValueError(
            f"fusedrnn: both cells of layer {layer} must return outputs of the same structure, "
            f"got {structure} and {other_structure}"
        )
    for name, *both in zip(structure.names("output"), leaves, in_order, strict=True):
        for leaf in both:
            if leaf.dim() < 2 + has_steps:
                raise ValueError(
                    f"fusedrnn: {name} of layer {layer} must have a dimension besides steps and "
                    "batch, in which the outputs of both directions are concatenated, got shape "
                    f"{tuple(leaf.shape)}"
                )
    return tuple(torch.cat(both, -1) for both in zip(leaves, in_order, strict=True)), structure
