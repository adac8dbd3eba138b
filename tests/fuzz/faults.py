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


def after(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    """A refusal that comes after something else was done."""
    return lambda x: (change(x), refuse())[1]


def dawdle(x: torch.Tensor) -> None:
    end = time.process_time() + 1.1 * MOST_SECONDS
    while time.process_time() < end:
        pass


def overruns(x: torch.Tensor) -> None:
    """Writes one number beyond an array of a workspace, in the sanitized library."""
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    torch.ops.fusedrnn_overrun.write_behind(memory, 5)


spoilt: list[torch.Tensor] = []
# Faults, and the kind of each finding.
FAULTS: list[tuple[Callable[..., Any], str]] = [
    (lambda x: refuse(), ""),
    (lambda x: x.sum(), ""),
    (lambda x: os.kill(os.getpid(), signal.SIGSEGV), "crash"),
    (lambda x: time.sleep(1e6), "hang"),
    (after(lambda x: torch.rand(1)), "changed state"),
    (after(lambda x: x.data.fill_(1)), "changed state"),  # which changes no version counter
    (after(lambda x: x.add_(1)), "changed state"),
    (after(lambda x: torch.set_num_threads(2)), "changed state"),
    (after(lambda x: torch.set_grad_enabled(False)), "changed state"),
    (after(lambda x: torch.set_flush_denormal(True)), "changed state"),
    (lambda x: refuse("no"), "foreign message"),
    (lambda x: refuse("fusedrnn: no, says /home/somebody/csrc/ops.h:123"), "path in message"),
    (lambda x: refuse("fusedrnn: no" * 100), "long message"),
    (lambda x: refuse(kind=KeyError), "foreign type"),
    (lambda x: 1 / 0, "foreign type"),
    (after(dawdle), "slow"),
    (after(lambda x: spoilt.append(x)), "other bits"),
]
OVERRUN = len(FAULTS)


def good_call() -> int:
    return len(spoilt)


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
