"""Puts the compiled libraries in place for the GPU of this machine: ``python -m bench.build``.

They are copied from build/gpu-libraries, if those were built from the same sources and for this
GPU; otherwise the package is built here, which takes minutes, and the last line says why. Nothing
is done if both sources and machine are those of the last time.

``python -m bench.build --architecture 90`` (``make gpu-libraries``) fills that folder, for GPUs of
one compute capability and without having one. It is small enough to travel with the sources. The
operators in it hold no Python and use the stable ABI of torch 2.11, so they load under any later
torch for the same major version of CUDA. Only _helpers depends on the version of Python: it is
compiled where it is used, in seconds. The folder also has the programs of bench.phases.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig

from .contain import ROOT
from .machine import nvidia_smi

STAMP = ROOT / "build" / "gpu-check.txt"
LIBRARIES = ROOT / "build" / "gpu-libraries"
MANIFEST = "built-for.json"
PACKAGE = ROOT / "fusedrnn"
COPIED = ("_core.abi3.so", "_cuda.abi3.so")
METADATA = "fusedrnn.egg-info"  # has the version, without which there is no import
SOURCES = ("csrc/**/*", "build_backend/*.py", "setup.py")
LOADS = "from fusedrnn import _library; raise SystemExit(_library.cuda_obstacle)"
PIP = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", ".")


def digest_of_sources() -> str:
    """A text that changes with everything that the libraries are built from."""
    content = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        if path.is_file() and "__pycache__" not in path.parts:
            content.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
            content.update(path.read_bytes())
    return content.hexdigest()


def make_libraries(architecture: str) -> None:
    """Builds for one compute capability, such as 9.0, into build/gpu-libraries."""
    from . import phase_programs

    digest = digest_of_sources()
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    env = _environment(architecture) | {"PYTHONPATH": str(ROOT / "build_backend")}
    new = LIBRARIES / "new"
    new.mkdir(parents=True)
    print(f"building for compute capability {architecture}, in several minutes", flush=True)
    build = [sys.executable, "setup.py", "egg_info", "--egg-base", str(LIBRARIES)]
    build += ["build_ext", "--build-lib", str(new)]
    if status := subprocess.run(build, cwd=ROOT, env=env).returncode:
        sys.exit(status)
    for name in COPIED:
        (new / "fusedrnn" / name).replace(LIBRARIES / name)
    shutil.rmtree(new)
    manifest = {"sources": digest, "architecture": architecture, "files": _digests()}
    (LIBRARIES / MANIFEST).write_text(json.dumps(manifest) + "\n")
    print("building the programs of bench.phases", flush=True)
    programs = phase_programs.build(phase_programs.BUILT_BEFORE, architecture.replace(".", ""))
    for error in programs.errors.values():
        print(f"fusedrnn: bench.phases will build its programs where the GPU is: {error}")
    print(f"{LIBRARIES.relative_to(ROOT)}: {_mib():.1f} MiB")


def why_not_copied(architecture: str) -> str | None:
    """Why the libraries of build/gpu-libraries do not fit; None if they may."""
    try:
        manifest = json.loads((LIBRARIES / MANIFEST).read_text())
    except (OSError, ValueError):
        return "`make gpu-libraries` has left no libraries in build/gpu-libraries"
    if not isinstance(manifest, dict) or manifest.keys() != {"sources", "architecture", "files"}:
        return f"build/gpu-libraries/{MANIFEST} is of another version"
    if manifest["sources"] != digest_of_sources():
        return "the libraries of build/gpu-libraries are of other sources"
    if (theirs := manifest["architecture"]) != architecture:
        return (
            f"build/gpu-libraries is for compute capability {theirs}, the GPU's is {architecture}"
        )
    if manifest["files"] != _digests():
        return "files of build/gpu-libraries are missing or damaged"
    return None


def copy_libraries() -> str | None:
    """Copies the libraries and compiles _helpers; returns what is wrong with them here."""
    for name in COPIED:
        partial = PACKAGE / f"{name}.partial"  # a library may be in use
        shutil.copyfile(LIBRARIES / name, partial)
        partial.replace(PACKAGE / name)
    shutil.copytree(LIBRARIES / METADATA, ROOT / METADATA, dirs_exist_ok=True)
    if not compile_helpers():
        return "csrc/helpers.cpp does not compile"
    return None if _loads() else "the libraries of build/gpu-libraries cannot be loaded"


def compile_helpers() -> bool:
    """Compiles the one library that is for this version of Python alone, as setup.py does."""
    import pybind11

    link_flags = runpy.run_path(str(ROOT / "build_backend" / "fusedrnn_build.py"))["LINK_FLAGS"]
    target = PACKAGE / f"_helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
    partial = target.with_name(f"{target.name}.partial")
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-O2", "-g0", "-fvisibility=hidden"]
    command += ["-shared", "-fPIC", f"-I{pybind11.get_include()}"]
    command += [f"-I{sysconfig.get_path('include')}", "csrc/helpers.cpp", "-o", str(partial)]
    if subprocess.run([*command, *link_flags], cwd=ROOT).returncode != 0:
        return False
    partial.replace(target)
    return True


def main() -> None:
    """Copies or builds; exits with status 0 if the package has its kernels for CUDA."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", help="fill build/gpu-libraries for this, such as 90")
    options = parser.parse_args()
    if options.architecture:
        make_libraries(_with_point(options.architecture))
        return
    architecture = nvidia_smi("compute_cap")
    if not architecture:
        sys.exit("fusedrnn: nvidia-smi names no GPU, so there is nothing to build for")
    about = f"{sys.version} torch {importlib.metadata.version('torch')} {architecture}"
    wanted = hashlib.sha256(f"{about} {digest_of_sources()}".encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted and _loads():
        print("fusedrnn: the libraries have been built from these sources before")
        return
    why = why_not_copied(architecture) or copy_libraries()
    if why:
        print(f"fusedrnn: building here, because {why}", flush=True)
        built = subprocess.run([sys.executable, *PIP], cwd=ROOT, env=_environment(architecture))
        if built.returncode != 0 or not _loads():
            sys.exit(built.returncode or 1)
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(wanted)
    how = f"built here, because {why}" if why else f"copied, {_mib():.1f} MiB"
    print(f"fusedrnn: the libraries for {architecture} were {how}")


def _environment(architecture: str) -> dict[str, str]:
    """For a build of the kernels, which takes all cores unless MAX_JOBS says otherwise."""
    return {**os.environ, "FUSEDRNN_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architecture}


def _with_point(architecture: str) -> str:
    """``90`` as nvidia-smi and torch write it, ``9.0``."""
    if not re.fullmatch(r"\d+\.?\d", architecture):
        sys.exit(f"fusedrnn: an architecture is a number such as 90, got {architecture}")
    digits = architecture.replace(".", "")
    return f"{digits[:-1]}.{digits[-1]}"


def _digests() -> dict[str, str]:
    """What is copied, with a digest of each file's content."""
    paths = [LIBRARIES / name for name in COPIED]
    paths += sorted(path for path in (LIBRARIES / METADATA).rglob("*") if path.is_file())
    return {
        str(path.relative_to(LIBRARIES)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.exists()
    }


def _mib() -> float:
    return sum(path.stat().st_size for path in LIBRARIES.rglob("*") if path.is_file()) / 2**20


def _loads() -> bool:
    return subprocess.run([sys.executable, "-c", LOADS], cwd=ROOT).returncode == 0


if __name__ == "__main__":
    main()
