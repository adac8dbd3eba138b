"""Builds and loads the emulation of the GPU backend on the CPU."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, load

from fusedrnn import _library, _plans, tuning

from .seeded_bugs import seeded_sources

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BUILD = ROOT / "build" / f"emulator-torch{torch.__version__}"
SOURCE = FOLDER / "emulator.cpp"
FLAGS = ["-g0", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-ffp-contract=fast"]
FLAGS += ["-fvisibility=hidden"]  # so that two such libraries in a process share nothing


@functools.cache
def emulated_operators() -> Any:
    """The operators of ``fusedrnn``, with the same schemas, for CPU tensors."""
    _load("fusedrnn_emulated", FOLDER)
    return torch.ops.fusedrnn_emulated


@functools.cache
def seeded_operators() -> Any:
    """The same operators with bugs in the persistent kernels; ``control`` chooses one."""
    _load("fusedrnn_seeded", seeded_sources())
    return torch.ops.fusedrnn_seeded


def _load(name: str, folder: Path) -> None:
    build = BUILD / name
    build.mkdir(parents=True, exist_ok=True)
    load(
        name=name,
        sources=[str(folder / SOURCE.name)],
        extra_cflags=[*FLAGS, f"-I{folder}", "-O1"],
        build_directory=str(build),
        is_python_module=False,
    )


def use(patch: Any, operators: Any) -> None:
    """Has modules compute by the emulation, as long as a pytest.MonkeyPatch is in force.

    Plans are not checked beforehand, since those for tensors on the CPU are the CPU's; the emulated
    GPU itself refuses calls.
    """
    patch.setattr(_library, "operators", operators)
    patch.setattr(tuning, "_matters", lambda input: True)
    patch.setattr(_plans, "check_plan", lambda *args, **problem: None)


def build_sanitized() -> Path:
    """Builds the library with sanitizers: it aborts on accesses outside of a tensor."""
    library = BUILD / "sanitized.so"
    sources = [*(ROOT / "csrc").rglob("*.h"), SOURCE]
    if library.exists() and library.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = [f"-I{FOLDER}", "-std=c++20", "-shared", "-fPIC", "-w", "-O1"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    flags += [f"-isystem{path}" for path in include_paths()]
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    files = [str(SOURCE), "-o", str(library)]
    subprocess.run(["c++", *FLAGS, *flags, *files, *torch_libraries], check=True)
    return library
