"""What would run, and in how much memory, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.types import Device

from . import _checks as checks
from . import _helpers, _plans
from . import _tuning as tuning
from ._modules import GRU, LSTM, RNNBase, StochasticGRU
from ._options import check_dtype, check_flag, check_num_layers, text_of

_MODULES = {cls._cell: cls for cls in (GRU, LSTM, StochasticGRU)}


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """How forward, or backward, of one layer and direction goes through a sequence.

    Sizes of a kernel are 0 if there is none. Modelled times follow the model of docs/gpu.md. They
    are 0 on the CPU, and on a GPU that is neither known by name nor of a known compute capability.
    """

    backend: str
    """"persistent": one kernel runs all steps of a chunk, with the weights in registers.
    "stepwise": a matrix product and a kernel are launched for each stage of each step."""
    reason: str
    """Why it is that backend, in a sentence."""
    grid: int
    """Blocks of the persistent kernel; each takes a multiprocessor for itself."""
    threads: int
    """Threads of a block."""
    weight_registers: int
    """Registers of a thread, of its 255, that hold weights."""
    shared_memory_bytes: int
    """Shared memory of a block."""
    workspace_bytes: int
    """Temporary memory: without results, saved tensors and gradients."""
    modelled_step_us: float
    """Microseconds of one step of the recurrence."""
    modelled_us: float
    """Microseconds of the whole pass."""
    modelled_us_without_recompute: float
    """Microseconds of the whole pass with ``recompute=False``, whatever is chosen."""


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """What one layer and direction takes, in bytes."""

    training_bytes: int
    """Peak of a training step: the output, the states before the first and after the last step,
    other saved tensors, the workspace, and the gradients of the weights. It leaves out the weights,
    the input, and the gradients of output and input."""
    nn_lstm_training_bytes: int
    """The least that torch.nn.LSTM of these sizes takes for the same on a GPU, by count: output,
    four gates, cell state and the gradient of the input of every step, and the gradients of the
    weights."""
    saved_bytes: int
    """Tensors that wait for backward besides input, weights and output: of an LSTM, the cell state
    before each chunk; and the pre-activations, unless ``Plan.recompute``."""
    saved_bytes_without_recompute: int
    """The same with ``recompute=False``, which saves all pre-activations too."""
    most_workspace_bytes: int
    """The most temporary memory that forward or backward can take for any tensors of these sizes:
    with lengths, packed, with resets, or in strides that must be copied. ``workspace_bytes=`` is a
    limit on this. It leaves out copies of weights, which no module's weights need."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one layer and direction runs over a sequence, as text by ``print`` and as attributes."""

    forward: PassPlan
    backward: PassPlan
    reason: str
    """Why forward has this backend; and if only backward is stepwise, why."""
    fp32_precision: str
    """Of products of float32: "tf32" if a GPU may round them, else "ieee"; "" of other dtypes."""
    chunk_steps: int
    """Steps of a chunk."""
    chunk_reason: str
    """Why a chunk has that many steps. If the caller gives neither ``chunk_size`` nor
    ``workspace_bytes``, chunks on a GPU are as short as they can be while their fixed cost is at
    most 3% of their steps, by the model. Training must also stay within half of
    ``nn_lstm_training_bytes``, and within 256 MiB or a quarter of them, whichever is more; if the
    weights are large for the sequence, even the shortest chunks may take more. The number of rows
    of a chunk is a multiple of 128 if possible. A CPU gets chunks of 256 rows."""
    recompute: bool
    """Whether backward recomputes the pre-activations of the gates: what the module's
    ``recompute`` says, or what this layer chooses at these sizes if that is None; always with
    ``return_sequence=False``. All numbers of this plan follow from that choice, for one layer in
    one direction."""
    memory: PlanMemory

    def __str__(self) -> str:
        lines = [self.reason, f"chunks of {self.chunk_steps:,} steps: {self.chunk_reason}"]
        if self.fp32_precision:
            lines.append(f"products of float32: {self.fp32_precision}")
        says = "recomputes" if self.recompute else "reads what forward saved of"
        lines.append(f"backward {says} the pre-activations; all numbers are of one layer, one way")
        for name in ("forward", "backward"):
            made: PassPlan = getattr(self, name)
            lines.append(f"{name}: {made.backend}")
            lines += _lines(made, leave_out=("backend", "reason"))
        return "\n".join([*lines, "memory", *_lines(self.memory)])


def _lines(part: PassPlan | PlanMemory, leave_out: Sequence[str] = ()) -> list[str]:
    """A line for each number that says something, with its unit in its name."""
    found = []
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in leave_out and value != 0:
            number = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
            found.append(f"  {field.name.replace('_', ' '):30} {number:>16}")
    return found


def plan(
    module: RNNBase | Mapping[str, Any],
    input_shape: Sequence[int],
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    sample: bool = True,
) -> Plan:
    """How a module would run, on a CPU or on a GPU that need not be there.

    Args:
        module: A GRU, an LSTM or a StochasticGRU, whose ``backend``, ``chunk_size`` and
            ``workspace_bytes`` count; or a mapping that one is made from: ``cell`` ("gru", "lstm",
            "stochastic_gru") and the constructor's arguments by name.
        input_shape: (seq_len, batch, input_size), (batch, seq_len, input_size) if ``batch_first``,
            or (seq_len, input_size).
        dtype: Of the tensors; the module's if None. Under autocast, the dtype of autocast. For
            float32 the plan depends on whether torch allows TF32 in recurrent layers at the time of
            this call: ``torch.backends.cudnn.rnn.fp32_precision``, "tf32" by default, or "ieee".
        device: "cpu", a CUDA device of this machine, or the name of a GPU: "A100", "H100", "H200",
            "B200", "L40S", "RTX 4090". The driver of a GPU of this machine is asked as well: it may
            have no room for all blocks of a kernel at once. None for the module's device; that of a
            mapping, or of a module on meta, is the GPU if there is one, else the CPU.
        sample: As in the call of a StochasticGRU.

    The plan also depends on :func:`fusedrnn.set_free_multiprocessors`, whose default differs if
    ``torch.distributed`` has joined several processes.

    Returns:
        The plan of the layer that takes the most workspace, in one direction. Layers differ only in
        the size of their input, and run one after the other.

    Raises:
        TypeError: ``module`` is neither a layer of fusedrnn nor a mapping of arguments that its
            class takes, the shape is no sequence of ints, or the dtype is no torch.dtype.
        ValueError: The cell, the shape or the device is not one of those above.
        RuntimeError: The dtype is not supported, there is no such CUDA device, the module's backend
            is "persistent" and that is not possible, or its ``workspace_bytes`` are too few for
            chunks of one step.

    Example::

        >>> sizes = {"cell": "gru", "input_size": 64, "hidden_size": 256}
        >>> plan = fusedrnn.plan(sizes, (1024, 64, 64), torch.bfloat16, device="H100")
        >>> plan.forward.backend, plan.forward.grid
        ('persistent', 128)
    """
    options = module
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
    widest, num_layers = module.input_size, module.num_layers
    if isinstance(options, Mapping):  # from which a module of two layers at most was made
        num_layers = options.get("num_layers", 1)
    if num_layers > 1:
        widest = max(widest, directions * output_size)
    if device is None:
        device = module.all_weights[0][0].device
        if device.type == "meta":
            device = "cuda" if torch.cuda.is_available() else "cpu"
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
    parts = {"forward": PassPlan, "backward": PassPlan, "memory": PlanMemory}
    named: Any = {name: parts[name](**made.pop(name)) for name in parts}
    recompute = module.recompute
    if recompute is None:
        recompute = not _plans.are_cheap_to_save(
            seq_len, batch, widest + output_size, module.hidden_size, num_layers * directions
        )
    recompute = recompute or not module.return_sequence
    if not recompute:
        us = named["backward"].modelled_us_without_recompute
        named["backward"] = replace(named["backward"], modelled_us=us)
        named["memory"] = _saving(named["memory"])
    return Plan(fp32_precision=precision, recompute=recompute, **named, **made)


def _saving(memory: PlanMemory) -> PlanMemory:
    """The memory of a layer that saves the pre-activations, from that of one that does not."""
    saved = memory.saved_bytes_without_recompute
    training = memory.training_bytes + saved - memory.saved_bytes
    return replace(memory, saved_bytes=saved, training_bytes=training)


def _module_of(options: Mapping[str, Any]) -> RNNBase:
    """The module that ``options`` describe, on meta; at most two layers matter to a plan."""
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
