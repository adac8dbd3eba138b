"""Builds programs that run persistent kernels alone, for sanitizers to watch."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SOURCE = FOLDER / "persistent.cpp"
PACKETS, FLAGS = 0, 1


def compiled(name: str, *flags: str, source: Path = SOURCE) -> Path:
    """The program of a source, compiled again if the source or a header has changed."""
    folder = source.parent
    made = ROOT / "build" / "persistent" / name
    made.parent.mkdir(parents=True, exist_ok=True)
    sources = [*(folder.parents[1] / "csrc").rglob("*.h"), *folder.glob("*.h"), source]
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, others wait
        if not made.exists() or made.stat().st_mtime < max(s.stat().st_mtime for s in sources):
            fresh = made.with_suffix(".fresh")  # another process may be loading the old one
            options = ["-std=c++20", "-O1", "-ffp-contract=fast", "-Wall", "-Wextra"]
            command = ["c++", *options, *flags, f"-I{folder}", str(source), "-o", str(fresh)]
            subprocess.run(command, check=True)
            fresh.replace(made)
    return made
