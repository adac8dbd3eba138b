"""A re-entrant lock shared by a thread and the autograd threads working for it.

A thread that holds the lock of a module and runs a backward pass on a GPU waits for a thread of
autograd, which may need the same lock. torch hands what is stored for a thread on to the threads
that work for it, and by that they are told apart here.
"""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType

import torch

_KEY = "fusedrnn.caller"


class CallerLock:
    """As threading.RLock, but for a thread and all threads that autograd runs on its behalf."""

    def __init__(self) -> None:
        self._changes = threading.Condition()
        self._holder: object | None = None
        self._depth = 0

    def __enter__(self) -> None:
        caller = _enter()
        try:
            with self._changes:
                self._changes.wait_for(lambda: self._holder in (None, caller))
                self._holder = caller
                self._depth += 1
        except BaseException:  # KeyboardInterrupt
            _exit()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changes:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._changes.notify()
        _exit()

    def is_mine(self) -> bool:
        """Whether this thread holds it, or the one that this works for."""
        has_caller = self._holder is not None and torch._C._is_key_in_tls(_KEY)
        return has_caller and self._holder is torch._C._get_obj_in_tls(_KEY)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.caller = object()
        self.depth = 0
        """Of the locks that it has entered or waits for, unless it works for another thread."""


_thread = _Thread()
# torch 2.11 does not have it: a thread that ends while the interpreter is gone may then abort it.
_remove = getattr(torch._C, "_remove_obj_from_tls", lambda key: None)


def _enter() -> object:
    """The same for a thread and for those that work for it."""
    if _thread.depth or not torch._C._is_key_in_tls(_KEY):
        _thread.depth += 1
        if _thread.depth == 1:
            # torch 2.11 gives back a reference that it has not taken, so it gets one more to give.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_thread.caller))
            torch._C._stash_obj_in_tls(_KEY, _thread.caller)
    return torch._C._get_obj_in_tls(_KEY)


def _exit() -> None:
    if _thread.depth:
        _thread.depth -= 1
        if not _thread.depth:
            _remove(_KEY)
