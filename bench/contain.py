"""Runs commands that may crash, hang or flood, and ends them in time with all their processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[1]
TAIL_BYTES = 1 << 16
POLL_S = 0.05
# Time for a killed process to end and for its pipe to be read. A process that waits inside the
# driver of a GPU may not end at all.
KILL_S = 5.0


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: Its exit status; below 0 the signal that ended it; None if it was stopped here.
        tail: The end of what it wrote.
    """

    pid: int
    status: int | None
    seconds: float
    tail: str

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return f"stopped after {self.seconds:.0f} s"
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"ended by {names.get(-self.status, f'signal {-self.status}')}"
        return f"exit status {self.status}"


def run(
    command: Sequence[str],
    deadline: Callable[[], float],
    *,
    env: Mapping[str, str] | None = None,
    take: Callable[[bytes], object] = lambda data: None,
) -> Ended:
    """Runs a command in the root of the source tree.

    The command is stopped when ``time.monotonic()`` passes ``deadline()``, which is asked again
    and again. ``take`` gets everything that it writes to stdout and stderr. The processes that it
    has started end with it; their inherited environment identifies them.
    """
    begin = time.monotonic()
    mark = f"FUSEDRNN_RUN_{uuid.uuid4().hex}"
    tail = b""

    def keep(data: bytes) -> None:
        nonlocal tail
        take(data)
        tail = (tail + data)[-TAIL_BYTES:]

    process = subprocess.Popen(
        list(command),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), mark: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    try:
        while process.poll() is None and time.monotonic() < deadline():
            _read(pipe, keep, POLL_S)
        status = process.poll()
    finally:
        process.kill()
        _kill(mark)
        _wait(process)
    end = time.monotonic() + POLL_S  # an escaped child may hold the pipe and fill it
    while time.monotonic() < end and _read(pipe, keep, 0):
        pass
    process.stdout.close()
    return Ended(process.pid, status, time.monotonic() - begin, tail.decode(errors="replace"))


def _read(pipe: int, keep: Callable[[bytes], object], wait_s: float) -> bool:
    """Waits for output and reads it; returns whether more may come."""
    if not select.select([pipe], [], [], wait_s)[0]:
        return False
    data = os.read(pipe, 1 << 16)
    if data:
        keep(data)
    else:
        time.sleep(wait_s)  # all writers have closed the pipe
    return bool(data)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} has been killed and does not end", flush=True)


def _kill(mark: str) -> None:
    """Kills all processes whose environment contains this text, until there are none.

    Looks twice: a process that is about to run another program has no environment for a moment.
    """
    end = time.monotonic() + KILL_S
    looks_without = 0
    while looks_without < 2 and time.monotonic() < end:
        found = _marked(mark)
        looks_without = 0 if found else looks_without + 1
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


class Log:
    """A log file that keeps the beginning and the end of all that is written to it."""

    def __init__(self, file: BinaryIO, first: int, last: int) -> None:
        self.file = file
        self.first, self.last, self.left_out = first, last, 0

    def write(self, data: bytes) -> None:
        """Appends, and now and then drops the part between the beginning and the end."""
        self.file.write(data)
        if self.file.tell() > self.first + 2 * self.last:
            self._shorten()

    def finish(self) -> None:
        """Drops everything between the beginning and the end."""
        if self.file.tell() > self.first + self.last + len(self._note()):
            self._shorten()

    def _note(self) -> bytes:
        return f"\n... {self.left_out} bytes are left out here ...\n".encode()

    def _shorten(self) -> None:
        noted = len(self._note()) if self.left_out else 0
        size = self.file.tell()
        self.file.seek(size - self.last)
        end = self.file.read(self.last)
        self.left_out += size - self.last - self.first - noted
        self.file.truncate(self.first)
        self.file.seek(self.first)
        self.file.write(self._note() + end)
