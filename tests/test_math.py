"""Elementary functions, types and normals of the C++ kernels, for every CPU instruction set here.

The bounds are in cpp/math_check.cpp; here it is compiled and run, and its random numbers are
compared with Python code that knows nothing of it, its conversions with torch's.
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

SOURCE = pathlib.Path(__file__).parent / "cpp" / "math_check.cpp"
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
# The processor flags, as Linux names them, that each instruction set's code may use.
NEEDED = {
    "baseline": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
CHECKS = ["exp", "log", "tanh", "sigmoid", "sincospi", "double", "select", "tails"]
CHECKS += ["narrow", "philox", "normals", "moments"]


def cpu_flags() -> set[str]:
    try:
        return set(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


@pytest.fixture(scope="module", params=NEEDED)
def run_check(request, tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    isa = request.param
    if not NEEDED[isa] <= cpu_flags():
        pytest.skip(f"no {isa} on this processor")
    program = tmp_path_factory.mktemp(isa) / "math_check"
    define = f"-DCHECK_{isa.upper()}"
    command = [compiler, *FLAGS, *WARNINGS, define, str(SOURCE), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    def run(check: str) -> str:
        done = subprocess.run([program, check], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("check", CHECKS)
def test_math(run_check, check):
    run_check(check)


def test_conversions_are_those_of_torch(run_check):
    rows = {"widen": [], "narrow": []}
    for name, *words in map(str.split, run_check("narrow").splitlines()[:-1]):
        rows[name].append([int(word, 16) for word in words])
    bits, *all_wide = torch.tensor(rows["widen"]).T
    x, *all_narrow = torch.tensor(rows["narrow"]).T
    x = x.int().view(torch.float32)
    assert torch.equal(bits, torch.arange(2**16)) and len(x) > 600_000
    for dtype, wide, narrow in zip(
        (torch.bfloat16, torch.float16), all_wide, all_narrow, strict=True
    ):
        expected = bits.short().view(dtype).float()
        is_nan = expected.isnan()
        assert torch.equal(wide.int().view(torch.float32).isnan(), is_nan)
        assert torch.equal(wide.int()[~is_nan], expected.view(torch.int32)[~is_nan])
        expected = x.to(dtype).view(torch.int16)
        assert torch.equal(narrow.short(), torch.where(x.isnan(), 0x7FFF, expected).short())


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


# From the known-answer file of Random123, the authors' own implementation.
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_philox_answers(run_check):
    lines = [line.split()[1:] for line in run_check("philox").splitlines() if "philox" in line]
    rows = [hex_words(" ".join(line)) for line in lines]
    known = [[*hex_words(c), *hex_words(k), *hex_words(w)] for c, k, w in KNOWN_ANSWERS]
    assert rows[:3] == known
    for row in rows:
        assert philox4x32(row[:4], row[4:6]) == row[6:]


def normal(seed: int, t: int, b: int, z: int, layer: int) -> float:
    words = philox4x32([t, b, z // 4, layer], [seed % 2**32, seed >> 32])
    radius_word, turn_word = words[z % 4 // 2 * 2 :][:2]
    radius = math.sqrt(-2 * math.log(((radius_word >> 1) + 0.5) * 2.0**-31))
    turn = (turn_word - 2**32 * (turn_word >> 31)) * 2.0**-31
    return radius * (math.cos, math.sin)[z % 2](math.pi * turn)


def test_normal_definition(run_check):
    lines = [line.split()[1:] for line in run_check("normals").splitlines() if "normal " in line]
    assert len(lines) > 300
    for *index, value in lines:
        assert normal(*map(int, index)) == pytest.approx(float(value), abs=1e-14)
