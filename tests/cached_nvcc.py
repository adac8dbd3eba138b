"""nvcc, but for kernels that this machine has compiled before: ``python cached_nvcc.py nvcc ...``.

CI compiles all kernels in a fresh clone, most often from the sources of the time before. make sets
PYTORCH_NVCC to this program, which torch then calls in the place of nvcc. An object is found by the
versions of nvcc and torch, the words of the command and the content of csrc, wherever that lies.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fusedrnn-tests")
DAYS = 30  # how long an object is kept that nothing has asked for


def digest(words: list[str]) -> str:
    """A name for what a command makes."""
    version = subprocess.run([words[0], "--version"], capture_output=True, text=True).stdout
    content = hashlib.sha256(f"{version} torch {importlib.metadata.version('torch')}".encode())
    content.update("\0".join(words[1:]).replace(str(ROOT), "").replace(sys.prefix, "").encode())
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        content.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
        content.update(path.read_bytes())
    return content.hexdigest()


def after(words: list[str], option: str) -> Path | None:
    """The path that follows an option."""
    return Path(words[words.index(option) + 1]) if option in words[:-1] else None


def forget_old() -> None:
    """Deletes what has not been used for long."""
    for path in CACHE.glob("*"):
        if path.stat().st_mtime < time.time() - DAYS * 86400:
            path.unlink(missing_ok=True)


def main() -> int:
    """Runs nvcc or takes what it made before; returns its exit status."""
    words = sys.argv[1:]
    target, dependencies = after(words, "-o"), after(words, "--dependency-output")
    if "-c" not in words or target is None:
        return subprocess.run(words).returncode
    kept = CACHE / f"{digest(words)}.o"
    if kept.exists():
        print(f"{target.name} was compiled before from the same sources", flush=True)
        kept.touch()
        shutil.copyfile(kept, target)
        if dependencies is not None:  # ninja compiles again if one of these changes
            headers = " ".join(str(path) for path in sorted((ROOT / "csrc").rglob("*.h")))
            dependencies.write_text(f"{target} : {headers}\n")
        return 0
    status = subprocess.run(words).returncode
    if status == 0:
        CACHE.mkdir(parents=True, exist_ok=True)
        forget_old()
        fresh = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(target, fresh)
        fresh.replace(kept)
    return status


if __name__ == "__main__":
    sys.exit(main())
