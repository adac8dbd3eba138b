"""Steps over the weights of a bank: by torch's optimizers, one for each task, on the device."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from bank.bank_modules import INPUT, KINDS
from bank.emulated_device import emulated
from torch import nn

from fusedrnn import WeightBank

CLASSES = [
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]
NAMES = [f"{cls.__name__}-{'-'.join(options)}" for cls, options in CLASSES]


def models(kind: str = "mlp", tasks: int = 4) -> list[nn.Module]:
    return [KINDS[kind]() for _ in range(tasks)]


def assert_equal(bank: WeightBank, modules: nn.Module) -> None:
    for (name, p), q in zip(bank.named_parameters(), modules.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("step_on", ["host", "device"])
@pytest.mark.parametrize("by_task", [False, True], ids=["one", "by_task"])
@pytest.mark.parametrize(("cls", "options"), CLASSES, ids=NAMES)
def test_equal_to_a_list(cls: Any, options: Any, by_task: bool, step_on: Any) -> None:
    made = models()
    modules = nn.ModuleList(copy.deepcopy(made))
    bank = emulated(WeightBank(made, device="cpu", step_on=step_on))
    ours = bank.optimizer(cls, **options) if by_task else cls(bank.parameters(), **options)
    theirs = cls(modules.parameters(), **options)
    for i in range(25):
        if i == 8 and not by_task:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        if i == 12:
            file = io.BytesIO()
            torch.save(ours.state_dict(), file)
            file.seek(0)
            ours = bank.optimizer(cls, **options) if by_task else cls(bank.parameters(), **options)
            ours.load_state_dict(torch.load(file, weights_only=False))
        for optimizer, model in ((ours, bank), (theirs, modules)):
            optimizer.zero_grad()
            torch.manual_seed(i)
            for _ in range(1 + i % 2):
                t, x = int(torch.randint(4, ())), torch.randn(5, INPUT)
                y = model(t, x) if model is bank else model[t](x)
                y.square().mean().backward()
            optimizer.step()
        assert_equal(bank, modules)
    for state in ours.state.values():
        assert all(value.is_cpu for value in state.values() if isinstance(value, torch.Tensor))


def test_state_is_made_when_a_task_is_used() -> None:
    bank = WeightBank(models(), device="cpu")
    optimizer = bank.optimizer(torch.optim.Adagrad, lr=0.1)
    assert len(optimizer.state) == 0
    bank(2, torch.randn(5, INPUT)).sum().backward()
    optimizer.step()
    assert {id(p) for p in optimizer.state} == {id(p) for p in bank[2].parameters()}


def test_a_learning_rate_for_one_task_and_a_scheduler_for_all() -> None:
    bank = WeightBank(models(), device="cpu")
    optimizer = bank.optimizer(torch.optim.SGD, lr=0.1)
    assert [group["task"] for group in optimizer.param_groups] == [0, 1, 2, 3]
    optimizer.param_groups[1]["lr"] = 0.0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = copy.deepcopy(bank.state_dict())
    for _ in range(2):
        optimizer.zero_grad()
        for t in (0, 1):
            bank(t, torch.ones(2, INPUT)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.0, 0.025, 0.025]
    after = bank.state_dict()
    assert not torch.equal(before["0.0.weight"], after["0.0.weight"])
    assert torch.equal(before["1.0.weight"], after["1.0.weight"])


def test_tasks_that_are_added_and_deleted() -> None:
    bank = WeightBank(models(), device="cpu")
    optimizer = bank.optimizer(torch.optim.AdamW, lr=0.1)
    bank(0, torch.ones(2, INPUT)).sum().backward()
    optimizer.step()
    del bank[0]
    bank.add("new", nn.Linear(INPUT, 2))
    optimizer.zero_grad()
    bank("new", torch.ones(2, INPUT)).sum().backward()
    before = bank["new"].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, bank["new"].weight)
    assert [group["task"] for group in optimizer.param_groups] == [1, 2, 3, "new"]
    assert {id(p) for p in optimizer.state} == {id(p) for p in bank["new"].parameters()}


def test_the_module_itself_on_the_host() -> None:
    """Gradients that do not come through a call of the bank count, too."""
    bank = WeightBank(models(), device="cpu")
    optimizer = bank.optimizer(torch.optim.SGD, lr=0.1)
    bank[3][0].weight.square().sum().backward()
    before = bank[3][0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, bank[3][0].weight)


def test_closures() -> None:
    bank = WeightBank(models(), device="cpu")
    optimizer = bank.optimizer(torch.optim.SGD, lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = bank(1, torch.ones(2, INPUT)).sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0] and len(calls) == 1


def test_clipping_and_scaling() -> None:
    made = models()
    modules = nn.ModuleList(copy.deepcopy(made))
    bank = emulated(WeightBank(made, device="cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    twin = torch.amp.GradScaler("cpu", init_scale=8.0)
    ours, theirs = bank.optimizer(torch.optim.SGD, lr=1.0), torch.optim.SGD(modules.parameters(), 1)
    x = torch.randn(5, INPUT)
    for model, optimizer, by in ((bank, ours, scaler), (modules, theirs, twin)):
        y = model(1, x) if model is bank else model[1](x)
        by.scale(y.square().sum()).backward()
        by.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        by.step(optimizer)
        by.update()
    assert_equal(bank, modules)


def test_a_step_on_the_device_leaves_weights_there() -> None:
    bank = emulated(WeightBank(models("lstm"), device="cpu", step_on="device"))
    optimizer = torch.optim.AdamW(bank.parameters(), 0.1)
    x = torch.randn(5, 2, INPUT)
    for _ in range(3):
        optimizer.zero_grad()
        bank(1, x).sum().backward()
        optimizer.step()
    assert bank._device.slots.copies == 1
    torch.testing.assert_close(bank(1, x), bank[1](x), rtol=0, atol=0)
    moments = [optimizer.state[p]["exp_avg"] for p in bank[1].parameters()]
    assert len({m.untyped_storage().data_ptr() for m in moments}) == 1  # one copy brings them


def test_a_step_on_the_device_that_fails() -> None:
    """The task comes home with what was stepped, as after a step on the host that fails."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise FloatingPointError

    bank = emulated(WeightBank(models(), device="cpu", step_on="device"))
    modules = nn.ModuleList(copy.deepcopy(module) for module in bank)
    ours, theirs = (Fails(model.parameters(), 0.1, momentum=0.9) for model in (bank, modules))
    x = torch.randn(5, INPUT)
    for _ in range(2):
        bank(1, x).sum().backward()
        modules[1](x).sum().backward()
        for optimizer in (ours, theirs):
            with pytest.raises(FloatingPointError):
                optimizer.step()
    home = bank._memories[0].data_ptr(), bank._memories[0].data_ptr() + bank._memories[0].nbytes
    assert all(home[0] <= p.data_ptr() < home[1] for p in bank[1].parameters())
    assert_equal(bank, modules)
    torch.testing.assert_close(bank(1, x), modules[1](x), rtol=0, atol=0)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        self.head: Any = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table(x))
        return result


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad
@pytest.mark.parametrize("by_task", [False, True], ids=["one", "by_task"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SparseAdam, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
    ids=["SparseAdam", "SGD", "SGD-momentum", "Adagrad"],
)
def test_sparse_gradients_on_the_device(cls: Any, options: Any, by_task: bool) -> None:
    made = [Table() for _ in range(3)]
    if cls is not torch.optim.SparseAdam:  # which takes no others
        for module in made:
            module.head = nn.Linear(3, 2)
    modules = nn.ModuleList(copy.deepcopy(made))
    bank = emulated(WeightBank(made, device="cpu", step_on="device"))
    ours = bank.optimizer(cls, **options) if by_task else cls(bank.parameters(), **options)
    theirs = cls(modules.parameters(), **options)
    for i in range(6):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        rows = torch.randint(6, (4,))
        for t in {i % 3, i % 2}:
            bank(t, rows).square().sum().backward()
            modules[t](rows).square().sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
        assert_equal(bank, modules)
        assert bank[i % 3].table.weight.grad.is_sparse
