"""A shared encoder, and a small network for each author: a process needs one of these at a time.

    python -m docs.examples.weight_bank --steps 300

An author is a module of Python's standard library, and its task is to predict the next character
of that module. All authors share an LSTM. Each has a GRU and a linear layer of its own, which are
in a ``fusedrnn.WeightBank``. Two processes train together, each with half of the authors:
DistributedDataParallel averages the gradients of the LSTM, the bank those of the authors in use.

The same model with an ``nn.ModuleList`` is trained in one process, with the batches of both. Its
losses are the same: a bank changes where weights are, and not what they learn.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import fusedrnn
from bench.text import ALPHABET, CLASSES, windows

RANKS = 2
DEFAULTS = {"steps": 300, "window": 32, "batch": 32, "width": 64, "authors": 16, "lr": 0.01}
Losses = tuple[list[float], list[float]]  # of all authors, before and after


class Author(nn.Module):
    """theta[t]: what one author has of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.head = fusedrnn.GRU(width, width), nn.Linear(width, CLASSES)

    def forward(self, encoded: Tensor) -> Tensor:
        return self.head(self.rnn(encoded)[0])


class Model(nn.Module):
    """Theta, which all authors share, and theta[t] of each."""

    def __init__(self, options: argparse.Namespace, *, use_bank: bool) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights for all
        self.encoder = fusedrnn.LSTM(CLASSES, options.width)
        made = nn.ModuleList(Author(options.width) for _ in range(options.authors))
        self.authors = fusedrnn.WeightBank(made, device="cpu") if use_bank else made

    def forward(self, t: int, text: Tensor) -> Tensor:
        """The loss of author ``t`` on a window (window + 1, batch)."""
        encoded, _ = self.encoder(F.one_hot(text[:-1], CLASSES).float())
        use_bank = isinstance(self.authors, fusedrnn.WeightBank)
        logits = self.authors(t, encoded) if use_bank else self.authors[t](encoded)
        return F.cross_entropy(logits.flatten(0, 1), text[1:].flatten()) / math.log(2)


def texts(options: argparse.Namespace) -> dict[str, Tensor]:
    """The windows of each author: the largest modules. Nobody trains on the last window."""
    found, paths = {}, Path(sysconfig.get_path("stdlib")).glob("*.py")
    for path in sorted(paths, key=lambda path: path.stat().st_size)[-options.authors :]:
        # What is not in the alphabet is of the last class.
        text = torch.tensor([ALPHABET.find(byte) % CLASSES for byte in path.read_bytes()])
        found[path.stem] = windows(text, options.batch, options.window)
    return found


def batches(data: list[Tensor], rank: int, steps: int) -> Iterator[tuple[int, Tensor]]:
    """What a rank trains on: its authors in turn."""
    own = range(rank, len(data), RANKS)
    for k in range(steps):
        t, turn = own[k % len(own)], k // len(own)
        yield t, data[t][turn % (len(data[t]) - 1)]


@torch.no_grad()
def losses(model: nn.Module, data: list[Tensor]) -> list[float]:
    """Of all authors, so also of those that only the other rank has used."""
    return [model(t, text[-1]).item() for t, text in enumerate(data)]


def train_bank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One of two processes. The first one saves the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    data, model = [*texts(options).values()], Model(options, use_bank=True)
    trained = DistributedDataParallel(fusedrnn.WeightBank.exclude(model))
    shared = AdamW(model.encoder.parameters(), lr=options.lr)
    own = model.authors.optimizer(AdamW, lr=options.lr)
    before = losses(model, data)
    for t, text in model.authors.prefetching(batches(data, rank, options.steps)):
        trained(t, text).backward()
        for optimizer in (shared, own):
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        torch.save((before, losses(model, data)), f"{folder}/losses")
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that takes its group down


def train_list(model: Model, options: argparse.Namespace) -> Losses:
    """One process with the batches of both."""
    data = [*texts(options).values()]
    optimizer = AdamW(model.parameters(), lr=options.lr)
    before = losses(model, data)
    of_ranks = [batches(data, rank, options.steps) for rank in range(RANKS)]
    for first, second in zip(*of_ranks, strict=True):
        ((model(*first) + model(*second)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, losses(model, data)


def main(arguments: list[str] | None = None) -> dict[str, Losses]:
    """Trains both models and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"({value})")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_bank, (options, folder), nprocs=RANKS)
        results = {"WeightBank, two processes": torch.load(f"{folder}/losses")}
    results["ModuleList, one process"] = train_list(Model(options, use_bank=False), options)
    table = Table("authors", *results, title=f"bits per character, {options.steps} steps")
    for rank in range(RANKS):
        means = [[f"{mean(part[rank::RANKS]):.4f}" for part in pair] for pair in results.values()]
        names = ", ".join([*texts(options)][rank::RANKS])
        table.add_row(f"of rank {rank}: {names}", *(" → ".join(pair) for pair in means))
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
