"""The compiled libraries, loaded: the operators, and why there may be none for CUDA."""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path
from typing import Any

import torch


def _compiled(name: str) -> Path:
    """A library without Python in it, under the name that setuptools gives it."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    suffix = next((suffix for suffix in suffixes if ".abi3" in suffix), suffixes[0])
    return Path(__file__).with_name(name + suffix)


_core = _compiled("_core")
try:
    from . import _helpers

    torch.ops.load_library(str(_core))
except (ImportError, OSError) as error:
    raise ImportError(
        f"fusedrnn is not built: its compiled modules in {Path(__file__).parent} are missing, or "
        f"are of another Python or torch ({error}); run `pip install .` in the source tree and "
        "import from elsewhere, or `pip install -e .` to import from the tree, as the benchmarks do"
    ) from error
core = ctypes.CDLL(str(_core))
"""What else the library of the operators for the CPU exports: see csrc/ops/ops.cpp."""

# Ctrl-C ends a long call through this.
core.fusedrnn_set_signal_check(ctypes.c_void_p(_helpers.signal_check()))

operators: Any = torch.ops.fusedrnn
"""The operators of csrc/ops/ops.h."""

cuda: ctypes.CDLL | None = None
"""The same of the operators for CUDA, csrc/ops/ops_cuda.cpp, if they are there."""

most_blocks = 0
"""Address of a function that asks a GPU's driver how many blocks of a kernel run at once, or 0."""


def _load_cuda() -> str | None:
    """Loads the operators for CUDA; says why there are none."""
    global most_blocks, cuda
    library = _compiled("_cuda")
    if not library.exists():
        return (
            "fusedrnn was built for the CPU only; reinstall it where torch has CUDA and there is a "
            "CUDA compiler (FUSEDRNN_CUDA=1 says what is missing)"
        )
    if torch.version.cuda is None:
        return "torch is a CPU build"
    try:
        torch.ops.load_library(str(library))
        loaded = ctypes.CDLL(str(library))
        ask = loaded.fusedrnn_most_blocks
    except (OSError, AttributeError) as error:  # a CUDA of another major version, an older build
        return f"the CUDA kernels cannot be loaded under CUDA {torch.version.cuda}: {error}"
    most_blocks = ctypes.cast(ask, ctypes.c_void_p).value or 0
    cuda = loaded
    return None


cuda_obstacle = _load_cuda()
"""Why CUDA tensors cannot be computed on, or None."""
