"""Calls of the operators for last states, and the same by one call of `forward` for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedrnn import _last_states, _ops
from fusedrnn._cells import CELLS, Sizes, layout
from fusedrnn._ops import LayerCall, LayerTensors


@dataclass(frozen=True)
class Stacked:
    """Sizes and options of a stack of layers, or of one layer of two directions."""

    cell: str = "gru"
    seq_len: int = 40
    batch: int = 3
    num_layers: int = 2
    input_size: int = 3
    hidden_size: int = 5
    mask: str = ""  # of "lengths", "packed" and "reset", those that it names
    noise: str = "seed"  # or "eps" or "none"
    dropout: float = 0.25
    inner_dropout: float = 0.4
    zoneout: float = 0.2
    bias: bool = True
    reverse: bool = False
    bidirectional: bool = False
    chunk_size: int = 0
    workspace_bytes: int = 0
    dtype: torch.dtype = torch.float64

    def call(self, **changes: Any) -> LayerCall:
        has_cell_state = CELLS[self.cell].has_cell_state
        return LayerCall(
            cell=self.cell,
            noise_stream=1 if self.reverse else 3,
            first_step=11,
            reverse=self.reverse,
            chunk_size=self.chunk_size,
            workspace_bytes=self.workspace_bytes,
            dropout=self.dropout,
            zoneout=self.zoneout,
            cell_zoneout=self.zoneout / 2 if has_cell_state else 0.0,
            **changes,
        )

    def tensors(self, device: str = "cpu") -> LayerTensors:
        """Random arguments, the same for the same sizes whatever the dtype."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int, scale: float = 0.7) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return values.to(device, self.dtype)

        facts = CELLS[self.cell]
        steps, batch, hidden = self.seq_len, self.batch, self.hidden_size
        directions = 2 if self.bidirectional else 1
        rows = self.num_layers * directions
        output = hidden - 1 if facts.is_projected else hidden
        sizes = Sizes(self.input_size, hidden, 4, output)
        lengths = torch.randint(1, steps + 1, (batch,), generator=generator)
        input, batch_sizes = normal(steps, batch, self.input_size), None
        if "packed" in self.mask:
            lengths[0] = steps
            taken = torch.arange(steps).unsqueeze(1) < lengths.sort(descending=True)[0]
            input, batch_sizes = input[taken.to(device)], taken.sum(1)
        reset = torch.rand(steps, batch, generator=generator) < 0.2
        weights = layout(self.cell, sizes, self.num_layers, directions, self.bias)
        noisy = facts.has_latent
        return LayerTensors(
            input=input,
            hx=normal(rows, batch, output),
            weights=[normal(*shape, scale=hidden**-0.5) for _, _, shape in weights],
            cx=normal(rows, batch, hidden) if facts.has_cell_state else None,
            eps=normal(rows, steps, batch, 4) if noisy and self.noise == "eps" else None,
            seed=torch.tensor([-77], device=device) if noisy and self.noise == "seed" else None,
            lengths=lengths if "lengths" in self.mask else None,
            batch_sizes=batch_sizes,
            reset=reset.to(device) if "reset" in self.mask else None,
            mask_seed=torch.tensor([9], device=device),
        )

    def grads(self, tensors: LayerTensors) -> tuple[Tensor, Tensor | None]:
        """Cotangents of the last states."""
        h, c = tensors.hx, tensors.cx
        of_c = None if c is None else torch.sin(c.double()).to(c)
        return torch.cos(1 + 3 * h.double()).to(h), of_c


def all_needed(tensors: LayerTensors) -> LayerTensors:
    flags: Any = tensors._replace(weights=[True] * len(tensors.weights))
    return flags._replace(
        input=True, hx=True, cx=tensors.cx is not None, eps=tensors.eps is not None
    )


def named(tensors: LayerTensors, h_n: Tensor, c_n: Tensor, found: Any) -> dict[str, Tensor]:
    """Results by name, as far as the call has them."""
    results = {"h_n": h_n, "grad_input": found.input, "grad_hx": found.hx}
    if tensors.cx is not None:
        results |= {"c_n": c_n, "grad_cx": found.cx}
    if tensors.eps is not None:
        results["grad_eps"] = found.eps
    parts = found.weights.split([w.numel() for w in tensors.weights])
    return results | {f"grad_weights[{i}]": part for i, part in enumerate(parts)}


def in_parts(case: Stacked, tensors: LayerTensors, **call: Any) -> dict[str, Tensor]:
    """By the operators for last states."""
    layers, needed = (case.call(**call), case.inner_dropout), all_needed(tensors)
    h_n, c_n, *parts = _ops.last_states(*layers, tensors)
    found = _ops.last_states_backward(*layers, needed, case.grads(tensors), parts, tensors)
    return named(tensors, h_n, c_n, found)


def layer_by_layer(case: Stacked, tensors: LayerTensors, **call: Any) -> dict[str, Tensor]:
    """Each layer over the whole sequence, by `forward` and `backward`."""
    layers, needed = (case.call(**call), case.inner_dropout), all_needed(tensors)
    h_n, c_n, *_ = _last_states.layer_by_layer(*layers, tensors)
    found = _last_states.gradients_layer_by_layer(*layers, needed, case.grads(tensors), tensors)
    return named(tensors, h_n, c_n, found)
