"""The operators as tracers see them: shapes and dtypes of results, and no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from . import _helpers, _ops, _plans
from ._cells import CELLS
from ._ops import (
    NEEDS_CX,
    NEEDS_EPS,
    NEEDS_FIRST_WEIGHT,
    NEEDS_HX,
    NEEDS_INPUT,
    ForwardResults,
    Gradients,
    LastStates,
    LayerTensors,
    Saved,
)


def _check_devices(tensors: LayerTensors, *others: Tensor | None) -> None:
    """Refuses tensors on different devices: torch runs a fake operator if any one is on meta."""
    input, hx, weights, cx, eps, seed, lengths, batch_sizes, reset, mask_seed, _ = tensors
    for tensor in (hx, cx, *others, *weights, reset, eps, seed, mask_seed):
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(
                "fusedrnn: all tensors must be on the device of input, "
                f"got {input.device} and {tensor.device}"
            )
    for tensor in (lengths, batch_sizes):
        if tensor is not None and not tensor.is_cpu and not input.is_meta:
            raise RuntimeError(
                f"fusedrnn: lengths and batch_sizes must be on the CPU, got {tensor.device}"
            )


def _columns(cell: str, weights: Sequence[Tensor]) -> dict[str, int]:
    """The sizes that are numbers of columns of the first direction's weight matrices."""
    names, matrices = CELLS[cell].weights, [w for w in weights if w.dim() == 2]
    return {size: matrix.shape[1] for (_, size), matrix in zip(names, matrices, strict=False)}


def _size_of_its_own(*sizes: int) -> int | None:
    """A symbol for a size that follows from ``sizes`` where those are symbols, else None.

    None also if the tracer takes no such symbols; to compute with ``sizes`` then fixes them.
    """
    if all(isinstance(size, int) for size in sizes):
        return None
    try:
        return torch.library.get_ctx().new_dynamic_size(min=1)  # type: ignore[return-value]
    except DynamicOutputShapeException:
        return None


@torch.library.register_fake("fusedrnn::forward")
def _fake_forward(*arguments: Any, **named: Any) -> ForwardResults:
    call, tensors, others = _ops.read(*arguments, **named)
    _check_devices(tensors)
    input, hx, weights, cx = tensors[:4]
    seq_len = _seq_len(tensors)
    directions, batch, output_size = hx.shape
    hidden_size = output_size if cx is None else cx.shape[2]
    latent_size = _columns(call.cell, weights).get("latent", 0)
    noise, columns = tensors.eps is not None or tensors.seed is not None, 0
    if others.get("save_gates", False):
        columns = _helpers.saved_columns(call.cell, hidden_size, latent_size, noise)
    # A plan needs plain numbers, which would make a graph one for this size alone.
    chunks = None if cx is None else _size_of_its_own(seq_len, batch)
    if chunks is None and cx is not None and seq_len != 1:
        made = _plans.plan_layer(
            _plans.gpu_facts(input.device),
            cell=call.cell,
            noise=noise,
            input_size=input.shape[-1],
            hidden_size=hidden_size,
            latent_size=latent_size,
            output_size=output_size,
            bias=any(w.dim() == 1 for w in weights),
            seq_len=seq_len,
            batch=batch,
            dtype=_plans.name_of(input.dtype),
            chunk_size=call.chunk_size,
            workspace_bytes=call.workspace_bytes,
            backend=call.backend,
            tuning=call.tuning,
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
            (0,) if cx is None else (directions, chunks or 1, batch, hidden_size),
            dtype=accumulate_in,
        ),
    )


def _seq_len(tensors: LayerTensors) -> int:
    return (tensors.input if tensors.batch_sizes is None else tensors.batch_sizes).shape[0]


@torch.library.register_fake("fusedrnn::last_states")
def _fake_last_states(*arguments: Any, **named: Any) -> LastStates:
    _, tensors, _ = _ops.read(*arguments, **named)
    _check_devices(tensors)
    input, hx, _, cx = tensors[:4]
    parts = _size_of_its_own(_seq_len(tensors))
    if parts is None:
        parts = _helpers.part_count(_seq_len(tensors))
    layers, batch, output_size = hx.shape
    c_shape = (layers, batch, output_size if cx is None else cx.shape[2])
    return LastStates(
        h_n=input.new_empty(hx.shape),
        c_n=input.new_empty(0 if cx is None else layers, *c_shape[1:]),
        part_h=input.new_empty(parts, *hx.shape),
        part_c=input.new_empty(0 if cx is None else parts, *c_shape),
    )


@torch.library.register_fake("fusedrnn::step")
def _fake_step(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call, tensors, _ = _ops.read(*arguments, **named)
    _check_devices(tensors)
    input = tensors.input
    h = input.new_empty(*input.shape[:-1], _columns(call.cell, tensors.weights)["hidden"])
    batch = input.shape[0] if input.dim() == 2 else 1
    has_cell_state = CELLS[call.cell].has_cell_state
    return h, torch.empty_like(h) if has_cell_state else h.new_empty(0, batch, h.shape[-1])


@torch.library.register_fake("fusedrnn::step_backward")
def _fake_step_backward(
    grad_h: Tensor | None, grad_c: Tensor | None, *arguments: Any, **named: Any
) -> list[Tensor]:
    _, tensors, others = _ops.read(*arguments, **named)
    _check_devices(tensors, grad_h, grad_c)
    input, needs = tensors.input, others["needs"]
    states = (input, tensors.hx, tensors.cx, tensors.eps)
    found = [
        input.new_empty(t.shape) for i, t in enumerate(states) if t is not None and needs & 1 << i
    ]
    # The gradients of weights share it.
    flat = input.new_empty(sum(w.numel() for w in tensors.weights))
    first = 0
    for i, weight in enumerate(tensors.weights):
        if needs & NEEDS_FIRST_WEIGHT << i:
            found.append(flat.narrow(0, first, weight.numel()).view(weight.shape))
        first += weight.numel()
    return found


@torch.library.register_fake("fusedrnn::backward")
def _fake_backward(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    *arguments: Any,
    **named: Any,
) -> Gradients:
    _, tensors, others = _ops.read(*arguments, **named)
    saved = (others.get(name) for name in Saved._fields)
    _check_devices(tensors, grad_output, grad_h_n, grad_c_n, *saved)
    needs = others["needs"]
    needed = [needs & bit for bit in (NEEDS_INPUT, NEEDS_HX, NEEDS_CX, NEEDS_EPS)]
    return _gradients(tensors, needed, needs >= NEEDS_FIRST_WEIGHT)


@torch.library.register_fake("fusedrnn::last_states_backward")
def _fake_last_states_backward(
    grad_h_n: Tensor | None, grad_c_n: Tensor | None, *arguments: Any, **named: Any
) -> Gradients:
    _, tensors, others = _ops.read(*arguments, **named)
    _check_devices(tensors, grad_h_n, grad_c_n, others["part_h"], others.get("part_c"))
    needs = others["needs"]
    return _gradients(tensors, needs[:4], any(needs[4:]))


@torch.library.register_fake("fusedrnn::draw")
def _fake_draw(
    seed: Tensor,
    first_step: int,
    steps: int,
    batch: int,
    width: int,
    stream: int,
    distribution: int,
    dtype: torch.dtype,
) -> Tensor:
    return seed.new_empty(steps, batch, width, dtype=dtype)


def _gradients(tensors: LayerTensors, needed: Iterable[int], needs_weights: bool) -> Gradients:
    """Gradients of input, hx, cx and eps, as far as they are needed, and of the weights."""
    input, hx, weights, cx, eps = tensors[:5]
    shapes = [
        t.shape if need and t is not None else (0,)
        for t, need in zip((input, hx, cx, eps), needed, strict=True)
    ]
    flat = sum(w.numel() for w in weights) if needs_weights else 0
    return Gradients(*(input.new_empty(shape) for shape in (*shapes, (flat,))))
