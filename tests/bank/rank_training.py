"""Training on several ranks, beside one process that has a list of the modules and all batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from bank.bank_modules import INPUT, KINDS
from bank.rank_processes import Here
from torch import Tensor, nn

from fusedrnn import WeightBank

BATCHES = 2, 3
"""Of even ranks, and of odd ones."""


class Last(nn.Module):
    """A task that takes (T, B, INPUT) to a loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found = self.module(x)
        return (found if isinstance(found, Tensor) else found[0]).square().mean()


class Model(nn.Module):
    """What all ranks share, and a bank or a list of tasks."""

    def __init__(self, tasks: Any) -> None:
        super().__init__()
        self.encoder, self.tasks = nn.Linear(INPUT, INPUT), tasks
        nn.init.constant_(self.encoder.bias, 0.1)
        nn.init.eye_(self.encoder.weight)

    def task(self, t: Any, x: Tensor) -> Tensor:
        return self.tasks(t, x) if isinstance(self.tasks, WeightBank) else self.tasks[t](x)

    def forward(self, tasks: Sequence[Any], x: Tensor) -> Tensor:
        h = torch.tanh(self.encoder(x))
        loss = h.square().mean()
        for t in tasks:
            loss = loss + self.task(t, h).to(loss.dtype)
        return loss


Pass = Sequence[Sequence[Any]]
"""The tasks that each rank uses in one backward pass."""
Plan = Sequence[Sequence[Pass]]
"""Of each step the passes, of which the last one is synchronized."""


def batch(rank: int, *where: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((rank, *where)) % 2**31)
    return torch.randn(4, BATCHES[rank % 2], INPUT, generator=generator)


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


class Training(NamedTuple):
    """How to train; ``run`` does it, and compares after each step."""

    make: Callable[[], nn.Module] = KINDS["mlp"]
    tasks: int = 4
    optimizer: Callable[[Any], Any] = adam
    own_optimizer: Callable[[WeightBank], Any] | None = None
    """Of the bank, if it is another one than that of the rest."""
    average: Any = "world"
    step_on: Any = "host"
    model: Callable[[Any], Model] = Model
    wrapping: tuple[tuple[str, Any], ...] = ()
    prepare: Callable[[Any], None] = lambda tasks: None
    """Called once with the bank, and with the list."""
    before_step: Callable[[Any, int], None] = lambda tasks, step: None
    tolerance: float = 0.0
    clip: float | None = None

    def run(self, here: Here, plan: Plan) -> WeightBank:
        modules = [Last(self.make()) for _ in range(self.tasks)]
        single = self.model(nn.ModuleList(copy.deepcopy(modules)))
        bank = here.bank(modules, average=self.average, step_on=self.step_on)
        model = here.wrap(self.model(bank), **(dict(self.wrapping) if here.is_ddp else {}))
        for tasks in (bank, single.tasks):
            self.prepare(tasks)
        theirs = [self.optimizer(single.parameters())]
        if self.own_optimizer is None:
            ours = [self.optimizer(model.parameters())]
        else:
            rest = [p for n, p in model.named_parameters() if "encoder" in n]
            ours = [self.optimizer(rest), self.own_optimizer(bank)]
        for step, passes in enumerate(plan):
            for optimizer in ours + theirs:
                optimizer.zero_grad()
            self.backward(here, model, bank, step, passes)
            self.backward_alone(here, single, step, passes)
            for tasks in (bank, single.tasks):
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(tasks.parameters(), self.clip)
                self.before_step(tasks, step)
            self.compare(here, model, bank, single, f"step {step}, gradients", is_grad=True)
            for optimizer in ours + theirs:
                optimizer.step()
            self.compare(here, model, bank, single, f"step {step}")
        return bank

    def backward(
        self, here: Here, model: Any, bank: WeightBank, step: int, passes: Sequence[Pass]
    ) -> None:
        for number, of_ranks in enumerate(passes):
            own, is_last = of_ranks[here.rank], number == len(passes) - 1
            with ExitStack() as stack:
                if not is_last:
                    stack.enter_context(bank.no_sync())
                    if here.is_ddp:
                        stack.enter_context(model.no_sync())
                    else:
                        model.set_requires_gradient_sync(False)
                elif not here.is_ddp:
                    model.set_requires_gradient_sync(True)
                exchanges = bank._ranks.exchanges
                model(own, batch(here.rank, step, number)).backward()
                if is_last and not self.is_trained(bank, own):
                    assert bank._ranks.exchanges == exchanges
                    bank.sync_gradients()
                assert bank._ranks.exchanges == exchanges + is_last

    def is_trained(self, bank: WeightBank, own: Sequence[Any]) -> bool:
        return any(p.requires_grad for t in own for p in bank[t].parameters())

    def backward_alone(self, here: Here, single: Model, step: int, passes: Sequence[Pass]) -> None:
        """Each rank computes what one process learns of the batches of all."""
        for number, of_ranks in enumerate(passes):
            for rank, tasks in enumerate(of_ranks):
                (single(tasks, batch(rank, step, number)) / here.world).backward()
        if self.average == "users":
            for t, module in enumerate(single.tasks):
                users = sum(any(t in own[rank] for own in passes) for rank in range(here.world))
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= here.world / users

    def compare(
        self,
        here: Here,
        model: Any,
        bank: WeightBank,
        single: Model,
        when: str,
        is_grad: bool = False,
    ) -> None:
        ours, theirs = numbers(bank, is_grad), numbers(single.tasks, is_grad)
        compare(ours, theirs, self.tolerance, f"tasks after {when}")
        for other in here.everywhere(ours):
            compare(ours, other, 0.0, f"ranks after {when}")
        rest = numbers(getattr(model, "module", model).encoder, is_grad)
        compare(
            rest, numbers(single.encoder, is_grad), self.tolerance or 1e-7, f"encoder after {when}"
        )


def numbers(module: nn.Module, is_grad: bool) -> dict[str, Tensor]:
    """Parameters, or those gradients that there are, as plain dense tensors."""
    found = {}
    for name, parameter in module.named_parameters():
        value: Any = parameter.grad if is_grad else parameter.detach()
        if value is not None:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[name] = value.to_dense() if value.layout != torch.strided else value
    return found


def compare(ours: Any, theirs: Any, tolerance: float, what: str) -> None:
    assert list(ours) == list(theirs), f"{what}: {sorted(ours.keys() ^ theirs.keys())}"
    for name, value in ours.items():
        torch.testing.assert_close(
            value,
            theirs[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )


def together(*steps: Pass) -> Plan:
    """Steps of one pass."""
    return [[step] for step in steps]


def cycle(plan: Plan, steps: int) -> Plan:
    return list(itertools.islice(itertools.cycle(plan), steps))


def flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in values])
