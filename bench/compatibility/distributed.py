"""Checks of training by replicas and by several processes, each against the loop."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import parallel

from .checkpoints import fresh, goes_on
from .rows import group, table
from .subjects import Subject, distributed, flat, hx_of
from .trial import Trial, expect, loss, same

row = group("checkpoints")
BATCH, PROCESSES = 6, 2
RATE, STEPS = 0.05, 2
WAIT_S = 100.0  # for processes that take a second or two
# What takes longest, and is done once: processes are forks of one that has it.
IMPORTED = [__name__, *(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "optim"))]


def _trial(s: Subject) -> Trial:
    return Trial(s, batch=BATCH, num_layers=2)


def _half(trial: Trial, rank: int) -> tuple[list[Tensor], dict[str, Any]]:
    """A process's rows of the batch: of input and states, and of noise."""
    rows = slice(rank * BATCH // PROCESSES, (rank + 1) * BATCH // PROCESSES)
    given = {name: v[:, :, rows] if name == "eps" else v for name, v in trial.given.items()}
    return [t[:, rows] for t in (trial.x, *trial.states)], given


def _learned(trial: Trial) -> dict[str, Tensor]:
    """The weights after steps along the mean of both halves' gradients, by the loop."""
    weights = trial.detached
    for _ in range(STEPS):
        leaves = {name: w.requires_grad_() for name, w in weights.items()}
        halves = [_half(trial, rank) for rank in range(PROCESSES)]
        mean: Any = sum(loss(trial.truth(leaves, *tensors, **given)) for tensors, given in halves)
        grads = torch.autograd.grad(mean / PROCESSES, list(leaves.values()))
        weights = {
            name: (w - RATE * grad).detach()
            for (name, w), grad in zip(leaves.items(), grads, strict=True)
        }
    return weights


# --- replicas -----------------------------------------------------------------------------------


@row("DataParallel")
def data_parallel(s: Subject) -> None:
    """Replicas as DataParallel makes and runs them, in threads, on a half of the batch each."""
    trial = _trial(s)

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        replicas = _replicas(trial.module)

        def of_half(rank: int) -> tuple[Tensor, ...]:
            _, given = _half(trial, rank)
            size = BATCH // PROCESSES
            x_half, *halves = (t.split(size, 1)[rank] for t in (x, *states))
            return flat(replicas[rank](x_half, hx_of(halves), **given))

        with ThreadPoolExecutor(PROCESSES) as pool:
            found = list(pool.map(of_half, range(PROCESSES)))
        return tuple(torch.cat(of_both, 1) for of_both in zip(*found, strict=True))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.trains(call)


def _replicas(module: nn.Module) -> list[nn.Module]:
    """Copies by torch's own function, which would only send weights to GPUs."""
    copies = lambda tensors, devices, detach: [[t * 1 for t in tensors] for _ in devices]  # noqa: E731
    with mock.patch.object(
        sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", copies
    ):
        return parallel.replicate(module, list(range(PROCESSES)))


# --- processes ----------------------------------------------------------------------------------

Task = Callable[[Trial, int, Path], dict[str, Tensor]]
"""What a process of a rank does: it returns weights, or fails as a check does."""


def _in_processes(s: Subject, task: Task, folder: Path) -> list[dict[str, Tensor]]:
    """What each of the processes, which work together, returns."""
    distributed()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    paths = [folder / f"of {rank}.pt" for rank in range(PROCESSES)]
    workers = [
        context.Process(target=_work, args=(s, task, rank, folder, path), daemon=True)
        for rank, path in enumerate(paths)
    ]
    for worker in workers:
        worker.start()
    end, left = time.monotonic() + WAIT_S, workers
    # A process that has failed leaves the others waiting.
    while left and not any(worker.exitcode for worker in workers) and time.monotonic() < end:
        connection.wait([worker.sentinel for worker in left], end - time.monotonic())
        left = [worker for worker in left if worker.is_alive()]
    for worker in left:
        worker.kill()
    results = [torch.load(path, weights_only=False) for path in paths if path.exists()]
    for result in results:
        if isinstance(result, Exception):
            raise result
    if len(results) < PROCESSES:
        raise RuntimeError(f"exit statuses {[worker.exitcode for worker in workers]}")
    return results


def _work(s: Subject, task: Task, rank: int, folder: Path, path: Path) -> None:
    torch.set_num_threads(1)
    dist = distributed()
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    result: Any
    try:
        result = task(_trial(s), rank, folder)
        dist.barrier()
    except Exception as error:  # the check that waits for this process raises it
        result = error
    partial = path.with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(path)
    # gloo's threads sometimes abort a process that takes its group down.
    os._exit(isinstance(result, Exception))


def _steps(trial: Trial, rank: int, model: nn.Module, optimizer: Any) -> None:
    tensors, given = _half(trial, rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(trial.call(*tensors, module=model, **given)).backward()
        optimizer.step()


def _by_ddp(trial: Trial, rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    places = [w.data_ptr() for w in trial.weights.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DDP warns of gradients that it has to copy
        model = parallel.DistributedDataParallel(trial.module, **options)
        _steps(trial, rank, model, torch.optim.SGD(model.parameters(), lr=RATE))
    expect(places == [w.data_ptr() for w in trial.weights.values()], "a weight was moved")
    return trial.detached


def _by_zero(trial: Trial, rank: int, folder: Path) -> dict[str, Tensor]:
    model = parallel.DistributedDataParallel(trial.module)
    optimizer = distributed("optim").ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=RATE
    )
    _steps(trial, rank, model, optimizer)
    return trial.detached


def _by_fsdp(trial: Trial, rank: int, folder: Path) -> dict[str, Tensor]:
    mesh = distributed("device_mesh").init_device_mesh("cpu", (PROCESSES,))
    distributed("fsdp").fully_shard(trial.module, mesh=mesh)
    _steps(trial, rank, trial.module, torch.optim.SGD(trial.module.parameters(), lr=RATE))
    states: Any = trial.module.state_dict()
    distributed("checkpoint").save(states, checkpoint_id=folder / "sharded")
    return {name: weight.full_tensor() for name, weight in states.items()}


def _train(s: Subject, task: Task, **options: Any) -> None:
    expected = _learned(_trial(s))
    with tempfile.TemporaryDirectory() as folder:
        found = _in_processes(s, functools.partial(task, **options), Path(folder))
    for weights in found:
        same(weights, expected, 1e-10, "a weight")


_BUCKETS = {"gradient_as_bucket_view": True, "static_graph": True}
table(
    row,
    _train,
    (
        "DistributedDataParallel",
        "Two processes learn from a half of the batch each as one from both; no weight is moved.",
        {"task": _by_ddp, "options": {}},
    ),
    (
        "DistributedDataParallel, buckets as gradients",
        "The same with gradient_as_bucket_view=True and static_graph=True.",
        {"task": _by_ddp, "options": _BUCKETS},
    ),
    (
        "ZeroRedundancyOptimizer",
        "The same with an optimizer that moves the weights into buckets of its own.",
        {"task": _by_zero},
    ),
    (
        "FSDP2",
        "The same with fully_shard, which leaves a half of each weight to each process.",
        {"task": _by_fsdp},
    ),
    speed="slow",
)


@row("FSDP2, saved", speed="slow")
def sharded_checkpoint(s: Subject) -> None:
    """What two processes have saved by torch.distributed.checkpoint loads in one without FSDP2."""
    trial = _trial(s)
    dcp = distributed("checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        values, _ = _in_processes(s, _by_fsdp, Path(folder))
        module = fresh(trial)
        state = module.state_dict()
        dcp.load(state, checkpoint_id=Path(folder, "sharded"), no_dist=True)
    module.load_state_dict(state)
    trial.module = module
    goes_on(trial, values)
