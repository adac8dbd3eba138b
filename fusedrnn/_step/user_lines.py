"""Lines of the user's code, as the reasons of a refusal name them."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import fx

_OWN = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+)', re.MULTILINE)

_thread = threading.local()


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file of Python is of its library, torch's or this package's.

    What has no file is mostly the user's: the standard input, a cell of a notebook, text for exec.
    """
    is_library = file.startswith(_PYTHON) and "site-packages" not in file
    return is_library or file.startswith((*_OWN, "<frozen ", "<eval_with_key>"))


@contextmanager
def at(where: str) -> Iterator[None]:
    """Within, this line is at work."""
    before = getattr(_thread, "line", "")
    _thread.line = where or before
    try:
        yield
    finally:
        _thread.line = before


def user_line() -> str:
    """The line of the user's that is at work; or nothing."""
    if where := getattr(_thread, "line", ""):
        return str(where)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_own(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def last_line(stack: str) -> str:
    """The user's last line in a stack as Python prints it; or nothing."""
    found = [(name, number) for name, number in _FRAME.findall(stack) if not is_own(name)]
    return f"{os.path.basename(found[-1][0])}:{found[-1][1]}" if found else ""


def line() -> str:
    """The line that is at work, in brackets."""
    return in_brackets(user_line())


def mark(error: BaseException, where: str) -> None:
    """Says where in the user's code an error comes from."""
    if where and not hasattr(error, "_fusedrnn_line"):
        error._fusedrnn_line = where  # type: ignore[attr-defined]


def line_of_error(error: BaseException) -> str:
    """The line that an error was marked with, in brackets; or nothing."""
    return in_brackets(getattr(error, "_fusedrnn_line", ""))


def line_of(node: fx.Node) -> str:
    """The line that a node comes from, in brackets; or nothing."""
    return in_brackets(node.meta.get("stack_trace") or "")


def in_brackets(where: str) -> str:
    """To be put behind what a reason says; nothing if it is not known where that is."""
    return f" ({where})" if where else ""
