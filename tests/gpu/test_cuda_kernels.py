"""The CUDA kernels as nvcc compiles them: registers suffice, and memory is read in wide words.

Needs nvcc, but neither a GPU nor a torch with CUDA.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from nvcc import CSRC, SOURCES, Compiled, compiled, each_architecture, needs_nvcc

pytestmark = pytest.mark.slow
each_night = pytest.mark.nightly  # compiles all kernels, which CI does once, for the package


@dataclass(frozen=True)
class Function:
    """The resources of a kernel, or of a function that it calls, as ptxas prints them."""

    name: str
    architecture: str
    stack_frame: int
    spill_stores: int
    spill_loads: int

    def __str__(self) -> str:
        return (
            f"{demangled(self.name)} for {self.architecture}: {self.stack_frame} bytes of local "
            f"memory, {self.spill_stores} bytes spilled and {self.spill_loads} bytes read back"
        )

    @property
    def uses_local_memory(self) -> bool:
        return max(self.stack_frame, self.spill_stores, self.spill_loads) > 0


def functions(log: str) -> list[Function]:
    """All functions in the output of ``nvcc -Xptxas -v``."""
    pattern = re.compile(
        r"Compiling entry function '\S+' for '(?P<architecture>\S+)'"
        r"|Function properties for (?P<name>\S+)\s+(?P<stack_frame>\d+) bytes stack frame, "
        r"(?P<spill_stores>\d+) bytes spill stores, (?P<spill_loads>\d+) bytes spill loads"
    )
    found, architecture = [], ""
    for match in pattern.finditer(log):
        architecture = match["architecture"] or architecture
        if match["name"]:
            sizes = [
                int(size) for size in match.group("stack_frame", "spill_stores", "spill_loads")
            ]
            found.append(Function(match["name"], architecture, *sizes))
    return found


def kernels(ptx: str) -> dict[str, str]:
    """The text of each kernel by its name."""
    found = re.finditer(r"^\.visible \.entry (\w+)\((.*?)^}", ptx, re.DOTALL | re.MULTILINE)
    return {demangled(kernel[1]): kernel[2] for kernel in found}


def global_accesses(ptx: str) -> dict[str, list[str]]:
    """The instructions that access global memory, by kernel: ``ld.global.v4.f32`` and the like."""
    instruction = re.compile(r"\b(?:ld|st)\.global[.\w]*")
    return {name: instruction.findall(text) for name, text in kernels(ptx).items()}


def in_loops(ptx: str) -> list[str]:
    """The instructions of a kernel that are in loops."""
    lines = re.sub(r"//[^\n]*", "", ptx).splitlines()
    at = {line.rstrip(":"): i for i, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    repeated: set[int] = set()
    for i, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if jump and at[jump[1]] <= i:
            repeated.update(range(at[jump[1]], i + 1))
    return [lines[i] for i in sorted(repeated)]


def width_bits(instruction: str) -> int:
    lanes = re.search(r"\.v(\d)", instruction)
    return int(instruction.rpartition(".")[2][1:]) * (int(lanes[1]) if lanes else 1)


def demangled(name: str) -> str:
    done = subprocess.run(["c++filt", "--no-params", name], capture_output=True, text=True)
    return done.stdout.strip()


@functools.cache
def of_all_kernels(architecture: str) -> tuple[str, str]:
    """What ptxas says of all sources, and their PTX."""

    def compile_one(source: Path) -> Compiled:
        text = f'#include "{source.relative_to(CSRC)}"\n'
        return compiled(text, f"-arch={architecture}", "-Xptxas=-v", "-cubin")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(compile_one, SOURCES))
    return "".join(each.said for each in found), "".join(each.ptx for each in found)


@each_night
@needs_nvcc
@each_architecture
def test_kernels_need_no_local_memory(architecture: str) -> None:
    log, ptx = of_all_kernels(architecture)
    found = functions(log)
    assert {f.architecture for f in found} == {architecture}
    assert {demangled(f.name) for f in found} >= global_accesses(ptx).keys()
    if bad := [str(f) for f in found if f.uses_local_memory]:
        pytest.fail("\n".join(bad), pytrace=False)


@each_night
@needs_nvcc
@each_architecture
def test_aligned_kernels_access_memory_in_wide_words(architecture: str) -> None:
    _, ptx = of_all_kernels(architecture)
    body = re.compile(r"run<fusedrnn::cuda::((\w+)Body<fusedrnn::(\w+), [\w:]+, true>)")
    aligned = {m: used for name, used in global_accesses(ptx).items() if (m := body.search(name))}
    grus = [m[1] for m in aligned if m[3] == "Gru"]
    assert len(grus) == 8, f"expected forward and backward in four dtypes, got {grus}"
    for match, used in aligned.items():
        # Seed, replay offset, length and reset are single numbers.
        single = {i for i in used if ".v" not in i}
        assert single <= {"ld.global.u64", "ld.global.u8"}, match[1]
        if match[3] == "Gru":
            wide = {i[:2] for i in used if width_bits(i) == 128}
            assert wide == {"ld", "st"}, match[1]


MMA = {"BFloat16": ("m16n8k16", "bf16"), "Half": ("m16n8k16", "f16"), "float": ("m16n8k8", "tf32")}
GATES = {"Sample": 2, "Linear": 1, "Gru": 3, "Lstm": 4}  # products of a stage


@each_night
@needs_nvcc
@each_architecture
@pytest.mark.parametrize("kernel", ["run_persistent", "run_persistent_backward"])
def test_persistent_kernels_use_tensor_cores_and_few_fences(kernel: str, architecture: str) -> None:
    _, ptx = of_all_kernels(architecture)
    body = re.compile(rf"\b{kernel}<([\w:]+), (\d), (.*)>$")
    persistent = [(m, text) for name, text in kernels(ptx).items() if (m := body.search(name))]
    assert len(persistent) == 45, "expected five lists of stages in three dtypes and three depths"
    for match, text in persistent:
        stages, depth = re.findall(r"\w+(?=,|$)", match[3]), int(match[2])
        gates = sum(GATES[stage] for stage in stages)
        # Packets hold states in forward, and the gradients of all gates in backward.
        sent = gates if kernel.endswith("backward") else len(stages)
        shape, dtype = MMA[match[1].removeprefix("fusedrnn::")]
        products = 2 * depth * gates
        assert text.count(f"mma.sync.aligned.{shape}.row.col.f32.{dtype}") == products, match[0]
        assert text.count("mma.sync") == products, match[0]
        # Only flags need a fence, once in each stage.
        assert not re.search(r"\b(membar|fence|atom|red)\b", text), match[0]
        assert len(re.findall(r"\bst\.release", text)) == len(stages), match[0]
        # Packets are read, and read again if they have not arrived.
        assert text.count("ld.relaxed.gpu.global.v4") == 2 * depth * sent, match[0]
        assert text.count("st.relaxed.gpu.global.v4") == sent, match[0]


PHILOX = [0xCD9E8D57, 0xD2511F53]  # Philox multiplies 32 bits by these, to 64 bits


@each_night
@needs_nvcc
@each_architecture
def test_steps_of_persistent_kernels_compute_nothing_slow(architecture: str) -> None:
    """No float64, no integer division, and 64-bit products only where strides are the user's."""
    _, ptx = of_all_kernels(architecture)
    persistent = {name: text for name, text in kernels(ptx).items() if "run_persistent" in name}
    assert len(persistent) == 90
    for name, text in persistent.items():
        steps = in_loops(text)
        assert sum("mma.sync" in line for line in steps) == text.count("mma.sync"), name
        slow = re.compile(r"\.f64\b|\b(?:div|rem)\.[su]\d")
        assert [line for line in steps if slow.search(line)] == [], name
        products = [line for line in steps if re.search(r"\bm(?:ul|ad)\.lo\.[su]64", line)]
        products = [p for p in products if not any(f", {factor};" in p for factor in PHILOX)]
        assert len(products) <= 6, (name, products)


WITH_A_SPILL = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5cleanPdi' for 'sm_80'
ptxas info    : Function properties for _Z5cleanPdi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 364 bytes cmem[0]
ptxas info    : Compiling entry function '_Z6spillsPdi' for 'sm_80'
ptxas info    : Function properties for _Z6spillsPdi
    1152 bytes stack frame, 720 bytes spill stores, 800 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 1152 bytes cumulative stack size
ptxas info    : Compile time = 27.787 ms
ptxas info    : Function properties for _Z6helperPdi
    512 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_a_spill_is_seen() -> None:
    clean, spills, helper = functions(WITH_A_SPILL)
    assert not clean.uses_local_memory
    assert spills == Function("_Z6spillsPdi", "sm_80", 1152, 720, 800)
    assert helper.uses_local_memory
    assert str(spills) == (
        "spills for sm_80: 1152 bytes of local memory, 720 bytes spilled and 800 bytes read back"
    )


WITH_A_LOOP = """\
	div.s32 	%r1, %r2, %r3;
$L__BB0_1:
	add.s32 	%r1, %r1, 1; // $L__BB0_1
	@%p1 bra 	$L__BB0_2;
	mul.lo.s32 	%r1, %r1, 3;
$L__BB0_2:
	setp.lt.s32 	%p2, %r1, %r2;
	@%p2 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_3;
$L__BB0_3:
	ret;
"""


def test_what_is_in_a_loop_is_seen() -> None:
    assert [line.split()[0] for line in in_loops(WITH_A_LOOP)] == [
        "$L__BB0_1:",
        "add.s32",
        "@%p1",
        "mul.lo.s32",
        "$L__BB0_2:",
        "setp.lt.s32",
        "@%p2",
    ]


def test_width_of_an_access() -> None:
    assert width_bits("ld.global.v4.f32") == width_bits("st.global.v2.f64") == 128
    assert width_bits("ld.global.nc.u16") == 16
