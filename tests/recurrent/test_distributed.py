"""Two processes that train one Recurrent together, by gloo; replicas of DataParallel."""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compiler.interpreted import interpreted
from runtime.plain import loop as plain_loop
from runtime.plain import loss_of
from torch import Tensor, nn

import fusedrnn
from fusedrnn._compiler import pipeline

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 9, 4, 6
KINDS = ["ddp", "fsdp"]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRUCell(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(x, h)
        return self.out(h), h


class Whole(nn.Module):
    """A model of one input."""

    def __init__(self, compile: str = "never") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(H, H)
        self.rnn = fusedrnn.Recurrent(Cell(), chunk_size=4, compile=compile)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.rnn(self.enter(x), torch.zeros(x.shape[1], H, dtype=x.dtype))


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(T, B, H, dtype=torch.float64)


def one_process() -> list[Tensor]:
    """Weights after two steps on the whole batch, half by half."""
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        total: Any = sum(loss_of(*model(half)) for half in rows().chunk(2, 1)) / 2
        total.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def work(rank: int, folder: str, compile: str) -> None:
    """Trains one model after the other: what takes long is to start a process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for kind in KINDS:
        model: Any = Whole(compile)
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
        torch.save([weight.detach() for weight in weights], f"{folder}/{kind} {rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that takes its group down


needs_distributed = pytest.mark.skipif(
    not dist.is_available(), reason="torch without torch.distributed"
)


def check_two_processes(folder: Path, compile: str) -> None:
    """Each has learnt what one process learns of both halves."""
    mp.spawn(work, (str(folder), compile), nprocs=2)
    expected = one_process()
    for kind, rank in itertools.product(KINDS, range(2)):
        found = torch.load(folder / f"{kind} {rank}.pt")
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@needs_distributed
def test_two_processes(tmp_path: Path) -> None:
    check_two_processes(tmp_path, "never")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.nn.parallel.replicate makes its replicas on the CPU."""
    module = sys.modules["torch.nn.parallel.replicate"]

    def copies(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
        return [[t.detach() if detach else t * 1 for t in tensors] for _ in devices]

    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)


class Shared(nn.Module):
    """A cell with weights of its own, a buffer, a frozen weight and one with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRUCell(H, H), nn.Linear(H, H)
        self.shift, self.scale = nn.Parameter(torch.rand(H)), 0.5
        self.frozen = nn.Parameter(torch.rand(H), requires_grad=False)
        self.tied = self.shift
        self.register_buffer("factor", torch.rand(H))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(x + self.tied, h) * self.frozen
        return self.out(h) * self.shift + self.factor * self.scale, h


class Scan(nn.Module):
    """The same by scan."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.cell(x, h)
        return h, y

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return fusedrnn.scan(self.step, h, x)[::-1]


WAYS: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: fusedrnn.Recurrent(Shared(), compile="require"),
    "replay": lambda: fusedrnn.Recurrent(Shared(), compile="never"),
    "graph": lambda: fusedrnn.Recurrent(Shared(), compile="never", recompute=False),
    "scan": lambda: Scan(Shared()),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("way", WAYS)
def test_replicas_as_in_data_parallel(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold plain tensors that are not leaves, as attributes, and each call has others."""
    monkeypatch.setenv("FUSEDRNN_COMPILE", "1")
    traced, compile_step = [], pipeline.compile_step

    def noted(step: Any, *given: Any) -> Any:
        traced.append(step)
        return compile_step(step, *given)

    monkeypatch.setattr(pipeline, "compile_step", noted)
    torch.manual_seed(0)
    with interpreted(makes_all_anew=True):
        rnn: Any = WAYS[way]().double()
        other = copy.deepcopy(rnn)
        x, h = rows(), torch.zeros(B, H, dtype=torch.float64)
        leaves = [p for p in rnn.parameters() if p.requires_grad]
        expected = plain_loop(other.cell, x, h)
        exact = torch.autograd.grad(
            loss_of(*expected), [p for p in other.parameters() if p.requires_grad]
        )
        for _ in range(2):
            replicas: list[Any] = nn.parallel.replicate(rnn, [0, 1])  # type: ignore[arg-type]
            for replica in (*replicas, rnn):
                kept = dict(vars(replica.cell))
                made = replica(x, h)
                torch.testing.assert_close(made, expected)
                found = torch.autograd.grad(loss_of(*made), leaves, retain_graph=True)
                torch.testing.assert_close(found, exact)
                assert vars(replica.cell) == kept
        # By a replica, and by the module.
        assert len(traced) == (2 if way in ("compiled", "scan") else 0)
        for scale in (2.0, 0.5):
            rnn.cell.scale = other.cell.scale = scale
            (replica,) = nn.parallel.replicate(rnn, [0], detach=True)  # type: ignore[arg-type]
            with torch.no_grad():
                torch.testing.assert_close(replica(x, h), plain_loop(other.cell, x, h))
