"""Banks whose tasks stay in a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from bank.bank_modules import INPUT, KINDS
from bank.emulated_device import EmulatedDevice
from torch import nn

from fusedrnn import WeightBank

BOTH = pytest.mark.parametrize("has_slots", [False, True], ids=["cpu", "emulated"])


def saved(path: Path, kind: str, tasks: Any) -> tuple[Path, WeightBank]:
    bank = WeightBank(KINDS[kind](), tasks, device="cpu")
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.normal_()
        for buffer in bank.buffers():
            buffer.copy_(torch.rand(buffer.shape) + 1)
    safetensors.save_file(bank.state_dict(), path / "tasks.safetensors")
    return path / "tasks.safetensors", bank.eval()


def opened(path: Path, kind: str, has_slots: bool) -> WeightBank:
    bank = WeightBank.open(path, KINDS[kind](), device="cpu")
    if has_slots:
        bank._use_engine(EmulatedDevice(3))
    return bank


@BOTH
@pytest.mark.parametrize("kind", ["mlp", "batch_norm", "lstm", "nn_lstm", "gru"])
def test_calls(tmp_path: Path, kind: str, has_slots: bool) -> None:
    path, bank = saved(tmp_path, kind, 12)
    tasks = opened(path, kind, has_slots)
    assert tasks.keys() == list(range(12)) and len(tasks) == 12
    assert list(tasks.parameters()) == [] and dict(tasks.state_dict()) == {}
    x = torch.randn(5, 2, INPUT)
    for t in (3, 11, 3, 0, -1):
        torch.testing.assert_close(tasks(t, x), bank(t, x), rtol=0, atol=0)
        torch.testing.assert_close(tasks[t](x), bank(t, x), rtol=0, atol=0)
    with torch.inference_mode():
        for t, y in tasks.prefetching((t, x) for t in (5, 6, 7)):
            torch.testing.assert_close(tasks(t, y), bank(t, x), rtol=0, atol=0)
    with pytest.raises(KeyError, match="0, 1, 2, 3, …, 11, got 12"):
        tasks(12, x)


@BOTH
def test_what_comes_before_a_task_is_trained(tmp_path: Path, has_slots: bool) -> None:
    path, bank = saved(tmp_path, "lstm", ["de", "fr", "en"])
    tasks = opened(path, "lstm", has_slots)
    x = torch.randn(5, 2, INPUT)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, y in zip((tasks, bank), inputs, strict=True):
        sum(model(t, y).sum() for t in ("de", "fr", "en")).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=0)
    assert tasks.keys() == ["de", "en", "fr"]


def test_more_tasks_than_are_kept(tmp_path: Path) -> None:
    path, bank = saved(tmp_path, "mlp", 150)
    tasks, x = opened(path, "mlp", True), torch.randn(5, 2, INPUT)
    for t in [*range(150), 3]:
        torch.testing.assert_close(tasks(t, x), bank(t, x), rtol=0, atol=0)
    assert len(tasks._tasks._kept) == 64
    plan = tasks.plan()
    assert plan.tasks == 150 and plan.host_weight_bytes == 0 and plan.task_bytes > 0


def test_errors(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, "mlp", 2)
    with pytest.raises(ValueError, match="must have the tensors of the module"):
        WeightBank.open(path, nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(INPUT, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"2.bias of task '0' .* shape \(3,\), got \(2,\)"):
        WeightBank.open(path, other)
    bank = WeightBank.open(path, KINDS["mlp"]().double(), device="cpu")
    with pytest.raises(
        ValueError, match=r"must be torch.float64 as in the module, got torch.float"
    ):
        bank(0, torch.randn(2, INPUT))
    with pytest.raises(TypeError, match="open takes a module"):
        WeightBank.open(path, 3)
    bank = WeightBank.open(path, KINDS["mlp"](), device="cpu")
    with pytest.raises(RuntimeError, match="a bank of a file is read-only"):
        bank.add(2, nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="a bank of a file is read-only"):
        del bank[0]
    with pytest.raises(TypeError, match="open the file again"):
        copy.deepcopy(bank)
    with pytest.raises(FileNotFoundError):
        WeightBank.open(tmp_path / "none", KINDS["mlp"]())


@BOTH
@pytest.mark.parametrize("kind", ["mlp", "batch_norm"])
def test_weights_that_all_tasks_add(tmp_path: Path, kind: str, has_slots: bool) -> None:
    bank = WeightBank(KINDS[kind](), ["de", "fr"], shared="add", device="cpu").eval()
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.normal_()
    path, x = tmp_path / "tasks.safetensors", torch.randn(5, 2, INPUT)
    safetensors.save_file(bank.state_dict(), path)
    tasks = WeightBank.open(path, KINDS[kind](), device="cpu", shared="add")
    if has_slots:
        tasks._use_engine(EmulatedDevice(3))
    assert tasks.keys() == ["de", "fr"] and "shared" not in tasks
    assert not any(parameter.requires_grad for parameter in tasks.parameters())
    for t in ("de", "fr", "de"):
        torch.testing.assert_close(tasks(t, x), bank(t, x), rtol=0, atol=0)
    with pytest.raises(ValueError, match='open it with shared="add"'):
        WeightBank.open(path, KINDS[kind](), device="cpu")
    plain, _ = saved(tmp_path, kind, 2)
    with pytest.raises(
        ValueError, match=r'shared="add" needs a file with tensors shared\.…; .* has 0, 1'
    ):
        WeightBank.open(plain, KINDS[kind](), device="cpu", shared="add")


def test_the_bank_of_a_model(tmp_path: Path) -> None:
    path, bank = saved(tmp_path, "lstm", 11)
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "heads": bank})
    safetensors.save_file(model.state_dict(), path)
    x = torch.randn(5, 2, INPUT)
    for prefix in ("heads.", "heads"):
        tasks = WeightBank.open(path, KINDS["lstm"](), device="cpu", prefix=prefix)
        assert tasks.keys() == list(range(11))
        torch.testing.assert_close(tasks(10, x), bank(10, x), rtol=0, atol=0)
    with pytest.raises(
        ValueError, match=r"begins with 'head\.'; they begin with encoder\., heads\."
    ):
        WeightBank.open(path, KINDS["lstm"](), prefix="head.")
    with pytest.raises(ValueError, match=r"named like 3\.weight"):
        WeightBank.open(path, KINDS["lstm"](), prefix="encoder.")
    with pytest.raises(ValueError, match="pass the place of the bank as prefix="):
        WeightBank.open(path, KINDS["lstm"]())


def test_files_of_something_else(tmp_path: Path) -> None:
    path, module = tmp_path / "file", nn.Linear(2, 2)
    torch.save(module.state_dict(), path)
    with pytest.raises(ValueError, match=r"file is not a safetensors file .*: make one by"):
        WeightBank.open(path, module)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="file is not a safetensors file"):
        WeightBank.open(path, module)
    safetensors.save_file({}, path)
    with pytest.raises(ValueError, match="has no tensors"):
        WeightBank.open(path, module)
    safetensors.save_file(module.state_dict(), path)
    with pytest.raises(ValueError, match=r"(weight|bias) in .* belongs to no task"):
        WeightBank.open(path, module)


def test_names_that_look_like_numbers(tmp_path: Path) -> None:
    bank = WeightBank({k: nn.Linear(2, 2) for k in ("²", "00", "0", "-1", "10", "2")}, device="cpu")
    safetensors.save_file(bank.state_dict(), tmp_path / "file")
    tasks = WeightBank.open(tmp_path / "file", nn.Linear(2, 2), device="cpu")
    assert tasks.keys() == [0, 2, 10, "-1", "00", "²"]
    x = torch.randn(3, 2)
    for t in bank.keys():  # noqa: SIM118, an iteration is of modules
        assert torch.equal(tasks(t, x), bank(t, x))
    with pytest.raises(KeyError):
        tasks(1, x)


def test_moves_and_conversions(tmp_path: Path) -> None:
    path, bank = saved(tmp_path, "mlp", 2)
    tasks, x = opened(path, "mlp", False), torch.randn(5, 2, INPUT)
    for convert in (lambda: tasks.half(), lambda: tasks.to(torch.float64), lambda: tasks.double()):
        with pytest.raises(RuntimeError, match="cannot be converted to another dtype"):
            convert()
    with pytest.raises(RuntimeError, match="cannot go to the meta device"):
        tasks.to("meta")
    assert tasks.to("cpu").float() is tasks
    torch.testing.assert_close(tasks(1, x), bank(1, x), rtol=0, atol=0)


def test_buffers_that_are_not_in_the_file(tmp_path: Path) -> None:
    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("calls", torch.zeros(1), persistent=False)

    bank, template = WeightBank(Counter(), 2, device="cpu"), Counter()
    safetensors.save_file(bank.state_dict(), tmp_path / "file")
    tasks = WeightBank.open(tmp_path / "file", template, device="cpu")
    tasks[0].calls.add_(1)
    assert tasks[0].calls == 1 and tasks[1].calls == 0 and template.calls == 0


def test_hooks_of_the_template_are_those_of_each_task(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, "mlp", 70)
    module, seen = KINDS["mlp"](), []
    module.register_forward_hook(lambda *args: seen.append(1))
    tasks = WeightBank.open(path, module, device="cpu")
    for t in [*range(70), 0]:
        tasks(t, torch.randn(2, INPUT))
    assert len(seen) == 71


@BOTH
def test_refresh(tmp_path: Path, has_slots: bool) -> None:
    path, bank = saved(tmp_path, "mlp", 2)
    tasks = opened(path, "mlp", has_slots)
    x = torch.randn(5, INPUT)
    for t in (None, 0, None):
        tasks.refresh(t)
        assert torch.equal(tasks(0, x), bank(0, x))
