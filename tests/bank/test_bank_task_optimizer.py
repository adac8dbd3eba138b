"""bank.optimizer(): its groups follow the tasks, states are loaded by name, and what it refuses."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bank.bank_modules import INPUT
from torch import nn

from fusedrnn import WeightBank

X = torch.ones(2, INPUT)
Groups = dict[Any, dict[str, Any]]


def bank_of(names: Any = 3, outputs: int = 2) -> WeightBank:
    return WeightBank(nn.Linear(INPUT, outputs), names, device="cpu")


def train(bank: WeightBank, optimizer: Any, *tasks: Any) -> None:
    """One step of these tasks, of which each has other gradients."""
    optimizer.zero_grad()
    for i, t in enumerate(tasks, 1):
        bank(t, i * X).square().sum().backward()
    optimizer.step()


def moments(optimizer: Any) -> dict[Any, Any]:
    """By task: those of AdamW for the weight, if it has some."""
    groups = {
        group["task"]: optimizer.state.get(group["params"][0]) for group in groups_of(optimizer)
    }
    return {task: state["exp_avg"].clone() for task, state in groups.items() if state}


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = optimizer.param_groups
    return found


# --- groups ---------------------------------------------------------------------------------------


def test_a_task_that_is_replaced() -> None:
    bank = bank_of()
    optimizer = bank.optimizer(torch.optim.AdamW, lr=0.1)
    groups_of(optimizer)[1]["lr"] = 0.5
    train(bank, optimizer, 0, 1, 2)
    before: Any = bank[1].weight
    kept = moments(optimizer)
    del bank[1]
    bank.add(1, nn.Linear(INPUT, 4))
    train(bank, optimizer, 1)
    assert bank[1].weight.grad is not None and before not in optimizer.state
    assert {group["task"]: group["lr"] for group in groups_of(optimizer)} == {
        0: 0.1,
        2: 0.1,
        1: 0.1,
    }
    assert moments(optimizer)[1].shape == (4, INPUT)
    for t in (0, 2):
        assert torch.equal(moments(optimizer)[t], kept[t])
    optimizer.zero_grad()
    assert bank[1].weight.grad is None


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_task_that_is_deleted(gone: int) -> None:
    bank = bank_of()
    optimizer = bank.optimizer(torch.optim.AdamW, lr=0.1)
    train(bank, optimizer, 0, 1, 2)
    del bank[gone]
    left = [t for t in range(3) if t != gone]
    assert [group["task"] for group in optimizer.state_dict()["param_groups"]] == left
    assert len(optimizer.state) == 4
    train(bank, optimizer, *left)


def test_a_task_that_is_added_is_in_the_groups_at_once() -> None:
    """GradScaler.unscale_() and schedulers look at them before step()."""
    bank = bank_of()
    optimizer = bank.optimizer(torch.optim.SGD, lr=1.0)
    bank.add(3, nn.Linear(INPUT, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(bank(3, X).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(bank[3].bias.grad, torch.full((2,), 2.0))


def test_groups_within_a_call() -> None:
    """The module has other tensors then."""
    bank = WeightBank(nn.Linear(INPUT, 2), 2, shared="add", device="cpu")
    own = list(bank[0].parameters())
    with bank.active(0):
        optimizer = bank.optimizer(torch.optim.SGD, lr=1.0)
    assert all(a is b for a, b in zip(groups_of(optimizer)[1]["params"], own, strict=True))


def test_two_tasks_with_one_parameter() -> None:
    bank = bank_of()
    optimizer = bank.optimizer(torch.optim.SGD, lr=1.0)
    bank.add("more", nn.Linear(INPUT, 2))
    bank["more"].weight = bank[0].weight
    for _ in range(2):
        with pytest.raises(ValueError, match="tasks 0 and 'more' have a parameter in common"):
            optimizer.step()


def test_groups_of_a_user() -> None:
    bank = bank_of()
    optimizer = bank.optimizer(torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match=r"groups .* are the tasks.* another optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(groups_of(optimizer)) == 3


def test_each_task_has_its_own_learning_rate() -> None:
    """Schedulers change a tensor in place, in each group."""
    bank, modules = bank_of(), nn.Linear(1, 1)
    optimizers = [
        bank.optimizer(torch.optim.AdamW, lr=torch.tensor(1.0)),
        torch.optim.AdamW(modules.parameters(), lr=torch.tensor(1.0)),
    ]
    for optimizer in optimizers:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
        assert [float(group["lr"]) for group in groups_of(optimizer)] == [0.5] * len(
            groups_of(optimizer)
        )
    optimizers[0].load_state_dict(optimizers[1].state_dict() | {"param_groups": _plain(bank)})
    assert len({id(group["lr"]) for group in groups_of(optimizers[0])}) == 3


def _plain(bank: WeightBank) -> Any:
    plain = torch.optim.AdamW(bank.parameters(), lr=torch.tensor(0.5))
    return plain.state_dict()["param_groups"]


def test_work_grows_with_the_tasks() -> None:
    """And not with their square, as where torch looks at all groups before it adds one."""

    def calls(tasks: int) -> int:
        bank = WeightBank(nn.Linear(1, 1), tasks, device="cpu")
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            optimizer = bank.optimizer(torch.optim.SGD, lr=1.0)
            bank.add("last", nn.Linear(1, 1))
            optimizer.zero_grad()
        finally:
            sys.setprofile(before)
        return count

    calls(10)  # loads what torch loads at first
    assert calls(800) < 10 * calls(100)  # 8 times; of squares, 64


# --- state dicts ----------------------------------------------------------------------------------


def test_states_are_loaded_by_name() -> None:
    first, second = bank_of(["a", "b", "c"]), bank_of(["c", "a", "b"])
    ours = first.optimizer(torch.optim.AdamW, lr=0.1)
    groups_of(ours)[0]["lr"] = 0.7
    train(first, ours, "a", "c")
    theirs = second.optimizer(torch.optim.AdamW, lr=0.1)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert [(g["task"], g["lr"]) for g in groups_of(theirs)] == [("c", 0.1), ("a", 0.7), ("b", 0.1)]
    assert moments(theirs).keys() == {"a", "c"}
    for task, moment in moments(ours).items():
        assert torch.equal(moments(theirs)[task], moment)


@pytest.mark.parametrize("shared", [None, "add"])
def test_states_of_a_list(shared: Any) -> None:
    one = nn.Linear(INPUT, 2)
    bank, twin = (WeightBank(copy.deepcopy(one), 3, shared=shared, device="cpu") for _ in range(2))
    twin.load_state_dict(bank.state_dict())
    theirs = torch.optim.AdamW(twin.named_parameters(), lr=0.1)
    train(twin, theirs, 0, 2)
    bank.load_state_dict(twin.state_dict())
    ours = bank.optimizer(torch.optim.AdamW, lr=0.5)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(2):
        train(bank, ours, 1, 2)
        train(twin, theirs, 1, 2)
    for p, q in zip(bank.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_states_of_others() -> None:
    bank = bank_of(["a", "b"])
    optimizer = bank.optimizer(torch.optim.AdamW, lr=0.1)
    train(bank, optimizer, "a")
    before = copy.deepcopy(optimizer.state_dict())
    larger = WeightBank({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1, bias=False)}, device="cpu")
    cases = {
        r"lacks \['b'\], and .* unknown tasks, \['c'\]": bank_of(["a", "c"]).optimizer(
            torch.optim.AdamW
        ),
        "task 'b' has 2 parameters, and the state dict has 1": larger.optimizer(torch.optim.AdamW),
        r"all 4 parameters, as AdamW\(.*groups of \[3\]": torch.optim.AdamW(larger.parameters()),
    }
    for message, other in cases.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[\] parameters"):
        optimizer.load_state_dict(bank.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert before["state"].keys() == after["state"].keys()


# --- classes --------------------------------------------------------------------------------------


def test_what_is_no_class() -> None:
    bank = bank_of()
    hint = r"the class, and its options as keywords: bank.optimizer\(AdamW, lr=1e-3\); got "
    for wrong, what in {
        functools.partial(torch.optim.AdamW, lr=1.0): "an object of type partial",
        torch.optim.AdamW(bank.parameters()): "an object of type AdamW",
        "adam": "'adam'",
        nn.Linear: "the class Linear",
    }.items():
        with pytest.raises(TypeError, match=hint + what) as caught:
            bank.optimizer(wrong)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 200


def test_a_class_whose_step_needs_a_closure() -> None:
    with pytest.raises(TypeError, match=r"of LBFGS .* use LBFGS\(bank.parameters\(\)\)"):
        bank_of().optimizer(torch.optim.LBFGS)


def test_a_class_that_looks_at_parameters() -> None:
    matrices = [nn.Linear(INPUT, 2, bias=False) for _ in range(2)]
    bank = WeightBank([nn.Identity(), *matrices], device="cpu")
    optimizer = bank.optimizer(torch.optim.Muon, lr=0.1)
    before = bank[1].weight.detach().clone()
    train(bank, optimizer, 1)
    assert not torch.equal(before, bank[1].weight)
    bank.add(3, nn.Linear(INPUT, 2))
    with pytest.raises(ValueError, match="only supports 2D"):
        bank.optimizer(torch.optim.Muon, lr=0.1)


def test_the_default_device_does_not_matter() -> None:
    bank = bank_of()
    with torch.device("cuda"):  # which this machine need not have
        optimizer = bank.optimizer(torch.optim.AdamW, fused=True)
    train(bank, optimizer, 0)


def test_banks_without_parameters() -> None:
    with pytest.raises(ValueError, match="has no parameters: add tasks"):
        WeightBank([nn.Identity()], device="cpu").optimizer(torch.optim.SGD, lr=1.0)


def test_a_bank_of_a_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(bank_of().state_dict(), tmp_path / "tasks")
    bank = WeightBank.open(tmp_path / "tasks", nn.Linear(INPUT, 2), device="cpu")
    with pytest.raises(RuntimeError, match="is read-only: it has no optimizer"):
        bank.optimizer(torch.optim.SGD, lr=1.0)
