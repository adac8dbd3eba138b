"""Builds programs that run persistent kernels alone, for sanitizers to watch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from builds import Build

from .seeded_bugs import seeded_sources

FOLDER = Path(__file__).parent
PACKETS, FLAGS = 0, 1
FORWARD, BACKWARD = "persistent", "persistent_backward"
SANITIZERS = {
    "watched": ("-fsanitize=thread",),
    "seeded": ("-fsanitize=thread",),  # with bugs
    "bounded": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


def program(name: str, *flags: str, source: Path) -> Build:
    """A program of the emulation: without torch, in which sanitizers would find much else."""
    folder = source.parent
    options = ("-std=c++20", "-O1", "-ffp-contract=fast", "-Wall", "-Wextra", f"-I{folder}")
    headers = (folder.parents[1] / "csrc", folder)
    return Build(
        name, (source,), (*options, *flags), with_torch=False, is_program=True, headers=headers
    )


def sanitized(kind: str, passes: str, element: str) -> Build:
    """A pass of all cells in one type of tensors, by a kind of SANITIZERS."""
    folder = seeded_sources() if kind == "seeded" else FOLDER
    flags = ("-g1", *SANITIZERS[kind], f"-DFUSEDRNN_ELEMENT={element}")
    return program(f"{kind}-{passes}-{element}", *flags, source=folder / f"{passes}.cpp")


EXCHANGE = program("exchange", source=FOLDER / "exchange.cpp")
SMOKE = program("smoke", source=FOLDER / "smoke.cpp")


def phases(name: str, *flags: str) -> Build:
    """Kernels for bench.phases, with clocks or without."""
    made = program(name, *flags, source=FOLDER / "phases.cpp")
    return replace(made, headers=(*made.headers, FOLDER.parents[1] / "bench"))


PHASES = phases("phases-clocks", "-DFUSEDRNN_PHASE_CLOCKS")
PLAIN_PHASES = phases("phases")
VARIANTS_OF_PHASES = phases("phases-variants", "-DFUSEDRNN_PHASES_VARIANTS")


def programs(is_nightly: bool) -> list[Build]:
    """All of these that the slow tests need, or those of each night too."""
    elements = ("BFloat16", "float") if is_nightly else ("BFloat16",)
    of = itertools.product(SANITIZERS, (FORWARD, BACKWARD), elements)
    phases = (PHASES, PLAIN_PHASES, VARIANTS_OF_PHASES)
    return [*phases, EXCHANGE, SMOKE, *(sanitized(*each) for each in of)]
