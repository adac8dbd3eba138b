"""Fixtures: the cache of a run for compiled cells, what compilers have made before, and folders of
libraries for single tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedrnn._compiler import build, headers, library_cache
from fusedrnn._compiler.toolchain import Compiler, compile

COMPILED = Path(__file__).parents[2] / "build" / "compiled-programs"
"""What compilers have made for earlier tests and runs, by all that it depends on."""


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing goes to the user's own cache. Processes that run tests side by side share one."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDRNN_CACHE", str(folder / "fusedrnn"))
        yield


@pytest.fixture(autouse=True)
def compiled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests of compilers, of libraries' files and of processes compile anew what is there."""
    if not request.path.name.startswith(("test_build", "test_processes")):
        monkeypatch.setattr(build, "compile", compile_once)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, which is not there yet; no setting of the caller counts."""
    for name in ("CXX", "FUSEDRNN_COMPILE", "FUSEDRNN_COMPILE_SECONDS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library_cache, "_process_folder", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # forked processes clear up nothing
    path = tmp_path / "cache"
    monkeypatch.setenv("FUSEDRNN_CACHE", str(path))
    return path


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that all users can read, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as name:
        path = Path(name)
        path.chmod(0o755)
        if not all(folder.stat().st_mode & 0o001 for folder in path.parents):
            pytest.skip("other users cannot read temporary folders")
        yield path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Shells start commands in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def compile_once(compiler: Compiler, flags: list[str], text: Path, library: Path) -> None:
    """As fusedrnn._compiler.toolchain.compile, but for each text once."""
    source = text.read_text(encoding="utf-8")
    parts = [*compiler.command, compiler.identity, *flags, headers.digest(source), source]
    made = COMPILED / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}.so"
    if made.exists():
        shutil.copyfile(made, library)
        return
    compile(compiler, flags, text, library)
    COMPILED.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=COMPILED, delete=False) as file:
        shutil.copyfile(library, file.name)
    os.replace(file.name, made)  # at once, since other processes may do the same
