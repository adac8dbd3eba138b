"""Recurrent cells that people publish, in plain torch, for ``fusedrnn.Recurrent``.

They are torch.nn's own and those of gated_cells.py and latent_cells.py. A cell is a module with
``cell(input, state)`` that returns its state, or ``(output, state)``, and a method
``initial_state(batch)``. Nothing in it knows of fusedrnn. Run this file to train each of them for a
step::

    python -m docs.examples.published_cells
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .gated_cells import (
    AttentionDecoderCell,
    BlockGRUCell,
    IndRNNCell,
    LateResetGRUCell,
    LayerNormLSTMCell,
    LFADSGeneratorCell,
    MinimalGatedUnitCell,
    PeepholeLSTMCell,
    RecurrentDropoutLSTMCell,
    ResetBeforeGRUCell,
    SLSTMCell,
)
from .latent_cells import (
    DreamerV1Cell,
    DreamerV2Cell,
    DreamerV3Cell,
    ForumCell,
    LFADSCell,
    PlaNetCell,
    VRNNCell,
)

FLAG = 0
"""In the place of a tensor's features: (seq_len, batch) of bool."""


@dataclass(frozen=True)
class Case:
    """A cell at some width, and what it takes."""

    name: str
    make: Callable[[int], nn.Module]
    """From the width, a multiple of 8."""
    input: Callable[[int], Any]
    """From the width: features of each tensor of the input, or FLAG, nested as it is."""

    def cell(
        self,
        width: int,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> nn.Module:
        """A new cell, whose memory of ``batch`` rows is set if it reads one."""
        cell = self.make(width).to(device, dtype)
        if isinstance(cell, AttentionDecoderCell):
            memory = torch.randn(batch, 6, width, dtype=dtype, device=device)
            cell.attend(memory.requires_grad_())
        return cell

    def inputs(
        self,
        seq_len: int,
        batch: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Any:
        """Random numbers with gradient, (seq_len, batch, features) each, and rare flags."""

        def drawn(features: int) -> Tensor:
            if features == FLAG:
                return torch.rand(seq_len, batch, device=device) < 0.1
            sizes = (seq_len, batch, features)
            return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)

        return pytree.tree_map(drawn, self.input(width))


def _width(width: int) -> int:
    return width


def _world(width: int) -> dict[str, int]:
    return {"embedding": width, "action": 4}


def _world_with_resets(width: int) -> dict[str, int]:
    return {**_world(width), "is_first": FLAG}


CASES = [
    Case("RNNCell", lambda n: nn.RNNCell(n, n), _width),
    Case("GRUCell", lambda n: nn.GRUCell(n, n), _width),
    Case("LSTMCell", lambda n: nn.LSTMCell(n, n), _width),
    Case("ForumCell", lambda n: ForumCell(n, n), _width),
    Case("MinimalGatedUnit", lambda n: MinimalGatedUnitCell(n, n), _width),
    Case("ResetBeforeGRU", lambda n: ResetBeforeGRUCell(n, n), _width),
    Case("LateResetGRU", lambda n: LateResetGRUCell(n, n), _width),
    Case("LateResetGRU-RMSNorm", lambda n: LateResetGRUCell(n, n, nn.RMSNorm), _width),
    Case("LateResetGRU-no-norm", lambda n: LateResetGRUCell(n, n, None), _width),
    Case("LayerNormLSTM", lambda n: LayerNormLSTMCell(n, n), _width),
    Case("PeepholeLSTM", lambda n: PeepholeLSTMCell(n, n), _width),
    Case("sLSTM", lambda n: SLSTMCell(n, n), _width),
    Case("IndRNN", lambda n: IndRNNCell(n, n), _width),
    Case("BlockGRU", lambda n: BlockGRUCell(n, n, 8), _width),
    Case("RecurrentDropoutLSTM", lambda n: RecurrentDropoutLSTMCell(n, n), _width),
    Case("PlaNet", lambda n: PlaNetCell(n, 4, n, n // 4), _world),
    Case("DreamerV1", lambda n: DreamerV1Cell(n, 4, n, n // 4), _world_with_resets),
    Case("DreamerV2", lambda n: DreamerV2Cell(n, 4, n, n // 8, 8), _world_with_resets),
    Case("DreamerV3", lambda n: DreamerV3Cell(n, 4, n, n // 8, 8), _world),
    Case("VRNN", lambda n: VRNNCell(n, n, n // 4), _width),
    Case("LFADSGenerator", lambda n: LFADSGeneratorCell(n, n), _width),
    Case("LFADS", lambda n: LFADSCell(n, n, n // 2, n // 8), _width),
    Case("AttentionDecoder", lambda n: AttentionDecoderCell(n, n, n), _width),
]


def main() -> None:
    """A step of training of each cell."""
    import fusedrnn

    for case in CASES:
        cell = case.cell(width=32, batch=4)
        rnn = fusedrnn.Recurrent(cell)
        inputs = case.inputs(seq_len=50, batch=4, width=32)
        output, _ = rnn(inputs)
        loss = sum(leaf.square().mean() for leaf in pytree.tree_leaves(output))
        loss.backward()
        how = "compiled" if rnn.explain(inputs).is_compiled else "steps in Python"
        print(f"{case.name}: loss {loss.item():.3f}, {how}")


if __name__ == "__main__":
    main()
