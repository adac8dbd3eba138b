"""Builds and loads the emulation of the GPU backend on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from builds import Build

from fusedrnn import _library, _plans
from fusedrnn import _tuning as tuning

from .seeded_bugs import seeded_sources

FOLDER = Path(__file__).parent
FLAGS = ("-g0", "-O1", "-ffp-contract=fast")
EMULATED = Build("emulator", (FOLDER / "emulator.cpp",), (*FLAGS, f"-I{FOLDER}"))
# Aborts on accesses outside of a tensor. With -O1 it is compiled for three times as long.
SANITIZED = Build(
    "emulator-sanitized",
    EMULATED.sources,
    (*EMULATED.flags, "-O0", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def seeded() -> Build:
    """The emulation of persistent kernels with bugs; ``control`` chooses one."""
    folder = seeded_sources()
    source, flags = folder / "emulator.cpp", (*FLAGS, f"-I{folder}")
    return Build("emulator-seeded", (source,), flags, headers=(folder.parents[1],))


@functools.cache
def emulated_operators() -> Any:
    """The operators of ``fusedrnn``, with the same schemas, for CPU tensors."""
    torch.ops.load_library(EMULATED.make())
    return torch.ops.fusedrnn_emulated


@functools.cache
def seeded_operators() -> Any:
    """The same operators with bugs in the persistent kernels."""
    torch.ops.load_library(seeded().make())
    return torch.ops.fusedrnn_seeded


def use(patch: Any, operators: Any) -> None:
    """Has modules compute by the emulation, as long as a pytest.MonkeyPatch is in force.

    Plans are not checked beforehand, since those for tensors on the CPU are the CPU's; the emulated
    GPU itself refuses calls.
    """
    patch.setattr(_library, "operators", operators)
    patch.setattr(tuning, "_matters", lambda input: True)
    patch.setattr(_plans, "check_plan", lambda *args, **problem: None)
