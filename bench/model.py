"""Predictions of plans for GPUs that are not in this machine: ``python -m bench.model``."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import fusedrnn
from fusedrnn import _helpers

from .cases import CUDA_KINDS, CUDA_SHAPES, TF32, Shape
from .report import Screen, Table, set_up_torch

GPU = "H100"
GPUS = ("A100", GPU, "B200", "L40S", "RTX 4090")
SIZES = ((16, 256), (64, 256), (64, 512), (32, 1024), (128, 1024), (256, 1024), (64, 2048))
CELLS = ("stochastic_gru", "gru", "lstm")
KINDS = tuple(kind for kind in CUDA_KINDS if kind != "float16")  # its plans are bfloat16's


def main() -> None:
    """Prints the costs of steps and chunks, the bytes of a row, and automatic chunks."""
    screen = Screen()
    screen.table(step_table())
    screen.table(work_table())
    screen.table(row_table())
    reasons: list[str] = []
    for kind in KINDS:
        screen.table(chunk_table(kind, reasons))
    lines = [[str(i), reason] for i, reason in enumerate(reasons, 1)]
    screen.table(Table("Why there are K steps in a chunk", ["", "reason"], lines))


def plan(
    cell: str, shape: Shape, dtype: torch.dtype, gpu: str = GPU, **options: Any
) -> fusedrnn.Plan:
    """The plan of a layer whose input and latent are as wide as its state."""
    size = shape.hidden_size
    options |= {"cell": cell, "input_size": size, "hidden_size": size}
    return fusedrnn.plan(options, (shape.seq_len, shape.batch, size), dtype, gpu)


def row_bytes(cell: str, dtype: torch.dtype, backend: str = "auto") -> float:
    """Workspace of backward for each row of a chunk, in units of H bytes, for I = Z = H = 512.

    Memory for splitting the sums of matrix products is left out; it is at most an eighth more.
    """
    shape, steps = Shape(4096, 16, 512), 16
    short, long = (
        plan(cell, shape, dtype, chunk_size=count, backend=backend).backward.workspace_bytes
        for count in (steps, 2 * steps)
    )
    return (long - short) / (steps * shape.batch * shape.hidden_size)


def step_table() -> Table:
    """The steps of forward on several GPUs."""
    lines = []
    for cell, (batch, size) in itertools.product(CELLS, SIZES):
        texts = []
        for gpu in GPUS:
            made = plan(cell, Shape(1024, batch, size), torch.bfloat16, gpu)
            note = " s" if made.forward.backend == "stepwise" else ""
            texts.append(f"{made.forward.modelled_step_us:.1f}{note}")
        lines.append([cell, str(batch), str(size), *texts])
    title = "Modelled microseconds per step of forward, bfloat16 (s: stepwise)"
    return Table(title, ["cell", "B", "H", *GPUS], lines)


def work_table() -> Table:
    """The work that a pass does once per chunk, and its time by the model."""
    us = _helpers.MODEL_US
    lines = []
    for cell, persistent, backward in itertools.product(CELLS, (True, False), (False, True)):
        counts = _helpers.chunk_counts(
            cell=cell,
            backward=backward,
            persistent=persistent,
            element_bytes=torch.bfloat16.itemsize,
            steps=1,
            recompute=True,
        )
        fixed_us = sum(us[name] * counts[name] for name in ("gemm", "launch"))
        fixed_us += us["kernel"] if persistent else 0
        texts = ["persistent" if persistent else "stepwise", "backward" if backward else "forward"]
        texts += [str(counts["gemm"]), str(counts["launch"]), f"{fixed_us:.0f}"]
        lines.append([cell, *texts])
    title = "What a chunk takes besides its steps and the arithmetic of GEMMs, 16 bits"
    return Table(title, ["cell", "", "", "GEMMs", "launches", "us"], lines)


def row_table() -> Table:
    """The bytes of a row, which limit the length of chunks."""
    lines = []
    for kind, backend in itertools.product(KINDS, ("auto", "stepwise")):
        set_up_torch(tf32=kind == TF32)
        dtype = CUDA_KINDS[kind]
        sizes = (f"{row_bytes(cell, dtype, backend):.1f}" for cell in CELLS)
        lines.append([kind, backend, *sizes, str(dtype.itemsize)])
    title = f"Workspace of backward for each row of a chunk, in H bytes, I = Z = H, {GPU}"
    return Table(title, ["dtype", "backend", *CELLS, "output"], lines)


def chunk_table(kind: str, reasons: list[str]) -> Table:
    """Automatic chunks at the shapes of the benchmark, and the memory of training with them.

    ``reasons``: the reasons for their lengths; new ones are added.
    """
    set_up_torch(tf32=kind == TF32)
    lines = []
    for shape, cell in itertools.product(CUDA_SHAPES, CELLS):
        made = plan(cell, shape, CUDA_KINDS[kind])
        us = made.forward.modelled_us + made.backward.modelled_us
        memory = made.memory.training_bytes / made.memory.nn_lstm_training_bytes
        if made.chunk_reason not in reasons:
            reasons.append(made.chunk_reason)
        why = str(1 + reasons.index(made.chunk_reason))
        numbers = [str(made.chunk_steps), why, f"{us / shape.seq_len:.1f}", f"{memory:.3f}"]
        ways = [made.forward.backend, made.backward.backend]
        lines.append([str(shape), cell, *ways, *numbers])
    columns = ["shape", "cell", "forward", "backward", "K", "why", "us / step", "memory / LSTM"]
    title = f"Training in chunks of K steps, {GPU}, {kind}, time by model and memory by count"
    return Table(title, columns, lines)


if __name__ == "__main__":
    main()
