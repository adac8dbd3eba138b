"""How building ends when it cannot succeed: with a reason, in time, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from compiler.build_cases import ABI, EXPORT, GXX, lanes, refused, runs, script, text

from fusedrnn._compiler import build as building
from fusedrnn._compiler.build import CannotBuild, build

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

Patch = pytest.MonkeyPatch


def test_no_compiler(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -O2")
    refused(r"there is no C\+\+ compiler: '/nowhere/g\+\+', named by CXX, was not found")
    monkeypatch.setenv("CXX", "'g++")
    refused("CXX must be a command, got .*: No closing quotation")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(r"there is no C\+\+ compiler: none of g\+\+, c\+\+ and clang\+\+ is on PATH; install")
    (tmp_path / "g++").write_text("no program")
    (tmp_path / "g++").chmod(0o755)
    refused(r"g\+\+ does not run: .*Exec format error")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo x.h:1: note; echo 'x.h:2: error: it is wrong' >&2; exit 3", ": x.h:2: error: it is"),
        ("echo 'write: No space left on device'; exit 1", "status 1: write: No space left on dev"),
        ("exit 1", "script failed with status 1$"),
        ("kill -9 $$", "script was ended by SIGKILL"),
        ("kill -11 $$", "script was ended by SIGSEGV"),
        ("exit 0", "script wrote no library"),
        ('while [ "$1" != -o ]; do shift; done; echo no ELF > $2', "the library cannot be loaded"),
    ],
)
def test_a_compiler_that_fails(
    folder: Path, tmp_path: Path, monkeypatch: Patch, body: str, reason: str
) -> None:
    """Its words are in the reason, it is not asked again, and nothing of it stays."""
    compiler = script(tmp_path / "script", body)
    monkeypatch.setenv("CXX", compiler)
    refused(reason)
    refused(reason)
    assert runs(compiler) == 1
    assert not list(folder.glob("work-*"))
    monkeypatch.delenv("CXX")
    assert lanes(build(text()))


def test_real_errors_are_short(folder: Path) -> None:
    wrong = "#include <vector>\n" + "int f() { return std::vector<int>::no; }\n" * 100
    with pytest.raises(CannotBuild, match=r"failed with status 1: <stdin>:3:.*error:.*no") as error:
        build(wrong)
    assert len(str(error.value)) < 700


def test_a_compiler_that_hangs(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The compiler's own children end with it."""
    compiler = script(tmp_path / "script", f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("FUSEDRNN_COMPILE_SECONDS", "0.5")
    refused(r"script did not end within 0.5 s \(FUSEDRNN_COMPILE_SECONDS\)")
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break  # nobody has asked for its status yet
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{child}").exists()
    assert not list(folder.glob("work-*"))


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_build_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "script", "sleep 1000"))
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        build(text())
    timer.join()
    assert not list(folder.iterdir())
    script(tmp_path / "script", f'exec {GXX} "$@"')
    assert lanes(build(text()))  # an interruption is no failure to remember


def test_children_that_nobody_waits_for(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert lanes(build(text()))
        monkeypatch.setenv("CXX", script(tmp_path / "script", "echo error; exit 1"))
        refused("script wrote no library: error")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_a_compiler_gets_to_know(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    compiler = script(tmp_path / "script", f"env > {tmp_path}/env; cat > {tmp_path}/text; exit 1")
    monkeypatch.setenv("CXX", compiler + " 'one word'")
    monkeypatch.setenv("CPATH", "/somewhere")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    refused("status 1")
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    known = {"PATH", "HOME", "LD_LIBRARY_PATH", "NVCC_CCBIN", "LC_ALL", "TMPDIR"}
    assert variables.keys() <= known | {"PWD", "OLDPWD", "SHLVL", "_"}  # which the shell adds
    assert variables["LC_ALL"] == "C" and variables["TMPDIR"].startswith(str(folder / "work-"))
    assert re.fullmatch(
        r"#define FUSEDRNN_ISA \w+\n" + re.escape(text()), (tmp_path / "text").read_text()
    )


def test_a_library_of_another_interface(folder: Path) -> None:
    old = f'extern "C" {EXPORT} const int64_t fusedrnn_abi = 987654;'
    refused(
        "generated code has version 987654 of the interface.*: install fusedrnn again",
        text(abi=old),
    )
    refused("the library cannot be loaded: .*fusedrnn_abi", text("without one", abi=""))
    refused("the library cannot be loaded: .*fusedrnn_stage", '#include "program/stage.h"\n' + ABI)
    refused(
        "the library cannot be loaded: .*undefined symbol",
        text() + f'extern "C" int nowhere(); {EXPORT} int f() {{ return nowhere(); }}',
    )


def test_an_older_core_is_named(folder: Path) -> None:
    with pytest.raises(CannotBuild, match="is older than its Python part: install fusedrnn again"):
        building._ask_core("fusedrnn_not_yet")
