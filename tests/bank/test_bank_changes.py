"""A bank whose modules are replaced, removed or converted from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank.bank_modules import INPUT, KINDS
from bank.emulated_device import emulated
from torch import Tensor, nn

import fusedrnn
from fusedrnn import WeightBank
from fusedrnn._bank import host_tasks

BOTH = pytest.mark.parametrize("has_slots", [False, True], ids=["cpu", "emulated"])


def made(kind: str = "mlp", *, has_slots: bool = True, **options: Any) -> WeightBank:
    bank = WeightBank([KINDS[kind]() for _ in range(3)], device="cpu", **options)
    return emulated(bank) if has_slots else bank


def x() -> Tensor:
    return torch.randn(5, 2, INPUT)


def assert_calls_are_of_its_modules(bank: WeightBank) -> None:
    y = x()
    for key, module in bank.items():
        assert bank._modules[str(key)] is module is bank[key]
        torch.testing.assert_close(bank(key, y), module(y), rtol=0, atol=0)


# --- modules that are replaced --------------------------------------------------------------------


def _replace_all(bank: WeightBank) -> None:
    for name in list(bank._modules):
        bank._modules[name] = KINDS["lstm"]()


REPLACEMENTS: dict[str, Callable[[WeightBank], Any]] = {
    "setattr": lambda bank: setattr(bank, "1", KINDS["gru"]()),
    "all": _replace_all,
    "same_parameters": lambda bank: setattr(bank, "0", copy.copy(bank[0])),
}


@BOTH
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_modules_that_are_replaced(how: str, has_slots: bool) -> None:
    bank = made("nn_lstm", has_slots=has_slots)
    own = bank.optimizer(torch.optim.SGD, lr=0.1)
    bank(0, x()), bank(1, x())
    REPLACEMENTS[how](bank)
    assert_calls_are_of_its_modules(bank)
    assert bank.keys() == [0, 1, 2]
    bank(1, x()).sum().backward()
    assert all(p.grad is not None for p in bank[1].parameters())
    assert not any(p.grad is not None for p in bank[0].parameters())
    assert bank._generation != own._generation
    addresses = [(m.data_ptr(), m.data_ptr() + m.nbytes) for m in bank._memories]
    for parameter in bank.parameters():
        assert any(begin <= parameter.data_ptr() < end for begin, end in addresses)


def test_conversions_of_whole_models() -> None:
    norms = nn.Sequential(WeightBank([nn.BatchNorm1d(3) for _ in range(2)], device="cpu"))
    (bank,) = nn.SyncBatchNorm.convert_sync_batchnorm(norms)
    assert type(bank[1]) is nn.SyncBatchNorm and bank._tasks["1"].module is bank[1]
    bank = emulated(WeightBank([nn.LSTM(INPUT, 4) for _ in range(2)], device="cpu"))
    fusedrnn.convert(bank)
    assert type(bank[0]) is fusedrnn.LSTM and bank._tasks["0"].is_in_place()
    assert torch.equal(bank(1, y := x())[0], bank[1](y)[0])


def test_a_replaced_module_keeps_its_place_and_is_checked() -> None:
    bank, generation = made(), 0
    bank.add("last", nn.Linear(INPUT, 2))
    generation = bank._generation
    bank._modules["1"] = nn.Linear(INPUT, 7)
    assert bank.plan().task_bytes > 0 and bank.keys() == [0, 1, 2, "last"]
    assert bank._generation > generation
    assert bank(1, x()).shape == (5, 2, 7)
    bank._modules["1"] = bank[0]
    with pytest.raises(ValueError, match="task 1 shares a tensor with task 0"):
        bank(1, x())
    bank._modules["1"] = nn.Linear(INPUT, 2)
    assert_calls_are_of_its_modules(bank)


def test_a_module_that_is_removed() -> None:
    bank = made()
    delattr(bank, "1")
    assert bank.keys() == [0, 2] and len(bank) == 2 and 1 not in bank
    with pytest.raises(KeyError, match="must be one of 0, 2, got 1"):
        bank(1, x())
    assert_calls_are_of_its_modules(bank)
    bank.add(1, nn.Linear(INPUT, 2))
    assert bank.keys() == [0, 2, 1]
    module = bank[2]
    delattr(bank, "2")
    bank.add(3, module)  # before anybody has looked for the other
    assert bank.keys() == [0, 1, 3]


@BOTH
def test_modules_that_are_exchanged(has_slots: bool) -> None:
    bank = made(has_slots=has_slots)
    first, second = bank[0], bank[1]
    bank._modules["0"], bank._modules["1"] = second, first
    assert_calls_are_of_its_modules(bank)
    assert bank[0] is second and bank[1] is first


@pytest.mark.parametrize("has_slots", [False, True])
def test_a_shared_module_that_is_replaced(has_slots: bool) -> None:
    bank = WeightBank(nn.Linear(INPUT, 2), 2, shared="add", device="cpu")
    bank = emulated(bank) if has_slots else bank
    y = x()
    bank(0, y)
    bank.shared = nn.Linear(INPUT, 2)
    torch.testing.assert_close(bank(0, y), bank.shared(y))
    bank(0, y).sum().backward()
    assert bank.shared.weight.grad is not None
    bank.shared = nn.Linear(INPUT, 3)
    with pytest.raises(ValueError, match="the shapes and dtypes of shared"):
        bank(0, y)
    del bank.shared
    with pytest.raises(RuntimeError, match=r"needs bank\.shared"):
        bank(0, y)


def test_a_module_named_shared_is_added_in_no_other_bank() -> None:
    bank = made(has_slots=False)
    bank.add_module("shared", KINDS["mlp"]())
    bank.cpu()
    assert_calls_are_of_its_modules(emulated(bank))


def test_the_shared_module_goes_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the meta device here, where a bank computes nothing."""
    monkeypatch.setattr("fusedrnn._bank.weight_bank.device_of", lambda device: torch.device(device))
    bank = WeightBank(nn.Linear(INPUT, 2), 2, shared="add", device="meta")
    assert bank.shared.weight.is_meta and bank[1].weight.is_cpu


# --- memory ---------------------------------------------------------------------------------------


def test_memory_of_deleted_tasks_is_freed() -> None:
    bank = made(has_slots=False)
    for _ in range(3):
        bank.add("x", nn.Linear(INPUT, 2))
        assert len(bank._memories) == 2
        kept = bank["x"].weight
        del bank["x"]
        assert len(bank._memories) == 1
        kept.detach().fill_(1)  # a tensor that somebody has keeps its memory
    bank.double()
    assert len(bank._memories) == 1


def test_blocks_that_exist_are_pinned_for_a_new_device() -> None:
    class Pins(host_tasks.Engine):  # type: ignore[misc]
        def __init__(self) -> None:
            self.pinned: list[int] = []

        def pin(self, memory: Tensor) -> None:
            self.pinned.append(memory.data_ptr())

    bank = made(has_slots=False)
    bank.add("x", nn.Linear(INPUT, 2))
    engine = Pins()
    bank._use_engine(engine)
    assert engine.pinned == [memory.data_ptr() for memory in bank._memories]
    bank.add("y", nn.Linear(INPUT, 2))
    assert engine.pinned == [memory.data_ptr() for memory in bank._memories]


# --- conversions ----------------------------------------------------------------------------------


class Scaled(WeightBank):
    """A bank with tensors and a module of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.extra = nn.Linear(2, 2)


def test_a_bank_with_tensors_of_its_own() -> None:
    bank = Scaled([KINDS["mlp"]() for _ in range(2)], device="cpu")
    bank.double()
    assert {tensor.dtype for tensor in bank.state_dict().values()} == {torch.float64}
    twin = copy.deepcopy(bank)
    assert twin.keys() == [0, 1] and twin.extra is not bank.extra
    with pytest.raises(ValueError, match="there is a task 'extra' already"):
        bank.add("extra", nn.Linear(2, 2))
    assert "extra" not in bank


def _fails(after: int) -> Callable[[Tensor], Tensor]:
    calls = iter(range(10**6))

    def fn(tensor: Tensor) -> Tensor:
        if next(calls) >= after:
            raise MemoryError("of the test")
        return tensor.double()

    return fn


@BOTH
@pytest.mark.parametrize("after", [0, 2, 6, 9])
def test_a_conversion_that_fails(after: int, has_slots: bool) -> None:
    bank, modules = made(has_slots=has_slots), nn.ModuleList()
    modules.extend(copy.deepcopy(list(bank)))
    with pytest.raises(MemoryError):
        bank._apply(_fails(after))
    assert bank.keys() == [0, 1, 2]
    assert all(task.is_in_place() for task in bank._tasks.values())
    bank.float()
    for name, tensor in modules.state_dict().items():
        assert torch.equal(bank.state_dict()[name], tensor)
    assert_calls_are_of_its_modules(bank)


def test_no_memory_for_a_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nbytes: int) -> Tensor:
        raise MemoryError("of the test")

    bank = made()
    with monkeypatch.context() as patch:
        patch.setattr(host_tasks, "allocate", fail)
        with pytest.raises(MemoryError):
            bank.double()
    assert bank.keys() == [0, 1, 2]
    bank.double()
    assert bank(1, x().double()).dtype == torch.float64
    assert emulated(bank)(1, x().double()).dtype == torch.float64


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}])
def test_memory_formats(options: Any) -> None:
    def make() -> nn.Module:
        return nn.Conv2d(2, 3, 3)

    bank = WeightBank([make() for _ in range(2)], device="cpu")
    modules = nn.ModuleList(make() for _ in range(2))
    for model in (bank, modules):
        model.to(memory_format=torch.channels_last, **options)
    assert bank[1].weight.stride() == modules[1].weight.stride()
    assert bank[1].weight.dtype == modules[1].weight.dtype


def test_what_is_moved_and_what_is_converted() -> None:
    """With a function that would move tensors to another device."""
    bank, moved = made(has_slots=False), []

    class There:
        """A tensor on another device, of which a bank looks at little."""

        is_meta = is_cpu = False
        device = torch.device("cpu")

        def __init__(self, tensor: Tensor) -> None:
            moved.append(tensor)
            self.tensor, self.dtype, self.stride = tensor, tensor.dtype, tensor.stride

        def to(self, device: str) -> Tensor:
            return self.tensor.clone()

    before = [parameter.data_ptr() for parameter in bank.parameters()]
    bank._apply(There)  # type: ignore[arg-type]
    assert [parameter.data_ptr() for parameter in bank.parameters()] == before
    assert len(moved) == 1  # the probe
    bank._apply(lambda tensor: There(tensor.double()))  # type: ignore[arg-type,return-value]
    assert next(bank.parameters()).dtype == torch.float64 and len(moved) == 2 + 12
