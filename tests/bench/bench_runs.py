"""How tests run the benchmarks; importing this module makes them importable too."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that fusedrnn is the installed one
from bench import (  # noqa: E402
    cases,
    clock,
    memory,
    report,
    speed,
    steps,
    sweep,
    worker,
)

OURS, LSTM, LOOP = "fusedrnn", "nn.LSTM", "plain loop"


def run_bench(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *options]
    # Threads that wait for each other are slow while other tests run.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)


def load(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return content


class OnCpu:
    """Runs the benchmarks for a GPU with steps on the CPU, as far as possible."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        later = (cases.CHECKPOINTED, cases.OFFLOADED)
        monkeypatch.setattr(sweep, "ON_CUDA_LATER", later)
        monkeypatch.setattr(sweep, "measure_apart", self.measure_apart)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        # Threads that wait for each other are slow while other tests run.
        monkeypatch.setattr(sweep, "set_up_torch", lambda tf32: None)
        monkeypatch.setattr(steps, "_captured", lambda call: argparse.Namespace(replay=call))
        for benchmark in (memory, speed):
            monkeypatch.setattr(benchmark, "training_step", self.training_step)
        monkeypatch.setattr(speed, "cuda_time_ms", clock.time_ms)
        monkeypatch.setattr(speed, "CUDA_ROUNDS", 3)
        monkeypatch.setattr(memory, "cuda_saved_bytes", lambda forward: (forward().nbytes, 0))
        monkeypatch.setattr(memory, "cuda_peak_bytes", lambda train: train() or 1000)
        self.failing: dict[str, str] = {}
        self.out = out
        self.measured: list[tuple[str, tuple[str, ...]]] = []

    def measure_apart(self, module: str, case: Any, names: Any, **_: float) -> dict[str, Any]:
        """Measures in this process, because replacements by tests exist only here."""
        self.measured.append((module, tuple(names)))
        rows = worker.measure_here(importlib.import_module(module).measure, case, names)
        return {name: row | {"process": os.getpid()} for name, row in rows.items()}

    def training_step(self, name: str, shape: cases.Shape, device: str, dtype: torch.dtype) -> Any:
        assert device == "cuda"
        if name in self.failing:
            raise RuntimeError(self.failing[name])
        return cases.training_step(name, shape, "cpu", dtype)

    def run(self, budget_s: float = 100) -> report.Run:
        options = argparse.Namespace(dtype=["float32"], shape=None, budget_s=budget_s)
        return report.Run(True, self.out, report.NoProgress(), options, {"gpu": "none"})
