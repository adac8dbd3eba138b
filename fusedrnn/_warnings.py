"""Warnings that name the user's line."""

import sys
import warnings
from types import FrameType


def warn(message: str) -> None:
    """Warns of what the first line does that is neither this package's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back and not _is_of_user(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_of_user(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith("<eval_with_key>"):  # of a graph of torch's
        return False
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in ("fusedrnn", "torch")
