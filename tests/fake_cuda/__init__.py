"""Builds and loads the operators for GPUs over a fake of CUDA, with only a C++ compiler.

``csrc/ops/ops_cuda.cpp`` and all of ``csrc/cuda/`` are compiled as they are. ``include/`` stands in
for the headers of CUDA, and the sources in this folder for a GPU, its runtime, cuBLASLt and torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from builds import Build

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIBRARY = Build(
    "fake-cuda",
    (*sorted(FOLDER.glob("*.cpp")), *sorted((ROOT / "csrc/cuda").rglob("*.cu"))),
    (
        f"-I{FOLDER / 'include'}",
        f"-I{FOLDER.parent / 'emulator'}",  # fibers.h, for csrc/persistent/device.h
        "-DUSE_CUDA",  # shows the CUDA part of torch's stable ABI
        "-O1",
        "-g0",
        "-ffp-contract=fast",
    ),
    # If torch has CUDA too, its symbols must not be mixed up with these.
    ("-Wl,-Bsymbolic", "-Wl,--no-undefined"),
)


@functools.cache
def fake_operators() -> Any:
    """The operators of ``fusedrnn``, with the same schemas, for CPU tensors."""
    torch.ops.load_library(LIBRARY.make())
    return torch.ops.fusedrnn_fake
