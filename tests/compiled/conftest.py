"""The caches of tests that build libraries: that of the run, and others for single tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled.caches import cache_of_the_run, compiled_once

from fusedrnn._compiler import library_cache

__all__ = ["cache_of_the_run", "compiled_once"]  # fixtures


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
