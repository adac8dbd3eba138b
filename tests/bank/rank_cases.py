"""What several ranks do in tests: each function runs on all of them, for a way that torch has."""

from __future__ import annotations

import copy
from typing import Any

import torch
from bank.bank_modules import HIDDEN, INPUT, KINDS
from bank.rank_processes import Here
from bank.rank_training import Model, Training, adam, batch, compare, flat, sgd, together
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

UNEQUAL = together([[0], [1]], [[2], [0]], [[3], [3]], [[1], [2]])
NEAR = 1e-6
"""Where sums are added in another order."""


def equal_tasks(here: Here) -> None:
    Training().run(here, together([[0], [0]], [[2], [2]], [[0], [0]]))


def unequal_tasks(here: Here) -> None:
    Training().run(here, UNEQUAL)


def unequal_grus(here: Here) -> None:
    Training(KINDS["gru"]).run(here, UNEQUAL)


def several_tasks(here: Here) -> None:
    """Also one that is used twice, and more than the device has blocks for gradients."""
    plan = together([[0, 1], [1]], [[2, 2], [3, 0, 2]], [[0, 1, 2, 3], [3, 1, 2]])
    Training(tolerance=NEAR).run(here, plan)


def no_task_on_one_rank(here: Here) -> None:
    Training().run(here, together([[0], []], [[], [1]], [[], []], [[0], [2]]))


def accumulation(here: Here) -> None:
    """Also of tasks that the last pass does not use, and by a rank that then uses none."""
    plan = [
        [[[0], [1]], [[0], [1]]],
        [[[2], [0]], [[1, 3], [1]], [[2], [3]]],
        [[[0], [1]], [[], [1]]],
        [[[], [1]], [[2], []]],
    ]
    Training(tolerance=NEAR).run(here, plan)


def users(here: Here) -> None:
    plan = together([[0], [0]], [[1], [2]], [[0, 1], [1]], [[], [3]])
    Training(average="users").run(here, plan)


def three_ranks(here: Here) -> None:
    plan = together([[0], [1], [1]], [[2], [], [2, 3]], [[0], [0], [0]])
    for average in ("world", "users"):
        # Adam would enlarge what another order of sums adds to a gradient of about 0.
        Training(average=average, optimizer=sgd, tolerance=NEAR).run(here, plan)


def tied(here: Here) -> None:
    Training(KINDS["tied"]).run(here, UNEQUAL)


class OneSided(nn.Module):
    """Batches of two and of three use other weights; some are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.unused = nn.Linear(INPUT, INPUT), nn.Linear(2, 2)
        self.two, self.three = nn.Linear(INPUT, 2), nn.Linear(INPUT, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.two if x.shape[1] == 2 else self.three)(self.both(x))


def one_sided(here: Here) -> None:
    Training(OneSided).run(here, together([[0], [0]], [[1], [2]], [[0, 3], [3]]))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.sum(-1) > 0).long() + x.shape[1] - 1))


def sparse(here: Here) -> None:
    plan = [*together([[0], [0]], [[1], [2]], [[3], []]), [[[0], [1]], [[0], [0]]]]
    Training(Embedded, optimizer=sgd, tolerance=NEAR).run(here, plan)


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, 3, dtype=torch.float64)
        self.c = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.d = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.b(self.a(x).double()).bfloat16())
        return (y.float() * self.d).abs()


def dtypes(here: Here) -> None:
    Training(Dtypes, optimizer=sgd, tolerance=1e-2).run(here, UNEQUAL)


def batch_norm(here: Here) -> None:
    """Statistics stay those of the rank's own batches."""
    bank = Training(KINDS["batch_norm"]).run(here, together([[0], [0]], [[0], [1]]))
    norm: Any = bank[0].module.norm  # type: ignore[union-attr]
    assert int(norm.num_batches_tracked) == 2 - here.rank
    means = here.everywhere(norm.running_mean)
    assert not torch.equal(*means)


def frozen(here: Here) -> None:
    """A rank whose task is frozen does not touch the bank, and says so."""

    def prepare(tasks: Any) -> None:
        tasks[1].requires_grad_(False)
        tasks[2].module[0].weight.requires_grad_(False)

    # In a list a step would pass over what has no gradient, too.
    plan = together([[1], [0]], [[1], [1]], [[2], [1, 3]], [[2, 1], [2]])
    Training(prepare=prepare).run(here, plan)


def freezing_between_steps(here: Here) -> None:
    def change(tasks: Any, step: int) -> None:
        if step == 1:
            tasks[0].module[2].requires_grad_(False)

    Training(before_step=change).run(here, together(*[[[0], [0, 1]]] * 4))


def clipping(here: Here) -> None:
    Training(clip=0.01, optimizer=sgd).run(here, UNEQUAL)


def own_optimizer(here: Here) -> None:
    of_bank = lambda bank: bank.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)  # noqa: E731
    Training(own_optimizer=of_bank).run(here, UNEQUAL)


def step_on_device(here: Here) -> None:
    Training(step_on="device").run(here, UNEQUAL)
    of_bank = lambda bank: bank.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)  # noqa: E731
    Training(step_on="device", own_optimizer=of_bank).run(here, UNEQUAL)


class Checkpointed(Model):
    is_reentrant = False

    def task(self, t: Any, x: Tensor) -> Tensor:
        call = super().task
        return checkpoint(call, t, x, use_reentrant=self.is_reentrant)


class ReentrantlyCheckpointed(Checkpointed):
    is_reentrant = True


class NestedCheckpoints(Model):
    def task(self, t: Any, x: Tensor) -> Tensor:
        call = super().task
        inner = lambda x: checkpoint(call, t, x, use_reentrant=True)  # noqa: E731
        return checkpoint(inner, x, use_reentrant=True)


def checkpoints(here: Here) -> None:
    plan = together([[0], [1]], [[2, 3, 1], [0, 1]], [[], [3, 0]])
    for model in (Checkpointed, ReentrantlyCheckpointed, NestedCheckpoints):
        Training(model=model, tolerance=NEAR).run(here, plan)


def unused_parameters(here: Here) -> None:
    for name in ("find_unused_parameters", "static_graph"):
        Training(wrapping=((name, True),)).run(here, together([[0], [1]], [[2], []], [[1], [1]]))


def added_and_deleted_tasks(here: Here) -> None:
    """Which the ranks' DistributedDataParallel has never seen."""
    bank = here.bank([nn.Linear(INPUT, 2) for _ in range(3)])
    model = here.wrap(Model(bank))
    optimizer = bank.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(4):
        if step == 1:
            bank.add(7, nn.Linear(INPUT, 5))
        if step == 2:
            del bank[0]
        t = (0, 7, 7, 1)[step]
        optimizer.zero_grad()
        h = batch(here.rank, step)
        (bank(t, h).square().mean() if step == 3 else model([t], h).sum()).backward()
        optimizer.step()
        weights = flat(bank.parameters())
        assert all(torch.equal(weights, other) for other in here.everywhere(weights))


class Sum(nn.Module):
    """One process's theta + theta[t]."""

    def __init__(self, shared: nn.Module, own: nn.ModuleList) -> None:
        super().__init__()
        self.shared, self.own = shared, own

    def forward(self, t: int, x: Tensor) -> Tensor:
        theta = dict(self.shared.named_parameters())
        weights = {n: theta[n] + p for n, p in self.own[t].named_parameters()}
        return torch.func.functional_call(self.shared, weights, x)


def shared(here: Here) -> None:
    """DistributedDataParallel averages what all tasks add, the bank what each has of its own."""
    one = nn.Linear(INPUT, 2)
    own = nn.ModuleList([nn.Linear(INPUT, 2) for _ in range(3)])
    for parameter in own.parameters():
        nn.init.zeros_(parameter)
    single = Sum(copy.deepcopy(one), own)
    bank = here.bank(one, 3, shared="add")
    model = here.wrap(bank)
    ours, theirs = adam(model.parameters()), adam(single.parameters())
    for step, tasks in enumerate([(0, 1), (2, 2), (1, 0)]):
        ours.zero_grad()
        theirs.zero_grad()
        model(tasks[here.rank], batch(here.rank, step)).square().mean().backward()
        for rank in range(2):
            (single(tasks[rank], batch(rank, step)).square().mean() / 2).backward()
        ours.step()
        theirs.step()
        for t in range(3):
            compare(dict(bank[t].named_parameters()), dict(own[t].named_parameters()), NEAR, "task")
        ours_theta = dict(one.named_parameters())
        if here.is_ddp:
            compare(ours_theta, dict(single.shared.named_parameters()), NEAR, "shared")


def gathered_anew(here: Here) -> None:
    """FSDP counts no change of the weights that it gathers, and has used their memory before."""
    one = nn.Linear(INPUT, 40_000, bias=False)
    bank = here.bank(one, 2, shared="add")
    for parameter in bank.task_parameters():
        parameter.requires_grad_(False)
    model, x = here.wrap(bank), batch(0)[:1]
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        optimizer.zero_grad()
        loss = model(0, batch(here.rank, step)[:1]).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            y = model(1, x).clone()
            if not here.is_ddp:
                bank.reshard()
            theta: Any = next(bank.shared.parameters())  # type: ignore[union-attr]
            whole = theta.full_tensor() if hasattr(theta, "full_tensor") else theta
            torch.testing.assert_close(y, nn.functional.linear(x, whole))
