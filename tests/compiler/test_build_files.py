"""Files of libraries: which are trusted, what becomes of damaged ones, and how new ones appear."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from compiler.build_cases import (
    GXX,
    built_elsewhere,
    give_away,
    in_child,
    lanes,
    runs,
    script,
    text,
)

from fusedrnn._compiler import build as building
from fusedrnn._compiler import library_cache
from fusedrnn._compiler.build import build

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

Patch = pytest.MonkeyPatch


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)


def moved(path: Path) -> Path:
    return path.rename(path.with_suffix(".moved"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped bit": flip_bit,
    "appended": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "link": lambda path: path.symlink_to(moved(path)),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew(folder: Path, damage: str) -> None:
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    DAMAGES[damage](path)
    library = build(text())
    assert library.path == path and not library.is_cached and lanes(library)
    assert library_cache.is_whole(path)


def test_a_folder_in_the_place_of_a_library(folder: Path) -> None:
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    path.unlink()
    path.mkdir()
    built_elsewhere("Is a directory")


def test_a_library_that_others_can_change(folder: Path) -> None:
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    path.chmod(0o666)
    built_elsewhere(f"other users can write to {path}")
    path.chmod(0o644)
    give_away(path)
    with pytest.raises(library_cache.Unusable, match="belongs to another user"):
        library_cache.is_whole(path)


def test_a_library_that_is_in_use_is_not_replaced(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A process that began before, and ends later, takes the library that is there by then."""
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    other = tmp_path / "other"
    path.rename(other)
    compiler = script(tmp_path / "g++", f'mv {other} {path}; exec {GXX} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(building, "_name", lambda *_: path.stem)  # though by another compiler
    number = other.stat().st_ino
    library = build(text())
    assert runs(compiler) == 1 and lanes(library)
    assert library.path.stat().st_ino == number


def test_a_file_system_without_links(folder: Path, monkeypatch: Patch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    assert lanes(build(text()))
    assert len(list(folder.iterdir())) == 2


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    folder.mkdir()
    for name in ("work-old", "work-new", "other"):
        (folder / name).mkdir()
        (folder / name / "stages.so").write_text("")
    for name in ("work-old", "other"):
        os.utime(folder / name, (time.time() - 1e5,) * 2)
    build(text())
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"work-new", "other"}
