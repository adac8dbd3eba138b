"""The compiled library: loading, fake kernels, autograd.  The only user of its operators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd import forward_ad
from torch.backends.cudnn import rnn as cudnn_rnn
from torch.compiler import is_compiling


def _compiled(name: str) -> Path:
    """A library without Python in it, under the very name that setuptools gives it."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    suffix = next((suffix for suffix in suffixes if ".abi3" in suffix), suffixes[0])
    return Path(__file__).with_name(name + suffix)


_core = _compiled("_core")
try:
    from . import _helpers

    torch.ops.load_library(str(_core))
except (ImportError, OSError) as error:
    raise ImportError(
        f"fusedrnn is not built: its compiled modules in {Path(__file__).parent} are missing, or "
        f"are of another Python or torch ({error}); run `pip install .` in the source tree and "
        "import from elsewhere"
    ) from error
# So that Ctrl-C ends a long call.
ctypes.CDLL(str(_core)).fusedrnn_set_signal_check(ctypes.c_void_p(_helpers.signal_check()))
_ops = torch.ops.fusedrnn

# The operators take places in these: see csrc/ops.h.
CELLS, BACKENDS = _helpers.CELLS, _helpers.BACKENDS
MOST_ROWS, MOST_LAYERS = _helpers.MOST_ROWS, _helpers.MOST_LAYERS

replay_chunks = False
# How a persistent kernel's blocks hand on results: by flags, or by the packets themselves. The bits
# are the same.
exchange_by_flags = False
# Whether a second stream takes what the steps of a chunk do not wait for, where a persistent kernel
# leaves multiprocessors free. The bits are the same.
overlap_chunks = False


def set_chunk_replay(enabled: bool) -> None:
    """Whether the steps of a chunk are recorded into a CUDA graph, once per call, and replayed.

    That saves most of the time that launching small kernels takes, and changes no bit of a result.
    It is off at first, because CUDA lets no thread synchronise a device while another one records,
    as ``torch.cuda.synchronize`` does: turn it on where no other thread needs that. Where the call
    is captured in a CUDA graph anyway, by ``torch.cuda.graph`` or ``torch.compile``, it does
    nothing, and is not needed. On the CPU it means nothing.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"fusedrnn: enabled must be a bool, got {type(enabled).__name__}")
    global replay_chunks
    replay_chunks = enabled


_free_multiprocessors: int | None = None
_FREE_FOR_OTHERS = 16


def set_free_multiprocessors(count: int | None) -> None:
    """Sets how many multiprocessors persistent kernels leave free for other kernels.

    It holds for all GPUs of this process and from the next call on, and for :func:`fusedrnn.plan`;
    a CUDA graph that has been captured keeps what it has.

    The blocks of a persistent kernel fill their multiprocessors until it ends, and it begins when
    all of them have room. What runs beside it has the others: without any, the collectives of
    DistributedDataParallel and FSDP would wait for each chunk of steps, and each chunk for them.
    But fewer blocks may also mean that each has more rows, and more time, so that it is 0 where
    nothing is known to run beside. Set it where you run kernels of your own on another stream, or
    to 0 where collectives never meet backward. At least one copy of the weights is always there.

    Args:
        count: Multiprocessors, or None, which is the default: 16 in a process that
            ``torch.distributed`` has joined with others, by whichever backend, else 0.

    Raises:
        TypeError: ``count`` is neither an int nor None.
        ValueError: ``count`` is below 0, or more than any GPU could have.
    """
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            name = type(count).__name__
            raise TypeError(f"fusedrnn: count must be an int or None, got {name}")
        if not 0 <= count < 2**31:
            raise ValueError(f"fusedrnn: count must be in [0, 2^31), got {count}")
    global _free_multiprocessors
    _free_multiprocessors = count


def multiprocessors_left() -> int:
    """To other kernels, by persistent ones, as of now."""
    if _free_multiprocessors is not None:
        return _free_multiprocessors
    is_joined = distributed.is_available() and distributed.is_initialized()
    return _FREE_FOR_OTHERS if is_joined and distributed.get_world_size() > 1 else 0


# Address of what asks a GPU's driver how many blocks of a kernel it runs at once; 0 without CUDA.
_most_blocks = 0


def _load_cuda() -> str | None:
    """Loads the operators on CUDA; says why there are none."""
    global _most_blocks
    library = _compiled("_cuda")
    if not library.exists():
        return (
            "fusedrnn was built for the CPU only; reinstall it where torch has CUDA and there is a "
            "CUDA compiler (FUSEDRNN_CUDA=1 says what is missing)"
        )
    if torch.version.cuda is None:
        return "torch is a CPU build"
    try:
        torch.ops.load_library(str(library))
        ask = ctypes.CDLL(str(library)).fusedrnn_most_blocks
    except (OSError, AttributeError) as error:  # a CUDA of another major version, an older build
        return f"the CUDA kernels cannot be loaded under CUDA {torch.version.cuda}: {error}"
    _most_blocks = ctypes.cast(ask, ctypes.c_void_p).value or 0
    return None


cuda_obstacle = _load_cuda()
"""Why CUDA tensors cannot be computed on, or None."""

# As in csrc/ops.h.
_NEEDS_INPUT, _NEEDS_HX, _NEEDS_CX, _NEEDS_EPS, _NEEDS_FIRST_WEIGHT = 1, 2, 4, 8, 16


def gpu_facts(device: torch.device) -> _helpers.Gpu | None:
    """What plans ask of a device; None if that is no GPU."""
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():  # a tracer may speak of one
        return "", 0, 0, 0, 0, 0
    facts = torch.cuda.get_device_properties(device)
    capability = 10 * facts.major + facts.minor
    shared_bytes = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    index = torch.cuda.current_device() if device.index is None else device.index
    return facts.name, capability, facts.multi_processor_count, shared_bytes, index, _most_blocks


def plan_layer(gpu: _helpers.Gpu | None, **problem: Any) -> dict[str, Any]:
    """What the operators make of a layer: see csrc/planner.h."""
    return _helpers.plan(gpu=gpu, **problem)


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether products of tensors may be rounded to TF32 on a GPU: as those of nn.LSTM, as of now.

    A graph of torch.compile has a guard on that, and is compiled again when it changes.
    """
    if dtype != torch.float32:
        return False  # without a guard
    return bool(cudnn_rnn.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _of_tensors(input: Tensor, weights: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "bias": any(w.dim() == 1 for w in weights),
        "dtype": str(input.dtype).removeprefix("torch."),
        "strides": [w.stride() for w in weights],
    }


check_sizes = _helpers.check_sizes


def check_plan(input: Tensor, weights: Sequence[Tensor], *, backend: str, **problem: Any) -> None:
    """What the operator would refuse to do, refused before anything else happens.

    Raises:
        RuntimeError: ``workspace_bytes`` are too few, or the backend is not possible.
    """
    switches = {
        "by_flags": exchange_by_flags,
        "overlap": overlap_chunks,
        "free_multiprocessors": multiprocessors_left(),
        "tf32": allows_tf32(input.dtype),
    }
    made = plan_layer(
        gpu_facts(input.device),
        backend=backend,
        **problem,
        **switches,
        **_of_tensors(input, weights),
    )
    if backend == "persistent" != made["backend"]:
        raise RuntimeError(f"fusedrnn: backend='persistent' is not possible here: {made['reason']}")


# Name, offset in elements and shape of a parameter.
_Parameters = tuple[tuple[str, int, tuple[int, ...]], ...]


@torch.compiler.assume_constant_result
def layout(
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    num_layers: int,
    directions: int,
    bias: bool,
) -> _Parameters:
    """Name, offset in elements and shape of each parameter in a module's flat buffer.

    All layers back to back, the directions of each too. Layer k > 0 reads the output of layer
    k - 1, all directions of it.
    """
    sizes = (int(input_size), int(hidden_size), int(latent_size), int(output_size))  # hashable
    return _layout(cell, sizes, num_layers, directions, bias)


@torch.compiler.assume_constant_result
def weights_per_direction(cell: str, bias: bool) -> int:
    """How many weights a layer has in each direction."""
    return len(_layout(cell, (1, 1, 1, 1), 1, 1, bias))


@functools.lru_cache(maxsize=256)
def _layout(
    cell: str, sizes: tuple[int, int, int, int], num_layers: int, directions: int, bias: bool
) -> _Parameters:
    input_size, hidden_size, latent_size, output_size = sizes
    parameters, offset = [], 0
    for layer in range(num_layers):
        # In Python, where a million layers can be interrupted.
        of_layer = _helpers.layer_layout(
            cell, input_size, hidden_size, latent_size, output_size, bias
        )
        for suffix in ("", "_reverse")[:directions]:
            for name, shape in of_layer:
                parameters.append((f"{name}_l{layer}{suffix}", offset, shape))
                offset += math.prod(shape)
        input_size = directions * output_size
    return tuple(parameters)


class Dropout(NamedTuple):
    """What is left out at random, or on the average if there is no seed."""

    input: float = 0.0
    """Probability that an element of the layer's input is zero."""
    h: float = 0.0
    """Zoneout: probability that a unit keeps its h."""
    state: float = 0.0
    """The same of the state beside h."""
    seed: Tensor | None = None
    """One int64; needed for the input's."""


class Mask(NamedTuple):
    """What the rows of a batch do besides computing; see csrc/step.h."""

    lengths: Tensor | None = None
    """(B,) int64 on the CPU: steps of each row of a padded batch."""
    batch_sizes: Tensor | None = None
    """(T,) int64 on the CPU: rows that take each step of a packed batch."""
    reset: Tensor | None = None
    """(T, B) bool: whether a row's state is zero before the step."""


class Setting(NamedTuple):
    """What a layer is and how it is run, apart from tensors and what is drawn."""

    cell: str
    layer: int = 0
    """Of those of the stack, each direction counted: the counter of its noise."""
    first_step: int = 0
    """Where the sequence is a part of a longer one: the noise is that of the place in that."""
    reverse: bool = False
    """The one direction there is runs backwards."""
    chunk_size: int = 0
    workspace_bytes: int = 0
    """Both 0: chunks are as the plan has them."""
    backend: str = "auto"
    recompute: bool = True


def run_layer(
    setting: Setting,
    input: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weights: Sequence[Tensor],
    mask: Mask,
    dropout: Dropout,
    eps: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    """One layer over a sequence, in D = 1 or 2 directions.

    input (T, B, I), hx (D, B, P), cx (D, B, H), weights of each direction -> output (T, B, D * P),
    h_n (D, B, P), c_n (D, B, H), or (0, B, H) if the cell has none. P is H, unless the cell
    projects its h to fewer features. With ``mask.batch_sizes`` input and output are packed: (rows,
    features). Without eps (D, T, B, Z) and seed (1,) there is no noise.
    """
    wants_grad = needs_grad((input, hx, cx, eps, *weights))
    cell, layer, first_step, reverse, chunk_size, workspace_bytes, backend, recompute = setting
    input_p, h_p, state_p, mask_seed = dropout
    first = (CELLS.index(cell), input, hx, cx)
    keep = wants_grad and not recompute
    last = (layer, first_step, reverse, chunk_size, workspace_bytes, BACKENDS.index(backend), keep)
    way = _way(wants_grad)
    if way is not None:
        tensors = (*first, eps, seed, *mask, mask_seed)
        return way(*tensors, input_p, h_p, state_p, *last, *weights)[:3]
    drawn = (eps, seed, input_p, h_p, state_p, mask_seed)
    results: tuple[Tensor, ...] = _call(
        _ops.forward, *first, weights, *mask, *drawn, *last, *_switches(input)
    )
    return results[:3]


def run_step(
    cell: str,
    input: Tensor,
    hx: Tensor | None,
    cx: Tensor | None,
    weights: Sequence[Tensor],
    eps: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One step of a cell whose tensors have no dimension for steps or layers, for `is_plain` ones.

    -> h, c, which is empty if the cell has none.
    """
    tensors = (input, hx, cx, weights, eps, seed)
    results: tuple[Tensor, Tensor] = _call(
        _ops.step, CELLS.index(cell), *tensors, *_switches_of_step(input)
    )
    return results


def reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A result in another shape, which is no view to autograd: ``detach_`` refuses those."""
    result: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return result


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether backward is to come for any of these."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether an operator may be called just so."""
    return not is_compiling() and _way(needs_grad(tensors)) is None


def _way(wants_grad: bool) -> Callable[..., tuple[Tensor, ...]] | None:
    """The cheapest function of a layer that what happens around it allows; None: the operator."""
    if is_compiling():
        return _Layer.apply if wants_grad else None
    # torch.func needs more of a Function, no operator may lose a tangent, and a trace has the
    # Function as one node.
    is_transformed = torch._C._are_functorch_transforms_active()
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_transformed or is_traced or forward_ad._current_level >= 0:
        return _Layer.apply
    return _EagerLayer.apply if wants_grad else None


def _switches(input: Tensor) -> tuple[Any, ...]:
    """The operators' last arguments, which are no module's business."""
    return replay_chunks, exchange_by_flags, overlap_chunks, *_switches_of_step(input)


def _switches_of_step(input: Tensor) -> tuple[int, bool]:
    """Those that matter without chunks."""
    if not _has_switches(input):
        return 0, False
    return multiprocessors_left(), allows_tf32(input.dtype)


def _has_switches(input: Tensor) -> bool:
    """Whether what they ask for means anything; on the CPU it would be but a guard of a graph."""
    return not input.is_cpu


def _call(operator: Any, *arguments: Any) -> Any:
    """Calls an operator; torch's stable ABI lets only RuntimeErrors through, which this amends."""
    if is_compiling():
        return operator(*arguments)
    try:
        return _helpers.call_interruptibly(operator, *arguments)
    except RuntimeError as error:
        if "fusedrnn: out of memory" in str(error) and any(
            isinstance(a, Tensor) and a.is_cuda for a in arguments
        ):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


class _Layer(torch.autograd.Function):
    """A layer that saves its arguments and its output, and little else unless told to ``keep``."""

    @staticmethod
    def forward(
        cell: int,
        input: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        eps: Tensor | None,
        seed: Tensor | None,
        lengths: Tensor | None,
        batch_sizes: Tensor | None,
        reset: Tensor | None,
        mask_seed: Tensor | None,
        dropout: float,
        zoneout: float,
        state_zoneout: float,
        layer: int,
        first_step: int,
        reverse: bool,
        chunk_size: int,
        workspace_bytes: int,
        backend: int,
        keep: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        tensors = (input, hx, cx, list(weights), lengths, batch_sizes, reset, eps, seed)
        probabilities = (dropout, zoneout, state_zoneout)
        options = (layer, first_step, reverse, chunk_size, workspace_bytes, backend, keep)
        options = (*options, *_switches(input))
        return _call(_ops.forward, cell, *tensors, *probabilities, mask_seed, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.cell, *tensors = inputs[:10]
        ctx.probabilities = inputs[10:13]
        *ctx.options, keep = inputs[13:20]
        weights = inputs[20:]
        out, _, _, kept, states = output
        ctx.mark_non_differentiable(kept, states)
        ctx.set_materialize_grads(False)
        extras = (kept if keep else None, None if inputs[3] is None else states)
        ctx.save_for_backward(*tensors, out, *extras, *weights)

    @staticmethod
    def backward(
        ctx: Any,
        grad_output: Tensor | None,
        grad_h_n: Tensor | None,
        grad_c_n: Tensor | None,
        _kept: None,
        _states: None,
    ) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint allows no second time
        input, hx, cx, eps, seed, *masks, mask_seed, output, kept, states = saved[:12]
        weights = list(saved[12:])
        need_input, need_hx, need_cx, need_eps = ctx.needs_input_grad[1:5]
        need_weights = ctx.needs_input_grad[20:]
        cotangents = (grad_output, grad_h_n, grad_c_n)
        if all(grad is None for grad in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        needs = _NEEDS_INPUT * need_input + _NEEDS_HX * need_hx
        needs += _NEEDS_CX * need_cx + _NEEDS_EPS * need_eps
        needs += sum(_NEEDS_FIRST_WEIGHT << i for i, need in enumerate(need_weights) if need)
        tensors = (input, hx, cx, output, kept, states, weights, *masks, eps, seed)
        options = (*ctx.options, needs, *_switches(input))
        arguments = (*cotangents, ctx.cell, *tensors, *ctx.probabilities, mask_seed, *options)
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            grads = _call(_ops.backward, *arguments)
        if torch.is_grad_enabled():  # create_graph=True
            sources = (*cotangents, input, hx, cx, eps, *weights)
            grads = _FirstOrder.apply(*grads, *(t for t in sources if t is not None))
        grad_input, grad_hx, grad_cx, grad_eps, flat = grads
        return (
            None,
            grad_input if need_input else None,
            grad_hx if need_hx else None,
            grad_cx if need_cx else None,
            grad_eps if need_eps else None,
            *(None,) * 15,
            *_parts(flat, weights, need_weights),
        )


def _parts(flat: Tensor, weights: list[Tensor], needed: tuple[bool, ...]) -> list[Tensor | None]:
    """The gradients of weights, which lie back to back in memory."""
    if is_compiling():
        shaped = flat.split([w.numel() for w in weights]) if any(needed) else weights
        return [
            part.view(w.shape) if need else None
            for need, part, w in zip(needed, shaped, weights, strict=True)
        ]
    parts: list[Tensor | None] = []
    begin = int(flat.storage_offset())
    for need, weight in zip(needed, weights, strict=True):
        shape = weight.shape
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        # In one view instead of two.
        parts.append(flat.as_strided(shape, strides, begin) if need else None)
        begin += weight.numel()
    return parts


class _EagerLayer(torch.autograd.Function):
    """The same without ``setup_context``, for which torch inspects a signature in each call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        output = _Layer.forward(*arguments)
        _Layer.setup_context(ctx, arguments, output)
        return output

    backward = _Layer.backward


class _FirstOrder(torch.autograd.Function):
    """Gradients that depend on ``sources``, in a way that autograd must not take for constant."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, *sources: Tensor) -> Any:
        return a.view_as(a), b.view_as(b), c.view_as(c), d.view_as(d), e.view_as(e)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "fusedrnn: second derivatives are not implemented; use fusedrnn.reference for them"
        )


def _check_devices(
    input: Tensor, tensors: Sequence[Tensor | None], *on_host: Tensor | None
) -> None:
    """One meta tensor is enough to get into a fake kernel, which must not answer for a real one."""
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


# The fake kernels repeat the operators' schemas, so their types stand there (csrc/ops.h).
@torch.library.register_fake("fusedrnn::forward")
def _(  # type: ignore[no-untyped-def]
    cell,
    input,
    hx,
    cx,
    weights,
    lengths,
    batch_sizes,
    reset,
    eps,
    seed,
    dropout,
    zoneout,
    state_zoneout,
    mask_seed,
    layer,
    first_step,
    reverse,
    chunk_size,
    workspace_bytes,
    backend,
    keep,
    replay,
    by_flags,
    overlap,
    free_multiprocessors=0,
    tf32=False,
):
    _check_devices(input, [hx, cx, *weights, reset, eps, seed, mask_seed], lengths, batch_sizes)
    seq_len = input.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    directions, batch, output_size = hx.shape
    hidden_size = output_size if cx is None else cx.shape[2]
    latent_size = weights[1].shape[1]
    has_noise = eps is not None or seed is not None
    columns = _helpers.kept_columns(CELLS[cell], hidden_size, latent_size, has_noise) if keep else 0
    states = 0 if cx is None else 1
    if cx is not None and seq_len != 1:  # else no plan is asked, which knows no symbols
        made = plan_layer(
            gpu_facts(input.device),
            cell=CELLS[cell],
            noise=has_noise,
            input_size=input.shape[-1],
            hidden_size=hidden_size,
            latent_size=latent_size,
            output_size=output_size,
            seq_len=seq_len,
            batch=batch,
            chunk_size=chunk_size,
            workspace_bytes=workspace_bytes,
            backend=BACKENDS[backend],
            by_flags=by_flags,
            overlap=overlap,
            free_multiprocessors=free_multiprocessors,
            tf32=tf32,
            **_of_tensors(input, weights),
        )
        states = -(-seq_len // made["chunk_steps"])
    accumulate_in = torch.promote_types(input.dtype, torch.float32)
    return (
        input.new_empty(*input.shape[:-1], directions * output_size),
        input.new_empty(directions, batch, output_size),
        input.new_empty(0 if cx is None else directions, batch, hidden_size),
        input.new_empty(directions * seq_len * batch * columns, dtype=accumulate_in),
        input.new_empty(directions * states * batch * hidden_size, dtype=accumulate_in),
    )


@torch.library.register_fake("fusedrnn::step")
def _(  # type: ignore[no-untyped-def]
    cell, input, hx, cx, weights, eps, seed, free_multiprocessors=0, tf32=False
):
    _check_devices(input, [hx, cx, *weights, eps, seed])
    reads_h = weights[2 if CELLS[cell] == "stochastic_gru" else 1]
    h = input.new_empty(*input.shape[:-1], reads_h.shape[1])
    batch = input.shape[0] if input.dim() == 2 else 1
    return h, torch.empty_like(h) if CELLS[cell] == "lstm" else h.new_empty(0, batch, h.shape[-1])


@torch.library.register_fake("fusedrnn::backward")
def _(  # type: ignore[no-untyped-def]
    grad_output,
    grad_h_n,
    grad_c_n,
    cell,
    input,
    hx,
    cx,
    output,
    kept,
    states,
    weights,
    lengths,
    batch_sizes,
    reset,
    eps,
    seed,
    dropout,
    zoneout,
    state_zoneout,
    mask_seed,
    layer,
    first_step,
    reverse,
    chunk_size,
    workspace_bytes,
    backend,
    needs,
    replay,
    by_flags,
    overlap,
    free_multiprocessors=0,
    tf32=False,
):
    tensors = [hx, cx, output, kept, states, *weights, reset, eps, seed, mask_seed]
    tensors += [grad_output, grad_h_n, grad_c_n]
    _check_devices(input, tensors, lengths, batch_sizes)

    def like(tensor: Tensor, bit: int) -> Tensor:
        return input.new_empty(tensor.shape if needs & bit else 0)

    flat_size = sum(w.numel() for w in weights) if needs >= _NEEDS_FIRST_WEIGHT else 0
    return (
        like(input, _NEEDS_INPUT),
        like(hx, _NEEDS_HX),
        like(cx, _NEEDS_CX),
        like(eps, _NEEDS_EPS),
        input.new_empty(flat_size),
    )
