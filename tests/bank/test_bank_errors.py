"""What a bank refuses, and what its messages say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank.bank_modules import INPUT, KINDS
from bank.emulated_device import emulated
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fusedrnn
from fusedrnn import WeightBank


def linear() -> nn.Module:
    return nn.Linear(INPUT, 2)


def make(**options: Any) -> WeightBank:
    return emulated(WeightBank([KINDS["gru"]() for _ in range(3)], device="cpu", **options))


def x() -> torch.Tensor:
    return torch.randn(5, 2, INPUT)


def _tied_tasks() -> Any:
    module = linear()
    return [module, module]


def _shared_tensor() -> Any:
    first, second = linear(), linear()
    second.weight = first.weight
    return [first, second]


def _buffer_of_a_weight() -> nn.Module:
    module = linear()
    module.register_buffer("view", module.weight.detach()[:1])
    return module


CONSTRUCTORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no_tasks": (lambda: WeightBank([]), ValueError, "at least one task"),
    "how_many": (lambda: WeightBank(linear()), TypeError, "how many copies, or their names"),
    "zero": (lambda: WeightBank(linear(), 0), ValueError, "number above 0"),
    "a_name": (lambda: WeightBank(linear(), "abc"), ValueError, "list of names, got 'abc'"),
    "twice": (lambda: WeightBank(linear(), ["a", "a"]), ValueError, "got 'a' twice"),
    "tasks_of_a_list": (lambda: WeightBank([linear()], 3), TypeError, "tasks needs a single"),
    "shared_of_a_list": (
        lambda: WeightBank([linear()], shared="add"),
        TypeError,
        "shared needs a single module",
    ),
    "no_module": (lambda: WeightBank([3]), TypeError, "must be an nn.Module, got int for 0"),
    "nothing": (lambda: WeightBank(3), TypeError, "a module, a list or a dict, got int"),
    "dot": (lambda: WeightBank({"a.b": linear()}), ValueError, "must not be empty or have a dot"),
    "no_name": (lambda: WeightBank({(1,): linear()}), TypeError, "an int or a str"),
    "equal_names": (
        lambda: WeightBank({1: linear(), "1": linear()}),
        ValueError,
        "must differ as text",
    ),
    "named_shared": (
        lambda: WeightBank(linear(), ["shared"], shared="add"),
        ValueError,
        "no task can have the name 'shared'",
    ),
    "one_module": (lambda: WeightBank(_tied_tasks()), ValueError, "shares a tensor with task 0"),
    "one_tensor": (lambda: WeightBank(_shared_tensor()), ValueError, "shares a tensor with task 0"),
    "buffer": (
        lambda: WeightBank([_buffer_of_a_weight()]),
        ValueError,
        "of task 0 share memory",
    ),
    "meta": (lambda: WeightBank([nn.Linear(2, 2, device="meta")]), ValueError, "to_empty"),
    "slots": (lambda: make(slots=0), ValueError, "slots must be an int of at least 1, got 0"),
    "average": (lambda: make(average="mean"), ValueError, '"world" or "users", got \'mean\''),
    "shared": (lambda: WeightBank(linear(), 2, shared="sum"), ValueError, "got 'sum'"),
    "step_on": (lambda: make(step_on="gpu"), ValueError, "step_on must be one of"),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors(name: str) -> None:
    call, error, message = CONSTRUCTORS[name]
    with pytest.raises(error, match=message):
        call()


def test_a_task_that_does_not_exist() -> None:
    bank = make()
    for key in (3, -4, "de"):
        with pytest.raises(KeyError, match=r"task must be one of 0, 1, 2, got"):
            bank(key, x())
    with pytest.raises(KeyError, match=r"0, 1, 2, 3, …, 19, got 20"):
        WeightBank(linear(), 20, device="cpu").prefetch(20)
    named = WeightBank(linear(), ["de", "fr"], device="cpu")
    for key in ("en", 0, -1):
        with pytest.raises(KeyError, match=r"task must be one of de, fr, got"):
            named[key]


@pytest.mark.parametrize("key", [1.0, None, [1], (1,), torch.tensor([1, 2]), torch.tensor(1.0)])
def test_a_task_of_another_type(key: Any) -> None:
    with pytest.raises(TypeError, match="a task must be an int or a str"):
        make()(key, x())


def test_a_task_on_a_device() -> None:
    with pytest.raises(TypeError, match="keep it on the host"):
        make()(torch.tensor(1, device="meta"), x())


def test_an_input_on_another_device() -> None:
    with pytest.raises(ValueError, match="computes on cpu, got an input on meta"):
        make()(1, x().to("meta"))
    with pytest.raises(ValueError, match="computes on cpu, got an input on meta"):
        make()(1, x(), (torch.zeros(2, 2, 4, device="meta"), 3))


CHANGES: dict[str, tuple[Callable[[WeightBank], Any], str]] = {
    "step": (
        lambda bank: torch.optim.SGD(bank.parameters(), 0.1).step(),
        r"head.weight of task 1 was changed \(version \d+ is now \d+\)",
    ),
    "fused": (
        lambda bank: torch.optim.AdamW(bank.parameters(), 0.1, fused=True).step(),
        r"head.weight of task 1 was changed",
    ),
    "flat_weight": (lambda bank: bank[1].rnn.flat_weight.zero_(), "flat_weight of task 1"),
    "assign": (
        lambda bank: bank[1].load_state_dict(KINDS["gru"]().state_dict(), assign=True),
        "of task 1 was replaced",
    ),
    "parameter": (
        lambda bank: setattr(bank[1].head, "weight", nn.Parameter(torch.ones(2, 4))),
        "of task 1 was replaced",
    ),
    "refresh": (lambda bank: bank.refresh(1), "or refresh"),
}


@pytest.mark.parametrize("is_overwritten", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change_before_backward(name: str, is_overwritten: bool) -> None:
    bank = make()
    for parameter in bank[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    loss = bank(1, x()).sum()
    change, message = CHANGES[name]
    change(bank)
    if is_overwritten:
        bank(0, x()), bank(2, x())
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    bank.zero_grad()
    bank(1, x()).sum().backward()  # the next one is right
    assert bank[1].head.weight.grad is not None


def test_a_shape_that_changed() -> None:
    bank = make()
    bank[2].head = nn.Linear(4, 7)
    with pytest.raises(
        RuntimeError,
        match=r"head.weight of task 2 was torch.float32 \(2, 4\) when the bank took it, and is "
        r"torch.float32 \(7, 4\)",
    ):
        bank(2, x())
    bank(1, x())
    bank[1].double()
    with pytest.raises(RuntimeError, match=r"of task 1 was torch.float32 .* is torch.float64"):
        bank(1, x())
    bank[0].extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"extra of task 0 was absent .* is torch.float32"):
        bank(0, x())


def test_a_replaced_module_of_equal_shape_is_taken() -> None:
    bank = make()
    bank(2, x())
    bank[2].head = nn.Linear(4, 2)
    y = x()
    torch.testing.assert_close(bank(2, y), bank[2](y), rtol=0, atol=0)
    bank(2, y).sum().backward()
    assert bank[2].head.weight.grad is not None


def test_writes_that_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, y = make(), x()
    bank(1, y)
    bank[1].head.weight.data.zero_()
    monkeypatch.setenv("FUSEDRNN_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"head.weight of task 1 .* call refresh\(\)"):
        bank(1, y)
    bank.refresh()
    torch.testing.assert_close(bank(1, y), bank[1](y), rtol=0, atol=0)
    bank(1, y)


def test_the_check_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDRNN_CHECK", "1")
    bank = emulated(WeightBank(linear(), 2, shared="add", device="cpu"))
    y = x()
    bank(0, y), bank(0, y)
    bank.shared.weight.data.zero_()
    with pytest.raises(RuntimeError, match="weight of task 0"):
        bank(0, y)


def test_added_tasks() -> None:
    bank = make()
    with pytest.raises(ValueError, match="there is a task 1 already"):
        bank.add(1, linear())
    with pytest.raises(ValueError, match="must not be empty or have a dot"):
        bank.add("a.b", linear())
    with pytest.raises(ValueError, match="task 7 shares a tensor with task 0"):
        bank.add(7, bank[0])
    with pytest.raises(KeyError):
        del bank[9]
    total = WeightBank(linear(), 2, shared="add", device="cpu")
    with pytest.raises(ValueError, match="the shapes and dtypes of shared"):
        total.add(2, nn.Linear(INPUT, 3))


def test_a_slot_that_is_in_use() -> None:
    bank = make()
    with bank.active(0, slot=0) as module:
        module(x())
        with pytest.raises(
            RuntimeError, match="slot 0 cannot take other weights: a call is using it"
        ):
            bank.active(1, slot=0).__enter__()
    with bank.active(1, slot=0) as module:
        kept = module.head.weight
    with pytest.raises(RuntimeError, match="slot 0 cannot take other weights: a call is using it"):
        bank.active(2, slot=0).__enter__()
    del kept
    with bank.active(2, slot=0):
        pass
    for slot in (2, -1, True, "0"):
        with pytest.raises(ValueError, match="slot must be an int from 0 to 1"):
            bank.active(0, slot=slot)


def test_slots_that_somebody_keeps_are_not_overwritten() -> None:
    bank, kept, y = make(), [], x()
    with pytest.warns(RuntimeWarning, match="all 2 slots of a WeightBank are in use"):
        for t in range(3):
            with bank.active(t) as module:
                kept.append(module.head.weight.detach())
        bank(0, y)
    for t in range(3):
        torch.testing.assert_close(kept[t], bank[t].head.weight, rtol=0, atol=0)


def test_an_error_in_a_call_leaves_the_module_whole() -> None:
    bank = make()
    weight = bank[1].head.weight
    with pytest.raises((RuntimeError, ValueError)):
        bank(1, torch.randn(5, 2, INPUT + 1))
    assert bank[1].head.weight is weight
    assert bank(1, x()).shape == (5, 2, 2)
    assert not any(slot.running for slot in bank._device.slots.slots)


def test_replicas_of_data_parallel() -> None:
    bank = make()
    bank._is_replica = True
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        bank(1, x())


def test_exclude_is_for_the_module_that_ddp_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As here, where DistributedDataParallel has got one with the excluded one in it."""
    bank = make()
    WeightBank.exclude(bank)
    monkeypatch.setattr(bank._ranks, "is_known_to_ddp", lambda parameters: len(parameters()) == 3)
    with pytest.raises(RuntimeError, match="with the same module that DistributedDataParallel"):
        bank(1, x())


def test_steps_with_a_closure() -> None:
    bank = make(step_on="device")
    optimizer = torch.optim.SGD(bank.parameters(), 0.1)
    bank(0, x()).sum().backward()
    with pytest.raises(ValueError, match=r"a closure of step\(\) cannot call the bank"):
        optimizer.step(lambda: bank(0, x()).sum())


def test_plans() -> None:
    with pytest.raises(ValueError, match="gb_per_s must be a list of numbers above 0, got "):
        make().plan(gb_per_s=(0,))
    with pytest.raises(ValueError, match="tflops must be a list of numbers above 0, got "):
        make().plan(tflops=())


def test_optimizers() -> None:
    with pytest.raises(
        TypeError, match=r"takes the class, and its options .* got an object of type function"
    ):
        make().optimizer(lambda p: None)
    assert "TaskOptimizer(AdamW, lr=0.1, tasks=3)" in repr(
        make().optimizer(torch.optim.AdamW, lr=0.1)
    )
    assert fusedrnn.WeightBank is WeightBank


def test_traces_are_refused() -> None:
    bank, y = make(), x()
    with pytest.raises(RuntimeError, match=r"cannot be traced or exported.* bank\[t\]"):
        make_fx(lambda y: bank(1, y), tracing_mode="fake")(y)
    torch.testing.assert_close(bank(1, y), bank[1](y), rtol=0, atol=0)
