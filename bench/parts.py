"""What ``python -m bench.gpu_check`` runs: each part a command, and three groups of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .machine import cuda_tool

# Compiled cells, with products, sums of rows, draws and vectors between them.
PROGRAMS = ("ForumCell", "LateResetGRU", "DreamerV3")
PROGRAM_DTYPES = ("float32", "bfloat16")
# Kinds of kernels, each of which has a process of its own under a sanitizer: see sanitize.py.
PERSISTENT = ("persistent_gru", "persistent_lstm", "persistent_stochastic_gru")
OF_PROGRAMS = tuple(f"{name}_{dtype}" for name in PROGRAMS for dtype in PROGRAM_DTYPES)
KINDS = (*PERSISTENT, *OF_PROGRAMS, "stepwise", "product")
# A tool has a part for each kind, and its name stands for all of these.
SANITIZERS = {
    tool: tuple(f"{tool}_{kind}" for kind in KINDS)
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck")
}
# Parts that write a file of results, and which.
BENCHMARKS = {
    "steps": "smoke.json",
    "phases": "phases.json",
    "variants": "variants.json",
    "lstm": "lstm.json",
    "fit": "fit.json",
    "cell_graphs": "cell_graphs.json",
    "calls": "calls.json",
    "smoke": "smoke.json",
    "numerics": "numerics.json",
    "speed": "speed.json",
    "memory": "memory.json",
    "chunks": "chunks.json",
    "packed": "packed.json",
    "weight_bank": "weight_bank.json",
    "kernels": "kernels.json",
    "any_cell": "any_cell.json",
    "train_text": "train_text_bfloat16.json",
}
# A benchmark begins nothing new this much before its part must end; what is at work then is stopped
# before that. In its command BUDGET stands for the seconds that this leaves.
SLACK_S = 30
BUDGET = "SECONDS"
WORKERS = 12  # processes of tests
TEST_S = 100  # for a test
# Tests that need the memory of the whole GPU, or that no other process uses it.
ALONE = "64_bit or out_of_memory"

# Names of parts; those of a tuple run at the same time, because they do not measure any. In each
# group, what decides a design comes first, and what only confirms comes last.
Stage = tuple[str, ...]
GROUPS: dict[str, tuple[Stage, ...]] = {
    "glance": (("build",), ("steps",), ("phases",), ("variants",)),
    "numbers": (("build",), ("lstm",), ("fit",), ("cell_graphs",), ("calls",), ("smoke",)),
    "proof": (
        ("build",),
        ("tests",),
        ("alone",),
        (*(f"racecheck_{kind}" for kind in (*PERSISTENT, *OF_PROGRAMS)), "initcheck_product"),
        ("programs", "emulation", "numerics"),
    ),
}
# What a group takes at most, on 16 cores and with libraries that were built before.
MINUTES = {"glance": 4.0, "numbers": 8.0, "proof": 12.0}


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        limit_s: What it may take. All it leaves over goes to the parts after it.
        command: Its words.
        most_s: What it may take at the cost of the parts after it, if more: without it these are
            for nothing.
        verdict: From the end of what it wrote to whether its results are good, and a note. It is
            asked whatever the exit status was; None if the exit status says all.
    """

    name: str
    limit_s: float
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    most_s: float = 0
    verdict: Callable[[str], tuple[bool, str]] | None = None


def parts(out: Path) -> dict[str, Part]:
    """All parts, by name."""
    python = sys.executable
    math, scales = "tests/values/test_math.py", "tests/calls/test_scales.py"
    programs = "tests/runtime/test_gpu_programs.py"
    apart = [f"--ignore={path}" for path in (math, scales, programs)]

    def tests(name: str, limit_s: float, *options: str, workers: int = WORKERS) -> Part:
        command = [python, "-m", "pytest", "-m", "cuda", "-p", "bench.pytest_faults"]
        command += ["--continue-on-collection-errors", "--tb=short", "-rfE"]
        if importlib.util.find_spec("pytest_timeout"):  # of a thread, since a call may hang in C
            command += [f"--timeout={TEST_S}", "--timeout-method=thread"]
        if workers > 1 and importlib.util.find_spec("xdist"):
            count = min(workers, os.cpu_count() or 1)
            command += ["-n", str(count), "--max-worker-restart=100"]
        return Part(name, limit_s, [*command, *options], verdict=test_results)

    def sanitizer(tool: str, kind: str) -> Part:
        command = [cuda_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "1"]
        command += ["--print-limit", "50"]  # errors, each of a page
        env = {}
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]  # torch asks for what it knows may fail
        if tool in ("memcheck", "initcheck"):
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # blocks with the bounds of their tensors
        else:
            command += ["--kernel-name", "kns=fusedrnn"]  # what cuBLAS shares is its own matter
        command += [python, "-m", "bench.sanitize", kind]
        return Part(f"{tool}_{kind}", 190, command, env, verdict=sanitizer_results)

    def benchmark(name: str, limit_s: float, *options: str, module: str = "") -> Part:
        command = [python, "-m", f"bench.{module or name}", "--device", "cuda", "--out", str(out)]
        command += options
        return Part(name, limit_s, command, verdict=lambda _: results(out / BENCHMARKS[name]))

    def sweep(name: str, limit_s: float, *options: str, module: str = "") -> Part:
        return benchmark(name, limit_s, *options, "--budget-s", BUDGET, module=module)

    all_parts = [
        Part("build", 40, [python, "-m", "bench.build"], most_s=300),
        # glance
        sweep("steps", 35, "--quick", module="smoke"),
        sweep("phases", 105),
        sweep("variants", 45, "--only", "variants", module="speed"),
        # numbers
        sweep("lstm", 105, "--only", "lstm", module="speed"),
        sweep("fit", 95),
        sweep("cell_graphs", 90),
        sweep("calls", 50),
        sweep("smoke", 85),
        # proof
        tests("tests", 180, *apart, "-k", f"not (emulation or {ALONE})"),
        tests("alone", 50, *apart, "-k", ALONE, workers=1),
        *(sanitizer(tool, kind) for tool in SANITIZERS for kind in KINDS),
        tests("programs", 245, programs, workers=6),  # each test has nvcc build a library
        tests("emulation", 245, "tests/gpu/test_cuda_persistent.py", "-k", "emulation", workers=4),
        sweep("numerics", 200),
        # in no group
        sweep("speed", 200),
        sweep("memory", 75),
        sweep("chunks", 60),
        sweep("packed", 60),
        sweep("weight_bank", 180),
        tests("bank", 180, "tests/bank"),
        sweep("kernels", 90),
        sweep("any_cell", 320),  # not enough for all cells: any_cell.FIRST come first
        benchmark("train_text", 200, "--dtype", "bfloat16"),
        tests("scales", 250, scales, workers=4),
        tests("math", 250, math, workers=1),  # compiles for half of it
    ]
    return {part.name: part for part in all_parts}


def test_results(tail: str) -> tuple[bool, str]:
    """What pytest says at its end. All skipped is not passed: then there was no GPU."""
    found = re.findall(r"^.*\d+ \w+.* in [\d.]+s.*$", tail, re.MULTILINE)
    summary = found[-1].strip(" =") if found else ""
    return " passed" in summary, summary


def sanitizer_results(tail: str) -> tuple[bool, str]:
    """What compute-sanitizer says at its end, and whether it failed itself; its status decides.

    An error of its own counts as one of the program.
    """
    said = re.findall(r"^=+ (Internal Sanitizer Error.*|\w+ SUMMARY.*)$", tail, re.MULTILINE)
    return True, "; ".join(dict.fromkeys(said))


def content_of(path: Path) -> dict[str, Any] | None:
    """What a benchmark has written; None if it has not, or not to its end."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    has_all = isinstance(content, dict) and content.keys() >= {"targets", "failures", "tables"}
    return content if has_all else None


def results(path: Path) -> tuple[bool, str]:
    """Whether what a benchmark found is right, and how many targets are met.

    A target that is missed is a result. What is wrong, or could not be measured, is a failure.
    """
    content = content_of(path)
    if content is None:
        return False, f"{path.name} cannot be read" if path.exists() else ""
    targets, failures = content["targets"], content["failures"]
    notes = (
        [f"{sum(t['passed'] for t in targets)} of {len(targets)} targets met"] if targets else []
    )
    rows = [row for case in content.get("cases", []) for row in case["contenders"].values()]
    rows += content.get("rows", [])
    for reason in ("error", "missing"):
        if count := sum(reason in row for row in rows):
            notes.append(f"{count} of {len(rows)} rows: {reason}")
    if failures:
        notes.append(f"{len(failures)} failures, the first: {failures[0]}")
    measured = any(not {"error", "missing"} & row.keys() for row in rows)
    return not failures and (measured or bool(targets)), "; ".join(notes)
