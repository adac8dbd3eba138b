"""All that needs a GPU, in nine minutes and without network: ``python -m bench.gpu_check OUT``.

Builds for the GPU that is there, runs the CUDA tests, compute-sanitizer and the benchmark. Needs a
torch built for CUDA, a CUDA toolkit, what the build needs and pytest, all in the Python that runs
it. A part that fails does not stop the others; the exit status is 0 if all passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
RESULTS = ("summary.json", "summary.md", "tests.xml", "memory.json", "speed.json")
LOG, SANITIZER_LOG = "log.txt", "sanitizer.txt"
ENVIRONMENT_S = 15
# A benchmark begins nothing new this much before its limit: one measurement may take as long.
SLACK_S = 30


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        limit_s: What it may take. All it leaves over goes to the parts after it.
        command: From the seconds that it gets to its words.
        log: File in the output folder to which its output is added.
        verdict: Reads its results: whether they are good, and a note. It is asked whatever the exit
            status was; None if the exit status says all.
    """

    name: str
    limit_s: float
    command: Callable[[float], Sequence[str]]
    log: str = LOG
    env: dict[str, str] = field(default_factory=dict)
    verdict: Callable[[], tuple[bool, str]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    passed: bool
    seconds: float
    note: str


def parts(out: Path) -> list[Part]:
    """All parts, in order; with the environment's, their limits add up to nine minutes."""
    python = sys.executable
    build_env = {"FUSEDRNN_CUDA": "1"}
    if gpu_arch := _nvidia_smi("compute_cap"):
        build_env["TORCH_CUDA_ARCH_LIST"] = gpu_arch
    pip = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", "."]
    pytest = [python, "-m", "pytest", "-m", "cuda", "--continue-on-collection-errors"]

    def sanitizer(tool: str) -> Part:
        command = [_cuda_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "1"]
        env = {}
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]  # torch asks for what it knows may fail
        if tool in ("memcheck", "initcheck"):
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # blocks with the bounds of their tensors
        else:
            command += ["--kernel-name", "kns=fusedrnn"]  # what cuBLAS shares is its own matter
        command += [python, "-m", "bench.sanitize"]
        return Part(tool, 30, lambda _: command, SANITIZER_LOG, env)

    def benchmark(name: str, limit_s: float, most_s: float = math.inf) -> Part:
        def command(limit_s: float) -> list[str]:
            budget_s = max(min(limit_s - SLACK_S, most_s), 0)
            options = ["--device", "cuda", "--out", str(out), "--budget-s", f"{budget_s:.0f}"]
            return [python, "-m", f"bench.{name}", *options]

        return Part(name, limit_s, command, verdict=lambda: _targets(out / f"{name}.json"))

    return [
        Part("build", 100, lambda _: pip, env=build_env),
        Part(
            "tests",
            140,
            lambda _: [*pytest, f"--junitxml={out / 'tests.xml'}"],
            verdict=lambda: _tests(out / "tests.xml"),
        ),
        *map(sanitizer, SANITIZERS),
        benchmark("memory", 65, most_s=60),  # what is left over is for speed
        benchmark("speed", 100),
    ]


def check(parts: Sequence[Part], out: Path) -> bool:
    """Runs the parts, and writes summary.json and summary.md after each of them."""
    begin = time.monotonic()
    environment = about()
    seconds = round(time.monotonic() - begin, 1)
    gpu = environment["gpu"] if environment["torch_sees_gpu"] else "torch sees no GPU"
    outcomes = [Outcome("environment", environment["torch_sees_gpu"], seconds, gpu)]
    print(_line(outcomes[0]), flush=True)

    deadline = begin + ENVIRONMENT_S
    for part in parts:
        deadline += part.limit_s
        outcomes.append(_run(part, out, deadline - time.monotonic()))
        print(_line(outcomes[-1]), flush=True)
        _write_summary(out, environment, outcomes, time.monotonic() - begin)
    return all(outcome.passed for outcome in outcomes)


def _run(part: Part, out: Path, limit_s: float) -> Outcome:
    begin = time.monotonic()
    words = list(part.command(limit_s))
    with (out / part.log).open("a+b") as log:
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
        good, result = part.verdict()
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


def _tests(path: Path) -> tuple[bool, str]:
    """All skipped is not passed: then there was no GPU."""
    if not path.exists():
        return False, ""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(path).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    ran = counts["tests"] - counts["skipped"]
    bad = counts["failures"] + counts["errors"]
    return ran > 0 and bad == 0, f"{ran - bad} passed, {bad} failed, {counts['skipped']} skipped"


def _targets(path: Path) -> tuple[bool, str]:
    """All targets that were measured are met, and how far the worst is from its limit."""
    if not path.exists():
        return False, ""
    content = json.loads(path.read_text())
    targets = content["targets"]
    rows = [row for case in content["cases"] for row in case["contenders"].values()]
    notes = [f"{sum(t['passed'] for t in targets)} of {len(targets)} targets met"]
    for what in dict.fromkeys(t["what"] for t in targets):
        worst = max((t for t in targets if t["what"] == what), key=lambda t: t["value"])
        notes.append(f"{what} ≤ {worst['value']:.3g} (target {worst['limit']}) at {worst['where']}")
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
    for name in ("memory", "speed"):
        if (out / f"{name}.json").exists():
            content[name] = json.loads((out / f"{name}.json").read_text())
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
    parser.add_argument("out", type=Path, help="folder of results")
    out: Path = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in (*RESULTS, LOG, SANITIZER_LOG):  # of an earlier run
        (out / name).unlink(missing_ok=True)
    begin = time.monotonic()
    passed = check(parts(out), out)
    print(f"{time.monotonic() - begin:.0f} s; results are in {out}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
