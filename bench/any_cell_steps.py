"""A training step of a cell that a user has written, by each contender of any_cell.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusedrnn
from docs.examples.published_cells import Case

LOOP, CHECKPOINT, COMPILED_LOOP = "plain loop", "checkpoint per chunk", "loop, torch.compile"
PROGRAM, SAVED = "Recurrent, compiled cell", "the same, recompute=False"
OURS = "Recurrent, loop"
SCAN = "torch's scan"
BUILT_IN = "built-in"
BUILT_IN_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "ForumCell": lambda width: fusedrnn.StochasticGRU(width, width, width),
    "GRUCell": lambda width: fusedrnn.GRU(width, width),
    "LSTMCell": lambda width: fusedrnn.LSTM(width, width),
}
"""From the name of a cell to the layer of this package that computes the same, if there is one."""


def contenders(case: Case, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that there are for a cell."""
    return [name for name in names if name != BUILT_IN or case.name in BUILT_IN_LAYERS]


@dataclass(frozen=True)
class Size:
    """Of a training step."""

    seq_len: int
    batch: int
    width: int

    def __str__(self) -> str:
        return f"T={self.seq_len} B={self.batch} width={self.width}"


class Step:
    """A training step of a cell by one of the contenders."""

    def __init__(
        self, name: str, case: Case, size: Size, device: str, of_inputs: bool = False
    ) -> None:
        """``of_inputs``: whether the inputs get gradients, too."""
        torch.manual_seed(0)
        self.cell = case.cell(size.width, size.batch, device=device)
        inputs = case.inputs(size.seq_len, size.batch, size.width, device=device)
        self.inputs = inputs if of_inputs else pytree.tree_map(lambda t: t.detach(), inputs)
        self.state = start_of(self.cell, size, device)
        self.structure = pytree.tree_structure(self.state)
        self.chunk = round(size.seq_len**0.5)
        self.forward = (
            self._built_in(case.name, size) if name == BUILT_IN else self._forwards()[name]
        )
        self.gradients: list[Tensor] | None = None
        self.output_bytes = 0
        """Of what the last call has returned, in which there may be a sequence of states."""

    def _forwards(self) -> dict[str, Callable[[], Any]]:
        def ours(**named: Any) -> Callable[[], Any]:
            rnn = fusedrnn.Recurrent(self.cell, **named)
            return lambda: rnn(self.inputs, self.state)[0]

        compiled = torch.compile(self.cell)
        return {
            LOOP: lambda: self._loop(self.cell),
            CHECKPOINT: self._checkpointed,
            COMPILED_LOOP: lambda: self._loop(compiled),
            PROGRAM: ours(compile="require"),
            SAVED: ours(compile="require", recompute=False),
            OURS: ours(compile="never"),
            SCAN: self._scan,
        }

    def _built_in(self, name: str, size: Size) -> Callable[[], Any]:
        """Forward of the layer with the weights of the cell, in whose place it is trained."""
        layer = BUILT_IN_LAYERS[name](size.width).to(self.inputs.device)
        weights = {f"{key}_l0": value for key, value in self.cell.state_dict().items()}
        layer.load_state_dict(weights)
        self.cell = layer
        state = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), self.state)  # one layer's
        return lambda: layer(self.inputs, state)[0]

    def train(self) -> None:
        """Forward and backward, with the same gradient of every output in all calls."""
        memory = getattr(self.cell, "memory", None)
        if memory is not None:
            self.cell.attend(memory)  # its graph is of one backward only
        outputs = [leaf for leaf in pytree.tree_leaves(self.forward()) if leaf.requires_grad]
        self.output_bytes = sum(leaf.nbytes for leaf in outputs)
        if self.gradients is None:
            self.gradients = [torch.ones_like(leaf) for leaf in outputs]
        torch.autograd.backward(outputs, self.gradients)
        self.cell.zero_grad(set_to_none=True)
        for leaf in pytree.tree_leaves(self.inputs):
            leaf.grad = None

    def _steps(self) -> Any:
        """The inputs step by step: a gradient of leaf[time] would be one of the whole leaf."""
        return pytree.tree_map(lambda leaf: leaf.unbind(0), self.inputs)

    def _step(self, cell: Callable[..., Any], state: Any, steps: Any, time: int) -> tuple[Any, Any]:
        x = pytree.tree_map(lambda leaf: leaf[time], steps, is_leaf=_is_steps)
        result = cell(x, state)
        if pytree.tree_structure(result) == self.structure:
            return result, pytree.tree_leaves(result)[0]
        return result[1], result[0]

    def _loop(self, cell: Callable[..., Any]) -> Any:
        state, steps, outputs = self.state, self._steps(), []
        for time in range(self.seq_len):
            state, y = self._step(cell, state, steps, time)
            outputs.append(y)
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *outputs)

    @property
    def seq_len(self) -> int:
        return int(pytree.tree_leaves(self.inputs)[0].shape[0])

    def _checkpointed(self) -> Any:
        steps = self._steps()

        def take(state: Any, begin: int, end: int) -> tuple[Any, Any]:
            outputs = []
            for time in range(begin, end):
                state, y = self._step(self.cell, state, steps, time)
                outputs.append(y)
            return state, pytree.tree_map(lambda *leaves: torch.stack(leaves), *outputs)

        state, parts = self.state, []
        for begin in range(0, self.seq_len, self.chunk):
            end = min(begin + self.chunk, self.seq_len)
            state, part = checkpoint(take, state, begin, end, use_reentrant=False)
            parts.append(part)
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)

    def _scan(self) -> Any:
        from torch._higher_order_ops.scan import scan

        def combine(state: Any, x: Any) -> tuple[Any, Any]:
            result = self.cell(x, state)
            if pytree.tree_structure(result) == self.structure:
                return result, pytree.tree_leaves(result)[0].clone()
            return result[1], pytree.tree_map(torch.clone, result[0])

        return scan(combine, self.state, self.inputs)[1]


def _is_steps(tree: Any) -> bool:
    return isinstance(tree, tuple) and all(isinstance(leaf, Tensor) for leaf in tree)


def start_of(cell: nn.Module, size: Size, device: str) -> Any:
    """The state before the first step."""
    if hasattr(cell, "initial_state"):
        return cell.initial_state(size.batch)
    zeros = torch.zeros(size.batch, size.width, device=device)
    return (zeros, zeros.clone()) if isinstance(cell, nn.LSTMCell) else zeros
