"""Builds programs that run persistent kernels alone, for sanitizers to watch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SOURCE = FOLDER / "persistent.cpp"
PACKETS, FLAGS = 0, 1


def compiled(name: str, *flags: str, source: Path = SOURCE) -> Path:
    """What a source becomes, anew if it or a header has changed."""
    made = ROOT / "build" / "persistent" / name
    sources = [*(ROOT / "csrc").rglob("*.h"), *FOLDER.glob("*.h"), source]
    if not made.exists() or made.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        made.parent.mkdir(parents=True, exist_ok=True)
        fresh = made.with_suffix(f".{os.getpid()}")  # another process may be loading the old one
        options = ["-std=c++20", "-O1", "-ffp-contract=fast", "-Wall", "-Wextra", f"-I{FOLDER}"]
        command = ["c++", *options, *flags, str(source), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.replace(made)
    return made
