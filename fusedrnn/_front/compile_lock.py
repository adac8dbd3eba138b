"""The lock of first uses: one step is compiled at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_tracing = threading.RLock()
"""Tracers exchange functions of torch for the time of a trace, so there is one at a time."""
_LONGEST_WAIT = 60.0
"""Seconds, which no trace takes: another thread's may need a module that this one has locked."""


def _renew_lock() -> None:
    """In a process that was forked while another thread had it."""
    global _tracing
    _tracing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Busy(Exception):
    """Why there is no program now, though there may be one later."""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """
    Raises:
        Busy: Another thread takes too long.
    """
    lock = _tracing
    if not lock.acquire(timeout=_LONGEST_WAIT):
        raise Busy("another thread is compiling a cell")
    try:
        yield
    finally:
        lock.release()
