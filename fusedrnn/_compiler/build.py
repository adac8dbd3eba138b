"""Generated C++ becomes a library: built at its first use, cached by its content, and loaded.

    library = build(text)      # text: stages, and the function that csrc/program/stage.h describes
    library.function           # its address

What the text may include is in headers.ROOTS. It exports, with default visibility, `fusedrnn_abi`
and `fusedrnn_stage`, or for a GPU `fusedrnn_stage_launch`.

A file is named `<content>-<compiler>.so`. The content is that of the text, the headers, the flags
and the target; no path is in it. A library by another compiler is as good where nothing can be
built: without a compiler, or if the folder is read-only. So an image or a cluster can ship what was
built elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from .. import _library
from . import headers, library_cache
from .toolchain import CannotBuild, Compiler, compile, find

__all__ = ["CannotBuild", "Library", "build"]

_FLAGS = {
    "cpu": [
        "-std=c++17",
        "-O3",
        "-g0",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-psabi",
        "-w",
        "-Wl,--as-needed,-s",
        *("-iquote", "."),  # for compilers that copy the text to a folder of their own
        *("-x", "c++"),
    ],
    "cuda": [
        "-std=c++17",
        "-O3",
        "-shared",
        "-cudart=static",  # needs no other version than the compiler's
        "-Xcompiler=-fPIC,-fvisibility=hidden,-w",
        "-Xlinker=--exclude-libs=ALL,--as-needed,-s",  # torch's runtime is another one
        "-w",
        "-I.",
        *("-x", "cu"),
    ],
}
_LEAST_BYTES = 4 << 20  # that must be free, or else a compiler's failure is no fault of the text
_FUNCTION = {"cpu": "fusedrnn_stage", "cuda": "fusedrnn_stage_launch"}
# In the order of cpu::Isa. Options and not a pragma, which clang does not have.
_INSTRUCTION_SETS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
}


class Library(NamedTuple):
    function: int
    """The address of fusedrnn_stage, or of fusedrnn_stage_launch."""
    path: Path
    key: str
    is_cached: bool
    """Whether it was there already, built by another process."""
    seconds: float
    """What compiling took; 0 if it was there."""
    bytes: int
    """The size of the file."""


class _SourceText(NamedTuple):
    """A text for one target: an instruction set of the CPU, or a GPU's architecture."""

    text: str
    device: str
    flags: tuple[str, ...]
    content: str
    """The first part of its name."""


def build(source: str, *, device: str = "cpu", capability: str | None = None) -> Library:
    """The library of a generated text, for this CPU or for a GPU.

    ``capability`` is the GPU's, such as "80" or "90a". Raises CannotBuild with the reason; the same
    call then fails at once, until the environment changes.
    """
    sources = _sources(source, device, _usable_targets(device, capability))
    compiler, obstacle = _compiler(device)
    question = (_name(sources[0], compiler), obstacle, *map(os.environ.get, _SETTINGS))
    with _locks.setdefault(question, threading.Lock()):
        known = _known.get(question)
        if known is None:
            try:
                known = _find(sources, compiler) or _make(sources[0], compiler, obstacle)
            except CannotBuild as error:
                known = str(error)
            _known[question] = known
    if isinstance(known, str):
        raise CannotBuild(known)
    return known


def kind_of(device: torch.device) -> str:
    """The kind of library that computes on a device: "cpu" or "cuda"."""
    return device.type


def capability_of(device: torch.device) -> str | None:
    """That of a GPU, or nothing for a CPU."""
    if device.type != "cuda":
        return None
    return "{}{}".format(*torch.cuda.get_device_capability(device))


_SETTINGS = ("FUSEDRNN_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR", "FUSEDRNN_COMPILE_SECONDS")
# What this process has built or failed to build. A process that was forked has no use for locks
# that its parent's threads may hold.
_Question = tuple[str | None, ...]
_known: dict[_Question, Library | str] = {}
_locks: dict[_Question, threading.Lock] = {}
os.register_at_fork(after_in_child=_locks.clear)


def _usable_targets(device: str, capability: str | None) -> list[str]:
    """What this machine can run, the best first."""
    if device == "cuda":
        assert capability is not None
        return [capability]
    widest = list(_INSTRUCTION_SETS)[_ask_core("fusedrnn_isa")]
    sets = list(reversed(_INSTRUCTION_SETS))
    return sets[sets.index(widest) :]


def _ask_core(question: str) -> int:
    """Asks the library of the package, which runs what is built here."""
    try:
        function = getattr(_library.core, question)
    except AttributeError:
        raise CannotBuild(
            "the compiled part of fusedrnn is older than its Python part: install fusedrnn again"
        ) from None
    function.restype = ctypes.c_int64
    return int(function())


def _sources(text: str, device: str, targets: Iterable[str]) -> list[_SourceText]:
    made = []
    for target in targets:
        if device == "cpu":
            begin = f"#define FUSEDRNN_ISA {target}\n"
            flags = [*_FLAGS[device], *_INSTRUCTION_SETS[target]]
        else:
            begin = ""
            flags = [*_FLAGS[device], f"-gencode=arch=compute_{target},code=sm_{target}"]
        try:
            digest = headers.digest(text)
        except OSError as error:
            raise CannotBuild(f"a header of fusedrnn is missing: {error}") from None
        all_of_it = "\0".join([begin + text, device, target, platform.machine(), digest, *flags])
        content = hashlib.sha256(all_of_it.encode()).hexdigest()[:40]
        made.append(_SourceText(begin + text, device, tuple(flags), content))
    return made


def _compiler(device: str) -> tuple[Compiler | None, str]:
    """The compiler, or why there is none."""
    try:
        return find(device), ""
    except CannotBuild as error:
        return None, str(error)


def _name(source: _SourceText, compiler: Compiler | None) -> str:
    by = hashlib.sha256(compiler.identity.encode()).hexdigest()[:16] if compiler else "none"
    return f"{source.content}-{by}"


def _find(sources: list[_SourceText], compiler: Compiler | None) -> Library | None:
    """A library that was built before."""
    try:
        folder = library_cache.open_folder(library_cache.wanted_folder())
    except library_cache.Unusable:
        return None  # _make() says why
    names = [_name(sources[0], compiler)] if compiler else []
    can_build = compiler is not None and os.access(folder, os.W_OK)
    if not can_build:
        for source in sources[: 1 if compiler else None]:
            names += sorted(path.stem for path in folder.glob(f"{source.content}-*.so"))
    for name in names:
        path = folder / f"{name}.so"
        try:
            if library_cache.is_whole(path):
                return _load(path, sources[0].device, is_cached=True)
        except (library_cache.Unusable, CannotBuild):  # of another machine or version: built anew
            continue
    return None


def _make(source: _SourceText, compiler: Compiler | None, obstacle: str) -> Library:
    if compiler is None:
        raise CannotBuild(obstacle)
    name, begin = _name(source, compiler), time.perf_counter()
    try:
        try:
            path = _compile(
                source, compiler, library_cache.open_folder(library_cache.wanted_folder()), name
            )
        except library_cache.Unusable as error:
            path = _compile(source, compiler, library_cache.process_folder(str(error)), name)
    except library_cache.Unusable as error:
        raise CannotBuild(f"the library cannot be stored: {error}") from None
    return _load(path, source.device, is_cached=False, seconds=time.perf_counter() - begin)


def _compile(source: _SourceText, compiler: Compiler, folder: Path, name: str) -> Path:
    """Raises Unusable if the folder is the reason that there is no library."""
    try:
        with library_cache.working_folder(folder) as work:
            text, library = work / "stages.cpp", work / "stages.so"
            text.write_text(source.text, encoding="utf-8")
            try:
                compile(compiler, list(source.flags), text, library)
            except CannotBuild:
                if shutil.disk_usage(work).free < _LEAST_BYTES:  # whatever the compiler says
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
                raise
            return library_cache.store(text, library, folder, name)
    except OSError as error:
        raise library_cache.Unusable(f"{folder} cannot be used ({error.strerror})") from None


def _load(path: Path, device: str, is_cached: bool, seconds: float = 0.0) -> Library:
    """Raises CannotBuild if it does not fit this process."""
    name = _FUNCTION[device]
    try:
        library = ctypes.CDLL(str(path))
        abi = ctypes.c_int64.in_dll(library, "fusedrnn_abi").value
        function = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except (OSError, AttributeError, ValueError) as error:
        raise CannotBuild(f"the library cannot be loaded: {error}") from None
    if abi != _ask_core("fusedrnn_abi"):
        raise CannotBuild(
            f"generated code has version {abi} of the interface of stages, and the compiled part "
            f"of fusedrnn has version {_ask_core('fusedrnn_abi')}: install fusedrnn again"
        )
    assert function is not None
    return Library(function, path, path.stem, is_cached, seconds, path.stat().st_size)
