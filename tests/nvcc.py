"""The path of nvcc, and a mark for tests that need it."""

import os
import shutil
from pathlib import Path

import pytest

SOURCES = sorted(Path(__file__).parents[1].glob("csrc/cuda/**/*.cu"))
CUDA_BIN = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=CUDA_BIN)

needs_nvcc = pytest.mark.skipif(NVCC is None or not SOURCES, reason="needs nvcc and the sources")
each_architecture = pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
