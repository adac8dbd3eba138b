"""Libraries of the stages of ``stages.h``, compiled here, and their calls through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import BuildError
from nvcc import NVCC, needs_nvcc
from torch import Tensor

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
BUILD = HERE.parents[1] / "build" / "compiled-stages"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
TARGETS = {
    "baseline": "",
    "avx2": "avx2,fma",
    "avx512": "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
}
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
}
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.slow),
    *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in (torch.float64, torch.float16)),
]
"""Of which each has a library of its own, that takes seconds to build."""
EMULATED, CUDA = "emulated", "cuda"  # the kernels of stage_kernel.h on fibers, and on a GPU
KERNELS = [
    EMULATED,
    pytest.param(
        CUDA,
        marks=[
            needs_nvcc,
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
STAGES = re.findall(r'kName = "(\w+)"', (HERE / "stages.h").read_text())


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type in which a stage of this storage type is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# The structs of csrc/program/stage.h.


class StageIn(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("gradient_stride", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("stream", ctypes.c_uint32),
        ("is_storage", ctypes.c_bool),
        ("gradient_is_storage", ctypes.c_bool),
        ("adds", ctypes.c_bool),
    )


class StageOut(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("is_storage", ctypes.c_bool),
        ("rounds", ctypes.c_bool),
        ("gradient", ctypes.c_void_p * 3),
        ("gradient_stride", ctypes.c_int64 * 3),
        ("gradient_is_storage", ctypes.c_bool * 3),
    )


class StageArgs(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64),
        ("first_t", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("first_step", ctypes.c_int64),
        ("seed", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("inputs", StageIn * 32),
        ("outputs", StageOut * 16),
    )


@dataclass
class Input:
    """What a stage reads, or None for numbers that are drawn or counted; rows may be one row."""

    data: Tensor | None = None
    bias: Tensor | None = None
    gradient: Tensor | None = None
    adds: bool = False
    group: int = 0
    offset: int = 0
    stream: int = 0

    def fill(self, to: StageIn, dtype: torch.dtype) -> None:
        if self.data is not None:
            to.data, to.stride = self.data.data_ptr(), row_stride(self.data)
            to.is_storage = self.data.dtype == dtype
        if self.bias is not None:
            to.bias = self.bias.data_ptr()
        if self.gradient is not None:
            to.gradient, to.gradient_stride = self.gradient.data_ptr(), row_stride(self.gradient)
            to.gradient_is_storage = self.gradient.dtype == dtype
        to.adds, to.group, to.offset, to.stream = self.adds, self.group, self.offset, self.stream


@dataclass
class Output:
    """Where a stage writes, and the gradients that it reads."""

    data: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    group: int = 0
    rounds: bool = False

    def fill(self, to: StageOut, dtype: torch.dtype) -> None:
        if self.data is not None:
            to.data, to.stride = self.data.data_ptr(), row_stride(self.data)
            to.is_storage = self.data.dtype == dtype
        to.group, to.rounds = self.group, self.rounds
        for s, gradient in enumerate(self.gradients):
            to.gradient[s], to.gradient_stride[s] = gradient.data_ptr(), row_stride(gradient)
            to.gradient_is_storage[s] = gradient.dtype == dtype


def row_stride(rows: Tensor) -> int:
    """Of (rows, columns), where a single row is that of all."""
    assert rows.dim() == 2 and rows.stride(1) == 1
    return rows.stride(0) if len(rows) > 1 else 0


@dataclass
class Call:
    """The call of a stage for some rows."""

    stage: str
    dtype: torch.dtype
    width: int
    batch: int
    inputs: list[Input]
    outputs: list[Output]
    first_t: int = 0
    first_step: int = 0
    seed: Tensor | None = None
    lengths: Tensor | None = None

    def arguments(self) -> StageArgs:
        args = StageArgs(self.width, self.first_t, self.batch, self.first_step)
        if self.seed is not None:
            args.seed = self.seed.data_ptr()
        if self.lengths is not None:
            args.lengths = self.lengths.data_ptr()
        for given, to in zip(self.inputs, args.inputs, strict=False):
            given.fill(to, self.dtype)
        for wanted, to in zip(self.outputs, args.outputs, strict=False):
            wanted.fill(to, self.dtype)
        return args

    def run(self, backend: str, first: int, last: int, *, backward: bool) -> None:
        """Does the rows [first, last): by an instruction set, or else all rows by EMULATED, CUDA.

        GPU kernels have no first row, since they do all rows of a call.
        """
        args = self.arguments()
        stage = (STAGES.index(self.stage), backward, ctypes.byref(args))
        if backend in TARGETS:
            library(self.dtype, backend)(*stage, first, last)
            return
        assert first == 0
        stream = torch.cuda.current_stream().cuda_stream if backend == CUDA else None
        assert kernels(self.dtype, backend)(*stage, last, stream) == 0


def cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def instruction_sets() -> list[str]:
    """Those of this processor."""
    return [isa for isa, target in TARGETS.items() if set(target.split(",")) - {""} <= cpu_flags()]


def marked_sets() -> list[Any]:
    """The same; the quick tests have the last one, CI the first one too."""
    sets = instruction_sets()
    marks = {sets[0]: [pytest.mark.slow]} | {sets[-1]: []}
    return [pytest.param(isa, marks=marks.get(isa, [pytest.mark.nightly])) for isa in sets]


@functools.cache
def headers() -> bytes:
    """The digest of all that a library may include."""
    names = ("base/*.h", "cell/*.h", "cpu/vector.h", "persistent/device.h", "program/*.h")
    paths = [path for name in names for path in CSRC.glob(name)]
    paths += [HERE / "stages.h", HERE.parent / "emulator/fibers.h"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).digest()


EXPORT = 'extern "C" __attribute__((visibility("default")))'
ARGUMENTS = "int64_t stage, int64_t backward, const StageArgs* args, int64_t first, int64_t last"


def for_set(isa: str) -> str:
    """The first lines of a library as Python prints it."""
    target = f'#pragma GCC target("{TARGETS[isa]}")\n' if TARGETS[isa] else ""
    return f'#define FUSEDRNN_ISA {isa}\n{target}#include "program/stage_loop.h"\n'


def of_functions(dtype: torch.dtype, functions: Mapping[str, Sequence[str]], *headers: str) -> str:
    """A library of the widest instruction set, whose functions run the stages of each."""
    lines = [for_set(instruction_sets()[-1]), *(f'#include "{header}"' for header in headers)]
    lines += ["using namespace fusedrnn;", "using namespace fusedrnn::program;"]
    for name, stages in functions.items():
        lines += [f"{EXPORT} void {name}({ARGUMENTS}) {{", "  switch (stage) {"]
        for i, stage in enumerate(stages):
            run = f"run<{TYPES[dtype]}, {stage}>(backward != 0, *args, first, last)"
            lines.append(f"    case {i}: return {run};")
        lines += ["  }", "}"]
    return "\n".join(lines)


def text(dtype: torch.dtype, isa: str) -> str:
    """A library of all stages."""
    return f"""{for_set(isa)}#include "{HERE}/stages.h"
using namespace fusedrnn::program;
{EXPORT} const int64_t fusedrnn_abi = kAbi;
{EXPORT} void fusedrnn_stage({ARGUMENTS}) {{
  int64_t number = 0;
  for_each_stage([&](auto s) {{
    using Stage = decltype(s);
    if (number++ == stage) run<fusedrnn::{TYPES[dtype]}, Stage>(backward != 0, *args, first, last);
  }});
}}
""".replace("fusedrnn::float", "float").replace("fusedrnn::double", "double")


def kernel_text(dtype: torch.dtype) -> str:
    """A library for GPUs."""
    return f"""#include "program/stage_kernel.h"
#include "{HERE}/stages.h"
using namespace fusedrnn::program;
{EXPORT} int64_t fusedrnn_stage_launch(
    int64_t stage, int64_t backward, const StageArgs* args, int64_t rows, void* stream) {{
  int64_t number = 0, error = 0;
  for_each_stage([&](auto s) {{
    if (number++ != stage) return;
    error = launch<fusedrnn::{TYPES[dtype]}, decltype(s)>(
        backward != 0, *args, rows, static_cast<fusedrnn::cuda::Stream>(stream));
  }});
  return error;
}}
""".replace("fusedrnn::float", "float").replace("fusedrnn::double", "double")


def built(name: str, command: list[str], source: str) -> Path:
    """A library of a source, whose path ends the command; kept for the next run, by its content."""
    content = "\0".join([*command, source]).encode() + headers()
    path = BUILD / f"{name}_{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            text = Path(folder, "library.cu" if command[0] == NVCC else "library.cpp")
            text.write_text(source)
            library = Path(folder, "library.so")
            done = subprocess.run([*command, "-o", library, text], capture_output=True, text=True)
            if done.returncode != 0:
                raise BuildError(f"{shlex.join(map(str, command))}\n{done.stderr}")
            library.rename(path)  # at once, since other processes may do the same
    return path


def compiled(name: str, source: str, *flags: str) -> Path:
    """A library for the CPU."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    shared = ["-shared", "-fPIC", "-iquote", str(CSRC)]
    return built(name, [COMPILER, *FLAGS, *WARNINGS, *shared, *flags], source)


@functools.cache
def library(dtype: torch.dtype, isa: str) -> ctypes._NamedFuncPointer:
    """Its function that does a stage."""
    path = compiled(f"{TYPES[dtype]}_{isa}", text(dtype, isa))
    loaded = ctypes.CDLL(str(path))
    assert ctypes.c_int64.in_dll(loaded, "fusedrnn_abi").value == 1
    function = loaded.fusedrnn_stage
    function.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] + [ctypes.c_int64] * 2
    function.restype = None
    return function


@functools.cache
def kernels(dtype: torch.dtype, backend: str) -> ctypes._NamedFuncPointer:
    """The function that launches a stage."""
    name, source = f"{TYPES[dtype]}_{backend}", kernel_text(dtype)
    if backend == EMULATED:
        path = compiled(name, source, f"-I{HERE.parent / 'emulator'}")
    else:
        flags = ["-std=c++17", "-O3", "-arch=native", "-shared", "-Xcompiler=-fPIC", f"-I{CSRC}"]
        path = built(name, [str(NVCC), *flags], source)
    function = ctypes.CDLL(str(path)).fusedrnn_stage_launch
    function.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function
