"""The CPU kernels for another processor: compiled for aarch64, and run in qemu.

Takes two Debian packages, without which the tests are skipped: g++-aarch64-linux-gnu and
qemu-user. The programs of tests/cpp are those that test_math.py and test_refused.py run on this
machine; a new one that calls run_named() is run here without a change.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest
from test_math import CPP, CSRC, FLAGS, FUNCTIONS, WARNINGS, constants

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        MISSING != [],
        reason=f"no {' and no '.join(MISSING)}: apt-get install g++-aarch64-linux-gnu qemu-user",
    ),
]
SWEEP, PLANS, TEAM = "math_sweep.cpp", "plans.cpp", "team_check.cpp"
STRIDE = "499"


def named_checks() -> dict[str, list[str]]:
    """Each program that calls run_named(), with the names of its checks."""
    found = {}
    for path in sorted(CPP.glob("*.cpp")):
        _, is_named, checks = path.read_text().partition("return run_named(")
        if is_named:
            found[path.name] = re.findall(r'\{"(\w+)",', checks)
    return found


CHECKS = [(source, check) for source, checks in named_checks().items() for check in checks]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory):
    """From a source to its program, which is compiled once."""
    folder = tmp_path_factory.mktemp("aarch64")

    def program(source: str) -> pathlib.Path:
        path = folder / pathlib.Path(source).stem
        if not path.exists():
            # Static, so that qemu needs no libraries of the other processor.
            compile_for_aarch64(CPP / source, path, "-static", "-pthread")
        return path

    return program


def compile_for_aarch64(source: pathlib.Path, made: pathlib.Path, *flags: str) -> None:
    command = [COMPILER, *FLAGS, *WARNINGS, *flags, source, "-o", made]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def run(*command: str | pathlib.Path) -> str:
    done = subprocess.run([QEMU, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_program_is_run() -> None:
    programs = {path.name for path in CPP.glob("*.cpp")}
    assert programs == {*named_checks(), SWEEP, PLANS, TEAM}
    assert all(named_checks().values()), "each has checks"


@pytest.mark.parametrize("source", sorted(path.name for path in (CSRC / "cpu").glob("*.cpp")))
def test_the_kernels_compile(source: str, tmp_path: pathlib.Path) -> None:
    """Those for instruction sets of x86 are empty there."""
    compile_for_aarch64(CSRC / "cpu" / source, tmp_path / "kernels.o", "-c")
    assert os.path.getsize(tmp_path / "kernels.o") > 0


def test_a_team(tmp_path: pathlib.Path) -> None:
    """How threads wait differs there, and what they see of each other's memory."""
    program, of_csrc = tmp_path / "team_check", str(CSRC / "cpu" / "team.cpp")
    compile_for_aarch64(CPP / TEAM, program, of_csrc, "-std=c++20", "-static", "-pthread")
    run(program)


# Sums in long double are computed without hardware there, and take minutes.
@pytest.mark.parametrize(("source", "check"), CHECKS)
def test_checks(programs, source: str, check: str) -> None:
    run(programs(source), check)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_over_floats(programs, function: str) -> None:
    print(run(programs(SWEEP), function, STRIDE, *constants()), end="")


def test_plans(programs) -> None:
    """Plans for GPUs, made on the other processor."""
    run(programs(PLANS))
