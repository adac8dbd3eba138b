"""What will run, before it does: the backend, its size, and its memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.types import Device

from . import _helpers, _plans, checks, tuning
from .modules import GRU, LSTM, RNNBase, StochasticGRU
from .options import check_dtype, check_flag, check_num_layers, text_of

_MODULES = {"gru": GRU, "lstm": LSTM, "stochastic_gru": StochasticGRU}


@dataclass(frozen=True)
class Plan:
    """How one layer and direction goes through a sequence; print it.

    What the kernel for whole chunks takes is 0 where there is none.

    Memory and time are those of one layer and direction, and with recompute where nothing else is
    said.

    Attributes:
        backend: Of forward: "persistent", one kernel for all steps of a chunk with the weights in
            registers, or "stepwise", a matrix product and a kernel for each stage of each step.
        backward: The same of backward.
        reason: Why forward is that; and if it is persistent and backward is not, why that is.
        fp32_precision: Of products of float32: "tf32" where a GPU may round them, else "ieee";
            "" of other dtypes.
        modelled_step_us: Microseconds that a step of the forward recurrence takes by the model of
            docs/performance.md, which has not been measured yet; 0 on the CPU.
        modelled_forward_us: Microseconds that forward takes for the whole sequence, by the same
            model; 0 on the CPU, and on a GPU that is not one of those below nor of the compute
            capability of one.
        chunk_steps: Steps that are worked on at once.
        chunk_reason: Why so many. Without ``chunk_size`` and ``workspace_bytes``, a GPU gets the
            shortest chunks that cost at most 3% besides their steps, by the model, as far as
            training takes at most half of ``nn_lstm_training_bytes``, but no more than 256 MiB or a
            quarter of them, whichever is more; rows of a chunk are a multiple of 128 where they can
            be. Where the weights are large for the sequence, even the shortest chunks may take
            more. A CPU gets chunks of 256 rows.
        grid: Blocks of the kernel, one for each multiprocessor that it takes.
        threads: Of a block.
        weight_registers: Registers of a thread, of its 255, that hold weights.
        shared_memory_bytes: Of a block.
        forward_workspace_bytes: Memory that forward takes besides its results.
        backward_workspace_bytes: The same of backward, besides the gradients.
        most_workspace_bytes: The most that either can take: packed or with lengths, with resets,
            and with input, noise and gradients in strides that it has to copy. What
            ``workspace_bytes=`` limits. Weights in strides that it has to copy, which no module
            makes, are not counted here.
        training_bytes: What a training step holds at its peak beside weights, input and the
            output's gradient: the output, what is saved besides, the workspace, and the gradients
            of the weights.
        nn_lstm_training_bytes: The same of a torch.nn.LSTM of these sizes on a GPU, by count, at
            least: output, four gates, cell state and the gradient of the input of every step, and
            the gradients of the weights.
        saved_bytes_with_recompute: What waits for backward besides input, weights and output: of an
            LSTM, its states before each chunk.
        modelled_backward_us_with_recompute: As ``modelled_forward_us``, of backward.
        saved_bytes_without_recompute: With the pre-activations besides, which ``recompute=False``
            keeps.
        modelled_backward_us_without_recompute: The same without the matrix products for these.
    """

    backend: str
    backward: str
    reason: str
    fp32_precision: str
    modelled_step_us: float
    modelled_forward_us: float
    chunk_steps: int
    chunk_reason: str
    grid: int
    threads: int
    weight_registers: int
    shared_memory_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    most_workspace_bytes: int
    training_bytes: int
    nn_lstm_training_bytes: int
    saved_bytes_with_recompute: int
    modelled_backward_us_with_recompute: float
    saved_bytes_without_recompute: int
    modelled_backward_us_without_recompute: float

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}", f"  backward: {self.backward}"]
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if value == "":
                continue
            text = format(value, {str: "", float: ",.1f", int: ","}[type(value)])
            lines.append(f"  {field.name.replace('_', ' ')}: {text}")
        return "\n".join(lines)


def plan(
    module: RNNBase | Mapping[str, Any],
    input_shape: Sequence[int],
    dtype: torch.dtype | None = None,
    device: Device = "cuda",
    *,
    sample: bool = True,
) -> Plan:
    """How a module would run, on a GPU that need not be there.

    Args:
        module: A GRU, an LSTM or a StochasticGRU; its ``backend``, ``chunk_size`` and
            ``workspace_bytes`` count. Or what one is made of: ``cell`` ("gru", "lstm",
            "stochastic_gru") and the constructor's arguments by name.
        input_shape: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``,
            or (seq_len, input_size).
        dtype: Of the tensors; the module's if None. Under autocast, that of autocast. Of float32
            it counts whether products of recurrent layers may be rounded to TF32 at the time of
            this call, which is torch's default: ``torch.backends.cudnn.rnn.fp32_precision``,
            "tf32" or "ieee", or what that follows, as the older
            ``torch.backends.cudnn.allow_tf32``.
        device: "cpu", a CUDA device of this machine, or the name of a GPU: "A100", "H100", "H200",
            "B200", "L40S", "RTX 4090". Of a GPU of this machine the driver is asked as well, which
            may have no room for all blocks of a kernel at once.
        sample: As in the call of a StochasticGRU.

    What else it depends on is the process: on :func:`fusedrnn.set_free_multiprocessors`, whose
    default is another one where ``torch.distributed`` has joined several processes.

    Returns:
        The plan of the layer that takes the most workspace, in one direction: layers differ in
        their input alone, and run one after the other.

    Raises:
        TypeError: ``module`` is none of fusedrnn's nor a mapping of arguments that its class takes,
            the shape is no sequence of ints, or the dtype none of torch's.
        ValueError: The cell, the shape or the device is not one of those above.
        RuntimeError: The dtype is not one of those above, there is no such CUDA device, the
            module's backend is "persistent" and that is not possible, or its ``workspace_bytes``
            are too few for chunks of one step.

    Example::

        >>> sizes = {"cell": "gru", "input_size": 64, "hidden_size": 256}
        >>> plan = fusedrnn.plan(sizes, (1024, 64, 64), torch.bfloat16, device="H100")
        >>> plan.backend, plan.grid
        ('persistent', 128)
    """
    if isinstance(module, Mapping):
        module = _module_of(module)
    if not isinstance(module, RNNBase):
        cls = type(module)
        raise TypeError(
            "fusedrnn: module must be a fusedrnn.GRU, LSTM or StochasticGRU, "
            f"got {cls.__module__}.{cls.__qualname__}"
        )
    dtype = check_dtype(module.all_weights[0][0].dtype if dtype is None else dtype)
    check_flag("sample", sample)
    seq_len, batch = _steps(module, input_shape)
    directions = 2 if module.bidirectional else 1
    output_size = module.proj_size or module.hidden_size
    widest = module.input_size
    if module.num_layers > 1:
        widest = max(widest, directions * output_size)
    gpu, tf32 = _gpu(device), tuning.allows_tf32(dtype)
    made = _plans.plan_layer(
        gpu,
        cell=module._options().cell,
        noise=sample,
        input_size=widest,
        hidden_size=module.hidden_size,
        latent_size=getattr(module, "latent_size", 0),
        output_size=output_size,
        bias=module.bias,
        seq_len=seq_len,
        batch=batch,
        dtype=_plans.name_of(dtype),
        chunk_size=module.chunk_size or 0,
        workspace_bytes=module.workspace_bytes or 0,
        backend=module.backend,
        tuning=tuning.number(dtype),
    )
    _plans.require_backend(module.backend, made)
    precision = ""
    if dtype == torch.float32:
        rounds = tf32 and gpu is not None and gpu[1] >= 80  # no GPU that is older has TF32
        precision = "tf32" if rounds else "ieee"
    return Plan(fp32_precision=precision, **made)


def _module_of(options: Mapping[str, Any]) -> RNNBase:
    """What they make, without memory; of many layers two, which are all that a plan looks at."""
    options = {"device": "meta", **options}
    cell = options.pop("cell", None)
    if not isinstance(cell, str) or cell not in _MODULES:
        raise ValueError(
            f"fusedrnn: cell must be one of {', '.join(_MODULES)}, got {text_of(cell)}"
        )
    cls = _MODULES[cell]
    unknown = [name for name in options if name not in inspect.signature(cls).parameters]
    if unknown:
        raise TypeError(f"fusedrnn: {cls.__name__} has no argument {unknown[0]!r}")
    missing = [name for name in ("input_size", "hidden_size") if name not in options]
    if missing:
        raise TypeError(f"fusedrnn: {cls.__name__} needs {missing[0]}")
    if "num_layers" in options:
        options["num_layers"] = min(check_num_layers(options["num_layers"]), 2)
    return cls(**options)


def _steps(module: RNNBase, input_shape: Sequence[int]) -> tuple[int, int]:
    """seq_len and batch of an input of this shape."""
    wanted = f"input_shape must be (seq_len, batch, {module.input_size})"
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str | bytes):
        raise TypeError(f"fusedrnn: {wanted}, got {type(input_shape).__name__}")
    for size in input_shape:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"fusedrnn: {wanted}, got {tuple(input_shape)}")
    *steps, input_size = input_shape or (0,)
    if len(steps) not in (1, 2) or input_size != module.input_size:
        raise ValueError(f"fusedrnn: {wanted}, got {tuple(input_shape)}")
    if min(steps) < 1:
        raise ValueError(f"fusedrnn: {wanted}, each at least 1, got {tuple(input_shape)}")
    if len(steps) == 2 and module.batch_first:
        steps.reverse()
    seq_len, batch = (*steps, 1)[:2]
    checks.rows(seq_len, batch, input_shape)
    return seq_len, batch


def _gpu(device: Device) -> _helpers.Gpu | None:
    """Facts of a GPU, or None for the CPU."""
    known = _helpers.known_gpus()
    if isinstance(device, str) and device in known:
        return known[device]
    try:
        where = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        where = torch.device("meta")
    if where.type == "cpu":
        return None
    if where.type != "cuda":
        names = ", ".join(known)
        raise ValueError(
            f"fusedrnn: device must be cpu, a CUDA device, or one of {names}, got {text_of(device)}"
        )
    if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"fusedrnn: there is no {where} on this machine; device may also be 'cpu', or the name "
            f"of a GPU: {', '.join(known)}"
        )
    return _plans.gpu_facts(where)
