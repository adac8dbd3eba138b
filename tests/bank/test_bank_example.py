"""The example of the guide, and the guide's table of break-even points."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from bank.emulated_device import Watch, emulated

import fusedrnn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that fusedrnn is the installed one
from docs.examples import weight_bank as example  # noqa: E402

SIZES = {"steps": 12, "window": 16, "batch": 8, "width": 16, "authors": 4, "lr": 0.02}


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_two_processes_with_a_bank_learn_what_one_learns_with_a_list() -> None:
    code = (
        "from docs.examples import weight_bank as example\n"
        "import json, sys\n"
        "if __name__ == '__main__':\n"
        "    print(json.dumps(example.main(sys.argv[1:])))\n"
    )
    options = [f"--{name}={value}" for name, value in SIZES.items()]
    command = [sys.executable, "-c", code, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check(*json.loads(done.stdout.splitlines()[-1]).values())


def test_slots_change_nothing() -> None:
    """In one process, on an emulated device: both tasks of a step are in one graph."""
    options = argparse.Namespace(**SIZES)
    with_bank = example.Model(options, use_bank=True)
    bank = emulated(with_bank.authors)
    with Watch(bank):
        found = example.train_list(with_bank, options)
    assert bank._device.slots.copies > 2 * SIZES["steps"]
    expected = example.train_list(example.Model(options, use_bank=False), options)
    check(found, expected)
    assert found == expected


def check(of_bank: example.Losses, of_list: example.Losses) -> None:
    """Equal losses of each author, which fall."""
    for found, expected in zip(of_bank, of_list, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    before, after = of_bank
    assert mean(after) < mean(before) - 0.2


def test_guide_has_the_numbers_of_plan() -> None:
    guide = (ROOT / "docs" / "weight-bank.md").read_text()
    bank = fusedrnn.WeightBank([torch.nn.Linear(64, 64)], device="cpu")
    # AdamW on the host moves 28 bytes for each weight, of which a copy moves 4.
    plan = bank.plan(gb_per_s=(25, 55, 400, 100 * 4 / 28), tflops=(50, 100, 300))
    for tflops, rows in plan.hidden_from:
        cells = " | ".join(f"{round(n):,}" for n in rows)
        assert f"| {tflops:g} | {cells} |" in guide
    task = fusedrnn.WeightBank(fusedrnn.LSTM(1024, 1024), tasks=2, device="cpu").plan()
    shown = re.sub(r" +", " ", guide)
    for what, nbytes in {
        "64 tasks, of which the largest has": task.task_bytes,
        "weights, 2 slots": task.device_weight_bytes,
        "gradients, 2 blocks": task.device_gradient_bytes,
        "weights of all tasks would": 32 * task.all_tasks_bytes,
        "weights of all tasks": 32 * task.host_weight_bytes,
        "gradients, of a task in use": task.host_gradient_bytes_per_task,
        "Adam, once all took a step": 32 * task.host_adam_bytes,
        "to the device, for a call": task.bytes_to_device,
        "to the host, for backward": task.bytes_to_host,
    }.items():
        assert f"{what} {nbytes:,} bytes" in shown
