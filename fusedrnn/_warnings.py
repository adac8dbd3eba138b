"""Warnings that name the user's line."""

import sys
import warnings

_OTHERS = ("fusedrnn", "torch", "")  # code that torch generates is of no module


def warn(message: str) -> None:
    """Warns of what the first line does that is neither this package's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
