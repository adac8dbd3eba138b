"""What a bank does before and after steps: counts them, and keeps the device's weights right."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bank.bank_modules import INPUT, KINDS
from bank.emulated_device import emulated
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fusedrnn import WeightBank


def models(tasks: int = 4) -> list[nn.Module]:
    return [KINDS["mlp"]() for _ in range(tasks)]


def test_steps_are_counted_once() -> None:
    bank = WeightBank(models(), device="cpu")
    other = nn.Linear(2, 2)
    ours = bank.optimizer(torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD([*other.parameters(), *bank[0].parameters()], 0.1)
    alone = torch.optim.SGD(other.parameters(), 0.1)
    bank(0, torch.ones(2, INPUT)).sum().backward()
    for optimizer in (ours, theirs, alone, ours):
        optimizer.step()
    assert bank._ranks.steps == 3


def test_optimizers_whose_groups_are_replaced() -> None:
    bank = WeightBank(models(), device="cpu")
    other = nn.ModuleList(models())
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(bank.parameters())
    optimizer.step()
    assert bank._ranks.steps == 1
    optimizer.param_groups[0]["params"][:] = list(other.parameters())
    optimizer.step()
    assert bank._ranks.steps == 1


def test_first_steps_of_tasks_do_not_look_at_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    bank: Any = emulated(WeightBank(models(), device="cpu", step_on="device"))
    optimizer = bank.optimizer(torch.optim.SGD, lr=0.1)
    looks = []
    parameters = bank.parameters
    monkeypatch.setattr(bank, "parameters", lambda: looks.append(1) or parameters())
    for t in range(4):
        bank(t, torch.ones(2, INPUT)).sum().backward()
        optimizer.step()
    assert len(looks) == 1


def test_a_step_within_another_optimizers_step() -> None:
    """It counts once, and what the other one writes without a count reaches the device."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, inner.defaults)
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.5)

    for step_on in ("host", "device"):
        bank: Any = emulated(WeightBank(models(), device="cpu", step_on=step_on))
        inner = torch.optim.SGD(bank.parameters(), 0.1)
        optimizer = Outer(inner)
        x = torch.randn(5, INPUT)
        for _ in range(2):
            bank(1, x).sum().backward()
            optimizer.step()
            with torch.no_grad():
                assert all(torch.equal(bank(t, x), bank[t](x)) for t in range(2))
        assert bank._ranks.steps == 2
        inner.step()
        assert bank._ranks.steps == 3


@pytest.mark.parametrize("by_task", [False, True], ids=["one", "by_task"])
@pytest.mark.parametrize("shared", [None, "add"])
def test_a_step_under_a_mode(by_task: bool, shared: Any) -> None:
    """A mode that looks at operations, under which foreach counts no change of the weights."""
    bank: Any = emulated(WeightBank(models()[0], 2, shared=shared, device="cpu"))
    cls, options = torch.optim.SGD, {"lr": 0.1, "foreach": True}
    optimizer = bank.optimizer(cls, **options) if by_task else cls(bank.parameters(), **options)
    x = torch.randn(5, INPUT)
    pending = bank(0, x).sum()
    bank(1, x).sum().backward()
    with FlopCounterMode(display=False):
        optimizer.step()
    expected = copy.deepcopy(bank)(1, x)  # out of the host's weights
    assert torch.equal(bank(1, x), expected)
    if shared is None:
        pending.backward()  # of weights that no step has changed


@pytest.mark.parametrize("by_task", [False, True], ids=["one", "by_task"])
def test_a_step_while_the_task_is_on_the_device(by_task: bool) -> None:
    bank: Any = emulated(WeightBank(models(), device="cpu"))
    cls = torch.optim.SGD
    optimizer = bank.optimizer(cls, lr=0.1) if by_task else cls(bank.parameters(), 0.1)
    before = copy.deepcopy(bank.state_dict())
    x = torch.randn(5, INPUT)
    bank(0, x).sum().backward()
    with bank.active(1) as module:
        module(x).sum().backward()
        with pytest.raises(RuntimeError, match=r"task 1 is on the device.*leave the with block"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="leave the with block"):
            optimizer.step(lambda: bank(1, x).sum())
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())
    with bank.active(2):  # which has no gradient
        optimizer.step()
    assert not torch.equal(bank[0][0].bias, before["0.0.bias"])


def test_another_thread_has_a_task_on_the_device() -> None:
    bank: Any = emulated(WeightBank(models(), device="cpu"))
    optimizer = bank.optimizer(torch.optim.SGD, lr=0.1)
    bank(1, torch.randn(5, INPUT)).sum().backward()
    with bank.active(1), ThreadPoolExecutor(1) as pool:
        pool.submit(optimizer.step).result()
