"""The GPU's kernels around generated stages: rounds of a block, races, and what nvcc makes of them.

test_stage_loop.py compares values. The emulation runs the threads of a block as fibers; a sanitizer
watches their shared memory.
"""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from compiler.stage_cases import KINDS, Case, Sizes, device_of
from compiler.stage_library import (
    COMPILER,
    CSRC,
    DTYPES,
    HERE,
    KERNELS,
    Call,
    Input,
    Output,
    kernel_text,
)
from nvcc import compiled, each_architecture, needs_nvcc


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("stage", ["moments", "largest", "exponentials", "many_groups"])
def test_groups_over_several_rounds_of_a_block(
    dtype: torch.dtype, backend: str, stage: str
) -> None:
    rng = random.Random(stage)
    for width, groups in ((600, (600, 7)), (1000, (300, 256)), (513, (1, 400))):
        sizes = Sizes(width, steps=1, batch=2, groups=groups, first_t=0)
        case = Case(stage, dtype, sizes, rng, backend)
        case.run()
        case.check()


@pytest.mark.parametrize("group", [5000, 700])
def test_sums_are_accurate(backend: str, group: int) -> None:
    width, device = 35_000, device_of(backend)
    x = (torch.rand(1, width) + 0.1).to(device)
    to = torch.empty(1, width // group, device=device)
    outputs = [Output(to, group=group), Output()]
    Call("moments", torch.float32, width, 1, [Input(x)], outputs).run(backend, 0, 1, backward=False)
    exact = x.double().view(-1, group).sum(1)
    assert ((to[0].double() / exact - 1).abs() <= 2e-7).all()


# --- races ---------------------------------------------------------------------------------------

RACES = """
#include "program/stage_kernel.h"
#include "{here}/stages.h"
#include <vector>
using namespace fusedrnn::program;
// All stages on rows of 600 columns in groups of 300; more than a block has threads.
int main() {{
  const int64_t width = 600, rows = 2, seed = 1;
  const std::vector<float> read(rows * width, 0.5f);
  std::vector<std::vector<float>> written(kMostIns + kMostOuts, read);
  StageArgs args{{}};
  args.width = width, args.batch = rows, args.seed = &seed;
  for (int i = 0; i < kMostIns; ++i) {{
    args.in[i].data = read.data(), args.in[i].gradient = written[i].data();
    args.in[i].stride = args.in[i].gradient_stride = width, args.in[i].group = 300;
  }}
  for (int k = 0; k < kMostOuts; ++k) {{
    args.out[k].data = written[kMostIns + k].data(), args.out[k].gradient[0] = read.data();
    args.out[k].stride = args.out[k].gradient_stride[0] = width, args.out[k].group = 300;
  }}
  int error = 0;
  for_each_stage([&](auto s) {{
    error |= launch<float, decltype(s)>(false, args, rows, nullptr);
    error |= launch<float, decltype(s)>(true, args, rows, nullptr);
  }});
  return error;
}}
"""
BUGS = {
    "no barrier before sums": (r"cuda::sync_block\(\);(\s+)sum_all", r"\1sum_all"),
    "no barrier after sums": (r"(sum_all\(begin, end\);\s+)cuda::sync_block\(\);", r"\1"),
    "one place for what is kept": (r"kept\[\(1 - parity\) \* kSums", r"kept[parity * kSums"),
}


def races(folder: Path, bug: str | None = None) -> str:
    """What the sanitizer says of the kernels, or of a copy with a bug."""
    header = (CSRC / "program/stage_kernel.h").read_text()
    if bug is not None:
        changed, count = re.subn(*BUGS[bug], header)
        assert count == 1, bug
        header = changed
    header = header.replace('#include "../', f'#include "{CSRC}/')
    header = header.replace('#include "stage', f'#include "{CSRC}/program/stage')
    copy = folder / "program"
    copy.mkdir()
    (copy / "stage_kernel.h").write_text(header)
    flags = ["-std=c++17", "-O1", "-g", "-Wno-psabi", "-fsanitize=thread"]
    includes = ["-iquote", str(folder), f"-I{HERE.parent / 'emulator'}"]
    program = folder / "races"
    command = [COMPILER, *flags, *includes, "-x", "c++", "-", "-o", program]
    text = RACES.format(here=HERE)
    built = subprocess.run(command, input=text, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    # Shadow memory has fixed addresses, which some systems would randomise away.
    done = subprocess.run(["setarch", "-R", program], capture_output=True, text=True)
    assert done.returncode in (0, 66), done.stderr
    return done.stderr if done.returncode else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [None, *(pytest.param(bug, marks=pytest.mark.nightly) for bug in BUGS)]
)
def test_races(tmp_path: Path, bug: str | None) -> None:
    said = races(tmp_path, bug)
    if bug is None:
        assert said == ""
    else:
        assert "data race" in said


# --- what nvcc makes of them ---------------------------------------------------------------------


@needs_nvcc
@each_architecture
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(
            pytest.param(dtype, marks=pytest.mark.nightly)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
    ids=str,
)
def test_no_spills(dtype: torch.dtype, architecture: str) -> None:
    text = kernel_text(dtype).replace(f"{HERE}/", "")
    flags = ["-O3", f"-arch={architecture}", "-cubin", "-Xptxas=-v"]
    said = compiled(text, *flags, includes=(HERE,)).said
    assert "warning" not in said
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert len(found) == 2 * len(KINDS)
    assert set(found) == {("0", "0")}
