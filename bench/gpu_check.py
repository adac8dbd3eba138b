"""All that needs a GPU, without network: ``python -m bench.gpu_check OUT``.

Builds for the GPU that is there, runs the CUDA tests, the benchmarks and compute-sanitizer, what
matters most first. It ends within nine minutes, and says which parts that did not reach; --minutes
17 is enough for all, and --parts chooses some. A part that fails does not stop the others; the exit
status is 0 if all passed. Needs a torch built for CUDA, a CUDA toolkit, what the build needs and
pytest, all in the Python that runs it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Parts that are benchmarks, and what they write.
BENCHMARKS = {
    "speed": "speed.json",
    "memory": "memory.json",
    "chunks": "chunks.json",
    "numerics": "numerics.json",
    "train_text": "train_text_bfloat16.json",
}
LOG = "log.txt"
RESULTS = ("summary.json", "summary.md", LOG, *BENCHMARKS.values())
ENVIRONMENT_S = 15
MINUTES = 9.0
# A benchmark begins nothing new this much before its limit: one measurement may take as long.
SLACK_S = 30


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        limit_s: What it may take. All it leaves over goes to the parts after it.
        command: Its words.
        verdict: From the lines that it wrote to whether its results are good, and a note. It is
            asked whatever the exit status was; None if the exit status says all.
    """

    name: str
    limit_s: float
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    verdict: Callable[[Sequence[str]], tuple[bool, str]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    passed: bool
    seconds: float
    note: str


def parts(out: Path) -> list[Part]:
    """All parts, in order."""
    python = sys.executable
    build_env = {"FUSEDRNN_CUDA": "1"}
    if gpu_arch := _nvidia_smi("compute_cap"):
        build_env["TORCH_CUDA_ARCH_LIST"] = gpu_arch
    pip = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", "."]

    def tests(name: str, limit_s: float, *options: str) -> Part:
        command = [python, "-m", "pytest", "-m", "cuda", "--continue-on-collection-errors"]
        return Part(name, limit_s, [*command, *options], verdict=_tests)

    def sanitizer(tool: str) -> Part:
        command = [_cuda_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "1"]
        command += ["--print-limit", "50"]  # errors, each of a page
        env = {}
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]  # torch asks for what it knows may fail
        if tool in ("memcheck", "initcheck"):
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # blocks with the bounds of their tensors
        else:
            command += ["--kernel-name", "kns=fusedrnn"]  # what cuBLAS shares is its own matter
        return Part(tool, 30, [*command, python, "-m", "bench.sanitize"], env)

    def benchmark(name: str, limit_s: float, *options: str) -> Part:
        command = [python, "-m", f"bench.{name}", "--device", "cuda", "--out", str(out), *options]
        return Part(name, limit_s, command, verdict=lambda _: _targets(out / BENCHMARKS[name]))

    def sweep(name: str, limit_s: float) -> Part:
        return benchmark(name, limit_s, "--budget-s", f"{limit_s - SLACK_S:.0f}")

    math, persistent = "tests/test_math.py", "tests/test_cuda_persistent.py"
    scales = "tests/test_hostile_scales.py"
    return [
        Part("build", 120, pip, build_env),
        tests("math", 25, math),  # compiles for half of it
        tests("persistent", 60, persistent, "-k", "not emulation"),
        sweep("speed", 115),
        sweep("memory", 60),
        tests("tests", 100, *(f"--ignore={p}" for p in (math, persistent, scales))),
        sweep("chunks", 45),
        tests("scales", 95, scales),
        sweep("numerics", 75),
        benchmark("train_text", 45, "--dtype", "bfloat16"),
        *map(sanitizer, SANITIZERS),
        tests("emulation", 145, persistent, "-k", "emulation"),  # compiles for a minute, or two
    ]


def check(parts: Sequence[Part], out: Path, seconds: float = 60 * MINUTES) -> bool:
    """Runs the parts, and writes summary.json and summary.md after each of them.

    A part does not begin if its limit would lead beyond ``seconds`` for all of them.
    """
    begin = time.monotonic()
    environment = about()
    took = round(time.monotonic() - begin, 1)
    gpu = environment["gpu"] if environment["torch_sees_gpu"] else "torch sees no GPU"
    outcomes = [Outcome("environment", environment["torch_sees_gpu"], took, gpu)]
    print(_line(outcomes[0]), flush=True)

    end, deadline = begin + seconds, begin + ENVIRONMENT_S
    for part in parts:
        left_s = end - time.monotonic()
        if left_s < part.limit_s:
            note = f"not begun: {left_s:.0f} s left, and it may take {part.limit_s:.0f} s"
            outcomes.append(Outcome(part.name, False, 0.0, note))
        else:
            deadline += part.limit_s
            outcomes.append(_run(part, out, min(deadline, end) - time.monotonic()))
        print(_line(outcomes[-1]), flush=True)
        _write_summary(out, environment, outcomes, time.monotonic() - begin)
    return all(outcome.passed for outcome in outcomes)


def _run(part: Part, out: Path, limit_s: float) -> Outcome:
    begin = time.monotonic()
    words = list(part.command)
    with (out / LOG).open("a+b") as log:
        log.write(f"\n$ {' '.join(words)}\n".encode())
        start = log.tell()
        try:
            status = _status(words, part.env, log, limit_s)
            note = ""
        except subprocess.TimeoutExpired:
            status, note = 1, f"stopped after {limit_s:.0f} s"
        except OSError as error:
            status, note = 1, f"{words[0]}: {error.strerror}"
        log.seek(start)
        lines = log.read().decode(errors="replace").split("\n")
    passed, said = status == 0, _last_words(lines)
    if part.verdict:
        good, result = part.verdict(lines)
        passed, said = passed and good, result or said
    note = "; ".join(filter(None, [note, said]))
    return Outcome(part.name, passed, round(time.monotonic() - begin, 1), note)


def _last_words(lines: Sequence[str]) -> str:
    """The last line, or one of our own sentences, to which pip adds hints."""
    ours = [line[line.index("fusedrnn: ") :] for line in lines if "fusedrnn: " in line]
    return (ours or [line.strip(" =") for line in lines if line.strip(" =")] or [""])[-1]


def _status(words: list[str], env: dict[str, str], log: Any, limit_s: float) -> int:
    log.flush()
    # A session of its own, so that a part that is stopped leaves no compiler or test behind.
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=max(limit_s, 0))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tests(lines: Sequence[str]) -> tuple[bool, str]:
    """What pytest says at its end. All skipped is not passed: then there was no GPU."""
    summaries = [line.strip(" =") for line in lines if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    summary = (summaries or [""])[-1]
    return " passed" in summary, summary


def _targets(path: Path) -> tuple[bool, str]:
    """All targets that were measured are met, and how far the worst is from its limit."""
    if not path.exists():
        return False, ""
    content = json.loads(path.read_text())
    targets = content["targets"]
    rows = [row for case in content.get("cases", []) for row in case["contenders"].values()]
    rows += content.get("rows", [])
    notes = [f"{sum(t['passed'] for t in targets)} of {len(targets)} targets met"]
    for what in dict.fromkeys(t["what"] for t in targets):
        worst = max((t for t in targets if t["what"] == what), key=lambda t: t["value"])
        notes.append(f"{what} ≤ {worst['value']:.4g} (target {worst['limit']}) at {worst['where']}")
    for reason in ("error", "missing"):
        if count := sum(reason in row for row in rows):
            notes.append(f"{count} of {len(rows)} rows: {reason}")
    return bool(targets) and all(t["passed"] for t in targets), "; ".join(notes)


def _write_summary(
    out: Path, environment: dict[str, Any], outcomes: Sequence[Outcome], seconds: float
) -> None:
    content = {
        "environment": environment,
        "seconds": round(seconds, 1),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    for name, file in BENCHMARKS.items():
        if (out / file).exists():
            content[name] = json.loads((out / file).read_text())
    (out / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    rows = [
        [o.part, "passed" if o.passed else "failed", f"{o.seconds:.1f}", o.note.replace("|", "/")]
        for o in outcomes
    ]
    about = ", ".join(
        f"{name} {environment[name]}" for name in ("gpu", "torch", "nvcc", "commit", "date")
    )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    head = [about, "", "| part | | seconds | |", "|:--|:--|--:|:--|"]
    (out / "summary.md").write_text("\n".join([*head, *lines]) + "\n")


def _line(outcome: Outcome) -> str:
    verdict = "passed" if outcome.passed else "FAILED"
    return f"{outcome.part:12} {verdict} {outcome.seconds:6.1f} s  {outcome.note}"


def about() -> dict[str, Any]:
    """The machine; an empty text is for what it does not have."""
    torch = "import torch; print(torch.__version__, torch.cuda.is_available())"
    torch_version, _, sees_gpu = _said(sys.executable, "-c", torch).rpartition(" ")
    changed = _said("git", "status", "--porcelain")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": _nvidia_smi("name"),
        "driver": _nvidia_smi("driver_version"),
        "torch": torch_version,
        "torch_sees_gpu": sees_gpu == "True",
        "nvcc": _said(_cuda_tool("nvcc"), "--version").rpartition("\n")[2],
        "commit": _said("git", "describe", "--always") + (" with changes" if changed else ""),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _nvidia_smi(field: str) -> str:
    """Of the first GPU, which is the one that torch takes."""
    return _said("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").partition("\n")[0]


def _cuda_tool(name: str) -> str:
    """Where a tool of the CUDA toolkit is; its name if it is nowhere."""
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which(name) or shutil.which(name, path=folder) or name


def _said(*words: str) -> str:
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    """Exits with status 0 if all passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of results; those of earlier runs go")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all ({MINUTES:g})")
    parser.add_argument("--parts", help="names of parts with commas between them (all)")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    chosen = parts(out)
    if options.parts is not None:
        names, known = options.parts.split(","), [part.name for part in chosen]
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--parts must be of {', '.join(known)}, got {', '.join(unknown)}")
        chosen = [part for part in chosen if part.name in names]
    out.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        (out / name).unlink(missing_ok=True)
    begin = time.monotonic()
    passed = check(chosen, out, 60 * options.minutes)
    print(f"{time.monotonic() - begin:.0f} s; results are in {out}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
