"""What plans predict of the forward pass on GPUs that are not here: ``python -m bench.model``."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import fusedrnn

GPUS = ("A100", "H100", "B200", "L40S", "RTX 4090")
SIZES = ((16, 256), (64, 256), (64, 512), (32, 1024), (128, 1024), (256, 1024), (64, 2048))
CELLS = ("stochastic_gru", "gru", "lstm")


def main() -> None:
    """One table: microseconds per step of the recurrence, and s where it is stepwise."""
    table = Table("cell", "B", "H", *GPUS, title="Modelled microseconds per step, bfloat16")
    for cell in CELLS:
        for batch, size in SIZES:
            sizes = {"cell": cell, "input_size": size, "hidden_size": size}
            texts = []
            for gpu in GPUS:
                plan = fusedrnn.plan(sizes, (1024, batch, size), torch.bfloat16, gpu)
                note = " s" if plan.backend == "stepwise" else ""
                texts.append(f"{plan.modelled_step_us:.1f}{note}")
            table.add_row(cell, str(batch), str(size), *texts)
    Console().print(table)


if __name__ == "__main__":
    main()
