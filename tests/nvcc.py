"""What nvcc makes of CUDA code, for tests that read it; kept for the next run on this machine.

Kernels take minutes to compile, so a result is found again by a digest of all that it depends on:
see cached_nvcc.py.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from cached_nvcc import CACHE, CSRC, ROOT, digest, keep, kept

SOURCES = sorted(CSRC.glob("cuda/**/*.cu"))
CUDA_BIN = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=CUDA_BIN)

needs_nvcc = pytest.mark.skipif(NVCC is None or not SOURCES, reason="needs nvcc and the sources")
each_architecture = pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("sm_90a", marks=pytest.mark.slow),
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
    path = CACHE / f"{digest(str(NVCC), text, *flags, folders=folders)}.json.gz"
    try:
        return Compiled(**json.loads(gzip.decompress(kept(path) or b"")))
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
    keep(path, gzip.compress(json.dumps(asdict(found)).encode()))
    return found
