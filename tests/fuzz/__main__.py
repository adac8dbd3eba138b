"""Random calls: ``python -m fuzz valid``, ``bad``, ``steps`` and ``scans`` in the folder tests.

Exits with status 1 if anything is wrong. Each finding is printed with a command that runs its case
again.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import batches

CONSOLE = Console()
PROGRAMS = ("valid", "bad", "steps", "scans")
SANITIZED = ("valid", "bad")
OUTCOMES = ("right", "fell back", "raised", "accepted", "died")
CASES_OF_A_SEED = 10**9
MOST_REASONS = 25


def main() -> None:
    """Runs one program or both, plain and under sanitizers."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("program", choices=[*PROGRAMS, "all"], help="all: plain and sanitized")
    parser.add_argument("--minutes", type=float, default=1.0, help="in all (1)")
    parser.add_argument("--seed", type=int, default=0, help="where cases begin")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--sanitized", action="store_true", help="by the library for sanitizers")
    options = parser.parse_args()
    if options.case is not None:
        sys.exit(alone(options.program, options.case, options.sanitized))
    runs = [(options.program, options.sanitized)]
    if options.program == "all":
        runs = [(program, False) for program in PROGRAMS] + [(one, True) for one in SANITIZED]
    if any(is_sanitized for _, is_sanitized in runs):
        batches.sanitized.LIBRARY.make(say=True)
    table = Table("program", "library", "cases", *OUTCOMES, "findings")
    table.caption = (
        "of wrong calls: accepted ones went through, as some may; died of no memory\n"
        "of steps: fell back to Python; accepted where a loop raises, or roundings decide"
    )
    has_findings = False
    for program, is_sanitized in runs:
        until = time.time() + 60 * options.minutes / len(runs)
        library = "sanitized" if is_sanitized else "plain"
        CONSOLE.print(f"{program}, {library}, {60 * options.minutes / len(runs):.0f} s")
        try:
            counts = show(program, is_sanitized, options.seed * CASES_OF_A_SEED, until)
        except RuntimeError as error:  # no case has begun
            CONSOLE.print(escape(str(error)), soft_wrap=True)
            counts = Counter({"finding: not begun": 1})
        whats = [f"{counts[what]:,}" for what in ("cases", *OUTCOMES)]
        findings = {k: n for k, n in counts.items() if k.startswith("finding: ")}
        has_findings |= bool(findings)
        texts = [f"{n:,} {kind.removeprefix('finding: ')}" for kind, n in sorted(findings.items())]
        table.add_row(program, library, *whats, "\n".join(texts) or "0")
    CONSOLE.print(table)
    sys.exit(1 if has_findings else 0)


def show(program: str, is_sanitized: bool, first: int, until: float) -> Counter[str]:
    """Runs cases, and prints findings, one of each kind, and why steps are taken in Python."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seen = set()
    flag = " --sanitized" if is_sanitized else ""
    for record in batches.run(program, first, until=until, is_sanitized=is_sanitized):
        counts.update(["cases", record.outcome.what])
        if record.outcome.reason:
            reasons[re.sub(r"\d+|'[^']*'|\(step.py:.*", "", record.outcome.reason)[:80]] += 1
        for kind, text in record.outcome.findings:
            counts[f"finding: {kind}"] += 1
            likeness = kind, re.sub(r"\d+|'[^']*'", "", text)[:80] or record.outcome.call[:40]
            if likeness not in seen:
                seen.add(likeness)
                command = f"python -m fuzz {program} --case {record.case}{flag}"
                CONSOLE.print(f"[bold]{escape(kind)}[/]: {escape(text)}", soft_wrap=True)
                CONSOLE.print(f"  {escape(command)}", soft_wrap=True)
                if program not in ("steps", "scans"):  # whose findings have the smallest call
                    CONSOLE.print(f"  [dim]{escape(record.outcome.call)}[/]", soft_wrap=True)
    for reason, count in reasons.most_common(MOST_REASONS):
        CONSOLE.print(f"[dim]{count:5,} in Python: {escape(reason)}[/]", soft_wrap=True)
    return counts


def alone(program: str, case: int, is_sanitized: bool) -> int:
    """Runs a single case and shows its process's output; returns 1 if anything is wrong."""
    (record,) = batches.run(program, case, 1, is_sanitized=is_sanitized, is_shown=True)
    CONSOLE.print(f"{record.outcome.what}: {escape(record.outcome.call)}", soft_wrap=True)
    for kind, text in record.outcome.findings:
        CONSOLE.print(f"[bold]{escape(kind)}[/]: {escape(text)}", soft_wrap=True)
    return 1 if record.outcome.findings else 0


if __name__ == "__main__":
    main()
