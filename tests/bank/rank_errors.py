"""Ranks that have diverged, or do what a bank refuses: all are told, and none waits for ever."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bank.bank_modules import INPUT
from bank.rank_behaviour import bank_of, close, loss, mean
from bank.rank_processes import Here
from bank.rank_training import Model, batch
from torch import nn

from fusedrnn import WeightBank


def diverged(match: str = "diverged") -> Any:
    return pytest.raises(RuntimeError, match=match)


def another_number_of_passes(here: Here) -> None:
    """The rank that is ahead meets the others' next pass, which is at another step."""
    bank = bank_of(here)
    optimizer = torch.optim.SGD(bank.parameters(), lr=0.1)
    loss(bank, 0, here).backward()
    if here.rank == 1:
        optimizer.step()
        ours, theirs = 1, 0
    else:
        ours, theirs = 0, 1
    with diverged(f"rank {1 - here.rank} is at step {theirs} .* this one at step {ours}"):
        loss(bank, 0, here).backward()


def other_tasks(here: Here) -> None:
    bank = bank_of(here)
    if here.rank == 1:
        bank.add(3, nn.Linear(INPUT, 2, bias=False))
    with diverged(f"has {4 - here.rank} tasks, this one at step 0 with {3 + here.rank}"):
        loss(bank, 0, here).backward()
    if here.rank == 1:
        del bank[3]
    # All have raised, so the next pass works.
    bank.zero_grad()
    loss(bank, 0, here).backward()
    close(bank[0].weight.grad, mean(bank[0].weight))  # type: ignore[arg-type]


def other_shapes(here: Here) -> None:
    bank = here.bank([nn.Linear(INPUT, 2 + here.rank)])
    with diverged("of other names or shapes"):
        loss(bank, 0, here).backward()


def other_names(here: Here) -> None:
    bank = here.bank({f"rank {here.rank}": nn.Linear(INPUT, 2)})
    with diverged("of other names or shapes"):
        loss(bank, f"rank {here.rank}", here).backward()  # type: ignore[arg-type]


def other_frozen_parameters(here: Here) -> None:
    bank = here.bank([nn.Linear(INPUT, 2) for _ in range(2)])
    weight: Any = bank[0].weight
    for is_used in (True, False):
        if not is_used:  # what one rank freezes while gradients wait it tells the others
            with bank.no_sync():
                loss(bank, 0, here).backward()
        weight.requires_grad_(here.rank == 0)
        t = 0 if is_used or here.rank == 0 else 1
        with diverged("freeze the same ones on all ranks"):
            loss(bank, t, here).backward()
        weight.requires_grad_(True)
        bank.zero_grad()
        loss(bank, 0, here).backward()
        close(bank[0].bias.grad, here.everywhere(bank[0].bias.grad)[1])  # type: ignore[union-attr]


def other_weights(here: Here) -> None:
    """Nobody sends theta[t] when training begins, so it must be the same on all ranks."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        bank = here.bank([nn.Linear(INPUT, 2, dtype=dtype) for _ in range(2)])
        with torch.no_grad():
            bank[1].bias[here.rank] += 1  # type: ignore[index, operator]
        for t in (0, 1):
            x = batch(here.rank).to(dtype)
            with diverged("seed all ranks alike") if t == 1 else nullcontext():
                bank(t, x).abs().mean().backward()
        assert bank[1].bias.grad is None  # type: ignore[union-attr]


def modules_that_one_rank_changed(here: Here) -> None:
    """What only one can see it tells the others."""
    bank = bank_of(here)
    if here.rank == 0:
        bank[1].weight = nn.Parameter(torch.zeros(5, 5))
    with diverged("a task keeps its tensors'" if here.rank == 0 else "rank 0 has raised an error"):
        loss(bank, here.rank, here).backward()
    if here.rank == 0:
        bank[1].weight = nn.Parameter(here.everywhere(None)[1])
    else:
        here.everywhere(bank[1].weight.detach())
    bank.zero_grad()
    loss(bank, 0, here).backward()
    close(bank[0].weight.grad, mean(bank[0].weight))  # type: ignore[arg-type]


def a_rank_that_never_comes(here: Here) -> None:
    """Also while DistributedDataParallel sends its own."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    alone = here._replace(group=group)
    bank = bank_of(alone)
    model = alone.wrap(Model(bank))
    model([0], batch(here.rank)).mean().backward()
    h = batch(here.rank)
    if here.rank == 0:
        with diverged(r"calls bank.sync_gradients\(\)"):
            model([1], h).mean().backward()
    else:
        model([], h).backward()
    here.everywhere(None)
    never = bank_of(alone)  # which has no messages yet
    if here.rank == 0:
        with diverged(r"calls bank.sync_gradients\(\)"):
            loss(never, 0, here).backward()
    here.everywhere(None)


def a_rank_that_forgets(here: Here) -> None:
    """It goes on to messages of others, of other lengths, which the bank's must not meet."""
    alone = here._replace(group=dist.new_group(timeout=timedelta(seconds=2)))
    bank = bank_of(alone)
    model = alone.wrap(Model(bank))
    h = batch(here.rank)
    model([0], h).mean().backward()
    if here.rank == 1:
        model([], h).mean().backward()
    with diverged(r"calls bank.sync_gradients\(\)" if here.rank == 0 else "Timed out|closed"):
        model([1], h).mean().backward()
    here.everywhere(None)


def wrapped_without_exclude(here: Here) -> None:
    bank = bank_of(here)
    model = nn.parallel.DistributedDataParallel(Model(bank), process_group=here.group)
    for _ in range(2):
        with diverged(r"call fusedrnn.WeightBank.exclude\(model\)"):
            model([0], batch(here.rank))
    # Within another model nothing is wrong.
    WeightBank.exclude(whole := Model(bank))
    other = nn.parallel.DistributedDataParallel(whole, process_group=here.group)
    other([0], batch(0)).mean().backward()
    with diverged(r"call fusedrnn.WeightBank.exclude\(model\)"):
        model([0], batch(here.rank))


def a_replica(here: Here) -> None:
    bank = bank_of(here)
    bank._is_replica = True
    with diverged("use DistributedDataParallel"):
        bank(0, batch(here.rank))


def banks_in_another_order(here: Here) -> None:
    """Whether their weights are alike or not. All raise, and the next pass is right."""
    for are_alike in (False, True):
        model = nn.ModuleDict({name: bank_of(here) for name in ("first", "second")})
        if are_alike:
            model["first"].load_state_dict(model["second"].state_dict())
            WeightBank.exclude(model)
        banks: Any = list(model.values())
        inner = loss(banks[here.rank], 0, here)
        match = "those of another bank" if are_alike else "several banks, .* same order"
        with diverged(match):
            inner.backward()
        model.zero_grad()
        for bank in banks:
            loss(bank, 0, here).backward()
            close(bank[0].weight.grad, mean(bank[0].weight))


def sharded_tasks(here: Here) -> None:
    """By fully_shard without ignored_params."""
    if here.is_ddp:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    bank = bank_of(here)
    model = fully_shard(Model(bank), mesh=DeviceMesh.from_group(here.group, "cpu"))
    with diverged(r"pass ignored_params=set\(bank.task_parameters\(\)\) to fully_shard"):
        model([0], batch(here.rank)).sum().backward()
        model.reshard()
        bank.sync_gradients()
