"""What tests compile with the C++ compiler, from one list: ``python tests/builds.py slow``.

make calls this before pytest, so that no test waits for a compiler, and a build that fails stops
the run with the compiler's own words. A library is written under a temporary name and renamed when
it is whole. Its name has a digest of all that it is made from, so a file that is there is never
stale. Tests that are started without make build what they need themselves.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FOLDER = ROOT / "build" / "tests"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
# Every library includes files of these; one that it does not need only costs a build.
HEADERS = (ROOT / "csrc", TESTS / "emulator", TESTS / "fake_cuda")
TORCH_FLAGS = ("-DTORCH_TARGET_VERSION=0x020b000000000000", "-fvisibility=hidden")
PROCESSES = len(os.sched_getaffinity(0))
_may_run = threading.BoundedSemaphore(PROCESSES)  # more compilers than cores only take memory


class BuildError(Exception):
    """A compiler failed; the message has its command and its words."""


class Stopped(Exception):
    """A build was given up, because a compiler failed in another one."""


@dataclass(frozen=True)
class Build:
    """A library or a program.

    Attributes:
        flags: For compiling and linking.
        links: For linking alone, after the objects.
        with_torch: Whether it uses torch's headers and libraries.
        is_program: Whether it is a program; otherwise it is a shared library.
        headers: Folders of what sources include, in the place of HEADERS.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    with_torch: bool = True
    is_program: bool = False
    headers: tuple[Path, ...] = HEADERS

    @functools.cached_property
    def path(self) -> Path:
        """Where the result is, or will be."""
        content = hashlib.sha256(compiler_version().encode())
        words = [*self._compile_flags(), *self._link_flags(), str(self.is_program)]
        content.update(" ".join(words).replace(str(ROOT), "").encode())
        ends = ("*.h", "*.cpp", "*.cu")  # some sources include others
        headers = (path for folder in self.headers for end in ends for path in folder.rglob(end))
        for path in sorted({*self.sources, *headers}):
            content.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        return (
            FOLDER / f"{self._prefix}{content.hexdigest()[:16]}{'' if self.is_program else '.so'}"
        )

    @property
    def _prefix(self) -> str:
        return f"{self.name}-torch{torch.__version__}-"

    @property
    def is_there(self) -> bool:
        """Whether it has been built."""
        return self.path.exists()

    def make(self, say: bool = False, stop: threading.Event | None = None) -> Path:
        """Builds it if it is not there; of several processes one builds, and the others wait.

        Args:
            stop: Is set if a compiler fails; if it is set, none is started.

        Raises:
            BuildError: The compiler failed.
        """
        if self.is_there:
            return self.path
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / f"{self.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if say:
                    print(f"  {self.name}: another process builds it", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.is_there:
                self._build(say, stop or threading.Event())
        return self.path

    def _build(self, say: bool, stop: threading.Event) -> None:
        begin, count = time.monotonic(), len(self.sources)
        folder = FOLDER / f"{self.name}.partial"  # one left by a process that was killed goes
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            objects = [folder / f"{i}.o" for i in range(count)]
            with ThreadPoolExecutor(count) as pool:
                jobs = map(partial(pool.submit, self._compile, stop), self.sources, objects)
                for done, job in enumerate(as_completed(list(jobs)), 1):
                    job.result()
                    if say:
                        tell(f"  {self.name}: {done} of {count} sources", begin)
            whole = folder / "whole"
            shared = [] if self.is_program else ["-shared"]
            link = [*COMPILER, *shared, *map(str, objects), *self._link_flags()]
            run([*link, "-o", str(whole)], stop)
            for old in FOLDER.glob(f"{self._prefix}*"):  # of other sources
                old.unlink()
            whole.replace(self.path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _compile(self, stop: threading.Event, source: Path, target: Path) -> None:
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        run([*self._compile_flags(), *language, "-c", str(source), "-o", str(target)], stop)

    def _compile_flags(self) -> list[str]:
        torchs = ["-std=c++20", *TORCH_FLAGS] if self.with_torch else []
        torchs += [f"-isystem{path}" for path in include_paths()] if self.with_torch else []
        return [*COMPILER, "-fPIC", *torchs, *self.flags]

    def _link_flags(self) -> list[str]:
        torchs = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        return [*self.flags, *(torchs if self.with_torch else []), *self.links]


def run(command: Sequence[str], stop: threading.Event) -> None:
    """Runs a compiler, unless another one has failed.

    Raises:
        BuildError: It failed.
        Stopped: Another one did.
    """
    with _may_run:
        if stop.is_set():
            raise Stopped
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        stop.set()
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


@functools.cache
def compiler_version() -> str:
    """What the compiler and torch are."""
    if shutil.which(COMPILER[0]) is None:
        raise BuildError(f"no C++ compiler: {COMPILER[0]!r} was not found; name one in CXX")
    said = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True).stdout
    return f"{platform.machine()} torch {torch.__version__} {said}"


def tell(what: str, begin: float) -> None:
    """Prints how far a build is."""
    print(f"{what}, {time.monotonic() - begin:.0f} s", flush=True)


SPEEDS = ("quick", "slow", "nightly")


def builds(speed: str) -> list[Build]:
    """All that the tests of a speed need, and those of the faster ones."""
    import emulator
    import fake_cuda
    from bank import fake_runtime
    from emulator import persistent
    from fuzz import sanitized

    quick = [emulator.EMULATED, persistent.EXCHANGE, persistent.SMOKE]
    if speed == "quick":
        return quick
    # What takes longest comes first, since it is one source, and so one core.
    slow = [emulator.SANITIZED] if sanitized.is_possible() else []
    if slow and speed == "nightly":
        slow.append(sanitized.LIBRARY)
    slow += [emulator.seeded(), *quick, fake_cuda.LIBRARY, fake_runtime.LIBRARY]
    return list(dict.fromkeys([*slow, *persistent.programs(speed == "nightly")]))


def printed(speed: str) -> dict[str, Callable[[], object]]:
    """Libraries whose source is printed: stages and programs, by name, with what makes each."""
    from compiler import stage_library
    from runtime import built_in_cells, driver_cells

    def of_speed(parameters: list[Any]) -> list[Any]:
        """The parameters of tests that are not slower."""
        later = {*SPEEDS[SPEEDS.index(speed) + 1 :]}
        pairs = [(p.values[0], p.marks) if hasattr(p, "marks") else (p, ()) for p in parameters]
        return [value for value, marks in pairs if later.isdisjoint(mark.name for mark in marks)]

    made: dict[str, Callable[[], object]] = {}
    for name, module in (("programs", driver_cells), ("built-in cells", built_in_cells)):
        for dtype in of_speed(module.DTYPES):
            made[f"{name}, {dtype}"] = partial(module.library, dtype)
    for dtype in of_speed(stage_library.DTYPES):
        emulated = partial(stage_library.kernels, dtype, stage_library.EMULATED)
        made[f"stages on the emulation, {dtype}"] = emulated
        for isa in of_speed(stage_library.marked_sets()):
            made[f"stages by {isa}, {dtype}"] = partial(stage_library.library, dtype, isa)
    return made


def make_printed(made: dict[str, Callable[[], object]]) -> None:
    """Makes what is not there of the printed libraries, one after another."""
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        jobs = {pool.submit(make): name for name, make in made.items()}
        for done, job in enumerate(as_completed(jobs), 1):
            if job.exception():
                pool.shutdown(cancel_futures=True)
            job.result()
            if time.monotonic() - begin > 1:  # those that are there take no time
                tell(f"  {jobs[job]}: {done} of {len(made)} printed libraries", begin)


def make_all(wanted: Iterable[Build]) -> None:
    """Builds what is not there, on all cores.

    Raises:
        BuildError: The first failure; no compiler is started after it.
    """
    if missing := [build for build in wanted if not build.is_there]:
        names = ", ".join(build.name for build in missing)
        print(f"compiling for tests, once: {names}", flush=True)
        stop = threading.Event()
        with ThreadPoolExecutor(PROCESSES) as pool:
            jobs = [pool.submit(build.make, say=True, stop=stop) for build in missing]
        errors = [error for job in jobs if (error := job.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error


def main() -> None:
    """Builds for a speed of tests; ends with status 1 and the compiler's words if one fails."""
    speed = sys.argv[1] if len(sys.argv) == 2 else ""
    if speed not in SPEEDS:
        sys.exit(f"usage: python tests/builds.py {'|'.join(SPEEDS)}")
    try:
        wanted, made = builds(speed), printed(speed)
        with ThreadPoolExecutor() as pool:  # both at once, so that no core waits for a long source
            for job in [pool.submit(make_all, wanted), pool.submit(make_printed, made)]:
                job.result()
    except BuildError as error:
        sys.exit(f"fusedrnn: a library for tests cannot be built:\n{error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    import builds as module  # which others import by this name: its classes are theirs

    module.main()
