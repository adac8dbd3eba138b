"""Builds programs that run persistent kernels alone, for sanitizers to watch."""

from __future__ import annotations

from pathlib import Path

from builds import Build

FOLDER = Path(__file__).parent
PACKETS, FLAGS = 0, 1


def program(name: str, *flags: str, source: Path) -> Build:
    """A program of the emulation: without torch, in which sanitizers would find much else."""
    folder = source.parent
    options = ("-std=c++20", "-O1", "-ffp-contract=fast", "-Wall", "-Wextra", f"-I{folder}")
    headers = (folder.parents[1] / "csrc", folder)
    return Build(
        name, (source,), (*options, *flags), with_torch=False, is_program=True, headers=headers
    )
