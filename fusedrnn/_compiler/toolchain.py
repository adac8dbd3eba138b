"""The compilers of generated libraries: which there are, and one run of one of them."""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, NamedTuple

from . import headers


class CannotBuild(Exception):
    """A library cannot be built or loaded; the text is the reason that users read."""


class Compiler(NamedTuple):
    command: tuple[str, ...]
    """An absolute path, and the arguments that CXX adds."""
    identity: str
    """All of it that the code may depend on: its version and arguments, and the C library."""

    @property
    def name(self) -> str:
        return os.path.basename(self.command[0])


def find(device: str) -> Compiler:
    """The compiler for "cpu" or "cuda". Raises CannotBuild with what was looked for."""
    command = _nvcc() if device == "cuda" else _cxx()
    state = os.stat(command[0])
    version = _version(command, (state.st_ino, state.st_size, state.st_mtime_ns))
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except ValueError:  # of another C library
        libc = None
    return Compiler(command, "\0".join([version, *command[1:], libc or sys.platform]))


def _which(name: str) -> str | None:
    """An absolute path, because the compiler runs in another folder."""
    path = shutil.which(name)
    return None if path is None else os.path.abspath(path)


def _cxx() -> tuple[str, ...]:
    named = os.environ.get("CXX", "").strip()
    if not named:
        for name in ("g++", "c++", "clang++"):
            if path := _which(name):
                return (path,)
        raise CannotBuild(
            "there is no C++ compiler: none of g++, c++ and clang++ is on PATH; install one, or "
            "name it in CXX"
        )
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise CannotBuild(f"CXX must be a command, got {named!r}: {error}") from None
    path = _which(words[0])
    if path is None:
        raise CannotBuild(f"there is no C++ compiler: {words[0]!r}, named by CXX, was not found")
    return (path, *words[1:])


def _nvcc() -> tuple[str, ...]:
    """As the build backend looks for it: a wrapper on PATH may be far from the toolkit."""
    on_path = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if on_path is not None:
        candidates.insert(2, str(Path(on_path).resolve().parent.parent))
    for toolkit in filter(None, candidates):
        if path := shutil.which("nvcc", path=os.path.join(os.path.abspath(toolkit), "bin")):
            return (path,)
    if on_path is not None:
        return (os.path.abspath(on_path),)
    raise CannotBuild(
        "there is no CUDA compiler: nvcc is neither in CUDA_HOME, nor on PATH, nor in "
        "/usr/local/cuda; install the CUDA toolkit, or name its folder in CUDA_HOME"
    )


@functools.cache
def _version(command: tuple[str, ...], state: tuple[int, int, int]) -> str:
    """What the compiler says of itself, without paths. ``state``: of its file, asked anew later."""
    try:
        said = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{shlex.join(command)} does not run: {error}") from None
    if said.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} --version {_end(said.returncode)}")
    lines = said.stdout.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if "/" not in line)


def _environment(temporary: Path | None = None) -> dict[str, str]:
    """All that a compiler gets to know: nothing that adds headers, libraries or flags."""
    names = ("PATH", "HOME", "LD_LIBRARY_PATH", "NVCC_CCBIN")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return kept | {"LC_ALL": "C"} | ({"TMPDIR": str(temporary)} if temporary else {})


def seconds_allowed() -> float:
    said = os.environ.get("FUSEDRNN_COMPILE_SECONDS", "").strip() or "300"
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e6:
        raise ValueError(
            f"fusedrnn: FUSEDRNN_COMPILE_SECONDS must be a number of seconds, got {said!r}"
        )
    return seconds


def compile(compiler: Compiler, flags: list[str], text: Path, library: Path) -> None:
    """Compiles one text; everything that the compiler writes is in the folder of ``library``.

    The text comes through the standard input, and headers are found in the current folder, so that
    no path is in the library. Raises CannotBuild with the compiler's words.
    """
    messages = library.with_name("messages.txt")
    command = [*compiler.command, *flags, "-o", str(library), "-"]
    environment = _environment(library.parent)
    with open(text, "rb") as source, open(messages, "wb") as said:
        code = _run(command, environment, source, said)
    if code != 0:
        raise CannotBuild(f"{compiler.name} {_end(code)}{_words(messages)}")
    # A program that ignores SIGCHLD never learns how its children ended.
    if not library.is_file() or library.stat().st_size == 0:
        raise CannotBuild(f"{compiler.name} wrote no library{_words(messages)}")


def _run(
    command: list[str], environment: dict[str, str], source: IO[bytes], said: IO[bytes]
) -> int:
    """Its status, or minus the signal that ended it; no part of it lives longer than allowed."""
    seconds, name = seconds_allowed(), os.path.basename(command[0])
    try:
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=headers.folder(),
            env=environment,
            start_new_session=True,  # so that its children can be ended with it
        )
    except OSError as error:
        raise CannotBuild(f"{name} does not run: {error}") from None
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise CannotBuild(
            f"{name} did not end within {seconds:g} s (FUSEDRNN_COMPILE_SECONDS)"
        ) from None
    finally:
        if process.returncode is None:  # too long, or interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end(code: int) -> str:
    if code >= 0:
        return f"failed with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _words(messages: Path) -> str:
    """The compiler's first errors, or else its first lines."""
    with open(messages, "rb") as file:
        lines = file.read(20000).decode(errors="replace").splitlines()
    lines = [line.strip()[:200] for line in lines if line.strip()]
    lines = [line for line in lines if "error" in line.lower()] or lines
    return ": " + "; ".join(lines[:3]) if lines else ""
