"""What plans predict for GPUs that are not here: ``python -m bench.model``."""

from __future__ import annotations

import itertools

import torch
from rich.console import Console
from rich.table import Table

import fusedrnn

from .cases import CUDA_SHAPES, Shape

GPUS = ("A100", "H100", "B200", "L40S", "RTX 4090")
SIZES = ((16, 256), (64, 256), (64, 512), (32, 1024), (128, 1024), (256, 1024), (64, 2048))
CELLS = ("stochastic_gru", "gru", "lstm")
DTYPES = (torch.bfloat16, torch.float32)


def main() -> None:
    """Microseconds per step of the forward recurrence, and bytes of chunks and of training."""
    console = Console()
    console.print(_step_table())
    console.print(_row_table())
    console.print(_memory_table())


def memory_ratio(cell: str, shape: Shape, dtype: torch.dtype, gpu: str = "H100") -> float:
    """Bytes of a training step by plan, over those of torch.nn.LSTM by count."""
    size = shape.hidden_size
    sizes = {"cell": cell, "input_size": size, "hidden_size": size}
    made = fusedrnn.plan(sizes, (shape.seq_len, shape.batch, size), dtype, gpu)
    return made.training_bytes / made.nn_lstm_training_bytes


def row_bytes(cell: str, dtype: torch.dtype, backend: str = "auto", gpu: str = "H100") -> float:
    """Workspace of backward for each row of a chunk, in units of H bytes, for I = Z = H = 512.

    Without what matrix products take to split the sums of long chunks, at most an eighth more.
    """
    batch, size, steps = 16, 512, 16
    short, long = (
        fusedrnn.plan(
            {
                "cell": cell,
                "input_size": size,
                "hidden_size": size,
                "chunk_size": count,
                "backend": backend,
            },
            (4096, batch, size),
            dtype,
            gpu,
        ).backward_workspace_bytes
        for count in (steps, 2 * steps)
    )
    return (long - short) / (steps * batch * size)


def _step_table() -> Table:
    table = Table(
        "cell", "B", "H", *GPUS, title="Modelled microseconds per step, bfloat16 (s: stepwise)"
    )
    for cell in CELLS:
        for batch, size in SIZES:
            sizes = {"cell": cell, "input_size": size, "hidden_size": size}
            texts = []
            for gpu in GPUS:
                plan = fusedrnn.plan(sizes, (1024, batch, size), torch.bfloat16, gpu)
                note = " s" if plan.backend == "stepwise" else ""
                texts.append(f"{plan.modelled_step_us:.1f}{note}")
            table.add_row(cell, str(batch), str(size), *texts)
    return table


def _row_table() -> Table:
    title = "Workspace of backward for each row of a chunk, in H bytes, I = Z = H, H100"
    table = Table("dtype", "backend", *CELLS, "output", title=title)
    for dtype, backend in itertools.product(DTYPES, ("auto", "stepwise")):
        sizes = (f"{row_bytes(cell, dtype, backend):.1f}" for cell in CELLS)
        table.add_row(str(dtype).removeprefix("torch."), backend, *sizes, str(dtype.itemsize))
    return table


def _memory_table() -> Table:
    names = [f"{cell} {str(dtype).removeprefix('torch.')}" for dtype in DTYPES for cell in CELLS]
    table = Table("shape", *names, title="Planned bytes of training over nn.LSTM's by count, H100")
    for shape in CUDA_SHAPES:
        ratios = [memory_ratio(cell, shape, dtype) for dtype in DTYPES for cell in CELLS]
        table.add_row(str(shape), *(f"{ratio:.3f}" for ratio in ratios))
    return table


if __name__ == "__main__":
    main()
