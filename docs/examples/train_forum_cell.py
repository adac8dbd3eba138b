"""Trains a cell written by hand, wrapped in one line, on real text.

    python -m docs.examples.train_forum_cell --steps 60

The text is the source code of Python's standard library. Three models learn it with the same
weights at the start: the cell of latent_cells.py in a plain loop, the same cell in
``fusedrnn.Recurrent``, and ``fusedrnn.StochasticGRU``, which is this cell in C++ and CUDA. The last
two see the same noise, so their losses agree; the loop draws noise of its own. Prints the loss, the
peak memory of a training step, and characters per second of each.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fusedrnn
from bench.clock import measure_memory
from bench.text import CLASSES, standard_library, windows

from .latent_cells import ForumCell


class PlainLoop(nn.Module):
    """What one writes without this package."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, input: Tensor, h: Tensor, generator: Any = None) -> tuple[Tensor, Tensor]:
        outputs = []
        for x in input:
            h = self.cell(x, h)
            outputs.append(h)
        return torch.stack(outputs), h


class Layer(nn.Module):
    """StochasticGRU with a state without its dimension of layers, as the others have it."""

    def __init__(self, cell: ForumCell) -> None:
        super().__init__()
        width = cell.hidden_size
        self.layer = fusedrnn.StochasticGRU(cell.weight_ih.shape[1], width, width)
        weights = {f"{name}_l0": value for name, value in cell.state_dict().items()}
        self.layer.load_state_dict(weights)

    def forward(self, input: Tensor, h: Tensor, generator: Any = None) -> tuple[Tensor, Tensor]:
        output, h_n = self.layer(input, h.unsqueeze(0), generator=generator)
        return output, h_n[0]


MODELS: dict[str, Callable[[ForumCell], nn.Module]] = {
    "plain loop": PlainLoop,
    "Recurrent": fusedrnn.Recurrent,  # the one line
    "StochasticGRU": Layer,
}


class Text(nn.Module):
    """An embedding, a recurrent layer and a linear layer."""

    def __init__(self, make: Callable[[ForumCell], nn.Module], width: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights for all
        self.embedding, self.linear = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES)
        self.rnn = make(ForumCell(width, width))

    def forward(self, text: Tensor, h: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Mean loss in bits per character of a window (window + 1, batch), and the last state."""
        generator = torch.Generator().manual_seed(seed)
        output, h = self.rnn(self.embedding(text[:-1]), h, generator=generator)
        logits = self.linear(output).flatten(0, 1)
        return F.cross_entropy(logits, text[1:].flatten()) / math.log(2), h


def train(name: str, steps: int, window: int, batch: int, width: int) -> dict[str, Any]:
    """Losses of all updates, seconds of an update, and the peak bytes of one."""
    model = Text(MODELS[name], width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    text = windows(standard_library().train, batch, window)
    h, losses, seconds = torch.zeros(batch, width), [], []
    for k in range(steps):
        begin = time.perf_counter()
        loss, h = model(text[k % len(text)], h.detach(), seed=k)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    start = torch.zeros(batch, width)
    memory = measure_memory(lambda: model(text[0], start, seed=0)[0].backward())
    return {"losses": losses, "seconds": median(seconds), "peak_bytes": memory.peak_bytes}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Trains all models and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    defaults = {"steps": 60, "window": 256, "batch": 32, "width": 256}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in defaults}
    results = {name: train(name, **sizes) for name in MODELS}
    title = "{steps} updates, window {window}, B={batch}, width {width}".format(**sizes)
    table = Table("", "bits/char at the end", "peak MiB", "chars/s", title=title)
    for name, result in results.items():
        characters = options.window * options.batch / result["seconds"]
        peak = result["peak_bytes"] / 2**20
        table.add_row(name, f"{result['losses'][-1]:.4f}", f"{peak:.1f}", f"{characters:,.0f}")
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
