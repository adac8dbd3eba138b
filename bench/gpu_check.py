"""Everything that needs a GPU, without a network: ``python -m bench.gpu_check OUT --group first``.

There are four groups of parts, each of which ends within nine minutes on 16 cores. ``first``
builds for the GPU that is there, and says whether the kernels compute what they should, and where
they do not; ``speed`` measures; ``deep`` has the sanitizers and what else takes long; ``cells``
measures cells that users write.

A part that fails does not stop the others. A value that is wrong, a crash, or a measurement of ours
that is missing is a failure, and the exit status is 0 if there is none; a target that is missed is
a result. Needs a torch built for CUDA, a CUDA toolkit, what the build needs and pytest, all in the
Python that runs it; pytest-xdist and pytest-timeout are used where they are.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import contain
from .machine import about
from .parts import BENCHMARKS, GROUPS, Part, content_of, parts

LOG = "log.txt"
RESULTS = ("summary.json", "summary.md", LOG, *BENCHMARKS.values())
ENVIRONMENT_S = 15
MINUTES = 9.0
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
        self.outcomes: list[Outcome] = []
        self.contents: dict[str, Any] = {}
        self.tables: list[str] = []
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
                note = f"not begun: {left_s:.0f} s left, and it may take {part.limit_s:.0f} s"
                self._add(Outcome(part.name, False, 0.0, note))
            if begun := [part for part in stage if part not in late]:
                with ThreadPoolExecutor(len(begun)) as pool:
                    for outcome, said in pool.map(partial(self._run_part, deadline), begun):
                        self._add(outcome, said)
                deadline += max(part.limit_s for part in begun)
        self.log.finish()
        self.log_file.close()
        return all(outcome.passed for outcome in self.outcomes)

    def _run_part(self, due: float, part: Part) -> tuple[Outcome, bytes]:
        """Runs a part; returns its outcome and what it wrote. It may begin before it is due."""
        words = list(part.command)
        file = io.BytesIO()
        said = contain.Log(file, *PART_BYTES)
        said.write(f"\n== {part.name}\n$ {' '.join(words)}\n".encode())
        begin = time.monotonic()
        stop = min(max(due + part.limit_s, begin + part.most_s), self.end)
        try:
            ended = contain.run(words, lambda: stop, env=part.env, take=said.write)
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
        return Outcome(part.name, passed, seconds, note[:NOTE_CHARACTERS]), file.getvalue()

    def _add(self, outcome: Outcome, said: bytes = b"") -> None:
        self.outcomes.append(outcome)
        self.log.write(said)
        verdict = "passed" if outcome.passed else "FAILED"
        print(f"{outcome.part:12} {verdict} {outcome.seconds:6.1f} s  {outcome.note}", flush=True)
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
            **self.contents,
        }
        (self.out / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
        text = summary(self.environment, self.outcomes, self.contents, self.tables)
        (self.out / "summary.md").write_text(text)

    def _seconds(self) -> float:
        return time.monotonic() - self.begin


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
    chosen.add_argument("--group", choices=GROUPS, default="first", help="of parts (first)")
    chosen.add_argument("--parts", help="names of parts, of any group: A,B+C runs B and C together")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all ({MINUTES:g})")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    if out.exists() and not out.is_dir():
        parser.error(f"{options.out} must be a folder")
    known = parts(out)
    stages: Sequence[Sequence[str]] = GROUPS[options.group]
    if options.parts is not None:
        stages = [names.split("+") for names in options.parts.split(",")]
        if unknown := [name for names in stages for name in names if name not in known]:
            got = ", ".join(map(repr, unknown))
            parser.error(f"--parts must be of {', '.join(known)}, got {got}")
    out.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        (out / name).unlink(missing_ok=True)
    check = Check(out, 60 * options.minutes)
    passed = check.run([[known[name] for name in stage] for stage in stages])
    print(f"{time.monotonic() - check.begin:.0f} s; results are in {out}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
