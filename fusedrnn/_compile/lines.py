"""Lines of the user's code, as the reasons of a refusal name them."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType

import torch
from torch import fx

_OWN = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file of Python is torch's or this package's.

    What has no file is mostly the user's: the standard input, a cell of a notebook, text for exec.
    """
    return file.startswith((*_OWN, "<frozen ", "<eval_with_key>"))


def user_line() -> str:
    """The line of the user's that is at work; or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_own(frame.f_code.co_filename):
            return line_in(frame)
        frame = frame.f_back
    return ""


def line_in(frame: FrameType) -> str:
    """The line at which a function is."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def line() -> str:
    """The same in brackets."""
    return in_brackets(user_line())


def line_of(node: fx.Node) -> str:
    """The line that a node comes from, in brackets; or nothing."""
    return in_brackets(node.meta.get("stack_trace") or "")


def line_of_error(error: BaseException) -> str:
    """The last line in a traceback, in brackets; or nothing."""
    found, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not is_own(name):
            found = f"{os.path.basename(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return in_brackets(found)


def in_brackets(where: str) -> str:
    """To be put behind what a reason says; nothing if it is not known where that is."""
    return f" ({where})" if where else ""
