"""Builds and loads the emulation of the GPU backend on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build" / f"emulator-torch{torch.__version__}"


@functools.cache
def emulated_operators() -> Any:
    """The operators of ``fusedrnn``, with the same schemas, for CPU tensors."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-O2", "-g0", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-ffp-contract=fast"]
    load(
        name="fusedrnn_emulated",
        sources=[str(FOLDER / "emulator.cpp")],
        extra_cflags=flags,
        build_directory=str(BUILD),
        is_python_module=False,
    )
    return torch.ops.fusedrnn_emulated
