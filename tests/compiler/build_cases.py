"""Small texts to build, calls of what was built, and compilers that fail."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fusedrnn._compiler import build as building
from fusedrnn._compiler import library_cache
from fusedrnn._compiler.build import CannotBuild, Library, build
from fusedrnn._compiler.toolchain import find

ROOT = Path(__file__).parents[2]
GXX = shutil.which("g++") or shutil.which("c++")

EXPORT = '__attribute__((visibility("default")))'
ABI = f'extern "C" {EXPORT} const int64_t fusedrnn_abi = fusedrnn::program::kAbi;'
SIGNATURE = (
    "void fusedrnn_stage(int64_t stage, int64_t backward, "
    "const fusedrnn::program::StageArgs* args, int64_t first, int64_t last)"
)


def text(note: str = "", abi: str = ABI) -> str:
    """Writes a number of all its arguments, and of the vectors' width, to where `args` points.

    It includes little, and so compiles in a tenth of a second.
    """
    return f"""// {note}
#include "program/stage.h"
{abi}
#define LANES_baseline 4
#define LANES_avx2 8
#define LANES_avx512 16
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
extern "C" {EXPORT} {SIGNATURE} {{
  const int64_t lanes = PASTE(LANES_, FUSEDRNN_ISA);
  *(int64_t*)args = 1000 * stage + 100 * backward + 10 * first + last + 10000 * lanes;
}}
"""


def instruction_sets() -> list[str]:
    """Those of this kind of processor, widest first."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return list(reversed(building._INSTRUCTION_SETS)) if is_x86 else ["baseline"]


def prepare(source: str, targets: Sequence[str] | None = None) -> list[Path]:
    """Libraries for other processors in the cache, as an image or a cluster may ship them.

    Args:
        targets: Instruction sets, by default all of this kind of processor.
    """
    folder, compiler, made = (
        library_cache.open_folder(library_cache.wanted_folder()),
        find("cpu"),
        [],
    )
    for target in building._sources(source, "cpu", targets or instruction_sets()):
        name = building._name(target, compiler)
        path = folder / f"{name}.so"
        if not library_cache.is_whole(path):
            building._compile(target, compiler, folder, name)
        made.append(path)
    return made


CUDA_TEXT = f"""
#include "program/stage.h"
{ABI}
__global__ void stage(int64_t* result) {{ *result = 7; }}
extern "C" {EXPORT} int fusedrnn_stage_launch(int64_t* result, cudaStream_t stream) {{
  stage<<<1, 1, 0, stream>>>(result);
  return int(cudaGetLastError());
}}
"""


def refused(match: str, source: str | None = None, **options: str) -> None:
    with pytest.raises(CannotBuild, match=match):
        build(text() if source is None else source, **options)


def built_elsewhere(why: str, note: str = "") -> Library:
    """Builds in a folder of this process, and checks the warning that says why."""
    with pytest.warns(RuntimeWarning, match=f"this process only, because .*{why}.*; set FUSEDRNN_"):
        library = build(text(note))
    assert lanes(library)
    assert library.path.parent == library_cache.process_folder("it is there")
    assert library.path.parent.stat().st_mode & 0o777 == 0o700
    return library


def lanes(library: Library) -> int:
    """Calls a library of text(), and returns the width of its vectors."""
    function = ctypes.CFUNCTYPE(
        None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    )(library.function)
    result = ctypes.c_int64()
    function(1, 1, ctypes.addressof(result), 2, 3)
    assert result.value % 10000 == 1123
    return result.value // 10000


def script(path: Path, body: str) -> str:
    """A compiler that is a script; it says its version, and `$log` gets a line for other runs."""
    log = path.with_suffix(".log")
    path.write_text(
        f"#!/bin/sh\nlog={log}\n"
        f'case "$*" in *--version*) echo "script 1.0"; exit 0;; esac\necho run >> $log\n{body}\n'
    )
    path.chmod(0o755)
    return str(path)


def runs(compiler: str) -> int:
    """How many times such a script has compiled."""
    log = Path(compiler).with_suffix(".log")
    return log.read_text().count("run\n") if log.exists() else 0


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with the functions of this file."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    begin = "from compiler.build_cases import *\nfrom fusedrnn._compiler.build import *\n"
    return subprocess.run(
        [sys.executable, "-c", begin + code],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def status_in_child(work: Callable[[], object]) -> int:
    """The status of a forked process that does some work and ends in the usual way."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:  # pytest must not go on in the child
            print(f"in the child: {error!r}", file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> None:
    """Does some work, checks included, in a forked process."""
    assert status_in_child(work) == 0


STRANGER = 54321  # a user without a name


def give_away(path: Path, *, group: bool = False) -> None:
    """Makes another user, or another group, the owner of a file; follows no link."""
    try:
        os.lchown(path, *((-1, STRANGER) if group else (STRANGER, -1)))
    except OSError:
        pytest.skip("needs root")


def as_another_user(work: Callable[[], object]) -> None:
    """Does some work without root's rights, which no mode of a folder limits."""
    if not all(folder.stat().st_mode & 0o001 for folder in (ROOT, *ROOT.parents)):
        pytest.skip("other users cannot read the sources")

    def change_and_work() -> None:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
        except OSError:
            os._exit(77)
        work()

    status = status_in_child(change_and_work)
    if status == 77:
        pytest.skip("needs root")
    assert status == 0
