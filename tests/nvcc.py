"""What nvcc makes of CUDA code, for tests that read it; kept for the next run on this machine.

Kernels take minutes to compile, so a result is found again by a digest of all that it depends on:
the code, all headers and kernels of ``csrc``, the flags, and the versions of the compilers.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
SOURCES = sorted(CSRC.glob("cuda/**/*.cu"))
CUDA_BIN = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=CUDA_BIN)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fusedrnn-tests/kernels")
MONTH_S = 30 * 24 * 3600

needs_nvcc = pytest.mark.skipif(NVCC is None or not SOURCES, reason="needs nvcc and the sources")
each_architecture = pytest.mark.parametrize(
    "architecture",
    [
        "sm_90a",
        pytest.param("sm_80", marks=pytest.mark.nightly),
        pytest.param("sm_100", marks=pytest.mark.nightly),
    ],
)


@dataclass(frozen=True)
class Compiled:
    """What nvcc has said, and the PTX that it has written."""

    said: str
    ptx: str


def compiled(text: str, *flags: str, includes: tuple[Path, ...] = ()) -> Compiled:
    """Compiles CUDA code, whose quoted includes are relative to ``csrc`` and to ``includes``.

    The flags choose the result: ``-ptx`` or ``-cubin``, of which the PTX is read too, or a program.
    Code that nvcc refuses is an error, and not kept.
    """
    assert str(ROOT) not in text, "another clone would not find it"
    folders = (CSRC, *includes)
    kept = CACHE / f"{_digest(text, flags, folders)}.json.gz"
    try:
        found = Compiled(**json.loads(gzip.decompress(kept.read_bytes())))
        os.utime(kept)
        return found
    except (OSError, EOFError, ValueError, TypeError, zlib.error):  # not there, or damaged
        pass
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "code.cu")
        source.write_text(text)
        command = [str(NVCC), "-std=c++17", *flags, *(f"-I{path}" for path in folders), str(source)]
        command += ["--keep", "--keep-dir", folder, "-o", f"{folder}/result"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ptx = "result" if "-ptx" in flags else "code.ptx"
        found = Compiled(done.stderr, Path(folder, ptx).read_text())
    _keep(kept, found)
    return found


def _digest(text: str, flags: tuple[str, ...], folders: tuple[Path, ...]) -> str:
    content = [text, *flags, _versions()]
    for folder in folders:  # paths are relative, so that another clone finds the same
        files = sorted(path for end in ("*.h", "*.cu") for path in folder.rglob(end))
        content += [f"{path.relative_to(folder)}\0{path.read_text()}" for path in files]
    return hashlib.sha256("\0\0".join(content).encode()).hexdigest()


@functools.cache
def _versions() -> str:
    """Of nvcc, and of the compiler that it calls for the CPU's code."""
    commands = ([str(NVCC), "--version"], ["c++", "--version"])
    return "".join(subprocess.run(c, capture_output=True, text=True).stdout for c in commands)


def _keep(path: Path, found: Compiled) -> None:
    """Writes a whole file at once, and removes those that nothing has asked for in a month."""
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(gzip.compress(json.dumps(asdict(found)).encode()))
    fresh.replace(path)
    for old in CACHE.iterdir():
        if old.stat().st_mtime < time.time() - MONTH_S:
            old.unlink(missing_ok=True)
