"""A bank as torch's lists and dicts of modules: names, state dicts, copies, conversions, files.

Longer than 350 lines, because its tests are of one topic, each of a few lines.
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
from bank.bank_modules import HIDDEN, INPUT, KINDS, Norm, Rnn, Tied
from bank.emulated_device import Recorder, emulated
from torch import Tensor, nn

import fusedrnn
from fusedrnn import WeightBank

BOTH = pytest.mark.parametrize("has_slots", [False, True], ids=["cpu", "emulated"])


def inputs() -> Tensor:
    return torch.randn(5, 2, INPUT)


def pair(kind: str, tasks: int = 3, *, has_slots: bool = True) -> tuple[WeightBank, nn.ModuleList]:
    models = [KINDS[kind]() for _ in range(tasks)]
    modules = nn.ModuleList(copy.deepcopy(models))
    bank = WeightBank(models, device="cpu")
    return (emulated(bank) if has_slots else bank), modules


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


# --- names ----------------------------------------------------------------------------------------


@BOTH
def test_a_list(has_slots: bool) -> None:
    bank, modules = pair("mlp", has_slots=has_slots)
    assert len(bank) == 3 and bank.keys() == [0, 1, 2] and 2 in bank and 3 not in bank
    assert list(bank) == list(bank.values()) == [bank[0], bank[1], bank[2]]
    assert bank[-1] is bank[2] and bank["1"] is bank[1]
    assert dict(bank.items())[1] is bank[1]
    x = inputs()
    for key in (1, "1", np.int64(1), torch.tensor(1), -2):
        torch.testing.assert_close(bank(key, x), modules[1](x), rtol=0, atol=0)


@BOTH
def test_a_dict_of_unequal_shapes(has_slots: bool) -> None:
    models = nn.ModuleDict({"de": nn.Linear(INPUT, 2), "fr": nn.Linear(INPUT, 7)})
    bank = WeightBank(copy.deepcopy(models), device="cpu")
    bank = emulated(bank) if has_slots else bank
    assert list(bank) == bank.keys() == ["de", "fr"]
    x = inputs()
    for name in models:
        torch.testing.assert_close(bank(name, x), models[name](x), rtol=0, atol=0)
    assert_same_state(bank, models)


def test_names_that_modules_have_as_attributes() -> None:
    bank = WeightBank({"keys": nn.Linear(2, 2), "type": nn.Linear(2, 3)}, device="cpu")
    assert bank("type", torch.ones(1, 2)).shape == (1, 3)
    assert bank.keys() == ["keys", "type"]


def test_copies_of_a_module() -> None:
    module = nn.Linear(3, 3)
    bank = WeightBank(module, tasks=2, device="cpu")
    named = WeightBank(module, tasks=["a", "b"], device="cpu")
    for task in (*bank.values(), *named.values()):
        assert task is not module
        torch.testing.assert_close(task.weight, module.weight, rtol=0, atol=0)
    with torch.no_grad():
        bank[0].weight.zero_()
    assert module.weight.any() and bank[1].weight.any()


def test_a_generator_of_modules() -> None:
    assert len(WeightBank((nn.Linear(2, 2) for _ in range(4)), device="cpu")) == 4


@BOTH
def test_tasks_are_added_and_deleted(has_slots: bool) -> None:
    bank, _ = pair("mlp", has_slots=has_slots)
    x = inputs()
    before = bank(2, x)
    bank.add(3, nn.Linear(INPUT, 100))  # larger than the slots
    assert bank(3, x).shape == (5, 2, 100)
    del bank[0]
    assert bank.keys() == [1, 2, 3] and len(bank) == 3
    torch.testing.assert_close(bank(2, x), before, rtol=0, atol=0)
    bank.add("0", nn.Linear(INPUT, 1))
    assert bank(0, x).shape == (5, 2, 1)
    bank(0, x).sum().backward()
    assert bank[0].weight.grad is not None and bank[1][0].weight.grad is None


# --- memory ---------------------------------------------------------------------------------------


def test_all_tasks_lie_in_one_block() -> None:
    bank, _ = pair("gru")
    addresses = [p.data_ptr() for p in bank.parameters()]
    assert addresses == sorted(addresses)
    total = sum(p.nbytes for p in bank.parameters())
    assert addresses[-1] + list(bank.parameters())[-1].nbytes - addresses[0] < total + 3 * 20 * 64
    assert all(p.data_ptr() % 64 == 0 for p in (m.head.weight for m in bank.values()))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_flat_modules_stay_flat(kind: str) -> None:
    bank, modules = pair(kind)
    for ours, theirs in zip(bank.values(), modules, strict=True):
        torch.testing.assert_close(ours.rnn.flat_weight, theirs.rnn.flat_weight, rtol=0, atol=0)
    bank[1].rnn.flat_weight.zero_()
    assert not bank[1].rnn.weight_hh_l0.any() and bank[0].rnn.weight_hh_l0.any()
    x = inputs()
    torch.testing.assert_close(bank(1, x), bank[1](x), rtol=0, atol=0)


def test_tensors_that_share_memory_go_on_sharing_it() -> None:
    module = nn.Linear(4, 4)
    module.half_of_it = nn.Parameter(module.weight.detach()[:2])
    bank = WeightBank([module], device="cpu")
    with torch.no_grad():
        bank[0].weight.fill_(3)
    assert (bank[0].half_of_it == 3).all()


def test_strides_are_kept() -> None:
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    bank = emulated(WeightBank([module], device="cpu"))
    x = torch.randn(1, 2, 5, 5)
    expected = copy.deepcopy(module)
    bank(0, x).sum().backward()
    expected(x).sum().backward()
    assert bank[0].weight.stride() == expected.weight.stride()
    assert bank[0].weight.grad.stride() == expected.weight.grad.stride()
    torch.testing.assert_close(bank[0].weight.grad, expected.weight.grad, rtol=0, atol=0)


def test_slots_are_as_many_as_asked_for() -> None:
    models = [nn.Linear(INPUT, INPUT) for _ in range(10)]
    modules = nn.ModuleList(copy.deepcopy(models))
    bank = emulated(WeightBank(models, device="cpu", slots=2))
    x = torch.randn(5, INPUT, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ours, theirs = x, y
    for t in range(10):  # ten tasks in one graph
        ours, theirs = torch.tanh(bank(t, ours)), torch.tanh(modules[t](theirs))
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
    assert len(bank._device.slots.slots) == 2 and bank._device.reloads == 8


def test_prefetching_brings_each_task_once() -> None:
    bank, _ = pair("mlp", 6)
    order = [0, 1, 1, 4, 2, 5, 5, 0]
    with torch.no_grad():
        for t, x in bank.prefetching((t, inputs()) for t in order):
            bank(t, x)
    assert bank._device.slots.copies == 6
    assert list(bank.prefetching([])) == []


# --- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "tied", "batch_norm", "nn_lstm", "lstm"])
@BOTH
def test_state_dicts_go_both_ways(kind: str, has_slots: bool) -> None:
    bank, modules = pair(kind, has_slots=has_slots)
    x = inputs()
    bank(1, x)
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.normal_()
    bank.load_state_dict(modules.state_dict())
    assert_same_state(bank, modules)
    torch.testing.assert_close(bank(1, x), modules[1](x), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.normal_()
    modules.load_state_dict(bank.state_dict())
    assert_same_state(bank, modules)


@pytest.mark.parametrize("make", [lambda: nn.Linear(INPUT, HIDDEN), Norm, Tied])
@pytest.mark.parametrize("rnn", [False, True])
def test_safetensors(tmp_path: Path, make: Any, rnn: bool) -> None:
    module = Rnn(fusedrnn.LSTM(INPUT, HIDDEN, 2)) if rnn else make()
    bank = WeightBank(module, 3, device="cpu")
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.normal_()
    if not isinstance(module, Tied):  # save_file refuses tied weights of any module
        safetensors.save_file(bank.state_dict(), tmp_path / "file")
        twin = WeightBank(module, 3, device="cpu")
        twin.load_state_dict(safetensors.load_file(tmp_path / "file"))
        assert_same_state(bank, twin)
    safetensors.save_model(bank, str(tmp_path / "model"))
    third = WeightBank(module, 3, device="cpu")
    safetensors.load_model(third, str(tmp_path / "model"))
    assert_same_state(bank, third)


def test_accelerate(tmp_path: Path) -> None:
    bank, modules = pair("lstm")
    accelerate.Accelerator(cpu=True).save_model(bank, str(tmp_path))
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.zero_()
    accelerate.load_checkpoint_in_model(bank, str(tmp_path))
    assert_same_state(bank, modules)
    x = inputs()
    torch.testing.assert_close(bank(2, x), modules[2](x), rtol=0, atol=0)


def test_one_task_is_saved_without_the_others() -> None:
    bank, _ = pair("lstm", 20)
    file = io.BytesIO()
    torch.save(bank[3].state_dict(), file)
    assert len(file.getvalue()) < 3 * sum(t.nbytes for t in bank[3].state_dict().values()) + 4000


# --- copies and conversions -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", ["tied", "batch_norm", "nn_lstm", "gru"])
def test_copies(kind: str, how: str) -> None:
    bank, _ = pair(kind)
    x = inputs()
    bank(0, x)
    if how == "deepcopy":
        twin = copy.deepcopy(bank)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(bank))
    else:
        file = io.BytesIO()
        torch.save(bank, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_same_state(bank, twin)
    assert twin.keys() == bank.keys()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(p.any() for p in bank[0].parameters() if p.ndim > 1)
    twin = emulated(twin)
    twin.eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.1)
    torch.testing.assert_close(twin(1, x), twin[1](x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["batch_norm", "lstm", "nn_lstm"])
def test_conversions(kind: str) -> None:
    bank, modules = pair(kind)
    x = inputs()
    parameters = list(bank.parameters())
    bank.double()
    bank = emulated(bank)
    modules.double()
    assert_same_state(bank, modules)
    assert all(a is b for a, b in zip(parameters, bank.parameters(), strict=True))
    bank.eval(), modules.eval()
    torch.testing.assert_close(bank(1, x.double()), modules[1](x.double()), rtol=0, atol=0)
    bank.half()
    assert next(bank.parameters()).dtype == torch.float16
    assert bank.plan().task_bytes < 2 * sum(t.nbytes for t in bank[0].state_dict().values()) + 999


def test_moves_set_the_device_and_leave_weights_on_the_host() -> None:
    class Elsewhere(Exception): ...

    bank, _ = pair("mlp")
    addresses = [p.data_ptr() for p in bank.parameters()]
    bank.cpu()
    assert bank.device == torch.device("cpu")
    assert [p.data_ptr() for p in bank.parameters()] == addresses
    with pytest.raises(RuntimeError, match="cannot go to the meta device"):
        bank.to("meta")
    with pytest.raises(RuntimeError, match="not shared between processes"):
        bank.share_memory()


def test_a_recurrent_stays_compiled() -> None:
    """Its cells have compile="require"."""
    bank, modules = pair("recurrent")
    x = inputs()
    for t in (0, 1, 2, 0):
        bank.zero_grad()
        modules.zero_grad()
        bank(t, x).sum().backward()
        modules[t](x).sum().backward()
        for p, q in zip(bank[t].parameters(), modules[t].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
        assert bank[t].rnn.explain(x).is_compiled


@pytest.mark.parametrize("kind", ["tied", "gru"])
def test_compiled_modules(kind: str) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    bank, modules = pair(kind, 6)
    for module in bank.values():
        module.compile(backend=backend)
    x = inputs()
    for t in [*range(6), *range(6)]:
        bank.zero_grad()
        modules.zero_grad()
        (bank(t, x).square().mean() + bank((t + 2) % 6, x).sum()).backward()
        (modules[t](x).square().mean() + modules[(t + 2) % 6](x).sum()).backward()
        for p, q in zip(bank.parameters(), modules.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)
    assert 1 <= len(graphs) <= 4


@BOTH
def test_a_model_that_is_compiled_around_a_bank(has_slots: bool) -> None:
    torch._dynamo.reset()
    bank, modules = pair("mlp", has_slots=has_slots)

    def model(t: int, x: Tensor) -> Tensor:
        return torch.tanh(bank(t, x * 2)) + 1

    compiled = torch.compile(model, backend="eager")
    x = inputs()
    for t in (0, 1, 0, 2):
        expected = torch.tanh(modules[t](x * 2)) + 1
        torch.testing.assert_close(compiled(t, x), expected)


def test_repr_and_plan() -> None:
    bank = WeightBank(nn.LSTM(1024, 1024), tasks=4, device="cpu")
    assert "tasks=4, device=cpu, slots=2" in repr(bank)
    plan = bank.plan()
    size = 4 * 2 * 1024 * 4 * 1025
    assert plan.task_bytes == plan.bytes_to_device == plan.bytes_to_host == size
    assert plan.device_weight_bytes == plan.device_gradient_bytes == 2 * size
    assert plan.host_weight_bytes == 4 * size and plan.host_adam_bytes == 8 * size
    assert dict(plan.hidden_from)[50.0] == pytest.approx((1333.3, 606.06, 83.333), rel=1e-4)
    assert "606 at 55 GB/s" in str(plan)


def test_the_host_waits_for_a_copy_before_a_call_is_over() -> None:
    """So that what it writes to the weights next is not what the call computes with."""

    bank, _ = pair("mlp")
    engine = Recorder()
    bank._use_engine(engine)
    with torch.no_grad():
        for count, t in enumerate((0, 1, 0, 2), 1):
            bank(t, inputs())
            assert engine.waited == engine.brought and len(engine.brought) <= count
    bank.prefetch(1)
    assert len(engine.waited) == len(engine.brought) - 1  # nobody uses it yet
