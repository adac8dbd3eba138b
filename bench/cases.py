"""The contenders, sizes and targets of the benchmarks, in one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fusedrnn

from .steps import (
    CellLoop,
    CellStep,
    CheckpointedCellLoop,
    CheckpointedLoop,
    CompiledLoop,
    FlaggedStep,
    GraphedStep,
    LastStateStep,
    Loop,
    OffloadedLoop,
    OverlappedStep,
    ReplayedStep,
    Shape,
    TrainingStep,
)

THREADS = 2

LSTM, GRU = "nn.LSTM", "nn.GRU"
LOOP, COMPILED = "plain loop", "plain loop, torch.compile"
OURS, SAVED = "fusedrnn", "fusedrnn, recompute=False"
OUR_GRU, SAVED_GRU = "fusedrnn.GRU", "fusedrnn.GRU, recompute=False"
OUR_LSTM, SAVED_LSTM = "fusedrnn.LSTM", "fusedrnn.LSTM, recompute=False"
GRU_CELL, LSTM_CELL = "nn.GRUCell", "nn.LSTMCell"
OUR_GRU_CELL, OUR_LSTM_CELL = "fusedrnn.GRUCell", "fusedrnn.LSTMCell"
OUR_CELL = "fusedrnn.StochasticGRUCell"
STEPWISE = "fusedrnn, stepwise"
STEPWISE_GRU, STEPWISE_LSTM = "fusedrnn.GRU, stepwise", "fusedrnn.LSTM, stepwise"
# The module of torch that each drop-in replaces.
DROP_INS = {OUR_GRU: GRU, SAVED_GRU: GRU, STEPWISE_GRU: GRU}
DROP_INS |= {OUR_LSTM: LSTM, SAVED_LSTM: LSTM, STEPWISE_LSTM: LSTM}
# Loops over torch's cell, as people write them who change an LSTM.
LSTM_LOOP, CHECKPOINTED_LSTM_LOOP = "loop of nn.LSTMCell", "loop of nn.LSTMCell, checkpoint"
LSTM_LOOPS = (LSTM_LOOP, CHECKPOINTED_LSTM_LOOP)
LAST_GRU, LAST_LSTM = "fusedrnn.GRU, last state only", "fusedrnn.LSTM, last state only"
# These need a GPU.
REPLAYED, CAPTURED = "fusedrnn, stepwise, replayed chunks", "fusedrnn, CUDA graph"
BY_FLAGS, OVERLAPPED = "fusedrnn, exchange by flags", "fusedrnn, second stream"
GRAPHED = "plain loop, CUDA graph"
# torch's modules in a CUDA graph, where launches cost nothing; their cost differs between hosts.
LSTM_GRAPHED, GRU_GRAPHED = "nn.LSTM, CUDA graph", "nn.GRU, CUDA graph"
# torch's modules again, in the process that runs persistent kernels.
LSTM_BESIDE, GRU_BESIDE = "nn.LSTM, beside", "nn.GRU, beside"
BESIDE = {LSTM: LSTM_BESIDE, GRU: GRU_BESIDE}
CHECKPOINTED, OFFLOADED = "plain loop, checkpoint", "plain loop, save_on_cpu"

ON_CPU = (LSTM, GRU, LOOP, COMPILED, OURS, SAVED, OUR_GRU, SAVED_GRU, OUR_LSTM, SAVED_LSTM)
ON_CPU += LSTM_LOOPS
# The contenders for which there is time without --all.
ON_CPU_SHORT = (LSTM, GRU, LOOP, OURS, OUR_GRU, OUR_LSTM)
# The contenders of a group run side by side in one process, at every shape and dtype. A fault of a
# persistent kernel costs every contender of its process the GPU, so groups without one come first.
# torch's LSTM and GRU run in both, so that the most important ratios are from the same rounds.
ON_CUDA_TOGETHER: tuple[tuple[str, ...], ...] = (
    (
        LSTM,
        GRU,
        LSTM_GRAPHED,
        GRU_GRAPHED,
        LOOP,
        GRAPHED,
        STEPWISE,
        REPLAYED,
        STEPWISE_GRU,
        STEPWISE_LSTM,
    ),
    (
        *(LSTM_BESIDE, GRU_BESIDE, OURS, OUR_GRU, OUR_LSTM),
        *(SAVED, SAVED_GRU, SAVED_LSTM, BY_FLAGS, OVERLAPPED, CAPTURED),
    ),
)
# All contenders, in the order of tables.
ON_CUDA: tuple[str, ...] = (OURS, SAVED, STEPWISE, REPLAYED, BY_FLAGS, OVERLAPPED)
ON_CUDA += (LSTM, LSTM_BESIDE, GRU, GRU_BESIDE, LSTM_GRAPHED, GRU_GRAPHED, LOOP, GRAPHED, CAPTURED)
ON_CUDA += tuple(DROP_INS)
# Contenders that run last, one by one, because they are slow to run or to compile; those that the
# time budget does not reach are reported as missing.
ON_CUDA_LATER = (CHECKPOINTED, OFFLOADED, COMPILED)


LARGE = Shape(256, 64, 512)
SMALL = Shape(128, 32, 256)
OVER_SEQ_LEN = tuple(Shape(seq_len, 32, 256) for seq_len in (32, 64, 128, 256, 512))
# Two lengths of more than one chunk of time, so that the workspace has its full size, and so long
# that backward recomputes.
OVER_SEQ_LEN_QUICK = tuple(Shape(seq_len, 32, 256) for seq_len in (72, 80))

LONG, LONG_QUICK = Shape(4096, 32, 256), Shape(256, 32, 32)  # for the last state alone
HAS_LAST_STATE_ONLY = "return_sequence" in inspect.signature(fusedrnn.GRU).parameters

# Upper bounds of ratios. Memory: the peak of a training step over the peak of the other contender.
MEMORY_LIMITS = {
    LARGE: {(OURS, LSTM): 0.15, (OUR_GRU, GRU): 0.35, (OUR_LSTM, LSTM): 0.2},
    SMALL: {(OURS, LSTM): 0.20, (OUR_GRU, GRU): 0.35, (OUR_LSTM, LSTM): 0.2},
    LONG: {(LAST_GRU, LSTM): 0.02, (LAST_LSTM, LSTM): 0.02},
}
# Time of a training step over the time of the other contender.
GEMMS, SAVED_GEMMS = "GEMMs alone", "GEMMs alone, recompute=False"
SPEED_LIMITS = {
    SMALL: {
        (OURS, GEMMS): 1.15,
        (OURS, LSTM): 1.6,
        (OURS, LOOP): 1.05,
        (SAVED, SAVED_GEMMS): 1.15,
        (SAVED, LSTM): 1.2,
        (SAVED, LOOP): 0.85,
    }
}
SPEED_LIMITS[LARGE] = SPEED_LIMITS[SMALL] | {
    (OUR_GRU, GRU): 1.45,
    (SAVED_GRU, GRU): 1.1,
    (OUR_LSTM, LSTM): 1.45,
    (SAVED_LSTM, LSTM): 1.1,
}
# Time of a backward pass whose gradients decay through denormals, over an ordinary backward pass.
DENORMAL_LIMIT = 1.2

# Calls whose multiplications take no longer than the work around them, and the contender that each
# is compared with. torch has no StochasticGRU: the module is compared with nn.GRU, and its cell,
# which mostly draws noise, with the loop over one step, which draws noise too.
ONE_STEP, SHORT_CALL = Shape(1, 1, 64), Shape(8, 8, 128)
_MODULES = {OUR_GRU: GRU, OUR_LSTM: LSTM, OURS: GRU, LOOP: GRU}
_CELLS = {OUR_GRU_CELL: GRU_CELL, OUR_LSTM_CELL: LSTM_CELL, OUR_CELL: LOOP}
CALLS = {ONE_STEP: _MODULES | _CELLS, SHORT_CALL: _MODULES}
# Time of our module over torch's: of a call under no_grad, and of a training step.
CALL_LIMITS = {ONE_STEP: (1.2, 1.5), SHORT_CALL: (1.1, 1.1)}

# The dtypes on a GPU, in the order of measurement, since time may run out. "tf32" is float32 as it
# is by default, where recurrent layers may round products to TF32; "float32" rounds none.
TF32 = "tf32"
CUDA_KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CUDA_KINDS |= {TF32: torch.float32, "float32": torch.float32}
CUDA_SHAPES = (
    Shape(1024, 16, 256),
    Shape(1024, 64, 256),
    Shape(1024, 64, 512),
    Shape(1024, 16, 768),
    Shape(1024, 32, 1024),
    Shape(256, 128, 1024),
    Shape(256, 64, 2048),
)
CUDA_QUICK = Shape(16, 32, 32)
CUDA_BUDGET_S = 150  # for each of the two benchmarks
# Limits for every dtype and shape, except where GEMMs in full float32 bound both contenders.
CUDA_SPEED_LIMITS = {(OURS, LOOP): 0.12, (OURS, GRAPHED): 0.55}
GEMM_BOUND = (Shape(256, 128, 1024), Shape(256, 64, 2048))
# In float16, cuDNN's LSTM has a persistent kernel for this shape.
CUDNN_PERSISTENT = Shape(1024, 16, 768)
# Limits by dtype and shape.
_DROP_IN_LIMITS = {(OUR_GRU, GRU): 0.5, (OUR_LSTM, LSTM): 0.5}
CUDA_TRAINING_LIMITS: dict[str, dict[Shape, dict[tuple[str, str], float]]] = {
    "bfloat16": {
        Shape(1024, 16, 256): {
            (OURS, LSTM): 0.45,
            (OUR_GRU, LSTM): 0.3,
            **_DROP_IN_LIMITS,
            (OUR_LSTM, LSTM): 0.35,
        },
        Shape(1024, 64, 256): {(OURS, LSTM): 0.45, **_DROP_IN_LIMITS},
        Shape(1024, 64, 512): {(OURS, LSTM): 0.6, **_DROP_IN_LIMITS},
        Shape(1024, 16, 768): _DROP_IN_LIMITS,
        Shape(1024, 32, 1024): {(OURS, LSTM): 0.7, **_DROP_IN_LIMITS},
        Shape(256, 128, 1024): {(OURS, LSTM): 1.0, **_DROP_IN_LIMITS},
    },
    "float16": {CUDNN_PERSISTENT: {(OUR_LSTM, LSTM): 1.0}},
    TF32: {
        Shape(1024, 16, 256): {(OURS, LSTM): 1.0, (OUR_GRU, LSTM): 1.0, (OUR_LSTM, LSTM): 1.0},
    },
}
# Limits of the forward pass in bfloat16: microseconds per step of StochasticGRU, and of GRU and
# LSTM; and ratios to other contenders.
CUDA_STEP_US = {
    Shape(1024, 16, 256): (2.0, 1.3),
    Shape(1024, 64, 256): (2.0, 1.3),
    Shape(1024, 64, 512): (2.5, 1.8),
    Shape(1024, 32, 1024): (3.5, 2.5),
}
CUDA_FORWARD_LIMITS = {(OURS, LSTM): 0.6, (OUR_GRU, GRU): 0.4, (OUR_LSTM, LSTM): 0.4}
# Contenders with persistent kernels, and the same modules stepwise.
PERSISTENT = {OURS: STEPWISE, OUR_GRU: STEPWISE_GRU, OUR_LSTM: STEPWISE_LSTM}

# StochasticGRU over chunk_size: the limit of the automatic chunk's time over the fastest chunk's
# time, of the chunks whose peak memory is within the target.
CHUNKS_KINDS = ("bfloat16",)
CHUNKS_SHAPES = (Shape(1024, 16, 256), Shape(1024, 64, 512), Shape(1024, 32, 1024))
CHUNKS_LIMIT = 1.03


def memory_limit(lstm_bytes: int) -> float:
    """The limit of the peak memory of a training step on a GPU, over nn.LSTM's peak."""
    return 0.25 if lstm_bytes >= 1 << 30 else 0.5


def has_targets(shape: Shape, kind: str) -> bool:
    """Whether the case has targets of time on a GPU; such cases are measured first."""
    return shape in CUDA_TRAINING_LIMITS.get(kind, {})


@dataclass(frozen=True)
class Contender:
    """One way to run a recurrent cell over a sequence, and to train it.

    Attributes:
        make: From a width to a module that maps (T, B, H) to (output, state).
        gemms: Products of a row of the sequence with an (H, H) matrix, in forward and in backward:
            one per matrix, again for its gradient, again to go back through it unless that leads
            to the input, and again for each time that it is computed anew.
        step: How a training step of the module runs.
    """

    make: Callable[[int], nn.Module]
    gemms: tuple[int, int]
    step: type[TrainingStep] = TrainingStep

    def tflops(self, shape: Shape, time_ms: float, *, training: bool) -> float:
        """The rate of the GEMMs in 10**12 operations a second; a multiply-add counts as two."""
        forward, backward = self.gemms
        products = forward + backward if training else forward
        operations = 2 * products * shape.seq_len * shape.batch * shape.hidden_size**2
        return operations / (1e9 * time_ms)


def _like(module: Callable[..., nn.Module], **options: Any) -> Callable[[int], nn.Module]:
    return lambda hidden_size: module(hidden_size, hidden_size, **options)


_stochastic_gru = _like(fusedrnn.StochasticGRU)


def _over(loop: Callable[[fusedrnn.StochasticGRU], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda hidden_size: loop(fusedrnn.StochasticGRU(hidden_size, hidden_size))


# W_ih and W_zh are 3 matrices each, W_hz is 2. All have a gradient, and W_ih leads to the input.
STOCHASTIC = (8, 8 + 5)
RECOMPUTED = (8, 8 + 8 + 5)
# W_ih and W_hh are 3 or 4 matrices each.
GRU_GEMMS, RECOMPUTED_GRU = (3 + 3, 6 + 3), (3 + 3, 6 + 6 + 3)
LSTM_GEMMS, RECOMPUTED_LSTM = (4 + 4, 8 + 4), (4 + 4, 8 + 8 + 4)
CONTENDERS: dict[str, Contender] = {
    **dict.fromkeys((LSTM, LSTM_BESIDE), Contender(_like(nn.LSTM), LSTM_GEMMS)),
    **dict.fromkeys((GRU, GRU_BESIDE), Contender(_like(nn.GRU), GRU_GEMMS)),
    LSTM_LOOP: Contender(_like(CellLoop), LSTM_GEMMS),
    CHECKPOINTED_LSTM_LOOP: Contender(_like(CheckpointedCellLoop), RECOMPUTED_LSTM),
    LSTM_GRAPHED: Contender(_like(nn.LSTM), LSTM_GEMMS, GraphedStep),
    GRU_GRAPHED: Contender(_like(nn.GRU), GRU_GEMMS, GraphedStep),
    LOOP: Contender(_over(Loop), STOCHASTIC),
    COMPILED: Contender(_over(CompiledLoop), STOCHASTIC),
    GRAPHED: Contender(_over(Loop), STOCHASTIC, GraphedStep),
    CHECKPOINTED: Contender(_over(CheckpointedLoop), RECOMPUTED),
    OFFLOADED: Contender(_over(OffloadedLoop), STOCHASTIC),
    OURS: Contender(_stochastic_gru, RECOMPUTED),
    SAVED: Contender(_like(fusedrnn.StochasticGRU, recompute=False), STOCHASTIC),
    STEPWISE: Contender(_like(fusedrnn.StochasticGRU, backend="stepwise"), RECOMPUTED),
    REPLAYED: Contender(
        _like(fusedrnn.StochasticGRU, backend="stepwise"), RECOMPUTED, ReplayedStep
    ),
    BY_FLAGS: Contender(_stochastic_gru, RECOMPUTED, FlaggedStep),
    OVERLAPPED: Contender(_stochastic_gru, RECOMPUTED, OverlappedStep),
    CAPTURED: Contender(_stochastic_gru, RECOMPUTED, GraphedStep),
    OUR_GRU: Contender(_like(fusedrnn.GRU), RECOMPUTED_GRU),
    SAVED_GRU: Contender(_like(fusedrnn.GRU, recompute=False), GRU_GEMMS),
    STEPWISE_GRU: Contender(_like(fusedrnn.GRU, backend="stepwise"), RECOMPUTED_GRU),
    OUR_LSTM: Contender(_like(fusedrnn.LSTM), RECOMPUTED_LSTM),
    SAVED_LSTM: Contender(_like(fusedrnn.LSTM, recompute=False), LSTM_GEMMS),
    STEPWISE_LSTM: Contender(_like(fusedrnn.LSTM, backend="stepwise"), RECOMPUTED_LSTM),
    GRU_CELL: Contender(_like(nn.GRUCell), GRU_GEMMS, CellStep),
    LSTM_CELL: Contender(_like(nn.LSTMCell), LSTM_GEMMS, CellStep),
    OUR_GRU_CELL: Contender(_like(fusedrnn.GRUCell), RECOMPUTED_GRU, CellStep),
    OUR_LSTM_CELL: Contender(_like(fusedrnn.LSTMCell), RECOMPUTED_LSTM, CellStep),
    OUR_CELL: Contender(_like(fusedrnn.StochasticGRUCell), RECOMPUTED, CellStep),
    LAST_GRU: Contender(_like(fusedrnn.GRU, return_sequence=False), RECOMPUTED_GRU, LastStateStep),
    LAST_LSTM: Contender(
        _like(fusedrnn.LSTM, return_sequence=False), RECOMPUTED_LSTM, LastStateStep
    ),
}


@dataclass(frozen=True)
class Group:
    """Contenders that share a table.

    Attributes:
        title: Goes into the table's.
        over: Headings of columns of ratios, each with a mapping from a contender to its divisor.
    """

    title: str
    names: Sequence[str]
    over: dict[str, Callable[[str], str]]


def groups(names: Collection[str]) -> list[Group]:
    """StochasticGRU with its competitors; and GRU and LSTM, each next to torch's."""
    drop_ins = [GRU, GRU_BESIDE, OUR_GRU, SAVED_GRU, STEPWISE_GRU]
    drop_ins += [LSTM, LSTM_BESIDE, OUR_LSTM, SAVED_LSTM, STEPWISE_LSTM, *LSTM_LOOPS]
    over = DROP_INS | {beside: name for name, beside in BESIDE.items()}
    over |= dict.fromkeys(LSTM_LOOPS, LSTM)
    return [
        Group(
            "",
            [name for name in names if name not in (*DROP_INS, *LSTM_LOOPS)],
            {"/ LSTM": lambda _: LSTM, "/ loop": lambda _: LOOP},
        ),
        Group(
            "GRU and LSTM, ",
            [name for name in drop_ins if name in names],
            {"/ torch.nn": lambda name: over.get(name, name)},
        ),
    ]


LAST_STATE = Group("last state only, ", (LSTM, LAST_GRU, LAST_LSTM), {"/ LSTM": lambda _: LSTM})


def training_step(
    name: str, shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainingStep:
    """A training step of the contender of this name."""
    contender = CONTENDERS[name]
    return contender.step(contender.make, shape, device, dtype)


def why_not_compiled(shapes: list[Shape]) -> str | None:
    """Compiles the step for these widths before time is taken; returns why that is impossible."""
    try:
        for shape in shapes:
            training_step(COMPILED, Shape(3, shape.batch, shape.hidden_size)).train()
    except Exception as error:  # a compiler fails in many ways; each is a reason to report
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"does not compile: {lines[0]}"
    return None
