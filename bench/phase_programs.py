"""The programs of bench.phases: built for a GPU, which need not be there, and run.

Each has one persistent kernel, with clocks or without (phases.h), or measures what an exchange is
made of (probes.cu, smoke.cu). Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import contain
from .contain import ROOT
from .machine import cuda_tool
from .worker import Row, error_row

CELLS = ("gru", "lstm", "stochastic_gru")
PASSES = ("forward", "backward")
CLOCKS, PLAIN, VARIANTS = "clocks", "plain", "variants"
# The probes, with the program of each.
PROBES = {
    "clock": "probes",
    "alone": "probes",
    "crowded": "probes",
    "packets": "smoke",
    "flags": "smoke",
    "pair": "probes",
    "cluster": "probes",
}
BUILT_BEFORE = ROOT / "build" / "gpu-libraries" / "phases"  # travels with the sources
BUILT_HERE = ROOT / "build" / "gpu-check-phases"
MANIFEST = "built-for.json"
SOURCES = ("csrc/**/*.h", "bench/*.h", "bench/*.cu", "bench/phase_programs.py")
COMPILE_S = 600  # all of them; 15 are enough on 16 cores
FLAGS = ("-std=c++17", "-O3", "-diag-suppress=128")  # a loop that some instantiations leave out


def name_of(cell: str, direction: str, kind: str) -> str:
    """The name of the program of a kernel."""
    return f"{cell}_{direction}_{kind}"


def commands() -> dict[str, list[str]]:
    """The arguments of nvcc for each program, those that take longest first."""
    found = {}
    kinds = {
        VARIANTS: ["-DFUSEDRNN_PHASES_VARIANTS"],
        CLOCKS: ["-DFUSEDRNN_PHASE_CLOCKS"],
        PLAIN: [],
    }
    for kind, defined in kinds.items():
        for direction, cell in itertools.product(reversed(PASSES), reversed(CELLS)):
            chosen = [f"-DFUSEDRNN_PHASES_CELL={cell}", f"-DFUSEDRNN_PHASES_PASS={direction}"]
            found[name_of(cell, direction, kind)] = [*defined, *chosen, "bench/phases.cu"]
    return found | {name: [f"bench/{name}.cu"] for name in ("probes", "smoke")}


@dataclass(frozen=True)
class Programs:
    """A folder of programs.

    Attributes:
        errors: Why there is no such program, by name.
    """

    folder: Path
    errors: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, *words: object, end: float) -> Row:
        """A row with what a program has said as JSON, or in lines that the row calls "said"."""
        if error := self.errors.get(name):
            return {"error": error}
        try:
            ended = contain.run([str(self.folder / name), *map(str, words)], lambda: end)
        except OSError as error:
            return error_row(error)
        said = ended.tail.strip().splitlines()
        if ended.status is None and time.monotonic() >= end:
            return {"missing": f"{ended.how}, when time was over"}
        if ended.status != 0:
            return {"error": f"{ended.how}: {(said or [''])[-1]:.150}"}
        try:
            row: Row = json.loads(said[-1])
        except (IndexError, ValueError):
            return {"said": said}
        return row


def build(folder: Path, architecture: str) -> Programs:
    """Compiles all programs for one compute capability, such as 90, at the same time."""
    digest = digest_of_sources()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    nvcc, end = cuda_tool("nvcc"), time.monotonic() + COMPILE_S

    def compile_one(name: str, arguments: list[str]) -> str:
        partial = folder / f"{name}.partial"
        command = [nvcc, *FLAGS, f"-arch=sm_{architecture}", *arguments, "-o", str(partial)]
        try:
            ended = contain.run(command, lambda: end)
        except OSError as error:
            return error_row(error)["error"]
        if ended.status != 0:
            print(ended.tail, flush=True)
            said = [line for line in ended.tail.splitlines() if "error" in line]
            return f"{name} does not compile: {ended.how}: {(said or [''])[0]:.150}"
        partial.replace(folder / name)
        return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(compile_one, *zip(*commands().items(), strict=True))
        errors = {name: error for name, error in zip(commands(), outcomes, strict=True) if error}
    if not errors:
        manifest = {"sources": digest, "architecture": architecture}
        (folder / MANIFEST).write_text(json.dumps(manifest) + "\n")
    return Programs(folder, errors)


def ready(architecture: str) -> Programs:
    """The programs that were built before from these sources; else they are built here."""
    for folder in (BUILT_BEFORE, BUILT_HERE):
        if fits(folder, architecture):
            for name in commands():
                (folder / name).chmod(0o755)  # a copy may not be executable
            return Programs(folder)
    print(f"no programs in {BUILT_BEFORE.relative_to(ROOT)} fit: building them here", flush=True)
    return build(BUILT_HERE, architecture)


def fits(folder: Path, architecture: str) -> bool:
    """Whether a folder has all programs, from these sources and for this compute capability."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    is_there = all((folder / name).exists() for name in commands())
    return is_there and manifest == {"sources": digest_of_sources(), "architecture": architecture}


def digest_of_sources() -> str:
    """A text that changes with everything that the programs are built from."""
    content = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        content.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
        content.update(path.read_bytes())
    return content.hexdigest()
