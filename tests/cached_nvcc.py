"""nvcc, but for kernels that this machine has compiled before: ``python cached_nvcc.py nvcc ...``.

CI compiles all kernels in a fresh clone, most often from the sources of the time before. make sets
PYTORCH_NVCC to this program, which torch then calls in the place of nvcc. What is kept is found by
the versions of the compilers, the words of the command, and the content of the folders that kernels
include, wherever these lie. Imports nothing beyond Python, since it runs while a package is built.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fusedrnn-tests/kernels")
MONTH_S = 30 * 24 * 3600
FROM_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH")


def digest(nvcc: str, *words: str, folders: tuple[Path, ...] = (CSRC,)) -> str:
    """A name for what nvcc makes of words; paths are relative, so another clone finds the same."""
    content = [_versions(nvcc), *(os.environ.get(name, "") for name in FROM_ENVIRONMENT)]
    content += [word.replace(str(ROOT), "").replace(sys.prefix, "") for word in words]
    for folder in folders:
        files = sorted(path for end in ("*.h", "*.cu", "*.cpp") for path in folder.rglob(end))
        content += [f"{path.relative_to(folder)}\0{path.read_text()}" for path in files]
    return hashlib.sha256("\0\0".join(content).encode()).hexdigest()


@functools.cache
def _versions(nvcc: str) -> str:
    """Of nvcc, and of the compiler that it calls for the CPU's code."""
    commands = ([nvcc, "--version"], ["c++", "--version"])
    return "".join(subprocess.run(c, capture_output=True, text=True).stdout for c in commands)


def torch_version(words: list[str]) -> list[str]:
    """What the torch says of itself whose headers a command includes; pip hides its metadata."""
    found = (re.search(r"/.*/torch(?=/include$)", word) for word in words)
    return [Path(folder[0], "version.py").read_text() for folder in found if folder]


def kept(path: Path) -> bytes | None:
    """What was kept under a path, if anything."""
    try:
        os.utime(path)
        return path.read_bytes()
    except OSError:
        return None


def keep(path: Path, content: bytes) -> None:
    """Writes a whole file at once, and removes those that nothing has asked for in a month.

    Nothing is kept where the folder cannot be written.
    """
    fresh = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        fresh.replace(path)
        for old in path.parent.iterdir():
            if old.stat().st_mtime < time.time() - MONTH_S:
                old.unlink(missing_ok=True)


def main() -> int:
    """Runs nvcc, or takes the object that it made before; returns its exit status."""
    words = sys.argv[1:]
    if "-c" not in words:
        return subprocess.run(words).returncode

    def after(option: str) -> Path:
        """What follows the last one: torch says -c twice."""
        return Path(words[len(words) - words[::-1].index(option)])

    source = after("-c").read_text()
    path = CACHE / f"{digest(words[0], *torch_version(words), source, *words[1:])}.o.gz"
    try:
        found = gzip.decompress(kept(path) or b"")
    except (OSError, EOFError, zlib.error):  # damaged
        found = b""
    if not found:
        status = subprocess.run(words).returncode
        if status == 0:
            keep(path, gzip.compress(after("-o").read_bytes(), 1))
        return status
    print(f"{after('-c').name} was compiled before from the same sources", flush=True)
    after("-o").write_bytes(found)
    if "-MF" in words:  # ninja compiles again if one of these changes
        headers = " ".join(str(path) for path in sorted(CSRC.rglob("*.h")))
        after("-MF").write_text(f"{after('-o')} : {headers}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
