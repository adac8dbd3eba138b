"""Calls with each fault that the programs look for; a test checks that they are found."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from . import Outcome
from .bad import tried
from .good import Good

MOST_SECONDS = 1.0  # of processor time, within which a wrong call must be refused here


def refuse(message: str = "fusedrnn: no", kind: type[Exception] = ValueError) -> None:
    raise kind(message)


def crash(x: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(x: torch.Tensor) -> None:
    while True:
        time.sleep(1)


def draws(x: torch.Tensor) -> None:
    torch.rand(1)
    refuse()


def writes(x: torch.Tensor) -> None:
    x.data[0] = 1  # which changes no version counter
    refuse()


def sets_threads(x: torch.Tensor) -> None:
    torch.set_num_threads(2)
    refuse()


def turns_gradients_off(x: torch.Tensor) -> None:
    torch.set_grad_enabled(False)
    refuse()


def flushes_denormals(x: torch.Tensor) -> None:
    torch.set_flush_denormal(True)
    refuse()


def dawdles(x: torch.Tensor) -> None:
    end = time.process_time() + 1.1 * MOST_SECONDS
    while time.process_time() < end:
        pass
    refuse()


def spoils(x: torch.Tensor) -> None:
    global spoilt
    spoilt = True
    refuse()


def overruns(x: torch.Tensor) -> None:
    """Writes one number beyond an array of a workspace, in the sanitized library."""
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    torch.ops.fusedrnn_overrun.write_behind(memory, 5)


spoilt = False
# Faults, and the kind of each finding.
FAULTS: list[tuple[Callable[..., Any], str]] = [
    (lambda x: refuse(), ""),
    (lambda x: x.sum(), ""),
    (crash, "crash"),
    (hang, "hang"),
    (draws, "changed state"),
    (writes, "changed state"),
    (lambda x: (x.add_(1), refuse()), "changed state"),
    (sets_threads, "changed state"),
    (turns_gradients_off, "changed state"),
    (flushes_denormals, "changed state"),
    (lambda x: refuse("no"), "foreign message"),
    (lambda x: refuse("fusedrnn: no, says /home/somebody/csrc/ops.h:123"), "path in message"),
    (lambda x: refuse("fusedrnn: no" * 100), "long message"),
    (lambda x: refuse(kind=KeyError), "foreign type"),
    (lambda x: 1 / 0, "foreign type"),
    (dawdles, "slow"),
    (spoils, "other bits"),
]
OVERRUN = len(FAULTS)


def good_call() -> bool:
    return spoilt


def run(case: int, note: Callable[[str], None]) -> Outcome:
    """Makes a fault, and restores everything after it."""
    function = overruns if case == OVERRUN else FAULTS[case][0]
    good = Good("fault", function, {"x": torch.zeros(3)})
    outcome = Outcome("accepted", getattr(function, "__name__", ""))
    try:
        return tried(good, outcome, most_seconds=MOST_SECONDS)
    finally:
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)
