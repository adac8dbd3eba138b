"""Libraries that were built elsewhere, for where nothing can be built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from compiler.build_cases import (
    GXX,
    as_another_user,
    instruction_sets,
    lanes,
    prepare,
    refused,
    runs,
    script,
    text,
)

from fusedrnn._compiler import build as building
from fusedrnn._compiler.build import build

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

Patch = pytest.MonkeyPatch


def test_libraries_are_prepared_for_other_processors(folder: Path, monkeypatch: Patch) -> None:
    paths = prepare(text())
    assert len(set(paths)) == len(instruction_sets()) == len(list(folder.glob("*.so")))
    before = [path.stat().st_mtime_ns for path in paths]
    assert prepare(text()) == paths
    assert [path.stat().st_mtime_ns for path in paths] == before
    library = build(text())
    assert library.is_cached and library.path in paths


def test_they_are_used_without_a_compiler(folder: Path, monkeypatch: Patch) -> None:
    prepare(text())
    monkeypatch.setenv("CXX", "/nowhere/c++")
    usable = building._usable_targets("cpu", None)
    library = build(text())
    assert library.is_cached
    assert lanes(library) == {"baseline": 4, "avx2": 8, "avx512": 16}[usable[0]]
    refused("there is no C", text("another"))


def test_a_narrower_one_will_do(folder: Path, monkeypatch: Patch) -> None:
    (ready,) = prepare(text(), targets=["baseline"])
    monkeypatch.setenv("CXX", "/nowhere/c++")
    library = build(text())
    assert library.path == ready and lanes(library) == 4
    monkeypatch.delenv("CXX")  # with a compiler, the widest is better
    widest = building._usable_targets("cpu", None)[0]
    assert build(text()).is_cached == (widest == "baseline")


def test_a_wider_one_is_not_loaded(folder: Path, monkeypatch: Patch) -> None:
    prepare(text(), targets=instruction_sets()[:1])
    monkeypatch.setattr(building, "_usable_targets", lambda device, capability: ["baseline"])
    if instruction_sets()[0] == "baseline":
        pytest.skip("this kind of processor has one instruction set")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    refused("there is no C")


def test_each_compiler_has_its_own(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    prepare(text())
    compiler = script(tmp_path / "script", f'exec {GXX} "$@"')
    monkeypatch.setenv("CXX", compiler)
    assert not build(text()).is_cached
    # Another compiler's will do where nothing can be stored.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (folder / f"{build(text()).key}.so").unlink()
    monkeypatch.setenv("FUSEDRNN_CACHE", f"{folder}/")
    assert build(text()).is_cached and runs(compiler) == 1


def test_root_prepares_for_other_users(folder: Path, readable: Path, monkeypatch: Patch) -> None:
    folder = readable / "cache"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("FUSEDRNN_CACHE", str(folder))
    (ready,) = prepare(text(), targets=building._usable_targets("cpu", None)[:1])
    compiler = script(readable / "script", f'exec {GXX} "$@"')

    def use() -> None:
        assert not os.access(folder, os.W_OK)
        library = build(text())
        assert library.is_cached and library.path == ready and lanes(library)
        os.environ["CXX"] = compiler  # another compiler, but nothing can be stored
        assert build(text()).path == ready and not runs(compiler)

    as_another_user(use)
