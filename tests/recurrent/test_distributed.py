"""Two processes that train one Recurrent together, by gloo; replicas of DataParallel."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compiled.plain import loss_of
from torch import Tensor, nn

import fusedrnn

T, B, H = 9, 4, 6


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRUCell(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(x, h)
        return self.out(h), h


class Whole(nn.Module):
    """A model of one input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(H, H)
        self.rnn = fusedrnn.Recurrent(Cell(), chunk_size=4, **options)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.rnn(self.enter(x), torch.zeros(x.shape[1], H, dtype=x.dtype))


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(T, B, H, dtype=torch.float64)


def one_process() -> list[Tensor]:
    """Weights after two steps on the whole batch, half by half."""
    model = Whole(compile="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        total: Any = sum(loss_of(*model(half)) for half in rows().chunk(2, 1)) / 2
        total.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


Kinds = Sequence[tuple[str, dict[str, Any]]]
"""Whether by "ddp" or "fsdp", and options of the Recurrent."""


def work(rank: int, folder: str, kinds: Kinds) -> None:
    """Trains one model after the other: what takes long is to start a process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for i, (kind, options) in enumerate(kinds):
        model: Any = Whole(**options)
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model.rnn, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(*model(rows().chunk(2, 1)[rank])).backward()
            optimizer.step()
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        torch.save([weight.detach() for weight in weights], f"{folder}/{i} {rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that takes its group down


needs_distributed = pytest.mark.skipif(
    not dist.is_available(), reason="torch without torch.distributed"
)


def check_two_processes(folder: Path, kinds: Kinds) -> None:
    """Each has learnt what one process learns of both halves."""
    mp.spawn(work, (str(folder), kinds), nprocs=2)
    expected = one_process()
    for i, rank in itertools.product(range(len(kinds)), range(2)):
        found = torch.load(folder / f"{i} {rank}.pt")
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@needs_distributed
def test_two_processes(tmp_path: Path) -> None:
    replay, parallel = {"mode": "replay"}, {"mode": "parallel"}
    check_two_processes(tmp_path, [("ddp", replay), ("fsdp", replay), ("fsdp", parallel)])


def test_replica_as_in_data_parallel() -> None:
    """DataParallel's replicas hold plain tensors that are not leaves, as attributes."""
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H))
    replica = rnn._replicate_for_data_parallel()
    replica.cell = rnn.cell._replicate_for_data_parallel()
    for name, p in rnn.cell.named_parameters():
        setattr(replica.cell, name, p * 1)
    x = torch.randn(T, B, H)
    found = torch.autograd.grad(loss_of(*replica(x)), list(rnn.parameters()))
    other = copy.deepcopy(rnn)
    expected = torch.autograd.grad(loss_of(*other(x)), list(other.parameters()))
    torch.testing.assert_close(found, expected)
