"""More of what several ranks do in tests: passes that fail, bytes, orders of messages, groups."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bank.bank_modules import HIDDEN, INPUT, KINDS, Fails, Norm
from bank.rank_processes import Here
from bank.rank_training import Model, batch, flat, numbers
from torch import Tensor, nn

from fusedrnn import WeightBank


def bank_of(here: Here, tasks: int = 3, **options: Any) -> WeightBank:
    return here.bank([nn.Linear(INPUT, 2, bias=False) for _ in range(tasks)], **options)


def loss(bank: WeightBank, t: int, here: Here, *where: int) -> Tensor:
    return bank(t, batch(here.rank, *where)).square().mean()


def gradient(weight: Tensor, rank: int, *where: int) -> Tensor:
    """What one rank alone has."""
    free = weight.detach().clone().requires_grad_()
    nn.functional.linear(batch(rank, *where), free).square().mean().backward()
    assert free.grad is not None
    return free.grad


def mean(weight: Tensor, *where: int) -> Tensor:
    return (gradient(weight, 0, *where) + gradient(weight, 1, *where)) / 2


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def passes_that_fail(here: Here) -> None:
    """On all ranks, in backward behind the bank and in forward: the next one is right."""
    bank = bank_of(here, tasks=4)
    weight: Any = bank[0].weight
    for is_synced in (True, False):
        for _ in range(3):
            x = Fails.apply(batch(here.rank).requires_grad_())
            with pytest.raises(ValueError, match="on purpose"):
                sum(bank(t, x).sum() for t in range(3)).backward()  # type: ignore[union-attr]
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                bank(1, torch.ones(2, INPUT + 1))
        bank.zero_grad()
        exchanges = bank._ranks.exchanges
        if is_synced:
            loss(bank, 0, here).backward()
        else:
            with bank.no_sync():
                loss(bank, 0, here).backward()
            bank.sync_gradients()
        assert bank._ranks.exchanges == exchanges + 1
        close(weight.grad, mean(weight))
        assert all(bank[t].weight.grad is None for t in range(1, 4))


def bytes_sent(here: Here) -> None:
    """Those of tasks in use: nothing for others, and nothing by DistributedDataParallel."""
    bank = here.bank([KINDS["gru"]() for _ in range(8)])
    model = here.wrap(bank_model := Model(bank))
    of_ddp: list[int] = []
    if here.is_ddp:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def count(state: Any, bucket: Any) -> Any:
            of_ddp.append(bucket.buffer().nbytes)
            return allreduce_hook(state, bucket)

        count.__annotations__.clear()  # which torch would take for wrong ones
        model.register_comm_hook(here.group, count)
    size = sum(p.nbytes for p in bank[0].parameters())
    tasks = ([[0], [0]], [[1], [2]], [[3, 4], [4]], [[5], []])
    for step, of_ranks in enumerate(tasks):
        before = bank._ranks.exchanged_bytes
        own = of_ranks[here.rank]
        h = torch.tanh(batch(here.rank, step))
        (model([], h) + sum(bank(t, h)[0].square().mean() for t in own)).backward()
        if not own:
            bank.sync_gradients()
        sent = (bank._ranks.exchanged_bytes - before) / size
        used = len({t for some in of_ranks for t in some})
        assert used <= sent <= 1.3 * used, sent  # to begin at multiples of 64 bytes, and counts
    before = bank._ranks.exchanged_bytes
    bank.sync_gradients()
    assert bank._ranks.exchanged_bytes == before
    assert bank._ranks.header_bytes <= 6 * (7 * 8 + 8 * 12)
    if here.is_ddp:
        encoder = sum(p.nbytes for p in bank_model.encoder.parameters())
        assert sum(of_ddp) == len(tasks) * encoder
        assert len(model._module_parameters) == 2


def buffers_stay_at_home(here: Here) -> None:
    """DistributedDataParallel would send those of rank 0 before each forward."""
    bank = here.bank([Norm(), Norm()])
    model = here.wrap(Model(bank))
    for step in range(2):
        h = batch(here.rank, step)
        (model([], h) + bank(here.rank, h).square().mean()).backward()
    found: Any = [bank[t].norm.num_batches_tracked for t in range(2)]  # type: ignore[union-attr]
    assert [int(count) for count in found] == [2 * (here.rank == t) for t in range(2)]


def outside_of_the_wrapper(here: Here) -> None:
    """Tasks that follow on a wrapped model begin each pass, and the order of messages is one."""
    bank = bank_of(here)
    inner = nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, INPUT))
    options: Any = {"static_graph": True} if here.is_ddp else {}
    encoder = here.wrap(inner, **options)
    for step, tasks in enumerate([(0, None), (None, 1), (2, 2), (1, 0)]):
        own = tasks[here.rank]
        h = encoder(batch(here.rank, step))
        (h.square().mean() if own is None else bank(own, h).square().mean()).backward()
        if own is None:
            bank.sync_gradients()
        grads = [*numbers(bank, is_grad=True).values(), *numbers(inner, is_grad=True).values()]
        assert torch.equal(*here.everywhere(flat(grads)))


def two_banks(here: Here) -> None:
    """Each has messages of its own; all ranks use both in the same order."""
    first, second = bank_of(here), bank_of(here, average="users")
    for step, tasks in enumerate([(0, 1), (2, 2)]):
        own = tasks[here.rank]
        h = batch(here.rank, step)
        (first(own, h).square().mean() + second(2 - own, h).square().mean()).backward()
    grads = flat(
        p.grad for bank in (first, second) for p in bank.parameters() if p.grad is not None
    )
    assert torch.equal(*here.everywhere(grads))


def all_processes(here: Here) -> None:
    """Without a group it is of all of them; a bank of one rank exchanges nothing."""
    bank = WeightBank([nn.Linear(INPUT, 2, bias=False)], device="cpu")
    loss(bank, 0, here).backward()
    weight: Any = bank[0].weight
    close(weight.grad, mean(weight))
    alone = [dist.new_group([rank]) for rank in range(here.world)]
    own = WeightBank(
        [nn.Linear(INPUT, 2, bias=False)], device="cpu", process_group=alone[here.rank]
    )
    if here.rank == 1:
        loss(own, 0, here).backward()
        close(own[0].weight.grad, gradient(own[0].weight, 1))  # type: ignore[arg-type]
        assert own._ranks.exchanges == 0
        twin = copy.deepcopy(own)
        loss(twin, 0, here).backward()  # in which the other rank has no part
        close(twin[0].weight.grad, gradient(own[0].weight, 1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"process_group cannot be pickled.* state_dict"):
        pickle.dumps(own)


def halves(here: Here) -> None:
    """A sum over ranks can be too large for 16 bits where the average is not."""
    bank = here.bank([nn.Linear(1, 1, bias=False, dtype=torch.float16)])
    bank(0, torch.full((1, 1), 40_960, dtype=torch.float16)).sum().backward()
    assert bank[0].weight.grad.item() == 40_960  # type: ignore[union-attr]


def zero_redundancy(here: Here) -> None:
    """Its step counts once on each rank, and what it sends to others reaches the device."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for shared in (None, "add") if here.is_ddp else (None,):
        modules: Any = nn.Linear(INPUT, 2) if shared else [nn.Linear(INPUT, 2) for _ in range(2)]
        bank = here.bank(modules, 2 if shared else None, shared=shared)
        banks = bank, copy.deepcopy(bank)
        models = [here.wrap(one) if shared else one for one in banks]
        options: Any = {"process_group": here.group, "lr": 0.5}
        ours = ZeroRedundancyOptimizer(bank.parameters(), torch.optim.SGD, **options)
        theirs = torch.optim.SGD(banks[1].parameters(), 0.5)
        for step in range(3):
            for model, optimizer in zip(models, (ours, theirs), strict=True):
                optimizer.zero_grad()
                model(step % 2, batch(here.rank, step)).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for t in range(2):
                    close(*(one(t, batch(9)) for one in banks))
        assert bank._ranks.steps == 3
    bank = bank_of(here)
    options["parameters_as_bucket_view"] = True
    ours = ZeroRedundancyOptimizer(bank.parameters(), torch.optim.SGD, **options)
    loss(bank, 0, here).backward()
    with pytest.raises(ValueError, match="parameters_as_bucket_view=False"):
        ours.step()
