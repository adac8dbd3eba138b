"""Results of a short run of the benchmarks, and the benchmarks for a GPU with steps on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_runs import OnCpu, run_bench


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results of ``python -m bench --all --quick``."""
    out = tmp_path_factory.mktemp("bench")
    run = run_bench("bench", "--all", "--quick", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "the progress bar shares the terminal with whatever goes here"
    assert "Left out" not in run.stdout + (out / "cpu.md").read_text()
    return out


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OnCpu:
    return OnCpu(monkeypatch, tmp_path)
