"""A cache for each test that builds libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusedrnn._compile import cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, which is not there yet; no setting of the caller counts."""
    for name in ("CXX", "FUSEDRNN_COMPILE", "FUSEDRNN_COMPILE_SECONDS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache, "_process_folder", None)
    path = tmp_path / "cache"
    monkeypatch.setenv("FUSEDRNN_CACHE", str(path))
    return path
