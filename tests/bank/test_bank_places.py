"""Where the tensors of a bank are: in a block of the host, and in slots of the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank.emulated_device import emulated
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from fusedrnn import WeightBank

X = torch.randn(5, 3)


def both(
    make: Callable[[], nn.Module] = lambda: nn.Linear(3, 3), **options: Any
) -> tuple[WeightBank, Any]:
    """A bank on an emulated device, and the list that it has to equal."""
    modules = nn.ModuleList(make() for _ in range(3))
    return emulated(WeightBank(copy.deepcopy(list(modules)), device="cpu", **options)), modules


# --- on the host ----------------------------------------------------------------------------------


def _transpose_data(module: Any) -> None:
    module.weight.data = module.weight.data.t()


def _transpose(module: Any) -> None:
    with torch.no_grad():
        module.weight.t_()


def _swap(module: Any) -> None:
    module[0].weight.data, module[1].weight.data = module[1].weight.data, module[0].weight.data


@pytest.mark.parametrize("change", [_transpose_data, _transpose, _swap])
def test_memory_of_a_task_in_another_order(change: Callable[[Any], None]) -> None:
    def make() -> nn.Module:
        linear = nn.Linear(3, 3)
        return nn.Sequential(linear, nn.Linear(3, 3)) if change is _swap else linear

    bank, modules = both(make)
    bank(0, X)
    for m in (bank, modules):
        change(m[0])
    torch.testing.assert_close(bank(0, X), modules[0](X))
    torch.testing.assert_close(bank.state_dict(), modules.state_dict(), rtol=0, atol=0)


def test_a_part_of_the_memory() -> None:
    bank, _ = both()
    bank[0].weight.data = bank[0].weight.data[:2]
    with pytest.raises(RuntimeError, match=r"and is torch.float32 \(2, 3\)"):
        bank(0, X)


@pytest.mark.parametrize("has_slots", [False, True])
def test_modules_that_are_made_in_inference_mode(has_slots: bool) -> None:
    def make() -> nn.Module:
        module = nn.LSTM(3, 3)
        module.register_buffer("scale", torch.ones(3))
        return module

    with torch.inference_mode():
        bank, modules = both(make)
        bank = bank if has_slots else WeightBank(list(bank.values()), device="cpu")
        for _ in range(2):
            assert torch.equal(bank(0, X)[0], modules[0](X)[0])
            for m in (bank, modules):
                m[0].weight_ih_l0.mul_(2)
                m[0].scale.add_(1)
    bank(0, X)[0].sum().backward()
    assert bank[0].weight_ih_l0.grad is not None and not bank[0].scale.requires_grad


def test_tensors_that_are_replaced_in_inference_mode() -> None:
    bank, modules = both(lambda: nn.BatchNorm1d(3))
    with torch.inference_mode():
        state = {name: torch.ones_like(t) for name, t in modules.state_dict().items()}
        for m in (bank, modules):
            m.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
            m[1].running_mean = X[0].clone()
        assert torch.equal(bank(1, X), modules[1](X))
    torch.testing.assert_close(bank.state_dict(), modules.state_dict(), rtol=0, atol=0)


def test_transforms_of_functions_are_refused_and_change_nothing() -> None:
    bank, modules = both()
    named = dict(bank.named_parameters())
    with pytest.raises(RuntimeError, match=r"Use the module itself, bank\[0\]"):
        torch.func.grad(lambda given: functional_call(bank, given, (0, X)).sum())(named)
    for _ in range(2):
        assert torch.equal(bank(0, X), modules[0](X))
    assert dict(bank.named_parameters()) == named


@pytest.mark.parametrize("wants", [False, True])
def test_tangents_of_inputs(wants: bool) -> None:
    bank, modules = both(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))

    def tangent(call: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.set_grad_enabled(wants), forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(X, X * 2))).tangent

    assert torch.equal(tangent(lambda x: bank(0, x)), tangent(modules[0]))


# --- on the device --------------------------------------------------------------------------------


DTYPES = [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex32, torch.float32]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES)
def test_comparisons_are_of_bytes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setenv("FUSEDRNN_CHECK", "1")

    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_buffer("scale", torch.ones(3, 3, dtype=torch.float32).to(dtype).t())
        return module

    bank, _ = both(make)
    bank(0, X), bank(0, X)
    before = bank[0].weight.detach().clone()
    for value, other in ((0.0, -0.0), (float("nan"), 0.0), (torch.finfo().max, float("inf"))):
        bank[0].weight.data.fill_(value)
        bank.refresh(0)
        bank(0, X)
        bank[0].weight.data.fill_(other)
        with pytest.raises(RuntimeError, match="weight of task 0 has changed in a way"):
            bank(0, X)
    bank[0].weight.data.copy_(before)
    bank.refresh(0)
    bank(0, X)


def test_slots_keep_their_numbers() -> None:
    bank, _ = both(slots=3)

    def address(slot: int) -> int:
        with bank.active(0, slot=slot) as module:
            return module.weight.data_ptr()

    bank(0, X)
    fixed = [address(1), address(2)]
    bank.add("large", nn.Linear(3, 100))
    with pytest.warns(RuntimeWarning, match="are too small"), bank.active(0, slot=0):
        bank("large", X)
    assert [address(1), address(2)] == fixed
    with pytest.raises(RuntimeError, match=r"slot 1 cannot .* call bank.to\(bank.device\)"):
        bank.active("large", slot=1).__enter__()
    bank.to(bank.device)


def test_slots_that_are_too_small_are_made_anew_in_their_places() -> None:
    bank, modules = both(slots=2)
    for t in (0, 1):
        bank(t, X)
    slots = list(bank._device.slots.slots)
    bank.add("large", nn.Linear(3, 100))
    bank("large", X)
    now = bank._device.slots.slots
    assert now[0] is not slots[0] and now[1] is slots[1]
    assert torch.equal(bank(1, X), modules[1](X)) and bank._device.slots.extra == 0
    with bank.active("large", slot=1):
        assert now[1] is not slots[1] and len(now) == 2


def test_batch_norm_that_trains_for_a_part_of_a_call() -> None:
    modules = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2)).eval()
    bank = emulated(WeightBank(copy.deepcopy(list(modules)), device="cpu")).eval()
    x = torch.randn(5, 3) + 2
    with bank.active(0) as module:
        for norm in (module, modules[0]):
            norm.train()
            norm(x)
            norm.eval()
    for (name, ours), theirs in zip(bank.named_buffers(), modules.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    bank(1, x), bank(1, x)
    assert torch.equal(bank(0, x), modules[0](x))
