"""The build backend: setuptools, plus the choice of the torch to compile against.

With torch in ``build-system.requires``, ``pip install .`` would download the newest torch, several
gigabytes, to build for an environment that may hold another one. So nothing is required up front:
what the environment holds is used, also where pip hides it, and pip is asked only for the rest.

What stops a build is said in one sentence and ends in SystemExit, so that pip shows no traceback.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Distribution -> oldest version to build with. setuptools 77 is the first to know SPDX licenses.
NEEDS = {"setuptools": "77", "torch": "2.11", "ninja": "1.10", "pybind11": "2.12"}

# Where libstdc++ is linked in (-static-libstdc++, or no other is found), it stays private: else the
# numbers of its locales' facets would be torch's in part, and a stream would find the wrong facet.
LINK_FLAGS = ["-Wl,--exclude-libs,ALL"]


def fail(sentence: str) -> NoReturn:
    sys.exit(f"fusedrnn: {sentence}")


def version_key(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` -> ``(2, 13)``: enough to compare with what NEEDS says."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet_needs() -> list[str]:
    """Requirements that the environment does not meet, in pip's notation."""
    unmet = []
    for name, oldest in NEEDS.items():
        have = installed_version(name)
        if have is None or version_key(have) < version_key(oldest):
            unmet.append(f"{name}>={oldest}")
    return unmet


def check_torch() -> None:
    """An old torch is not replaced behind the user's back."""
    have = installed_version("torch")
    if have is not None and version_key(have) < version_key(NEEDS["torch"]):
        fail(f"torch {NEEDS['torch']} or newer is needed, found {have}")


def check_compiler() -> None:
    """The compiler must be there before pip spends minutes on downloads."""
    compiler = os.environ.get("CXX", "c++")  # as torch looks for it; may carry arguments
    words = shlex.split(compiler)
    if not words or shutil.which(words[0]) is None:
        fail(f"no C++ compiler: '{compiler}' was not found; install one, or name it in CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        fail("Python.h was not found; install the development files of this Python")


def runtime_headers(toolkit: Path) -> Path | None:
    folders = [toolkit / "include", *sorted(toolkit.glob("targets/*/include"))]  # conda's place
    return next((folder for folder in folders if (folder / "cuda_runtime.h").exists()), None)


def find_cuda_toolkit() -> Path | None:
    """A folder with compiler and headers; the nvcc on PATH may be a wrapper far from them."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc is not None:
        candidates.insert(2, str(Path(nvcc).resolve().parent.parent))
    for folder in map(Path, filter(None, candidates)):
        if (folder / "bin/nvcc").exists() and runtime_headers(folder):
            return folder
    return None


def cuda_headers(toolkit: Path) -> list[str]:
    """Include folders: the toolkit's, then those of the cuBLAS that torch came with."""
    folders = [runtime_headers(toolkit)]
    for place in map(Path, sys.path):
        folders += sorted(place.glob("nvidia/cu[0-9]*/include"))  # CUDA 13: all in one
        folders += sorted(place.glob("nvidia/cublas/include"))
    return [str(folder) for folder in folders]


def ask_nvcc(toolkit: Path, question: str) -> str:
    nvcc = toolkit / "bin/nvcc"
    return subprocess.run([nvcc, question], stdout=subprocess.PIPE, text=True).stdout


def cuda_obstacle(torch_cuda: str | None) -> str | None:
    """Why the CUDA kernels cannot be built. ``torch_cuda``: of which CUDA torch is, if any."""
    if torch_cuda is None:
        return "torch is a CPU build"
    toolkit = find_cuda_toolkit()
    if toolkit is None:
        return "no CUDA toolkit was found; name its folder in CUDA_HOME"
    release = re.search(r"release (\d+\.\d+)", ask_nvcc(toolkit, "--version"))
    nvcc = release.group(1) if release else "unknown"
    if nvcc.split(".")[0] != torch_cuda.split(".")[0]:
        return f"nvcc is of CUDA {nvcc} and torch of CUDA {torch_cuda}: major versions must agree"
    if not any(Path(folder, "cublasLt.h").exists() for folder in cuda_headers(toolkit)):
        return "cublasLt.h was not found, neither in the CUDA toolkit nor beside torch"
    return None


def choose_cuda(choice: str, torch_cuda: str | None) -> tuple[Path | None, str | None]:
    """The toolkit to build the CUDA kernels with, and what to tell if there is none.

    ``choice`` is FUSEDRNN_CUDA: 0 never builds them, 1 fails if they cannot be built.
    """
    if choice not in ("auto", "0", "1"):
        fail(f"FUSEDRNN_CUDA must be auto, 0 or 1, got '{choice}'")
    if choice == "0":
        return None, None
    obstacle = cuda_obstacle(torch_cuda)
    if obstacle is None:
        return find_cuda_toolkit(), None
    if choice == "1":
        fail(f"FUSEDRNN_CUDA=1, but {obstacle}")
    return None, f"fusedrnn: building for the CPU only, because {obstacle}"


# For machines without a GPU.
DEFAULT_ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def default_architectures(toolkit: Path) -> str:
    """The architectures that this nvcc knows; the last also as PTX, which newer GPUs compile."""
    known = ask_nvcc(toolkit, "--list-gpu-code").split()
    chosen = [a for a in DEFAULT_ARCHITECTURES if f"sm_{a.replace('.', '')}" in known]
    return ";".join(chosen or DEFAULT_ARCHITECTURES) + "+PTX"


def prepare_cuda(toolkit: Path, torch: Any) -> None:
    """Tells torch.utils.cpp_extension, which reads the environment, where and for what to build.

    It finds neither a toolkit behind a wrapper of nvcc, nor what to do without a GPU; with GPUs it
    builds for those.
    """
    os.environ["CUDA_HOME"] = str(toolkit)
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.is_available():
        os.environ["TORCH_CUDA_ARCH_LIST"] = default_architectures(toolkit)


def use_environment() -> None:
    """Make visible again what the environment holds, behind all that pip has put on sys.path.

    pip isolates through PYTHONPATH, which ``-E`` ignores; the interpreter is the environment's.
    """
    ask = "import json, sys, sysconfig as s; print(json.dumps([sys.path, s.get_path('scripts')]))"
    said = subprocess.run([sys.executable, "-E", "-c", ask], stdout=subprocess.PIPE, check=True)
    folders, scripts = json.loads(said.stdout)
    sys.path += [folder for folder in folders if folder and folder not in sys.path]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), scripts])  # ninja


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    check_compiler()
    check_torch()
    return unmet_needs()


def is_writable() -> bool:
    """Whether setuptools can write next to the sources, as it always does."""
    folders = (".", "fusedrnn", "build", "fusedrnn.egg-info")
    return all(os.access(folder, os.W_OK) for folder in folders if os.path.exists(folder))


@contextlib.contextmanager
def writable_tree() -> Iterator[None]:
    """Works in a copy of the source tree, if that one is read-only."""
    if is_writable():
        yield
        return
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "fusedrnn")
        left_out = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__", ".*")
        shutil.copytree(here, copy, ignore=left_out, copy_function=shutil.copyfile)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.chdir(copy)
        try:
            yield
        finally:
            os.chdir(here)


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def setuptools_hook(name: str) -> Callable[..., Any]:
    """setuptools' own hook, once all it needs is known to be there."""

    def hook(folder: str, *args: Any, **kwargs: Any) -> Any:
        unmet = get_requires_for_build_wheel()
        if unmet:  # pip, too, comes here without asking when told --no-build-isolation
            fail(f"building needs {', '.join(unmet)}; install them, or let pip isolate the build")
        if "editable" in name and not is_writable():
            fail("an editable install writes into the source tree, which is read-only")
        from setuptools import build_meta

        folder = os.path.abspath(folder)
        with writable_tree():
            return getattr(build_meta, name)(folder, *args, **kwargs)

    return hook


prepare_metadata_for_build_wheel = setuptools_hook("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = setuptools_hook("prepare_metadata_for_build_editable")
build_wheel = setuptools_hook("build_wheel")
build_editable = setuptools_hook("build_editable")
build_sdist = setuptools_hook("build_sdist")

use_environment()
