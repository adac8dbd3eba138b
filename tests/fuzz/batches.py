"""Runs cases in batches, each in a process of its own, and records every case's outcome."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import Outcome, sanitized

TESTS = Path(__file__).parents[1]
BATCH = 200
HANG_SECONDS = 240.0  # on a busy machine
MOST_BYTES = 8 << 30
SUMMARY = re.compile(
    r"^SUMMARY: .*|^Fatal Python error.*|.*runtime error: .*|^\w*Error: .*|.*rss limit exhausted.*",
    re.MULTILINE,
)
HANG = re.compile(r"^Timeout \(", re.M)
TOO_LARGE = re.compile(r"SUMMARY: AddressSanitizer: (allocation-size-too-big|out-of-memory)")


@dataclass
class Record:
    """The record of a case."""

    program: str
    case: int
    outcome: Outcome


def run(
    program: str,
    first: int,
    count: int | None = None,
    *,
    until: float | None = None,
    is_sanitized: bool = False,
    hang_seconds: float = HANG_SECONDS,
    is_shown: bool = False,
) -> Iterator[Record]:
    """Runs ``count`` cases from ``first`` on, or as many as there is time for.

    ``is_shown``: whether to print the process's output, and where errors come from.
    """
    end = None if count is None else first + count
    while (end is None or first < end) and (until is None or time.time() < until):
        batch = BATCH if end is None else min(BATCH, end - first)
        options: dict[str, Any] = {"program": program, "first": first, "count": batch}
        options |= {"until": until, "is_sanitized": is_sanitized, "is_shown": is_shown}
        options["hang_seconds"] = hang_seconds * (3 if is_sanitized else 1)
        records, reached = _batch(options)
        yield from records
        if reached == first:  # time was up, or the process has not begun a case
            break
        first = reached


def _batch(options: dict[str, Any]) -> tuple[list[Record], int]:
    """Runs a batch with the options of a worker; returns records, and the first case left."""
    program, first = options["program"], options["first"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if options["is_sanitized"]:
        sanitized.LIBRARY.make()
        environment |= sanitized.environment(MOST_BYTES)
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as report:
        words = json.dumps(options | {"most_bytes": MOST_BYTES, "report": report.name})
        command = [sys.executable, "-m", "fuzz.worker", words]
        run = subprocess.run(command, cwd=TESTS, env=environment, stderr=subprocess.PIPE)
        lines: list[dict[str, Any]] = [json.loads(line) for line in report]
    records, begun, call = [], None, ""
    for line in lines:
        if "case" in line:
            case, begun = line.pop("case"), None
            records.append(Record(program, case, Outcome(**line)))
        elif "begins" in line:
            begun = line["begins"]
        else:
            call = line.get("call", "")
    said = run.stderr.decode(errors="replace")
    if options["is_shown"]:
        print(said, file=sys.stderr)
    if begun is not None:
        records.append(Record(program, begun, death(run.returncode, said, call)))
    elif not lines or "is_as_before" not in lines[-1]:
        raise RuntimeError(f"no case was begun: {said[-2000:]}")
    elif not lines[-1]["is_as_before"]:
        what = f"a good call after these {len(records)} cases has other bits than before them"
        records[-1].outcome.findings.append(("other bits", what))
    return records, first + len(records)


def death(status: int, said: str, call: str) -> Outcome:
    """How a process died in a call, from its output."""
    if TOO_LARGE.search(said):  # the sanitizer ends the process instead of raising std::bad_alloc
        return Outcome("raised", call)
    if hang := HANG.search(said):
        return Outcome("died", call, [("hang", said[hang.start() :][:1500])])
    what = " | ".join(SUMMARY.findall(said)) or said[-500:]
    return Outcome("died", call, [("crash", f"status {status}: {what}")])
