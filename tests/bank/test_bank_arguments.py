"""What a bank takes as tasks, as their names, and as pairs to prefetch."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from bank.emulated_device import emulated
from torch import Tensor, nn

from fusedrnn import WeightBank


class Named(str, enum.Enum):
    DE = "de"


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def of_list(tasks: int = 3) -> WeightBank:
    return WeightBank([linear() for _ in range(tasks)], device="cpu")


def x() -> Tensor:
    return torch.randn(4, 3)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["de", np.str_("de"), Named.DE])
def test_names_that_are_text(key: Any) -> None:
    bank = WeightBank({key: linear()}, device="cpu")
    assert bank.keys() == ["de"] and type(bank.keys()[0]) is str
    assert key in bank and "de" in bank
    y = x()
    assert torch.equal(bank(key, y), bank["de"](y))
    del bank[key]
    bank.add(key, linear())
    copies = WeightBank(linear(), tasks=[key, "fr"], device="cpu")
    assert bank.keys() == ["de"] and copies.keys() == ["de", "fr"]


@pytest.mark.parametrize("number", [2, np.int64(2), torch.tensor(2), torch.tensor([2])])
def test_names_that_are_numbers(number: Any) -> None:
    bank = WeightBank(linear(), tasks=number, device="cpu")
    assert bank.keys() == [0, 1] and bank._is_list
    assert number not in bank
    bank.add(number, linear())
    assert number in bank and bank[number] is bank[2]
    assert WeightBank({number: linear()}, device="cpu").keys() == [2]


def test_in_says_what_calls_take() -> None:
    bank, named = of_list(), WeightBank({"1": linear()}, device="cpu")
    for key in (0, "2", -1, -3, torch.tensor(1), torch.tensor([1]), np.int64(2)):
        assert key in bank and bank[key] in list(bank)
    others = (3, -4, "de", 1.0, True, None, [1], bank[0], torch.ones(2), torch.tensor(True))
    for key in (*others, torch.tensor(1, device="meta")):
        assert key not in bank
        with pytest.raises((KeyError, TypeError)):
            bank[key]
    assert -1 not in named and 1 in named


@pytest.mark.parametrize("key", [True, np.bool_(True), torch.tensor(True)])
def test_a_bool_is_no_name(key: Any) -> None:
    bank = of_list()
    for use in (lambda: bank[key], lambda: bank.add(key, linear()), lambda: bank(key, x())):
        with pytest.raises(TypeError, match="a task must be an int or a str, got "):
            use()
    with pytest.raises((TypeError, ValueError), match="a number above 0, or a list of names"):
        WeightBank(linear(), tasks=True)


FORGOTTEN: dict[str, tuple[Any, str]] = {
    "tensor": (torch.randn(400, 300), r"a Tensor of shape \(400, 300\), torch.float32, on cpu"),
    "array": (np.zeros((40, 3)), r"a ndarray of shape \(40, 3\)"),
    "batch": ([torch.randn(4, 3)] * 2, "a list of 2"),
    "module": (nn.Sequential(*[nn.Linear(2, 2)] * 99), "a module Sequential"),
    "object": (range(10**9), r"range\(0, 1000000000\)"),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_task_that_was_forgotten(name: str) -> None:
    first, shown = FORGOTTEN[name]
    with pytest.raises(TypeError, match=f"an int or a str, got {shown}: call bank") as caught:
        of_list()(first, 1)
    assert len(str(caught.value)) < 200
    with pytest.raises(KeyError) as missing:
        of_list()("x" * 10**6)
    assert len(str(missing.value)) < 200


def test_a_module_with_an_argument_named_task() -> None:
    class Head(nn.Module):
        def forward(self, x: Tensor, task: str) -> Any:
            return task

    assert WeightBank([Head()], device="cpu")(0, x(), task="qa") == "qa"


WORKING = ("keys", "type", "forward", "device", "state_dict", "shared", "_own")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))])
def test_copies_with_names_that_modules_have_as_attributes(how: Callable[[Any], Any]) -> None:
    bank = WeightBank({name: linear() for name in WORKING}, device="cpu")
    twin, y = how(bank), x()
    for name in WORKING:
        assert twin[name] is not bank[name] and torch.equal(twin(name, y), bank(name, y))
    twin.eval().load_state_dict(bank.state_dict())


@pytest.mark.parametrize("name", ["training", "_modules", "_tasks", "_device", "_apply"])
def test_names_that_cannot_be(name: str) -> None:
    for make in (
        lambda: WeightBank({"a": linear(), name: linear()}, device="cpu"),
        lambda: WeightBank(linear(), ["a", name], device="cpu"),
        lambda: of_list().add(name, linear()),
    ):
        with pytest.raises(ValueError, match=f"no task can have the name '{name}'"):
            make()


# --- modules --------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = linear(), of_list(1)


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bank": (Outer, "make both banks submodules"),
    "script": (lambda: torch.jit.script(linear()), "whose tensors are in C"),
    "trace": (lambda: nn.Sequential(torch.jit.trace(linear(), x())), "whose tensors are in C"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_cannot_be_tasks(kind: str) -> None:
    make, message = KINDS[kind]
    first, bank = linear(), of_list()
    address = first.weight.data_ptr()
    for use in (
        lambda: WeightBank([first, make()], device="cpu"),
        lambda: WeightBank(make(), 2, device="cpu"),
        lambda: bank.add(3, make()),
    ):
        with pytest.raises(TypeError, match=message):
            use()
    bank._modules["1"] = make()
    with pytest.raises(TypeError, match=message):
        bank[1]
    assert first.weight.data_ptr() == address and 3 not in bank  # nothing was touched


def _with_memory(weight: Tensor) -> nn.Module:
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("size", [3, 3000])
def test_tasks_that_have_the_same_memory(kind: Any, size: int) -> None:
    """Also where the first ones are in the bank before the others are made."""
    weight = torch.randn(size, size)
    made: Iterator[nn.Module] = (_with_memory(weight) for _ in range(3))
    with pytest.raises(ValueError, match="task 1 shares a tensor with task 0"):
        WeightBank(kind(made), device="cpu")
    stacked = torch.randn(3, size, size)
    bank = WeightBank(kind(_with_memory(part) for part in stacked), device="cpu")
    for t in range(3):  # side by side is not the same
        assert torch.equal(bank[t].weight, stacked[t])
    with pytest.raises(ValueError, match="task 3 shares a tensor with task 1"):
        bank.add(3, _with_memory(bank[1].weight.detach()))
    module = bank[1]
    del bank[1]
    bank.add(3, module)  # nobody else's any more


def test_memory_of_a_generator_may_be_used_again() -> None:
    bank = WeightBank((nn.Linear(2900, 2900) for _ in range(6)), device="cpu")
    assert len(bank) == 6


def test_a_buffer_within_a_parameter() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(10, 3)
            self.all, self.second = nn.Parameter(weight), nn.Parameter(weight[1:2])
            self.register_buffer("sixth", weight[5:6])

    with pytest.raises(ValueError, match="all and sixth of task 0 share memory"):
        WeightBank([Views()], device="cpu")


def test_tensors_whose_elements_share_memory() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1).expand(3, 3))
            self.register_buffer("mask", torch.ones(1, 3).expand(3, 3))
            self.register_buffer("windows", torch.arange(5.0).as_strided((3, 3), (1, 1)))
            self.bias = nn.Parameter(torch.randn(3, 3).t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * self.mask + self.windows) + self.bias.sum(0)

    modules = nn.ModuleList(Folded() for _ in range(2))
    bank, y = emulated(WeightBank(copy.deepcopy(modules), device="cpu")), x()
    assert torch.equal(bank(1, y), modules[1](y))
    assert bank[1].weight.is_contiguous() and bank[1].windows.is_contiguous()
    assert bank[1].bias.stride() == (1, 3)
    bank(1, y).sum().backward()
    torch.optim.SGD(bank.parameters(), 0.1).step()


# --- add, prefetching -----------------------------------------------------------------------------


def test_a_task_that_is_added_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, module, seen = of_list(50), linear(), []
    named_members = nn.Module._named_members

    def note(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return named_members(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_named_members", note)
    bank.add("x", module)
    assert seen and all(looked_at is module for looked_at in seen)


def test_add_without_a_module() -> None:
    with pytest.raises(TypeError, match='add takes a module, unless the bank has shared="add"'):
        of_list().add(3)
    bank, y = WeightBank(linear(), ["de"], shared="add", device="cpu"), x()
    bank.add("fr")
    assert torch.equal(bank("fr", y), bank.shared(y))
    assert not any(p.any() for p in bank["fr"].parameters())
    bank("fr", y).sum().backward()
    assert torch.equal(bank.shared.weight.grad, bank["fr"].weight.grad)


def test_the_module_that_all_add_is_no_task() -> None:
    bank = WeightBank(linear(), ["de"], shared="add", device="cpu")
    with pytest.raises(ValueError, match=r"task 'x' shares a tensor with bank\.shared"):
        bank.add("x", bank.shared)
    with pytest.raises(ValueError, match="no task can have the name 'shared'"):
        bank.add("shared", linear())


@pytest.mark.parametrize("item", [torch.ones(2, 3), 1, (0,), (0, 1, 2), "ab", {0: 1, 1: 2}])
def test_prefetching_takes_pairs(item: Any) -> None:
    with pytest.raises(TypeError, match=r"takes pairs \(task, batch\).*; got "):
        next(of_list().prefetching([item]))
    assert [t for t, _ in of_list().prefetching([[torch.tensor(1), 0], (2, 0)])] == [1, 2]


@pytest.mark.parametrize("rates", [5.0, (), (0,), ("a",), "25", None, [25, -1]])
def test_rates_of_plans(rates: Any) -> None:
    with pytest.raises(ValueError, match="gb_per_s must be a list of numbers above 0, got"):
        of_list().plan(gb_per_s=rates)
    assert of_list().plan(gb_per_s=np.array([25.0], np.float32)).milliseconds[0][0] == 25


# --- the default device ---------------------------------------------------------------------------


def test_a_default_device_is_not_that_of_host_memory() -> None:
    modules = [linear() for _ in range(2)]
    fourth, y = linear(), x()
    with torch.device("meta"):
        bank = WeightBank(modules, device="cpu")
        for _ in range(2):
            bank.add(len(bank), copy.deepcopy(fourth))
            bank.double().float().to("cpu")
            twin = copy.deepcopy(bank)
            bank(0, y).sum().backward()
            bank = emulated(bank)
    assert torch.equal(twin(2, y), fourth(y)) and bank[0].weight.grad is not None
