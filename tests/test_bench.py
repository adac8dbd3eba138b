"""The benchmark runs, its files have their structure, and what does not depend on time holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OURS, LSTM, LOOP = "fusedrnn", "nn.LSTM", "plain loop"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results of ``python -m bench --quick``."""
    out = tmp_path_factory.mktemp("bench")
    run = bench("bench", "--quick", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "the progress bar shares the terminal with whatever goes here"
    return out


def bench(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def load(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", ["memory", "speed", "train_text"])
def test_results_say_where_they_come_from(results: Path, name: str) -> None:
    about = load(results, name)["environment"]
    assert about["command"].startswith("python -m bench --quick")
    assert about["threads"] == 2
    assert all(about[key] for key in ("date", "cpu", "torch", "fusedrnn", "python"))


def test_files(results: Path) -> None:
    assert (results / "memory_over_seq_len.png").read_bytes().startswith(b"\x89PNG")
    markdown = (results / "cpu.md").read_text()
    assert "`python -m bench --quick" in markdown
    assert "| " + OURS + " |" in markdown


def test_saved_for_backward_is_the_output(results: Path) -> None:
    memory = load(results, "memory")
    for result in memory["shapes"] + memory["over_seq_len"]:
        shape = result["shape"]
        hx_bytes, seed_bytes = 4 * shape["batch"] * shape["hidden_size"], 8
        ours = result["contenders"][OURS]
        assert ours["largest_saved_bytes"] == [result["output_bytes"], hx_bytes, seed_bytes]


def test_workspace_and_allocations_do_not_depend_on_the_length(results: Path) -> None:
    over = [result["contenders"][OURS] for result in load(results, "memory")["over_seq_len"]]
    assert len(over) > 1
    assert len({ours["allocations"] for ours in over}) == 1
    assert len({ours["workspace_bytes"] for ours in over}) == 1


def test_memory_target(results: Path) -> None:
    memory = load(results, "memory")
    assert memory["targets"]
    assert all(target["passed"] for target in memory["targets"])
    peak = {name: m["peak_bytes"] for name, m in memory["shapes"][0]["contenders"].items()}
    assert peak[OURS] <= 0.20 * peak[LSTM]
    assert peak[OURS] < peak[LOOP]


def test_speed_has_all_ratios(results: Path) -> None:
    speed = load(results, "speed")
    (result,) = speed["shapes"]
    assert {f"{OURS} / {other}" for other in (LSTM, LOOP, "GEMMs alone")} <= set(result["ratios"])
    rounds = {len(times) for times in result["train_ms"].values()}
    assert len(rounds) == 1, "ratios need all times of a round"
    assert set(speed["denormals"]["slowdown"]) == {OURS, LOOP}


def test_loop_and_ours_learn_the_same(results: Path) -> None:
    text = load(results, "train_text")
    for loss in text["agreement"].values():
        assert loss["difference"] <= loss["tolerance"]
    loop, ours = (text["cells"][name] for name in (LOOP, OURS))
    assert ours["train_bits"] == pytest.approx(loop["train_bits"], rel=1e-4)
    assert ours["train_bits"][-1] < ours["train_bits"][0]
    assert ours["longest_window"] > loop["longest_window"] > 0


def test_train_one_cell(tmp_path: Path) -> None:
    run = bench(
        "bench.train_text", "--quick", "--cell", "ours", "--steps", "2", "--out", str(tmp_path)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    text = load(tmp_path, "train_text")
    assert list(text["cells"]) == [OURS]
    assert text["job"]["steps"] == len(text["cells"][OURS]["train_bits"]) == 2


def test_sizes_are_checked(tmp_path: Path) -> None:
    run = bench("bench.train_text", "--steps", "0", "--out", str(tmp_path))
    assert run.returncode != 0
    assert run.stderr.strip() == "--steps must be at least 1, got 0"
