"""What is compared, at which sizes, against which targets: the one table of the benchmark."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fusedrnn

from .steps import (
    CellStep,
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
LOOP, COMPILED = "plain loop", "compiled loop"
OURS, SAVED = "fusedrnn", "fusedrnn, recompute=False"
OUR_GRU, SAVED_GRU = "fusedrnn.GRU", "fusedrnn.GRU, recompute=False"
OUR_LSTM, SAVED_LSTM = "fusedrnn.LSTM", "fusedrnn.LSTM, recompute=False"
GRU_CELL, LSTM_CELL = "nn.GRUCell", "nn.LSTMCell"
OUR_GRU_CELL, OUR_LSTM_CELL = "fusedrnn.GRUCell", "fusedrnn.LSTMCell"
OUR_CELL = "fusedrnn.StochasticGRUCell"
STEPWISE = "fusedrnn, stepwise"
STEPWISE_GRU, STEPWISE_LSTM = "fusedrnn.GRU, stepwise", "fusedrnn.LSTM, stepwise"
# And what each drops in for.
DROP_INS = {OUR_GRU: GRU, SAVED_GRU: GRU, STEPWISE_GRU: GRU}
DROP_INS |= {OUR_LSTM: LSTM, SAVED_LSTM: LSTM, STEPWISE_LSTM: LSTM}
LAST_GRU, LAST_LSTM = "fusedrnn.GRU, last state only", "fusedrnn.LSTM, last state only"
# These need a GPU.
REPLAYED, CAPTURED = "fusedrnn, stepwise, replayed chunks", "fusedrnn, CUDA graph"
BY_FLAGS, OVERLAPPED = "fusedrnn, exchange by flags", "fusedrnn, second stream"
GRAPHED = "plain loop, CUDA graph"
# What torch's take where the processor's launches cost nothing, which differs from host to host.
LSTM_GRAPHED, GRU_GRAPHED = "nn.LSTM, CUDA graph", "nn.GRU, CUDA graph"
# torch's beside persistent kernels, whose process is not that of the others.
LSTM_BESIDE, GRU_BESIDE = "nn.LSTM, beside", "nn.GRU, beside"
BESIDE = {LSTM: LSTM_BESIDE, GRU: GRU_BESIDE}
CHECKPOINTED, OFFLOADED = "plain loop, checkpoint", "plain loop, save_on_cpu"

ON_CPU = (LSTM, GRU, LOOP, COMPILED, OURS, SAVED, OUR_GRU, SAVED_GRU, OUR_LSTM, SAVED_LSTM)
# Of them, what there is time for without --all.
ON_CPU_SHORT = (LSTM, GRU, LOOP, OURS, OUR_GRU, OUR_LSTM)
# Those of a group run side by side in a process of their own, at every shape and dtype: a fault of
# a persistent kernel costs every contender of its process the GPU, so those without one come first.
# torch's LSTM and GRU run in both, so that ratios of what matters most are of the same rounds.
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
# In the order of tables.
ON_CUDA: tuple[str, ...] = (
    OURS,
    SAVED,
    STEPWISE,
    REPLAYED,
    BY_FLAGS,
    OVERLAPPED,
    LSTM,
    LSTM_BESIDE,
)
ON_CUDA += (GRU, GRU_BESIDE, LSTM_GRAPHED, GRU_GRAPHED, LOOP, GRAPHED, CAPTURED, *DROP_INS)
# And only then these, one by one: they are slow to run or to compile, and what the time budget does
# not reach is said to be missing.
ON_CUDA_LATER = (CHECKPOINTED, OFFLOADED, COMPILED)


LARGE = Shape(256, 64, 512)
SMALL = Shape(128, 32, 256)
OVER_SEQ_LEN = tuple(Shape(seq_len, 32, 256) for seq_len in (32, 64, 128, 256, 512))
# Two lengths of more than one chunk of time, so that the workspace has its full size.
OVER_SEQ_LEN_QUICK = tuple(Shape(seq_len, 32, 32) for seq_len in (32, 64))

LONG, LONG_QUICK = Shape(4096, 32, 256), Shape(256, 32, 32)  # whose last state is asked for
HAS_LAST_STATE_ONLY = "return_sequence" in inspect.signature(fusedrnn.GRU).parameters

# Upper bounds of ratios. Memory: peak of a training step over that of the other one.
MEMORY_LIMITS = {
    LARGE: {(OURS, LSTM): 0.15, (OUR_GRU, GRU): 0.35, (OUR_LSTM, LSTM): 0.2},
    SMALL: {(OURS, LSTM): 0.20, (OUR_GRU, GRU): 0.35, (OUR_LSTM, LSTM): 0.2},
    LONG: {(LAST_GRU, LSTM): 0.02, (LAST_LSTM, LSTM): 0.02},
}
# Time of a training step over that of the other one.
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
# Time of a backward pass whose gradients decay through denormals over that of an ordinary one.
DENORMAL_LIMIT = 1.2

# Calls whose multiplications take no longer than what surrounds them, and what each is compared
# with. torch has no StochasticGRU: it is compared with the GRU that it is otherwise, and its cell,
# of which most is to draw noise, with the loop over one step, which draws noise too.
ONE_STEP, SHORT_CALL = Shape(1, 1, 64), Shape(8, 8, 128)
_MODULES = {OUR_GRU: GRU, OUR_LSTM: LSTM, OURS: GRU, LOOP: GRU}
_CELLS = {OUR_GRU_CELL: GRU_CELL, OUR_LSTM_CELL: LSTM_CELL, OUR_CELL: LOOP}
CALLS = {ONE_STEP: _MODULES | _CELLS, SHORT_CALL: _MODULES}
# Time of ours over that of torch's, of a call under no_grad and of a training step.
CALL_LIMITS = {ONE_STEP: (1.2, 1.5), SHORT_CALL: (1.1, 1.1)}

# On a GPU, by value: what is measured first, in case that time runs out. By name: "tf32" is float32
# as torch has it by default, where recurrent layers may round products to TF32; "float32" has none.
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
CUDA_BUDGET_S = 150  # of each benchmark: five minutes for both
# Everywhere; but where both are bound by GEMMs in full float32, arithmetic sets the limit.
CUDA_SPEED_LIMITS = {(OURS, LOOP): 0.12, (OURS, GRAPHED): 0.55}
GEMM_BOUND = (Shape(256, 128, 1024), Shape(256, 64, 2048))
# In float16 there, cuDNN's LSTM has a persistent kernel.
CUDNN_PERSISTENT = Shape(1024, 16, 768)
# And by dtype and shape.
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
# Of the forward pass in bfloat16: microseconds per step of StochasticGRU, and of GRU and LSTM; and
# over the time of others.
CUDA_STEP_US = {
    Shape(1024, 16, 256): (2.0, 1.3),
    Shape(1024, 64, 256): (2.0, 1.3),
    Shape(1024, 64, 512): (2.5, 1.8),
    Shape(1024, 32, 1024): (3.5, 2.5),
}
CUDA_FORWARD_LIMITS = {(OURS, LSTM): 0.6, (OUR_GRU, GRU): 0.4, (OUR_LSTM, LSTM): 0.4}
# Persistent kernels, and the same stepwise.
PERSISTENT = {OURS: STEPWISE, OUR_GRU: STEPWISE_GRU, OUR_LSTM: STEPWISE_LSTM}

# StochasticGRU over chunk_size: the automatic one is to be this near to the fastest of those whose
# peak memory is within the target.
CHUNKS_KINDS = ("bfloat16",)
CHUNKS_SHAPES = (Shape(1024, 16, 256), Shape(1024, 64, 512), Shape(1024, 32, 1024))
CHUNKS_LIMIT = 1.03


def memory_limit(lstm_bytes: int) -> float:
    """Of the peak memory of a training step on a GPU, over this one of nn.LSTM's."""
    return 0.25 if lstm_bytes >= 1 << 30 else 0.5


def has_targets(shape: Shape, kind: str) -> bool:
    """Whether times on a GPU have targets of their own there; these are measured first."""
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
        """The rate of its GEMMs, in 10**12 operations a second; a multiply-add is two."""
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
REBUILT = (8, 8 + 8 + 5)
# W_ih and W_hh are 3 or 4 matrices each.
GRU_GEMMS, REBUILT_GRU = (3 + 3, 6 + 3), (3 + 3, 6 + 6 + 3)
LSTM_GEMMS, REBUILT_LSTM = (4 + 4, 8 + 4), (4 + 4, 8 + 8 + 4)
CONTENDERS: dict[str, Contender] = {
    **dict.fromkeys((LSTM, LSTM_BESIDE), Contender(_like(nn.LSTM), LSTM_GEMMS)),
    **dict.fromkeys((GRU, GRU_BESIDE), Contender(_like(nn.GRU), GRU_GEMMS)),
    LSTM_GRAPHED: Contender(_like(nn.LSTM), LSTM_GEMMS, GraphedStep),
    GRU_GRAPHED: Contender(_like(nn.GRU), GRU_GEMMS, GraphedStep),
    LOOP: Contender(_over(Loop), STOCHASTIC),
    COMPILED: Contender(_over(CompiledLoop), STOCHASTIC),
    GRAPHED: Contender(_over(Loop), STOCHASTIC, GraphedStep),
    CHECKPOINTED: Contender(_over(CheckpointedLoop), REBUILT),
    OFFLOADED: Contender(_over(OffloadedLoop), STOCHASTIC),
    OURS: Contender(_stochastic_gru, REBUILT),
    SAVED: Contender(_like(fusedrnn.StochasticGRU, recompute=False), STOCHASTIC),
    STEPWISE: Contender(_like(fusedrnn.StochasticGRU, backend="stepwise"), REBUILT),
    REPLAYED: Contender(_like(fusedrnn.StochasticGRU, backend="stepwise"), REBUILT, ReplayedStep),
    BY_FLAGS: Contender(_stochastic_gru, REBUILT, FlaggedStep),
    OVERLAPPED: Contender(_stochastic_gru, REBUILT, OverlappedStep),
    CAPTURED: Contender(_stochastic_gru, REBUILT, GraphedStep),
    OUR_GRU: Contender(_like(fusedrnn.GRU), REBUILT_GRU),
    SAVED_GRU: Contender(_like(fusedrnn.GRU, recompute=False), GRU_GEMMS),
    STEPWISE_GRU: Contender(_like(fusedrnn.GRU, backend="stepwise"), REBUILT_GRU),
    OUR_LSTM: Contender(_like(fusedrnn.LSTM), REBUILT_LSTM),
    SAVED_LSTM: Contender(_like(fusedrnn.LSTM, recompute=False), LSTM_GEMMS),
    STEPWISE_LSTM: Contender(_like(fusedrnn.LSTM, backend="stepwise"), REBUILT_LSTM),
    GRU_CELL: Contender(_like(nn.GRUCell), GRU_GEMMS, CellStep),
    LSTM_CELL: Contender(_like(nn.LSTMCell), LSTM_GEMMS, CellStep),
    OUR_GRU_CELL: Contender(_like(fusedrnn.GRUCell), REBUILT_GRU, CellStep),
    OUR_LSTM_CELL: Contender(_like(fusedrnn.LSTMCell), REBUILT_LSTM, CellStep),
    OUR_CELL: Contender(_like(fusedrnn.StochasticGRUCell), REBUILT, CellStep),
    LAST_GRU: Contender(_like(fusedrnn.GRU, return_sequence=False), REBUILT_GRU, LastStateStep),
    LAST_LSTM: Contender(_like(fusedrnn.LSTM, return_sequence=False), REBUILT_LSTM, LastStateStep),
}


@dataclass(frozen=True)
class Group:
    """Contenders that share a table.

    Attributes:
        title: Goes into the table's.
        over: Headings of columns of ratios, and from a contender to the one it is divided by.
    """

    title: str
    names: Sequence[str]
    over: dict[str, Callable[[str], str]]


def groups(names: Collection[str]) -> list[Group]:
    """StochasticGRU among its competitors; and GRU and LSTM, each next to torch's."""
    drop_ins = [GRU, GRU_BESIDE, OUR_GRU, SAVED_GRU, STEPWISE_GRU]
    drop_ins += [LSTM, LSTM_BESIDE, OUR_LSTM, SAVED_LSTM, STEPWISE_LSTM]
    of_torch = {beside: name for name, beside in BESIDE.items()}
    return [
        Group(
            "",
            [name for name in names if name not in DROP_INS],
            {"/ LSTM": lambda _: LSTM, "/ loop": lambda _: LOOP},
        ),
        Group(
            "GRU and LSTM, ",
            [name for name in drop_ins if name in names],
            {"/ torch.nn": lambda name: (DROP_INS | of_torch).get(name, name)},
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
    """Compiles the step for these widths, out of every clock; says why that is not possible."""
    try:
        for shape in shapes:
            training_step(COMPILED, Shape(3, shape.batch, shape.hidden_size)).train()
    except Exception as error:  # a compiler fails in many ways, each of them a fine answer
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"does not compile: {lines[0]}"
    return None
