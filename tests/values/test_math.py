"""Elementary functions, types, normals and products of the C++ kernels, for every CPU instruction
set here.

The bounds are in cpp/functions.h, cpp/math_check.cpp and cpp/product_check.cpp; here they are
compiled and run, and what they print of random numbers is compared with the plain loop's, of
conversions with torch. FUSEDRNN_EXHAUSTIVE=1 takes all floats; else it is a
sample of some ten millions if slow tests run, and of a million if not. These are of the widest
instruction set alone.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import subprocess

import nvcc
import pytest
import torch
from compiler.stage_library import COMPILER, TARGETS, cpu_flags, instruction_sets

from fusedrnn import reference

SOURCES = ("base/math.h", "base/scalar.h", "program/functions.h", "program/rare_functions.h")
CPP = pathlib.Path(__file__).parents[1] / "cpp"
CSRC = CPP.parents[1] / "csrc"
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
CHECKS = ["special", "double", "select", "tails", "narrow", "philox", "normals"]
FUNCTIONS = re.findall(r'"(\w+)"', (CPP / "functions.h").read_text())  # the only such strings
EXHAUSTIVE = os.environ.get("FUSEDRNN_EXHAUSTIVE") == "1"
STRIDES = [1] if EXHAUSTIVE else [4999, pytest.param(499, marks=pytest.mark.slow)]


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


HERE = instruction_sets()


@pytest.fixture(
    scope="module",
    params=[pytest.param(i, marks=[pytest.mark.slow] * (i != HERE[-1])) for i in TARGETS],
)
def isa(request):
    if request.param not in HERE:
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


def test_products(isa, tmp_path):
    program = compiled("product_check.cpp", tmp_path / "product", f"-DCHECK_{isa.upper()}")
    for check in ("edges", "many_terms"):
        run(program, check)


@pytest.mark.timeout(3600 if EXHAUSTIVE else 600)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_over_floats(math_sweep, isa, function, stride):
    """Checks errors with denormals kept and flushed; vectors have the bits of single floats."""
    said = run(math_sweep, function, str(stride), *constants())
    print(f"{isa}, {said}", end="")


@pytest.mark.ci_has_every(3)
@pytest.mark.slow  # compiles a program for each bug
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
@pytest.mark.slow
def test_the_sweep_for_gpus_in_a_loop(tmp_path):
    program = compiled("math_sweep.cu", tmp_path / "math_sweep", *FMA_FLAGS)
    assert "exp: error " in run(program, "997")
    flags = [*FMA_FLAGS, "-DFUSEDRNN_CHECK_SEEDED_BUG=1"]
    program = compiled("math_sweep.cu", tmp_path / "math_sweep", *flags)
    assert "FAILED exp: " in said_by_failing(program, "997")


HOST_FLAGS = ",".join([*FMA_FLAGS, "-ffp-contract=fast"])
GPU_FLAGS = ["-O3", f"-Xcompiler={HOST_FLAGS}"]


@nvcc.needs_nvcc
@nvcc.each_architecture
@pytest.mark.slow
def test_the_sweep_compiles_for_gpus(architecture):
    text = '#include "math_sweep.cu"\n'
    arch = f"-gencode=arch={architecture.replace('sm', 'compute')},code={architecture}"
    nvcc.compiled(text, *GPU_FLAGS, arch, includes=(CPP,))


@nvcc.needs_nvcc
@has_fma
@pytest.mark.cuda
def test_over_all_floats_on_a_gpu(tmp_path):
    """The GPU judges errors; the bits of a sample are compared with the CPU's."""
    program = tmp_path / "math_sweep"
    run(nvcc.NVCC, "-std=c++17", *GPU_FLAGS, "-arch=native", CPP / "math_sweep.cu", "-o", program)
    print(run(program, "1"), end="")


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


def test_philox_answers(run_check):
    """Those of the plain loop, whose known answers are in test_reference.py."""
    lines = [line.split()[1:] for line in run_check("philox").splitlines() if "philox" in line]
    rows = torch.tensor([[int(word, 16) for word in " ".join(line).split()] for line in lines])
    counters, keys, expected = rows.split([4, 2, 4], 1)
    assert torch.equal(reference.philox4x32(counters, keys), expected)


def test_normal_definition(run_check):
    lines = [line.split()[1:] for line in run_check("normals").splitlines() if "normal " in line]
    assert len(lines) > 300
    for *index, value in lines:
        seed, t, b, z, layer = map(int, index)
        seed -= 2**64 * (seed >> 63)  # as a signed number
        found = reference.philox_normal(seed, 1, b + 1, z + 1, layer, torch.float64, first_step=t)
        assert found[0, b, z].item() == pytest.approx(float(value), abs=1e-14)
