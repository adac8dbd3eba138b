"""Random calls, right ones and wrong ones: ``python -m fuzz`` in the folder tests.

A case is made from one number, which can run it again alone. Cases run in processes of their own
(worker.py), so that a crash or a hang is a finding like any other (batches.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The outcome of a case."""

    what: str  # "right", "raised" or "accepted"
    call: str  # the call in words
    findings: list[tuple[str, str]] = field(default_factory=list)
    """What is wrong: of what kind, and exactly."""
    reason: str = ""
    """Why a cell was taken in Python, if it was."""
