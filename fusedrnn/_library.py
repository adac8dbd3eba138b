"""The compiled library: loading, fake kernels, autograd.  The only user of its operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_core = next(Path(__file__).parent.glob("_core*.so"), None)
try:
    from . import _helpers
except ImportError:
    _core = None
if _core is None:
    raise ImportError(
        f"fusedrnn is not built: its compiled modules are missing in {Path(__file__).parent}; "
        "run `pip install .` in the source tree and import from elsewhere"
    )
torch.ops.load_library(str(_core))
_ops = torch.ops.fusedrnn

replay_chunks = True
"""Whether steps on a GPU are recorded once per call and replayed (the benchmark shows both)."""


def _load_cuda() -> str | None:
    """Loads the operators on CUDA; says why there are none."""
    library = next(Path(__file__).parent.glob("_cuda*.so"), None)
    if library is None:
        return (
            "fusedrnn was built for the CPU only; reinstall it where torch has CUDA and there is a "
            "CUDA compiler (FUSEDRNN_CUDA=1 says what is missing)"
        )
    if torch.version.cuda is None:
        return "torch is a CPU build"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:  # a CUDA of another major version
        return f"the CUDA kernels cannot be loaded under CUDA {torch.version.cuda}: {error}"
    return None


cuda_obstacle = _load_cuda()
"""Why CUDA tensors cannot be computed on, or None."""

_NEEDS_INPUT, _NEEDS_HX, _NEEDS_EPS, _NEEDS_FIRST_WEIGHT = 1, 2, 4, 8  # as in csrc/ops.cpp


@torch.compiler.assume_constant_result
def layout(
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    num_layers: int,
    bias: bool,
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Name, offset in elements and shape of each parameter in a module's flat buffer."""
    return _helpers.layout(cell, input_size, hidden_size, latent_size, num_layers, bias)


def run_layer(
    cell: str,
    input: Tensor,
    hx: Tensor,
    weights: Sequence[Tensor],
    *,
    eps: Tensor | None,
    seed: Tensor | None,
    layer: int,
    chunk_size: int,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """One layer over a sequence: input (T, B, I), hx (B, H) -> output (T, B, H), h_n (B, H).

    Without eps (T, B, Z) and seed (1,) there is no noise.  ``chunk_size`` 0 is automatic.
    """
    keep = (
        not recompute
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (input, hx, eps, *weights))
    )
    output, h_n, _ = _Layer.apply(cell, input, hx, eps, seed, layer, chunk_size, keep, *weights)
    return output, h_n


def _call(operator: Any, *arguments: Any) -> Any:
    """Calls an operator; torch's stable ABI lets only RuntimeErrors through, which this amends."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        if "fusedrnn: out of memory" in str(error) and any(
            isinstance(a, Tensor) and a.is_cuda for a in arguments
        ):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


class _Layer(torch.autograd.Function):
    """A layer that saves its arguments and its output, and nothing else unless told to ``keep``."""

    @staticmethod
    def forward(
        cell: str,
        input: Tensor,
        hx: Tensor,
        eps: Tensor | None,
        seed: Tensor | None,
        layer: int,
        chunk_size: int,
        keep: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = (cell, input, hx, list(weights), eps, seed, layer, chunk_size, keep)
        return _call(_ops.forward, *arguments, replay_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.cell, input, hx, eps, seed, ctx.layer, ctx.chunk_size, keep, *weights = inputs
        out, _, kept = output
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, eps, seed, out, kept if keep else None, *weights)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_h_n: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        input, hx, eps, seed, output, kept, *weights = ctx.saved_tensors
        need_input, need_hx, need_eps = ctx.needs_input_grad[1:4]
        need_weights = ctx.needs_input_grad[8:]
        if grad_output is None and grad_h_n is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = _NEEDS_INPUT * need_input + _NEEDS_HX * need_hx + _NEEDS_EPS * need_eps
        needs += sum(_NEEDS_FIRST_WEIGHT << i for i, need in enumerate(need_weights) if need)
        arguments = (grad_output, grad_h_n, ctx.cell, input, hx, output, kept, weights, eps, seed)
        with torch.no_grad():
            grads = _call(
                _ops.backward, *arguments, ctx.layer, ctx.chunk_size, needs, replay_chunks
            )
        if torch.is_grad_enabled():  # create_graph=True
            sources = (grad_output, grad_h_n, input, hx, eps, *weights)
            grads = _FirstOrder.apply(*grads, *(t for t in sources if t is not None))
        grad_input, grad_hx, grad_eps, flat = grads
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if any(need_weights):
            parts = flat.split([w.numel() for w in weights])
            for i, (need, part, w) in enumerate(zip(need_weights, parts, weights, strict=True)):
                grad_weights[i] = part.view(w.shape) if need else None
        return (
            None,
            grad_input if need_input else None,
            grad_hx if need_hx else None,
            grad_eps if need_eps else None,
            None,
            None,
            None,
            None,
            *grad_weights,
        )


class _FirstOrder(torch.autograd.Function):
    """Gradients that depend on ``sources``, in a way that autograd must not take for constant."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor, d: Tensor, *sources: Tensor) -> Any:
        return a.view_as(a), b.view_as(b), c.view_as(c), d.view_as(d)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "fusedrnn: second derivatives are not implemented; use fusedrnn.reference for them"
        )


# The fake kernels repeat the operators' schemas, so their types stand there (csrc/ops.cpp).
@torch.library.register_fake("fusedrnn::forward")
def _(  # type: ignore[no-untyped-def]
    cell, input, hx, weights, eps, seed, layer, chunk_size, keep, replay
):
    seq_len, batch, _ = input.shape
    hidden_size, latent_size = hx.shape[1], weights[1].shape[1]
    has_noise = eps is not None or seed is not None
    columns = _helpers.kept_columns(cell, hidden_size, latent_size, has_noise) if keep else 0
    accumulate_in = torch.promote_types(input.dtype, torch.float32)
    return (
        input.new_empty(seq_len, batch, hidden_size),
        input.new_empty(batch, hidden_size),
        input.new_empty(seq_len * batch * columns, dtype=accumulate_in),
    )


@torch.library.register_fake("fusedrnn::backward")
def _(  # type: ignore[no-untyped-def]
    grad_output,
    grad_h_n,
    cell,
    input,
    hx,
    output,
    kept,
    weights,
    eps,
    seed,
    layer,
    chunk_size,
    needs,
    replay,
):
    def like(tensor: Tensor, bit: int) -> Tensor:
        return input.new_empty(tensor.shape if needs & bit else 0)

    flat_size = sum(w.numel() for w in weights) if needs >= _NEEDS_FIRST_WEIGHT else 0
    return (
        like(input, _NEEDS_INPUT),
        like(hx, _NEEDS_HX),
        like(eps, _NEEDS_EPS),
        input.new_empty(flat_size),
    )
