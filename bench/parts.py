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

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Parts that write a file of results, and which.
BENCHMARKS = {
    "smoke": "smoke.json",
    "speed": "speed.json",
    "calls": "calls.json",
    "memory": "memory.json",
    "chunks": "chunks.json",
    "fit": "fit.json",
    "packed": "packed.json",
    "kernels": "kernels.json",
    "numerics": "numerics.json",
    "train_text": "train_text_bfloat16.json",
    "any_cell": "any_cell.json",
}
# A benchmark begins nothing new this much before its limit: what is at work is stopped before that.
SLACK_S = 30
WORKERS = 12  # processes of tests
TEST_S = 100  # for a test
# Tests that need the memory of the whole GPU, or that no other process uses it.
ALONE = "64_bit or out_of_memory"

# Names of parts; those of a tuple run at the same time, because they do not measure any.
Stage = tuple[str, ...]
GROUPS: dict[str, tuple[Stage, ...]] = {
    "first": (("build",), ("smoke",), ("tests",), ("alone",)),
    "speed": (("build",), ("speed",), ("calls",), ("memory",), ("chunks",), ("fit",)),
    "deep": (
        ("build",),
        SANITIZERS,
        ("numerics", "scales", "train_text", "math", "emulation"),
    ),
    "cells": (("build",), ("programs",), ("any_cell",)),
}


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
    math, scales = "tests/values/test_math.py", "tests/hostile/test_hostile_scales.py"
    programs = "tests/compiled/test_gpu_programs.py"
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

    def sanitizer(tool: str) -> Part:
        command = [cuda_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "1"]
        command += ["--print-limit", "50"]  # errors, each of a page
        env = {}
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]  # torch asks for what it knows may fail
        if tool in ("memcheck", "initcheck"):
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # blocks with the bounds of their tensors
        else:
            command += ["--kernel-name", "kns=fusedrnn"]  # what cuBLAS shares is its own matter
        return Part(tool, 150, [*command, python, "-m", "bench.sanitize"], env)

    def benchmark(name: str, limit_s: float, *options: str) -> Part:
        command = [python, "-m", f"bench.{name}", "--device", "cuda", "--out", str(out), *options]
        return Part(name, limit_s, command, verdict=lambda _: results(out / BENCHMARKS[name]))

    def sweep(name: str, limit_s: float) -> Part:
        return benchmark(name, limit_s, "--budget-s", f"{limit_s - SLACK_S:.0f}")

    all_parts = [
        Part("build", 90, [python, "-m", "bench.build"], most_s=300),
        sweep("smoke", 90),
        tests("tests", 260, *apart, "-k", f"not (emulation or {ALONE})"),
        tests("alone", 60, *apart, "-k", ALONE, workers=1),
        sweep("speed", 200),
        sweep("calls", 50),
        sweep("memory", 75),
        sweep("chunks", 60),
        sweep("fit", 48),
        sweep("packed", 60),
        sweep("kernels", 90),
        tests("programs", 90, programs),  # each test has nvcc build a library
        sweep("any_cell", 320),  # not enough for all cells: any_cell.FIRST come first
        *map(sanitizer, SANITIZERS),
        sweep("numerics", 200),
        benchmark("train_text", 200, "--dtype", "bfloat16"),
        tests("scales", 250, scales, workers=4),
        tests("math", 250, math, workers=1),  # compiles for half of it
        tests("emulation", 250, "tests/gpu/test_cuda_persistent.py", "-k", "emulation", workers=4),
    ]
    return {part.name: part for part in all_parts}


def test_results(tail: str) -> tuple[bool, str]:
    """What pytest says at its end. All skipped is not passed: then there was no GPU."""
    found = re.findall(r"^.*\d+ \w+.* in [\d.]+s.*$", tail, re.MULTILINE)
    summary = found[-1].strip(" =") if found else ""
    return " passed" in summary, summary


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
