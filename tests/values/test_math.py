"""Elementary functions, types, normals and products of the C++ kernels, for every CPU instruction
set here.

The bounds are in cpp/functions.h, cpp/math_check.cpp and cpp/product_check.cpp; here they are
compiled and run, and what they print of random numbers is compared with Python code that knows
nothing of it, of conversions with torch. FUSEDRNN_EXHAUSTIVE=1 takes all floats, else it is a
sample of some ten millions.
"""

from __future__ import annotations

import math
import os
import pathlib
import platform
import re
import shutil
import subprocess

import pytest
import torch
from nvcc import NVCC, each_architecture, needs_nvcc

SOURCES = ("base/math.h", "base/scalar.h", "program/functions.h")
CPP = pathlib.Path(__file__).parents[1] / "cpp"
CSRC = CPP.parents[1] / "csrc"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
# The processor flags, as Linux names them, that each instruction set's code may use.
NEEDED = {
    "baseline": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
CHECKS = ["special", "double", "select", "tails", "narrow", "philox", "normals", "moments"]
NAMES = [line for line in (CPP / "functions.h").read_text().splitlines() if " kName = " in line]
FUNCTIONS = re.findall(r'"(\w+)"', "".join(NAMES))
EXHAUSTIVE = os.environ.get("FUSEDRNN_EXHAUSTIVE") == "1"
STRIDE = 1 if EXHAUSTIVE else 499


def cpu_flags() -> set[str]:
    try:
        return set(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def constants() -> list[str]:
    """All floating-point literals of the functions, near which their behaviour may change."""
    literal = r"\b(?:0x[\da-f.]+p[+-]?\d+|\d+\.\d+(?:e[+-]?\d+)?)(?=f?\b)"
    sources = [(CSRC / name).read_text() for name in SOURCES]
    found = sorted({constant for source in sources for constant in re.findall(literal, source)})
    assert {"0.55", "87.5", "0x1.715476p+0"} <= set(found)
    return found


def compiled(source: str, program: pathlib.Path, *flags: str) -> pathlib.Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    language = ["-x", "c++"] if source.endswith(".cu") else []
    command = [COMPILER, *FLAGS, *WARNINGS, *flags, *language, str(CPP / source)]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


def run(*command: str | pathlib.Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said_by_failing(*command: str | pathlib.Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=NEEDED)
def isa(request):
    if not NEEDED[request.param] <= cpu_flags():
        pytest.skip(f"no {request.param} on this processor")
    return request.param


@pytest.fixture(scope="module")
def run_check(isa, tmp_path_factory):
    program = tmp_path_factory.mktemp(isa) / "math_check"
    compiled("math_check.cpp", program, f"-DCHECK_{isa.upper()}")
    return lambda check: run(program, check)


@pytest.fixture(scope="module")
def math_sweep(isa, tmp_path_factory):
    program = tmp_path_factory.mktemp(isa) / "math_sweep"
    return compiled("math_sweep.cpp", program, f"-DCHECK_{isa.upper()}", "-pthread")


@pytest.mark.parametrize("check", CHECKS)
def test_math(run_check, check):
    run_check(check)


@pytest.mark.parametrize("check", ["edges", "many_terms"])
def test_products(isa, tmp_path, check):
    program = compiled("product_check.cpp", tmp_path / "product", f"-DCHECK_{isa.upper()}")
    run(program, check)


@pytest.mark.timeout(3600 if EXHAUSTIVE else 600)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_over_floats(math_sweep, isa, function):
    """Checks errors with denormals kept and flushed; vectors have the bits of single floats."""
    said = run(math_sweep, function, str(STRIDE), *constants())
    print(f"{isa}, {said}", end="")


@pytest.mark.parametrize(
    ("bug", "wanted"),
    [
        (1, "FAILED exp, error with denormals kept"),
        (2, "FAILED exp, error with denormals flushed"),
        (3, "FAILED exp, vector and float differ"),
    ],
)
def test_a_wrong_function_is_noticed(tmp_path, bug, wanted):
    flags = [f"-DFUSEDRNN_CHECK_SEEDED_BUG={bug}", "-pthread"]
    program = compiled("math_sweep.cpp", tmp_path / "math_sweep", *flags)
    said = said_by_failing(program, "exp", "9973", *constants())
    assert wanted in said
    assert bug != 2 or "kept" not in said, "then it would be noticed without flushing"


# --- the same on a GPU ---------------------------------------------------------------------------

FMA_FLAGS = ["-mfma"] if platform.machine() == "x86_64" else []
has_fma = pytest.mark.skipif(
    FMA_FLAGS != [] and "fma" not in cpu_flags(), reason="no fused multiply-add on this processor"
)


@has_fma
def test_the_sweep_for_gpus_in_a_loop(tmp_path):
    program = compiled("math_sweep.cu", tmp_path / "math_sweep", *FMA_FLAGS)
    assert "exp: error " in run(program, "997")
    flags = [*FMA_FLAGS, "-DFUSEDRNN_CHECK_SEEDED_BUG=1"]
    program = compiled("math_sweep.cu", tmp_path / "math_sweep", *flags)
    assert "FAILED exp: " in said_by_failing(program, "997")


def compiled_for_gpu(program: pathlib.Path, architecture: str) -> pathlib.Path:
    host = ",".join([*FMA_FLAGS, "-ffp-contract=fast"])
    command = [NVCC, "-O3", "-std=c++17", f"-arch={architecture}", f"-Xcompiler={host}"]
    built = subprocess.run(
        [*command, str(CPP / "math_sweep.cu"), "-o", program], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return program


@needs_nvcc
@each_architecture
def test_the_sweep_compiles_for_gpus(tmp_path, architecture):
    compiled_for_gpu(tmp_path / "math_sweep", architecture)


@needs_nvcc
@has_fma
@pytest.mark.cuda
def test_over_all_floats_on_a_gpu(tmp_path):
    """The GPU judges errors; the bits of a sample are compared with the CPU's."""
    print(run(compiled_for_gpu(tmp_path / "math_sweep", "native"), "1"), end="")


# --- conversions, random numbers -----------------------------------------------------------------


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
