"""How tests run the benchmarks; importing this module makes them importable too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that fusedrnn is the installed one


def run_bench(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *options]
    # Threads that wait for each other are slow while other tests run.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)


def load(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return content
