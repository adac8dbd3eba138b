"""Runs cases one by one, and notes each before it begins, since it may end the process.

batches.py starts it, with its options as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import importlib
import json
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from . import Outcome, sanitized


def main() -> None:
    """Runs all cases, or as many as there is time for."""
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    if options.is_sanitized:
        sanitized.import_fusedrnn()
    program = importlib.import_module(f"fuzz.{options.program}")
    program.is_shown = options.is_shown
    getattr(program, "prepare", lambda: None)()
    if not options.is_sanitized:  # the sanitizer's shadow memory would count
        limit_memory(options.most_bytes)
    before = program.good_call()
    with open(options.report, "a", buffering=1) as report:

        def write(**line: Any) -> None:
            print(json.dumps(line), file=report)

        for case in range(options.first, options.first + options.count):
            if options.until is not None and time.time() > options.until:
                break
            write(begins=case)
            faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
            outcome = run(program, case, note=lambda call: write(call=call))
            faulthandler.cancel_dump_traceback_later()
            write(case=case, **dataclasses.asdict(outcome))
        write(is_as_before=program.good_call() == before)


def run(program: object, case: int, note: Callable[[str], None]) -> Outcome:
    """Runs a case; an error of the program itself is a finding too."""
    try:
        return program.run(case, note)  # type: ignore[attr-defined]
    except Exception:
        return Outcome("failed", "", [("failure", traceback.format_exc(limit=-6))])


def limit_memory(most_bytes: int) -> None:
    """Limits further memory, so that huge allocations are refused and not swapped."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + most_bytes, now + most_bytes))


if __name__ == "__main__":
    main()
