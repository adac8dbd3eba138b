"""Weights that are frozen and trained again: each call trains what it trained then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank.bank_modules import HIDDEN, INPUT
from bank.emulated_device import Recorder, emulated
from torch import Tensor, nn
from torch.func import functional_call

from fusedrnn import WeightBank


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))


def inputs() -> Tensor:
    return torch.randn(5, INPUT)


def pair(make: Callable[[], nn.Module] = mlp, tasks: int = 2) -> tuple[WeightBank, nn.ModuleList]:
    modules = nn.ModuleList(make() for _ in range(tasks))
    return emulated(WeightBank(copy.deepcopy(list(modules)), device="cpu")), modules


def assert_same_gradients(bank: nn.Module, modules: nn.Module) -> None:
    for (name, ours), theirs in zip(bank.named_parameters(), modules.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("are_summed", [True, False])
def test_between_calls(are_summed: bool) -> None:
    bank, modules = pair()
    losses: tuple[list[Tensor], list[Tensor]] = [], []
    for i, frozen in enumerate((0, 2, None, 0)):
        x = inputs()
        for model, found in zip((bank, modules), losses, strict=True):
            model[1].requires_grad_(True)
            if frozen is not None:
                model[1][frozen].requires_grad_(False)
                model[1][2 - frozen].bias.requires_grad_(i != 3)
            y = bank(1, x) if model is bank else modules[1](x)
            found.append(y.square().sum())
            if not are_summed:
                found.pop().backward()
    if are_summed:
        for found in losses:
            sum(found).backward()  # type: ignore[union-attr]
    assert_same_gradients(bank, modules)


def test_between_forward_and_backward() -> None:
    bank, modules = pair()
    x = inputs()
    losses = bank(1, x).sum(), modules[1](x).sum()
    for model in (bank, modules):
        model[1][0].requires_grad_(False)
        model[1][2].bias.requires_grad_(False)
    for loss in losses:
        loss.backward()
    assert_same_gradients(bank, modules)
    assert bank[1][0].weight.grad is None and bank[1][2].weight.grad is not None


class Sum(nn.Module):
    """The reference: a module's weights plus those of a task."""

    def __init__(self, bank: WeightBank) -> None:
        super().__init__()
        self.shared: Any = copy.deepcopy(bank.shared)
        self.tasks = nn.ModuleList(copy.deepcopy(module) for module in bank.values())

    def forward(self, t: int, x: Tensor) -> Tensor:
        theta = dict(self.shared.named_parameters())
        weights = {name: theta[name] + p for name, p in self.tasks[t].named_parameters()}
        return functional_call(self.shared, weights, x)


@pytest.mark.parametrize("has_slots", [True, False], ids=["emulated", "cpu"])
def test_of_what_all_tasks_add(has_slots: bool) -> None:
    """Which of the two is frozen is no matter of which weights have a gradient."""
    bank = WeightBank(mlp(), 2, shared="add", device="cpu")
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.normal_()
    bank = emulated(bank) if has_slots else bank
    single = Sum(bank)
    settings = [
        lambda own, shared: own.requires_grad_(False),
        lambda own, shared: shared.requires_grad_(False),
        lambda own, shared: shared[0].requires_grad_(False),
        lambda own, shared: (shared[2].requires_grad_(False), own[0].requires_grad_(False)),
        lambda own, shared: None,
    ]
    for late in (False, True):
        losses = []
        for freeze in settings:
            x = inputs()
            for model, tasks in ((bank, bank), (single, single.tasks)):
                model.requires_grad_(True)
                freeze(tasks[1], model.shared)  # type: ignore[no-untyped-call]
                losses.append(model(1, x).square().sum())
                if not late:
                    losses.pop().backward()
        for loss in losses:  # long after weights were frozen otherwise
            loss.backward()
        assert_same_gradients(bank, single)


def test_hooks_of_weights_that_a_call_does_not_use() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(INPUT, 2), nn.Linear(INPUT, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    bank, modules = pair(Half)
    for parameter in [*bank.parameters(), *modules.parameters()]:
        parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    x = inputs()
    for _ in range(2):
        bank(1, x).sum().backward()
        modules[1](x).sum().backward()
    assert_same_gradients(bank, modules)


def test_buffers_have_no_gradient() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(INPUT, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    bank, _ = pair(Scaled)
    with pytest.raises(RuntimeError, match=r"the buffer scale of task 0 .* nn.Parameter"):
        bank(0, inputs())
    with torch.no_grad():
        bank(0, inputs())


def test_a_sparse_gradient_and_a_dense_one() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(INPUT, INPUT, sparse=True)
            self.head = nn.Linear(INPUT, INPUT, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) if x.is_floating_point() else self.table(x)

    for order in ((0, 1), (1, 0), (0, 0, 1, 1)):
        bank, modules = pair(Both)
        values = torch.tensor([2, 0, 2]), inputs()
        for i in order:
            bank(1, values[i]).sum().backward()
            modules[1](values[i]).sum().backward()
        for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
            dense = [g if g is None else g.to_dense() for g in (ours.grad, theirs.grad)]
            assert (dense[0] is None) == (dense[1] is None)
            assert dense[0] is None or torch.equal(dense[0], dense[1])


def test_backward_lands_the_weights_that_it_brings_again() -> None:
    """Before it returns: the host may load others next, which the copy must not read."""

    bank = WeightBank([mlp(), mlp()], device="cpu", slots=1)
    square = nn.Linear(HIDDEN, INPUT)
    engine = Recorder()
    bank._use_engine(engine)
    for is_frozen, is_grad in ((True, False), (False, True)):
        bank.requires_grad_(not is_frozen)
        x = inputs().requires_grad_()
        loss = bank(1, square(bank(0, x))).sum()
        before = len(engine.brought)
        if is_grad:
            torch.autograd.grad(loss, x)
        else:
            loss.backward()
        assert len(engine.brought) > before
        assert set(engine.brought) <= set(engine.waited)
