"""The example that trains on text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("steps_in_python")

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
