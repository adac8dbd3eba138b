"""The CPU library for sanitizers, loaded in the place of the ordinary one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from builds import ROOT, Build

# fusedrnn's own code, and one overrun.
LIBRARY = Build(
    "core-sanitized",
    (
        ROOT / "csrc/ops/ops.cpp",
        *sorted((ROOT / "csrc/cpu").glob("*.cpp")),
        Path(__file__).parent / "sanitized.cpp",
    ),
    (
        *("-w", "-O1", "-g"),
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DFUSEDRNN_RED_ZONES"),
        *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # as setup.py
    ),
)
LIMITS = ("max_allocation_size_mb", "hard_rss_limit_mb")  # refuses, and ends the process
RED_ZONES = 1 << 16  # bytes of all red zones in a workspace, at most


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
        return load(str(LIBRARY.make()) if is_core else path, *arguments, **options)

    with mock.patch.object(ctypes, "CDLL", instead):
        import fusedrnn  # noqa: F401
    from calls import draw

    draw.extra_bytes = RED_ZONES
