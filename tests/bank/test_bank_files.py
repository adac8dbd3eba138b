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
        bank._use(EmulatedDevice(3))
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
    with pytest.raises(ValueError, match=r"must be torch.float64 as the module's, got torch.float"):
        bank(0, torch.randn(2, INPUT))
    with pytest.raises(TypeError, match="open takes a module"):
        WeightBank.open(path, 3)
    bank = WeightBank.open(path, KINDS["mlp"](), device="cpu")
    with pytest.raises(RuntimeError, match="for reading only"):
        bank.add(2, nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="for reading only"):
        del bank[0]
    with pytest.raises(TypeError, match="open it anew"):
        copy.deepcopy(bank)
    with pytest.raises(FileNotFoundError):
        WeightBank.open(tmp_path / "none", KINDS["mlp"]())
