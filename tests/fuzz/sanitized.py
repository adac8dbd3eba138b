"""Builds the CPU library for sanitizers, and loads it in place of the ordinary one.

``python -m fuzz.sanitized`` in the folder tests builds it, or says what the compiler says.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.cpp_extension import include_paths

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIBRARY = ROOT / "build" / f"fuzz-torch{torch.__version__}" / "sanitized.so"
SOURCES = [ROOT / "csrc/ops/ops.cpp", *sorted((ROOT / "csrc/cpu").glob("*.cpp"))]
LIMITS = ("max_allocation_size_mb", "hard_rss_limit_mb")  # refuses, and ends the process
RED_ZONES = 1 << 16  # bytes of all red zones in a workspace, at most
FLAGS = [
    *("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w", "-O1", "-g"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DFUSEDRNN_RED_ZONES"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # as setup.py
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]


def build() -> Path:
    """Builds the library if a source has changed: fusedrnn's own code, and one overrun.

    Raises:
        RuntimeError: with the compiler's own words.
    """
    sources = [*SOURCES, FOLDER / "sanitized.cpp"]
    newest = max(s.stat().st_mtime for s in [*sources, *(ROOT / "csrc").rglob("*.h")])
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > newest:
        return LIBRARY
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-isystem{path}" for path in include_paths()]
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    # Renamed when it is whole, since another process may build it too, or be loading the old one.
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent) as folder:
        fresh, objects = Path(folder, LIBRARY.name), [Path(folder, f"{s.stem}.o") for s in sources]

        def compiled(i: int) -> None:
            _run("c++", *FLAGS, *includes, "-c", sources[i], "-o", objects[i])
            print(f"library for sanitizers: {sources[i].name} is compiled", flush=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            print(f"library for sanitizers: {len(sources)} sources, some minutes", flush=True)
            list(pool.map(compiled, range(len(sources))))
        _run("c++", *FLAGS, *objects, "-o", fresh, *torch_libraries)
        fresh.replace(LIBRARY)
    return LIBRARY


def _run(*command: Any) -> None:
    done = subprocess.run([*map(str, command)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"the library for sanitizers cannot be built:\n{done.stderr}")


def runtime(name: str) -> str | None:
    """The path of a library that the compiler links to programs, or None."""
    words = ["c++", f"-print-file-name={name}"]
    found = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return found if Path(found).is_absolute() else None


def is_possible() -> bool:
    """Whether torch passes the address sanitizer; torch for CUDA does not."""
    return torch.version.cuda is None and runtime("libasan.so") is not None


def environment(most_bytes: int) -> dict[str, str]:
    """The environment of a process that loads the library, with a limit of memory."""
    # libstdc++ too, since the sanitizer looks for its functions before torch loads it.
    libraries = [runtime("libasan.so"), runtime("libstdc++.so")]
    options = ["detect_leaks=0", "allocator_may_return_null=1", "handle_abort=1"]
    options += [f"{limit}={most_bytes >> 20}" for limit in LIMITS]
    return {
        "LD_PRELOAD": " ".join(path for path in libraries if path),
        "ASAN_OPTIONS": ":".join(options),
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def import_fusedrnn() -> None:
    """Imports fusedrnn so that its operators are those of the library, which has their names."""
    load = ctypes.CDLL  # torch loads libraries of operators by it

    def instead(path: str, *arguments: Any, **options: Any) -> ctypes.CDLL:
        is_core = path is not None and Path(path).name.startswith("_core.")
        return load(str(LIBRARY) if is_core else path, *arguments, **options)

    with mock.patch.object(ctypes, "CDLL", instead):
        import fusedrnn  # noqa: F401
    from calls import draw

    draw.extra_bytes = RED_ZONES


if __name__ == "__main__":
    try:
        print(build() if is_possible() else "no address sanitizer for this compiler and torch")
    except RuntimeError as error:
        sys.exit(str(error))
