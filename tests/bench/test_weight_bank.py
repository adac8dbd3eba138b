"""The benchmark of banks writes what a benchmark writes, on a CPU and, without a GPU, for one."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench import (
    clock,
    parts,
    report,
    sweep,
    weight_bank,
    weight_bank_cases,
    weight_bank_device,
    weight_bank_host,
    weight_bank_ways,
    worker,
)
from bench.weight_bank_cases import GROUPS, QUICK


def test_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [str(weight_bank.__file__), "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="0"):
        report.main([weight_bank.run], None)
    found = json.loads((tmp_path / "weight_bank.json").read_text())
    assert (
        found["environment"]["command"] == f"python -m bench.weight_bank --quick --out {tmp_path}"
    )
    assert found["failures"] == []
    steps = [row for row in found["rows"] if row["group"] in weight_bank_host.MODULES]
    assert len(steps) == len(weight_bank_host.MODULES) * len(weight_bank_host.CONTENDERS)
    assert all(len(row["processor_ms"]) == 3 for row in found["rows"])
    assert found["plan"]["tasks"] == weight_bank_host.QUICK.tasks
    assert len(found["tables"]) == 5
    assert {target["where"] for target in found["targets"]} == {
        *weight_bank_host.MODULES,
        "optimizers",
    }


def test_the_plan_is_that_of_64_lstms() -> None:
    """By the design's count: 33.6 MB each, of which a device has four and not 64."""
    size = weight_bank_host.Size(tasks=2)
    plan = weight_bank_host.plan(size)
    assert plan.task_bytes == 4 * (4 * 1024 * (1024 + 1024) + 2 * 4 * 1024)
    assert plan.device_weight_bytes + plan.device_gradient_bytes == 4 * plan.task_bytes
    table = weight_bank._break_even_table(plan)
    assert [line[2] for line in table.rows] == [
        "606 (device step 2,424)",
        "1,212 (device step 4,848)",
        "3,636 (device step 14,545)",
    ]
    assert [line[-1] for line in table.rows] == ["2,333", "4,667", "14,000"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU is asked of nobody, and calls that a GPU would time are made."""
    for name in ("Stream", "current_stream", "stream", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)
    for module in (weight_bank_device, weight_bank_ways, weight_bank_cases):
        for name in ("cuda_time_ms", "cuda_enqueue_ms"):
            monkeypatch.setattr(module, name, clock.time_ms, raising=False)
    monkeypatch.setattr(weight_bank_device, "cuda_peak_bytes", lambda call: call() or 1000)
    monkeypatch.setattr(weight_bank_device, "cuda_saved_bytes", lambda call: (call().nbytes, 0))
    monkeypatch.setitem(
        weight_bank_device.HOST_MEMORY,
        weight_bank_cases.BY_TORCH,
        lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8),
    )


def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float) -> report.Report:
    """Measures the rows for a GPU on the CPU, in this process."""

    def measure_apart(_: str, job: Any, names: Any, **named: Any) -> dict[str, Any]:
        return worker.measure_here(weight_bank_device.measure, job | {"device": "cpu"}, names)

    monkeypatch.setattr(weight_bank, "measure_apart", measure_apart)
    options = argparse.Namespace(budget_s=budget_s, device="cuda")
    run = report.Run(True, tmp_path, report.NoProgress(), options, {"gpu": "none"})
    found = weight_bank.run_on_cuda(run)
    run.write(found)
    return found


def test_rows_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    found = on_a_gpu(tmp_path, monkeypatch, 60)
    assert found.failures == []
    rows = json.loads((tmp_path / "weight_bank.json").read_text())["rows"]
    assert [(row["group"], row["name"]) for row in rows] == [
        (group, name) for group, names in GROUPS.items() for name in names
    ]
    assert not [row for row in rows if sweep.why_none(row)]
    assert len(found.targets) == 3 + 2 + 2 + 8 + 1
    assert all(math.isfinite(target.value) for target in found.targets)
    passed, note = parts.results(tmp_path / "weight_bank.json")
    assert passed and f"of {len(found.targets)} targets" in note


def test_rows_that_are_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    late = on_a_gpu(tmp_path, monkeypatch, -1)
    assert late.targets == []
    of_targets = [name for group in weight_bank_cases.WITH_TARGETS for name in GROUPS[group]]
    assert len(late.failures) == len(of_targets)


@pytest.mark.nightly
def test_an_error_costs_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken\nand a hint")

    for name in (weight_bank_cases.ON_DEVICE, weight_bank_cases.BANK):
        monkeypatch.setitem(weight_bank_ways.WAYS, name, broken)
    found = on_a_gpu(tmp_path, monkeypatch, 60)
    assert len(found.failures) == 4 and all("broken" in failure for failure in found.failures)
    rows = [row for row in found.numbers["rows"] if not sweep.why_none(row)]
    assert len(rows) == sum(map(len, GROUPS.values())) - 4


def test_sizes_cross_to_another_process() -> None:
    assert weight_bank_cases.Size(**json.loads(json.dumps(asdict(QUICK)))) == QUICK
