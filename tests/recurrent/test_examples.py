"""The example that trains on text, and the benchmark of any cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_training_on_text() -> None:
    """Same noise, same loss; less memory than the loop."""
    code = (
        "from docs.examples import train_forum_cell as example\n"
        "import json\n"
        "options = '--steps 8 --window 64 --batch 8 --width 32'.split()\n"
        "print(json.dumps(example.main(options)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    wrapped, layer, loop = (results[n] for n in ("Recurrent", "StochasticGRU", "plain loop"))
    assert wrapped["losses"] == pytest.approx(layer["losses"], rel=1e-5)
    assert wrapped["losses"][-1] < wrapped["losses"][0]
    assert loop["losses"][0] == pytest.approx(wrapped["losses"][0], rel=0.05)
    assert wrapped["peak_bytes"] < loop["peak_bytes"]


@pytest.mark.slow
def test_the_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    options = ["--quick", "--cell", "LateResetGRU", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "bench.any_cell", *options]
    env = {**os.environ, "FUSEDRNN_COMPILE": "1", "FUSEDRNN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "any_cell.json").read_text())
    found = written["cells"]["LateResetGRU"]
    assert "peak_ratio" in found["Recurrent, compiled cell"]
    assert found["Recurrent, loop"]["peak_ratio"] < found["plain loop"]["peak_ratio"] == 1
    peaks = [row["peak_bytes"]["Recurrent, loop"] for row in written["over_seq_len"]]
    assert len(peaks) == 2
