"""Facts of the machine and of the source tree, found without importing torch."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .contain import ROOT

ASK_S = 60


def about() -> dict[str, Any]:
    """The facts by name; an empty text stands for something that the machine does not have."""
    torch = "import torch; print(torch.__version__, torch.cuda.is_available())"
    torch_version, _, sees_gpu = _said(sys.executable, "-c", torch).rpartition(" ")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": nvidia_smi("name"),
        "driver": nvidia_smi("driver_version"),
        "torch": torch_version,
        "torch_sees_gpu": sees_gpu == "True",
        "nvcc": _said(cuda_tool("nvcc"), "--version").rpartition("\n")[2],
        "commit": commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def commit() -> str:
    """The commit of the source tree, or FUSEDRNN_COMMIT if the tree has no repository."""
    if not (ROOT / ".git").exists():
        return os.environ.get("FUSEDRNN_COMMIT") or "unknown"
    changed = _said("git", "status", "--porcelain")
    return _said("git", "describe", "--always") + (" with changes" if changed else "")


def nvidia_smi(field: str) -> str:
    """Facts of the first GPU, which torch uses by default."""
    return _said("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").partition("\n")[0]


def cuda_tool(name: str) -> str:
    """The path of a tool of the CUDA toolkit, or its name if it is not found."""
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which(name) or shutil.which(name, path=folder) or name


def _said(*words: str) -> str:
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
