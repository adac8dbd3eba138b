"""The inline PTX of ``csrc/persistent/device.h``, compiled by nvcc and interpreted here.

A kernel calls each function once, in all lanes of a warp. Its PTX is run by the PTX manual's
description of its few instructions, matrices spread over lanes included. Accesses to memory that
other blocks look at must be the very instructions that the functions promise: no values show a
missing ``.acquire``. Needs nvcc, but neither a GPU nor a torch with CUDA.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import nvcc
import pytest
from nvcc import compiled, needs_nvcc

pytestmark = pytest.mark.slow  # compiles

HEADER = Path(__file__).parents[2] / "csrc/persistent/device.h"
LANES = 32
LANE = np.arange(LANES)

# Kernels by name: the work of each lane i, from arrays `in` and `more` to `out`.
KERNELS = {
    "load_relaxed_packet": "((Packet*)out)[i] = load_relaxed((const Packet*)in + i);",
    "store_relaxed_packet": "store_relaxed((Packet*)out + i, ((const Packet*)in)[i]);",
    "load_plain_packet": "((Packet*)out)[i] = load_plain((const Packet*)in + i);",
    "store_plain_packet": "store_plain((Packet*)out + i, ((const Packet*)in)[i]);",
    "load_acquire": "out[i] = load_acquire(in + i);",
    "store_release": "store_release(out + i, in[i]);",
    "load_relaxed": "out[i] = load_relaxed(in + i);",
    "store_relaxed": "store_relaxed(out + i, in[i]);",
    "shuffle_down": "out[i] = shuffle_down(in[i], 4);",
    "round_to_tf32": "out[i] = round_to_tf32(((const float*)in)[i]);",
    "mma_float": "multiply<float>(in, more, out, i);",
    "mma_bf16": "multiply<BFloat16>(in, more, out, i);",
    "mma_f16": "multiply<Half>(in, more, out, i);",
}
# The memory accesses written in PTX; each must occur once.
ACCESSES = {
    "load_relaxed_packet": "ld.relaxed.gpu.global.v4.u32",
    "store_relaxed_packet": "st.relaxed.gpu.global.v4.u32",
    "load_plain_packet": "ld.global.v4.u32",
    "store_plain_packet": "st.global.v4.u32",
    "load_acquire": "ld.acquire.gpu.global.u32",
    "store_release": "st.release.gpu.global.u32",
    "load_relaxed": "ld.relaxed.gpu.global.u32",
    "store_relaxed": "st.relaxed.gpu.global.u32",
}
SOURCE = """
using namespace fusedrnn;
using namespace fusedrnn::cuda;
// a and b by lanes; d, which is added to, behind b
template <class T>
__device__ void multiply(const uint32_t* a, const uint32_t* b, uint32_t* out, int i) {
  uint32_t of_a[4];
  float d[4];
  for (int k = 0; k < 4; ++k) {
    of_a[k] = a[4 * i + k];
    d[k] = ((const float*)b)[64 + 4 * i + k];
  }
  mma<T>(d, of_a, b[2 * i], b[2 * i + 1]);
  for (int k = 0; k < 4; ++k) ((float*)out)[4 * i + k] = d[k];
}
#define KERNEL(name, statement)                                                                  \\
  extern "C" __global__ void name##_kernel(const uint32_t* __restrict__ in, const uint32_t* more, \\
                                           uint32_t* out) {                                      \\
    const int i = threadIdx.x;                                                                   \\
    statement                                                                                    \\
  }
"""


def ptx_of(header: str) -> dict[str, list[str]]:
    """The instructions of each kernel, compiled with a header that may be changed."""
    text = header.replace('#include "../', '#include "').replace("#pragma once", "") + SOURCE
    text += "".join(f"KERNEL({name}, {does})\n" for name, does in KERNELS.items())
    ptx = compiled(text, "-arch=compute_90", "-ptx").ptx
    found = re.finditer(r"\.entry (\w+)_kernel\(.*?\)\s*\{(.*?)\n\}", ptx, re.DOTALL)
    return {
        kernel[1]: re.findall(r"^\s*([a-z][^;]*);", kernel[2], re.MULTILINE) for kernel in found
    }


@functools.cache
def ptx() -> dict[str, list[str]]:
    return ptx_of(HEADER.read_text())


def bits(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers, np.float32).view(np.uint32)


def numbers(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def of_16_bits(kind: str, words: np.ndarray) -> np.ndarray:
    """The two numbers of each word, the first in its low half."""
    halves = np.stack([words & 0xFFFF, words >> 16], axis=-1).astype(np.uint16)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return numbers(halves.astype(np.uint32) << 16).astype(np.float64)


def mma(kind: str, d: list, a: list, b: list) -> list:
    """Runs m16n8k16 and m16n8k8; the manual's figures show which lane has which elements.

    ``groupID`` is lane / 4, ``threadID_in_group`` is lane % 4.
    """
    group, thread = LANE // 4, LANE % 4
    if kind == "tf32":  # a: row groupID, + 8 for a1 and a3; column + 4 for a2 and a3
        left, right = np.zeros((16, 8)), np.zeros((8, 8))
        for i in range(4):
            row, column = group + (8 if i in (1, 3) else 0), thread + (4 if i >= 2 else 0)
            left[row, column] = numbers(a[i] & ~np.uint32(0x1FFF))
        for i in range(2):
            right[thread + 4 * i, group] = numbers(b[i] & ~np.uint32(0x1FFF))
    else:  # a: numbers 0 to 7, two in a register; rows + 8 for 2, 3, 6, 7; columns + 8 from 4
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for i in range(8):
            row = group + (8 if i in (2, 3, 6, 7) else 0)
            column = 2 * thread + i % 2 + (8 if i >= 4 else 0)
            left[row, column] = of_16_bits(kind, a[i // 2])[:, i % 2]
        for i in range(4):
            row = 2 * thread + i % 2 + (8 if i >= 2 else 0)
            right[row, group] = of_16_bits(kind, b[i // 2])[:, i % 2]
    product = left @ right
    places = [(group + 8 * (i // 2), 2 * thread + i % 2) for i in range(4)]
    return [bits(numbers(d[i]) + product[place]) for i, place in enumerate(places)]


class Warp:
    """Interprets a kernel; a register is an array with a value for each lane."""

    def __init__(self, arrays: list[np.ndarray]):
        self.memory = np.concatenate(arrays).astype(np.uint32)
        ends = np.cumsum([0, *(len(array) for array in arrays)])
        self.starts = [4 * start for start in ends[:-1]]
        self.registers: dict[str, np.ndarray] = {"%tid.x": LANE}

    def value(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        return np.full(LANES, int(operand))

    def words(self, text: str) -> np.ndarray:
        """The index of ``[register+offset]`` in the memory's words."""
        register, _, offset = text.strip("[]").partition("+")
        return (self.registers[register] + int(offset or 0)) // 4

    def run(self, instructions: list[str]) -> None:
        for instruction in instructions:
            opcode, _, rest = instruction.partition(" ")
            opcode = opcode.strip()
            # {a, b} are one operand
            operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)]
            self.execute(opcode.partition("\t")[0], operands)

    def execute(self, opcode: str, operands: list[str]) -> None:
        lists = [re.findall(r"[^,\s{}]+", operand) for operand in operands]
        to, *_ = operands or [""]
        parts = opcode.split(".")
        if opcode == "ret":
            return
        if opcode == "ld.param.u64":
            number = int(re.search(r"_param_(\d)", operands[1])[1])  # type: ignore[index]
            self.registers[to] = np.full(LANES, self.starts[number])
        elif parts[0] == "ld":
            for k, register in enumerate(lists[0]):
                self.registers[register] = self.memory[self.words(operands[1]) + k]
        elif parts[0] == "st":
            for k, register in enumerate(lists[1]):
                self.memory[self.words(to) + k] = self.value(register)
        elif parts[0] in ("mov", "cvta"):
            self.registers[to] = self.value(operands[1])
        elif parts[0] == "mma":
            kind = re.fullmatch(
                r"mma\.sync\.aligned\.m16n8k(?:8|16)\.row\.col\.f32\.(\w+)\.\1\.f32", opcode
            )
            assert kind, opcode
            a, b, d = ([self.value(r) for r in registers] for registers in (*lists[1:3], lists[3]))
            assert (len(a), len(b), len(d)) == (4, 2, 4)
            self.registers |= dict(zip(lists[0], mma(kind[1], d, a, b), strict=True))
        else:
            inputs = [self.value(operand) for operand in operands[1:]]
            self.registers[to.partition("|")[0]] = OTHERS[opcode](*inputs)


def shuffled_down(value, distance, clamp, mask):
    assert (mask == -1).all() and (clamp == LANES - 1).all()
    source = LANE + distance
    return np.where(source < LANES, value[np.minimum(source, LANES - 1)], value)


def nearest_tf32(value):
    """Rounds to TF32, ties away from zero; which NaN a NaN becomes is not specified."""
    rounded = (value.astype(np.uint32) + np.uint32(0x1000)) & ~np.uint32(0x1FFF)
    return np.where(np.isnan(numbers(value)), 0xFFFFFFFF, rounded).astype(np.uint32)


OTHERS: dict[str, Callable[..., np.ndarray]] = {
    "add.s64": lambda a, b: a + b,
    "shl.b32": lambda a, b: a << b,
    "mul.wide.u32": lambda a, b: a.astype(np.int64) * b,
    "mul.wide.s32": lambda a, b: a.astype(np.int64) * b,
    "shfl.sync.down.b32": shuffled_down,
    "cvt.rna.tf32.f32": nearest_tf32,
    "setp.num.f32": lambda a, b: ~np.isnan(numbers(a)) & ~np.isnan(numbers(b)),
    "setp.nan.f32": lambda a, b: np.isnan(numbers(a)) | np.isnan(numbers(b)),
    "selp.b32": lambda a, b, which: np.where(which, a, b).astype(np.uint32),
}


def run(name: str, instructions: list[str], *inputs: np.ndarray) -> np.ndarray:
    """Runs a kernel; returns the contents of ``out``."""
    read, more = (*inputs, np.zeros(0, np.uint32))[:2]
    warp = Warp([read, more, np.zeros(4 * LANES, np.uint32)])
    warp.run(instructions)
    return warp.memory[len(read) + len(more) :]


# --- what the functions promise ------------------------------------------------------------------


def words(count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2**32, count, dtype=np.uint32)


def check_access(name: str, instructions: list[str]) -> None:
    """Asserts that one instruction moves a packet or a word between memory and registers.

    The other one of the two accesses to global memory is the kernel's own.
    """
    width = 4 if "packet" in name else 1
    read = words(width * LANES)
    assert (run(name, instructions, read)[: width * LANES] == read).all()
    is_load = ACCESSES[name].startswith("ld")
    opcodes = [i.split()[0] for i in instructions if i.startswith("ld" if is_load else "st")]
    assert [o for o in opcodes if "param" not in o] == [ACCESSES[name]]


def check_shuffle(name: str, instructions: list[str]) -> None:
    read = words(LANES)
    assert (run(name, instructions, read)[: LANES - 4] == read[4:]).all()


def check_round(name: str, instructions: list[str]) -> None:
    values = np.random.default_rng(4).normal(size=LANES).astype(np.float32)
    values[:6] = [np.nan, -np.inf, 0, 1 + 2**-11, -1 - 2**-11, 1 + 2**-11 - 2**-20]
    rounded = run(name, instructions, bits(values))[:LANES]
    assert rounded[0] == 0x7FFFFFFF
    assert (numbers(rounded[1:6]) == [-np.inf, 0, 1 + 2**-10, -1 - 2**-10, 1]).all()
    assert (np.abs(numbers(rounded[6:]) / values[6:] - 1) <= 2**-11).all()


def check_mma(name: str, instructions: list[str]) -> None:
    """Checks products of small integers, which all types can hold and whose sums are exact.

    Matrices are spread over the lanes as device.h describes.
    """
    random = np.random.default_rng(5)
    wide = name == "mma_float"
    depth = 8 if wide else 16
    a, b = random.integers(-8, 9, (16, depth)), random.integers(-8, 9, (depth, 8))
    d = random.integers(-8, 9, (16, 8))
    g, q = LANE // 4, LANE % 4

    def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        if name == "mma_f16":
            low, high = (
                x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)
            )
        else:
            low, high = bits(low) >> 16, bits(high) >> 16
        return low | high << 16

    if wide:
        of_a = [bits(a[g + r, q + c]) for r, c in ((0, 0), (8, 0), (0, 4), (8, 4))]
        of_b = [bits(b[q + r, g]) for r in (0, 4)]
    else:
        places = [(g + r, 2 * q + c) for r, c in ((0, 0), (8, 0), (0, 8), (8, 8))]
        of_a = [packed(a[r, c], a[r, c + 1]) for r, c in places]
        of_b = [packed(b[2 * q + r, g], b[2 * q + r + 1, g]) for r in (0, 8)]
    d_places = [(g + r, 2 * q + c) for r, c in ((0, 0), (0, 1), (8, 0), (8, 1))]
    of_d = [bits(d[place]) for place in d_places]
    read, more, added = (np.stack(list_, axis=1).ravel() for list_ in (of_a, of_b, of_d))
    out = numbers(run(name, instructions, read, np.concatenate([more, added])))
    expected = d + a @ b
    for k, place in enumerate(d_places):
        assert (out.reshape(LANES, 4)[:, k] == expected[place]).all(), f"d[{k}]"


def check(name: str, instructions: list[str]) -> None:
    if name in ACCESSES:
        check_access(name, instructions)
    elif name == "shuffle_down":
        check_shuffle(name, instructions)
    elif name == "round_to_tf32":
        check_round(name, instructions)
    else:
        check_mma(name, instructions)


@needs_nvcc
@pytest.mark.parametrize("name", KERNELS)
def test_functions(name: str) -> None:
    check(name, ptx()[name])


# --- faults that have to be noticed --------------------------------------------------------------

FAULTS = {
    "a1 and a2 swapped": ('"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', ["mma_"]),
    "b0 and b1 swapped": ('"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)', ["mma_"]),
    "d1 and d2 swapped": ('"+f"(d[1]), "+f"(d[2])', '"+f"(d[2]), "+f"(d[1])', ["mma_"]),
    "f16 read as bf16": ("f32.f16.f16.f32", "f32.bf16.bf16.f32", ["mma_f16"]),
    "d not added to": ('{%8, %9}, {%0, %1, %2, %3};"', '{%8, %9}, {%0, %0, %0, %0};"', ["mma_"]),
    "no acquire": ("ld.acquire.gpu", "ld.relaxed.gpu", ["load_acquire"]),
    "no release": ("st.release.gpu", "st.relaxed.gpu", ["store_release"]),
    "within a block only": (".gpu.global", ".cta.global", ["relaxed", "acquire", "release"]),
    "plain instead of relaxed": ("ld.relaxed.gpu", "ld", ["load_relaxed"]),
    "two words of a packet swapped": (
        '"=r"(v.word[1]), "=r"(v.word[2])',
        '"=r"(v.word[2]), "=r"(v.word[1])',
        ["load_relaxed_packet", "load_plain_packet"],
    ),
    "another lane": ("v, unsigned(distance)", "v, unsigned(distance + 1)", ["shuffle_down"]),
    "any NaN": ("return x == x ? rounded : 0x7fffffffu", "return rounded", ["round_to_tf32"]),
}


@needs_nvcc
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str) -> None:
    right, wrong, where = FAULTS[fault]
    header = HEADER.read_text()
    assert right in header
    changed = ptx_of(header.replace(right, wrong))
    for name in KERNELS:
        if any(part in name for part in where):
            with pytest.raises(AssertionError):
                check(name, changed[name])
        else:
            check(name, changed[name])


# --- what was compiled before --------------------------------------------------------------------


@needs_nvcc
def test_what_was_compiled_is_found_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc, "CACHE", tmp_path / "cache")
    header = tmp_path / "include/number.h"
    header.parent.mkdir()
    text = '#include "number.h"\n__global__ void kernel(int* to) { *to = NUMBER; }\n'

    def ptx() -> str:
        return compiled(text, "-arch=compute_90", "-ptx", includes=(header.parent,)).ptx

    header.write_text("#define NUMBER 40")
    first = ptx()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("nvcc is called"))
        assert ptx() == first
        (kept,) = nvcc.CACHE.iterdir()
        kept.write_bytes(kept.read_bytes()[:-20])
        with pytest.raises(pytest.fail.Exception, match="nvcc is called"):
            ptx()
    header.write_text("#define NUMBER 41")
    assert ", 40;" in first and ", 41;" in ptx()
