"""What tests compile is there whole or not at all, and a failure has the compiler's words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import builds
import cached_nvcc
import pytest
from builds import Build, BuildError, make_all


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "built")
    path = tmp_path / "source.cpp"
    path.write_text("int main() { return 3; }\n")
    return path


def program(source: Path) -> Build:
    return Build("program", (source,), with_torch=False, is_program=True, headers=())


def test_a_changed_source_is_another_file(source: Path, capsys: pytest.CaptureFixture) -> None:
    first = program(source)
    make_all([first])
    assert subprocess.run([first.path]).returncode == 3
    assert "program: 1 of 1 sources" in capsys.readouterr().out
    make_all([program(source)])
    assert capsys.readouterr().out == ""
    source.write_text("int main() { return 4; }\n")
    assert subprocess.run([program(source).make()]).returncode == 4
    assert not first.is_there


def test_a_failure_leaves_nothing_and_stops_all(source: Path) -> None:
    source.write_text("int main() { return here; }\n")
    with pytest.raises(BuildError, match=r"here.* was not declared"):
        make_all([program(source)])
    assert [path.name for path in builds.FOLDER.iterdir()] == ["program.lock"]
    source.write_text("int main() {}\n")
    assert program(source).make().exists()


@pytest.mark.parametrize(
    ("words", "cxx", "expected"),
    [([], "c++", "usage: "), (["quick"], "/nowhere/c++", "no C++ compiler: '/nowhere/c++'")],
)
def test_the_command(words: list[str], cxx: str, expected: str) -> None:
    command = [sys.executable, builds.__file__, *words]
    done = subprocess.run(command, env=os.environ | {"CXX": cxx}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") <= 2, done.stderr
    assert expected in done.stderr


def test_nvcc_is_called_once_for_the_same_words(tmp_path: Path) -> None:
    """And again if the source or the flags change, or what was kept is damaged or cannot be."""
    nvcc, source, made = tmp_path / "nvcc", tmp_path / "a.cu", tmp_path / "a.o"
    nvcc.write_text('#!/bin/sh\n[ "$1" = -c ] || exit 0\necho called\ncat "$3" > "$5"\n')
    nvcc.chmod(0o755)

    def is_called(text: str, *flags: str, home: Path = tmp_path / "cache", **env: str) -> bool:
        source.write_text(text)
        made.unlink(missing_ok=True)
        words = [sys.executable, cached_nvcc.__file__, nvcc, "-c", "-c", source, "-o", made, *flags]
        env = os.environ | {"XDG_CACHE_HOME": str(home)} | env
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr, made.read_text()) == (0, "", text)
        return "called" in done.stdout

    assert is_called("one") and not is_called("one")
    assert is_called("two") and is_called("one", "-G") and is_called("one", NVCC_APPEND_FLAGS="-G")
    for path in (tmp_path / "cache").rglob("*.gz"):
        path.write_bytes(path.read_bytes()[:-9])
    assert is_called("one") and not is_called("one")
    assert is_called("one", home=source) and is_called("one", home=source)
