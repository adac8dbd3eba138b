"""Random calls, right ones and wrong ones: ``python -m fuzz`` in the folder tests.

Each case is made of one number, by which it can be run again alone. Cases run in processes of their
own (worker.py), so that one that crashes or hangs is a finding like any other (batches.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Of one case."""

    what: str  # "right", "raised" or "accepted"
    call: str  # in words
    findings: list[tuple[str, str]] = field(default_factory=list)
    """What is wrong: of what kind, and exactly."""
