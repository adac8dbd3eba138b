"""Contenders that behave like processes after a fault of a GPU; ``bench.worker`` runs them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

FLOOD_BYTES = 10 << 20
poisoned = False


def hang() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


def hang_in_c() -> None:
    """Hangs while holding the lock of Python's interpreter."""
    ctypes.PyDLL(None).sleep(1000)


def leave_a_child() -> None:
    """Starts a child in a session of its own that holds the parent's pipe."""
    code = "import time; time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    os._exit(3)


def flood() -> None:
    line = b"x" * 99 + b"\n"
    for _ in range(FLOOD_BYTES // 10_000 // 10):
        os.write(1, line * 1000)


def poison() -> None:
    global poisoned
    poisoned = True
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand hints")


def fail() -> None:
    raise ValueError("an error like any other")


BAD = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "hang": hang,
    "hang in C": hang_in_c,
    "child": leave_a_child,
    "flood": flood,
    "poison": poison,
    "fail": fail,
    "exit": lambda: os._exit(0),
}


def measure(case: Any, names: Sequence[str], notes: Any) -> None:
    """Works as the benchmarks do: prepares all contenders, measures all, then writes the rows."""
    measured = []
    for name in names:
        with notes.on(name):
            if poisoned:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if name in BAD and case != "late":
                BAD[name]()
            measured.append(name)
    for name in measured:
        notes.begin(name)
        if name in BAD and case == "late":
            BAD[name]()
    for name in measured:
        notes.row(name, {"ms": [1.0]})
