"""What plans predict for GPUs that are not here: ``python -m bench.model``."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import fusedrnn

from .cases import CUDA_SHAPES, Shape

GPUS = ("A100", "H100", "B200", "L40S", "RTX 4090")
SIZES = ((16, 256), (64, 256), (64, 512), (32, 1024), (128, 1024), (256, 1024), (64, 2048))
CELLS = ("stochastic_gru", "gru", "lstm")
DTYPES = (torch.bfloat16, torch.float32)
GATES = {"stochastic_gru": 8, "gru": 6, "lstm": 8}  # rows of all weights, in units of H


def main() -> None:
    """Microseconds per step of the forward recurrence, and bytes of a training step."""
    console = Console()
    console.print(_step_table())
    console.print(_memory_table())


def memory_ratio(cell: str, shape: Shape, dtype: torch.dtype, gpu: str = "H100") -> float:
    """Bytes that training holds besides weights and input, over those of torch.nn.LSTM at least.

    Ours are planned, at the peak, in backward: the output, what is saved beside it, the gradients
    of the weights in the type of sums, and the workspace, or after it these gradients in the
    tensors' type. Its are counted: output, four gates and cell state of each step, and gradients.
    """
    size = shape.hidden_size
    sizes = {"cell": cell, "input_size": size, "hidden_size": size}
    made = fusedrnn.plan(sizes, (shape.seq_len, shape.batch, size), dtype, gpu)
    output_bytes = shape.output_bytes_in(dtype)
    rounded_bytes = 0 if dtype == torch.float32 else _weights(cell, size) * dtype.itemsize
    ours = output_bytes + made.saved_bytes_with_recompute
    ours += _weights(cell, size) * torch.float32.itemsize
    ours += max(made.backward_workspace_bytes, rounded_bytes)
    return ours / (6 * output_bytes + _weights("lstm", size) * dtype.itemsize)


def _weights(cell: str, size: int) -> int:
    """Numbers of a cell's weights and biases, input and latent as wide as the state."""
    rows = GATES[cell] * size
    return rows * size + rows


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


def _memory_table() -> Table:
    names = [f"{cell} {str(dtype).removeprefix('torch.')}" for dtype in DTYPES for cell in CELLS]
    table = Table("shape", *names, title="Planned bytes of training over nn.LSTM's by count, H100")
    for shape in CUDA_SHAPES:
        ratios = [memory_ratio(cell, shape, dtype) for dtype in DTYPES for cell in CELLS]
        table.add_row(str(shape), *(f"{ratio:.3f}" for ratio in ratios))
    return table


if __name__ == "__main__":
    main()
