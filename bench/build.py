"""Builds the package for the GPU of this machine, if necessary: ``python -m bench.build``.

A build is unnecessary if the operators for CUDA can be loaded, and sources, Python, torch and GPU
are the same as at the last build after which they could.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys

from .contain import ROOT
from .machine import nvidia_smi

STAMP = ROOT / "build" / "gpu-check.txt"
SOURCES = ("csrc/**/*", "build_backend/*.py", "setup.py", "pyproject.toml")
LOADS = "from fusedrnn import _library; raise SystemExit(_library.cuda_obstacle)"
PIP = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", ".")


def fingerprint(architecture: str) -> str:
    """A text that changes whenever something changes that a build depends on."""
    said = f"{sys.version} torch {importlib.metadata.version('torch')} {architecture}"
    content = hashlib.sha256(said.encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        if path.is_file():
            content.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
            content.update(path.read_bytes())
    return content.hexdigest()


def main() -> None:
    """Builds if necessary, and exits with status 0 if the package has its kernels for CUDA."""
    architecture = nvidia_smi("compute_cap")
    wanted = fingerprint(architecture)
    if STAMP.exists() and STAMP.read_text() == wanted and _loads():
        print("it has been built from these sources before")
        return
    env = {**os.environ, "FUSEDRNN_CUDA": "1"}  # ninja takes all cores
    if architecture:
        env["TORCH_CUDA_ARCH_LIST"] = architecture
    built = subprocess.run([sys.executable, *PIP], cwd=ROOT, env=env)
    if built.returncode != 0 or not _loads():
        sys.exit(built.returncode or 1)
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(wanted)


def _loads() -> bool:
    return subprocess.run([sys.executable, "-c", LOADS], cwd=ROOT).returncode == 0


if __name__ == "__main__":
    main()
