"""Everything that needs a GPU, without a network: ``python -m bench.gpu_check OUT --group glance``.

Three groups of parts end within 4, 8 and 12 minutes on 16 cores. ``glance`` looks into a step of a
kernel, ``numbers`` measures what is compared, and ``proof`` runs tests and sanitizers; --parts runs
any parts. The libraries are taken along if `make gpu-libraries` has built them, else built.

A part that fails does not stop the others. A value that is wrong, a crash, or a measurement of ours
that is missing is a failure, and the exit status is 0 if there is none; a target that is missed is
a result. What was measured is in OUT at any moment: summary.json after each part, and the file of
the part at work after each of its measurements. SIGTERM ends the run with a whole summary.

Needs a torch built for CUDA, a CUDA toolkit, what the build needs and pytest, all in the Python
that runs it; pytest-xdist and pytest-timeout are used where they are.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import contain
from .machine import about
from .parts import (
    BENCHMARKS,
    BUDGET,
    GROUPS,
    MINUTES,
    SANITIZERS,
    SLACK_S,
    Part,
    content_of,
    parts,
)

LOG, RUNNING_LOG = "log.txt", "running.txt"
RESULTS = ("summary.json", "summary.md", LOG, RUNNING_LOG, *BENCHMARKS.values())
ENVIRONMENT_S = 15
# Bytes of the log, beginning and end: of the whole log, and of each part.
LOG_BYTES, PART_BYTES = (2 << 20, 4 << 20), (1 << 18, 1 << 19)
NOTE_CHARACTERS = 300


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part."""

    part: str
    passed: bool
    seconds: float
    note: str


class Check:
    """A run of parts, which writes its results after each part."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out = out
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.log_file = (out / LOG).open("w+b", buffering=0)
        self.log = contain.Log(self.log_file, *LOG_BYTES)
        self.environment = about()
        sees_gpu = self.environment["torch_sees_gpu"]
        gpu = self.environment["gpu"] if sees_gpu else "torch sees no GPU"
        if not self.environment["torch"]:
            gpu = f"there is no torch in {sys.executable}: name another Python by PYTHON="
        self.outcomes: list[Outcome] = []
        self.contents: dict[str, Any] = {}
        self.tables: list[str] = []
        self.running: list[str] = []
        self.stopped_by = ""
        self._add(Outcome("environment", sees_gpu, round(self._seconds(), 1), gpu))

    def run(self, stages: Sequence[Sequence[Part]]) -> bool:
        """Runs stages one after the other, and the parts of each at the same time.

        A part does not begin if its time limit reaches beyond the end of the run.
        """
        deadline = self.begin + ENVIRONMENT_S
        for stage in stages:
            left_s = self.end - time.monotonic()
            late = [part for part in stage if left_s < part.limit_s]
            for part in late:
                note = f"{left_s:.0f} s left, and it may take {part.limit_s:.0f} s"
                note = f"not begun: {self.stopped_by or note}"
                self._add(Outcome(part.name, False, 0.0, note))
            if begun := [part for part in stage if part not in late]:
                self.running = [part.name for part in begun]
                self._write_summary()
                alone = len(begun) == 1
                with ThreadPoolExecutor(len(begun)) as pool:
                    ended = [pool.submit(self._run_part, deadline, alone, p) for p in begun]
                    for one in as_completed(ended):
                        self._add(*one.result())
                deadline += max(part.limit_s for part in begun)
        self.log.finish()
        self.log_file.close()
        (self.out / RUNNING_LOG).unlink(missing_ok=True)
        return all(outcome.passed for outcome in self.outcomes)

    def stop(self, number: int, frame: object = None) -> None:
        """Handles a signal: stops the parts at work, and begins no other."""
        self.stopped_by = f"the run was ended by {signal.Signals(number).name}"
        self.end = time.monotonic()

    def _run_part(self, due: float, alone: bool, part: Part) -> tuple[Outcome, bytes]:
        """Runs a part; returns its outcome and what it wrote. It may begin before it is due."""
        begin = time.monotonic()
        stop = max(due + part.limit_s, begin + part.most_s)
        budget_s = min(stop, self.end) - begin - SLACK_S
        words = [f"{budget_s:.0f}" if word == BUDGET else word for word in part.command]
        # What a part says is in a file while it runs, unless others run at the same time.
        file = (self.out / RUNNING_LOG).open("w+b", buffering=0) if alone else io.BytesIO()
        said = contain.Log(file, *PART_BYTES)
        said.write(f"\n== {part.name}\n$ {' '.join(words)}\n".encode())
        try:
            ended = contain.run(words, lambda: min(stop, self.end), env=part.env, take=said.write)
            passed, tail = ended.status == 0, ended.tail
            how = ended.how if ended.status is None or ended.status < 0 else ""
        except OSError as error:
            passed, tail, how = False, "", f"{words[0]}: {error.strerror}"
        said.finish()
        result = ""
        if part.verdict:
            good, result = part.verdict(tail)
            passed = passed and good
        note = "; ".join(filter(None, [how, result or last_words(tail)]))
        seconds = round(time.monotonic() - begin, 1)
        with file:
            file.seek(0)
            written = file.read()
        return Outcome(part.name, passed, seconds, note[:NOTE_CHARACTERS]), written

    def _add(self, outcome: Outcome, said: bytes = b"") -> None:
        self.outcomes.append(outcome)
        self.running = [name for name in self.running if name != outcome.part]
        self.log.write(said)
        verdict = "passed" if outcome.passed else "FAILED"
        print(f"{outcome.part:18} {verdict} {outcome.seconds:6.1f} s  {outcome.note}", flush=True)
        file = self.out / BENCHMARKS.get(outcome.part, "none")
        if content := content_of(file):  # so the summary includes it from now on
            self.tables += content.pop("tables")
            self.contents[outcome.part] = content
            file.unlink()
        self._write_summary()

    def _write_summary(self) -> None:
        content = {
            "environment": self.environment,
            "seconds": round(self._seconds(), 1),
            "parts": [asdict(outcome) for outcome in self.outcomes],
            "running": self.running,
            **self.contents,
        }
        text = summary(self.environment, self.outcomes, self.contents, self.tables)
        for name, new in (
            ("summary.json", json.dumps(content, indent=1) + "\n"),
            ("summary.md", text),
        ):
            partial = self.out / f"{name}.partial"  # so that an interruption leaves no half
            partial.write_text(new)
            partial.replace(self.out / name)

    def _seconds(self) -> float:
        return time.monotonic() - self.begin


def limit_s(known: Mapping[str, Part], stages: Sequence[Sequence[str]]) -> float:
    """What a run of stages takes at most, if its libraries need not be built."""
    return ENVIRONMENT_S + sum(max(known[name].limit_s for name in stage) for stage in stages)


def last_words(tail: str) -> str:
    """The last line of an output, or this package's own sentence if pip adds hints after it."""
    lines = tail.split("\n")
    ours = [line[line.index("fusedrnn: ") :] for line in lines if "fusedrnn: " in line]
    return (ours or [line.strip(" =") for line in lines if line.strip(" =")] or [""])[-1]


def summary(
    environment: dict[str, Any],
    outcomes: Sequence[Outcome],
    contents: dict[str, Any],
    tables: Sequence[str],
) -> str:
    """The report: failures and missed targets first, then all measurements."""
    names = ("gpu", "torch", "nvcc", "commit", "date")
    text = [", ".join(f"{name} {environment[name] or 'none'}" for name in names), ""]
    text += [f"**{verdict(outcomes, contents)}**", ""]
    text += table(
        ["part", "", "seconds", ""],
        [
            [o.part, "passed" if o.passed else "**failed**", f"{o.seconds:.1f}", o.note]
            for o in outcomes
        ],
    )
    for name, content in contents.items():
        text += [f"## {name}", ""]
        if failures := content["failures"]:
            text += [*(f"- **failed**: {failure}" for failure in failures), ""]
        if targets := sorted(content["targets"], key=lambda target: target["passed"]):
            rows = [
                [
                    t["what"],
                    t["where"],
                    f"{t['value']:.4g} {t['spread']}",
                    f"≤ {t['limit']}",
                    "met" if t["passed"] else "missed",
                ]
                for t in targets
            ]
            text += table(["target", "at", "measured", "limit", ""], rows)
    return "\n".join([*text, *tables]) + "\n"


def verdict(outcomes: Sequence[Outcome], contents: dict[str, Any]) -> str:
    """The outcome of all parts, in a line."""
    failed = [outcome.part for outcome in outcomes if not outcome.passed]
    missed = {
        name: count
        for name, content in contents.items()
        if (count := sum(not target["passed"] for target in content["targets"]))
    }
    text = f"Failed: {', '.join(failed)}." if failed else "Nothing failed."
    if missed:
        text += f" Targets missed: {', '.join(f'{n} of {name}' for name, n in missed.items())}."
    return text


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    lines = [[*columns], [":--"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines] + [""]


def main() -> None:
    """Runs a group of parts; exits with status 0 if nothing failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of results; those of earlier runs go")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--group", choices=GROUPS, default="glance", help="of parts (glance)")
    chosen.add_argument(
        "--parts",
        help="names of parts, of any group or none: A,B+C runs B and C together; "
        f"{', '.join(SANITIZERS)} stand for all of their parts, together",
    )
    parser.add_argument(
        "--minutes", type=float, help="for all (those of the group; the limits of the parts)"
    )
    options = parser.parse_args()
    out: Path = options.out.absolute()
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    if out.exists() and not out.is_dir():
        parser.error(f"{options.out} must be a folder")
    known = parts(out)
    stages: Sequence[Sequence[str]] = GROUPS[options.group]
    seconds = 60 * MINUTES[options.group]
    if options.parts is not None:
        stages = [
            [part for name in names.split("+") for part in SANITIZERS.get(name, (name,))]
            for names in options.parts.split(",")
        ]
        if unknown := [name for names in stages for name in names if name not in known]:
            got = ", ".join(map(repr, unknown))
            of_tools = {part for kinds in SANITIZERS.values() for part in kinds}
            named = [*(name for name in known if name not in of_tools), *SANITIZERS]
            parser.error(f"--parts must be of {', '.join(named)}, got {got}")
        seconds = limit_s(known, stages)
    out.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        (out / name).unlink(missing_ok=True)
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a summary to be left whole
    check = Check(out, seconds if options.minutes is None else 60 * options.minutes)
    for number in signals:
        signal.signal(number, check.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    passed = check.run([[known[name] for name in stage] for stage in stages])
    print(f"{time.monotonic() - check.begin:.0f} s; results are in {out}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
