"""Builds and loads the operators for GPUs over a fake of CUDA, with only a C++ compiler.

``csrc/ops/ops_cuda.cpp`` and all of ``csrc/cuda/`` are compiled as they are. ``include/`` stands in
for the headers of CUDA, and the sources in this folder for a GPU, its runtime, cuBLASLt and torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BUILD = ROOT / "build" / f"fake-cuda-torch{torch.__version__}"
FLAGS = [
    f"-I{FOLDER / 'include'}",
    f"-I{FOLDER.parent / 'emulator'}",  # fibers.h, for csrc/persistent/device.h
    "-DUSE_CUDA",  # shows the CUDA part of torch's stable ABI
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-std=c++20",
    "-O1",
    "-g0",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
]


def _as_cpp(kernels: Path) -> Path:
    """A source that is compiled for the CPU, although its name may end in .cu."""
    source = BUILD / f"{kernels.stem}_cu.cpp"
    text = f'#include "{kernels}"\n'
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


@functools.cache
def fake_operators() -> Any:
    """The operators of ``fusedrnn``, with the same schemas, for CPU tensors."""
    BUILD.mkdir(parents=True, exist_ok=True)
    kernels = [_as_cpp(path) for path in sorted((ROOT / "csrc/cuda").rglob("*.cu"))]
    load(
        name="fusedrnn_fake_cuda",
        sources=[str(path) for path in [*sorted(FOLDER.glob("*.cpp")), *kernels]],
        extra_cflags=FLAGS,
        # If torch has CUDA too, its symbols must not be mixed up with these.
        extra_ldflags=["-Wl,-Bsymbolic", "-Wl,--no-undefined"],
        build_directory=str(BUILD),
        is_python_module=False,
    )
    return torch.ops.fusedrnn_fake
