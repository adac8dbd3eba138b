"""The operators as tracers see them: shapes and dtypes of results, and no numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import _helpers, _plans
from ._ops import (
    NEEDS_CX,
    NEEDS_EPS,
    NEEDS_FIRST_WEIGHT,
    NEEDS_HX,
    NEEDS_INPUT,
    ForwardResults,
    Gradients,
)
from .cells import CELL_NAMES, CELLS
from .options import BACKENDS


def _check_devices(
    input: Tensor, tensors: Iterable[Tensor | None], *on_host: Tensor | None
) -> None:
    """Refuses tensors on different devices: torch runs a fake operator if any one is on meta."""
    for tensor in tensors:
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(
                "fusedrnn: all tensors must be on the device of input, "
                f"got {input.device} and {tensor.device}"
            )
    for tensor in on_host:
        if tensor is not None and not tensor.is_cpu and not input.is_meta:
            raise RuntimeError(
                f"fusedrnn: lengths and batch_sizes must be on the CPU, got {tensor.device}"
            )


def _columns(cell: int, weights: list[Tensor]) -> dict[str, int]:
    """The sizes that are numbers of columns of the first direction's weight matrices."""
    names, matrices = CELLS[CELL_NAMES[cell]].weights, [w for w in weights if w.dim() == 2]
    return {size: matrix.shape[1] for (_, size), matrix in zip(names, matrices, strict=False)}


@torch.library.register_fake("fusedrnn::forward")
def _fake_forward(
    cell: int,
    input: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weights: list[Tensor],
    *,
    lengths: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    reset: Tensor | None = None,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    mask_seed: Tensor | None = None,
    chunk_size: int = 0,
    workspace_bytes: int = 0,
    backend: int = 0,
    tuning: int = 0,
    save_gates: bool = False,
    **_: Any,
) -> ForwardResults:
    _check_devices(input, [hx, cx, *weights, reset, eps, seed, mask_seed], lengths, batch_sizes)
    name = CELL_NAMES[cell]
    seq_len = input.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    directions, batch, output_size = hx.shape
    hidden_size = output_size if cx is None else cx.shape[2]
    latent_size = _columns(cell, weights).get("latent", 0)
    noise = eps is not None or seed is not None
    columns = _helpers.saved_columns(name, hidden_size, latent_size, noise) if save_gates else 0
    chunks: Any = 1
    if cx is not None and not (isinstance(seq_len, int) and isinstance(batch, int)):
        # A plan needs plain numbers, which would make a graph one for this size alone.
        chunks = torch.library.get_ctx().new_dynamic_size(min=1)
    elif cx is not None and seq_len != 1:
        made = _plans.plan_layer(
            _plans.gpu_facts(input.device),
            cell=name,
            noise=noise,
            input_size=input.shape[-1],
            hidden_size=hidden_size,
            latent_size=latent_size,
            output_size=output_size,
            bias=any(w.dim() == 1 for w in weights),
            seq_len=seq_len,
            batch=batch,
            dtype=_plans.name_of(input.dtype),
            chunk_size=chunk_size,
            workspace_bytes=workspace_bytes,
            backend=BACKENDS[backend],
            tuning=tuning,
            strides=_plans.strides_of(weights),
        )
        chunks = -(-seq_len // made["chunk_steps"])
    accumulate_in = torch.promote_types(input.dtype, torch.float32)
    return ForwardResults(
        output=input.new_empty(*input.shape[:-1], directions * output_size),
        h_n=input.new_empty(directions, batch, output_size),
        c_n=input.new_empty(0 if cx is None else directions, batch, hidden_size),
        saved_gates=input.new_empty(directions * seq_len * batch * columns, dtype=accumulate_in),
        chunk_cell_states=input.new_empty(
            (0,) if cx is None else (directions, chunks, batch, hidden_size), dtype=accumulate_in
        ),
    )


@torch.library.register_fake("fusedrnn::step")
def _fake_step(
    cell: int,
    input: Tensor,
    hx: Tensor | None,
    cx: Tensor | None,
    weights: list[Tensor],
    *,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    _check_devices(input, [hx, cx, *weights, eps, seed])
    h = input.new_empty(*input.shape[:-1], _columns(cell, weights)["hidden"])
    batch = input.shape[0] if input.dim() == 2 else 1
    has_cell_state = CELLS[CELL_NAMES[cell]].has_cell_state
    return h, torch.empty_like(h) if has_cell_state else h.new_empty(0, batch, h.shape[-1])


@torch.library.register_fake("fusedrnn::backward")
def _fake_backward(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    cell: int,
    input: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weights: list[Tensor],
    *,
    output: Tensor,
    needs: int,
    lengths: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    reset: Tensor | None = None,
    eps: Tensor | None = None,
    seed: Tensor | None = None,
    mask_seed: Tensor | None = None,
    saved_gates: Tensor | None = None,
    chunk_cell_states: Tensor | None = None,
    **_: Any,
) -> Gradients:
    tensors = [hx, cx, output, saved_gates, chunk_cell_states, *weights, reset, eps, seed]
    tensors += [mask_seed, grad_output, grad_h_n, grad_c_n]
    _check_devices(input, tensors, lengths, batch_sizes)

    def like(tensor: Tensor | None, bit: int) -> Tensor:
        is_needed = needs & bit and tensor is not None
        return input.new_empty(tensor.shape if is_needed and tensor is not None else 0)

    weights_size = sum(w.numel() for w in weights) if needs >= NEEDS_FIRST_WEIGHT else 0
    return Gradients(
        input=like(input, NEEDS_INPUT),
        hx=like(hx, NEEDS_HX),
        cx=like(cx, NEEDS_CX),
        eps=like(eps, NEEDS_EPS),
        weights=input.new_empty(weights_size),
    )
