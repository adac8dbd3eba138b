"""The random cells of steps.py as steps of scan."""

from __future__ import annotations

from collections.abc import Callable

from . import Outcome, steps

is_shown = False
prepare, good_call = steps.prepare, steps.good_call


def run(case: int, note: Callable[[str], None]) -> Outcome:
    """One cell, in one or two calls."""
    return steps.run(case, note, by_scan=True)
