"""Calls of the built-in cells, drawn by three distributions, and judged by one loop in float64.

- ``usual`` has every form, option, mode, dtype and layout of memory that a user may choose;
- ``any_sizes`` has any sizes, in float64;
- ``scales`` has numbers of hostile scales, by the *changes* of changes.py.

A call (draw.py) becomes a trial with tensors (trial.py). Errors of its outputs and gradients
against float64 (oracle.py) may be at most twice those of torch's own module, or of the loop where
torch has none, in the same dtype on the same numbers (judge.py).

``python -m calls`` in the folder tests runs the scales; the usual calls are run by the program
``valid`` of the folder fuzz.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import Case
from emulator import emulated_operators, use


@dataclass
class Call:
    """Everything about a call, except how its tensors lie in memory."""

    case: Case
    form: str = "functional"  # or "module" or "cell"
    rows: str = "batch"  # or "single" or "packed"
    noise: str = "none"  # or "eps", "seed", "generator" or "default"
    options: dict[str, Any] = field(default_factory=dict)
    batch_first: bool = False
    return_sequence: bool = True
    has_state: bool = True
    is_sorted: bool = False  # only for packed rows
    lengths_as: str = "tensor"  # or "list" or "numpy"
    autocast: bool = False
    threads: int = 1
    mode: str = "grad"  # or "no_grad" or "inference"
    is_plain: bool = False  # dense tensors, which all have a gradient
    exact: float = 1e-11  # relative error in float64, where the truth has errors too
    change: str = ""  # what makes the numbers hostile; rows are then judged one by one
    name: str = ""

    def __str__(self) -> str:
        return self.name or repr(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        is_cast = self.autocast and self.case.dtype != torch.float64
        return torch.bfloat16 if is_cast else self.case.dtype

    @property
    def directions(self) -> int:
        return 2 if self.case.bidirectional else 1


# The backends, and the arguments that set up the emulation for each.
BACKENDS: dict[str, dict[str, int]] = {
    "cpu": {},
    "emulated": {},
    "emulated, denormals flushed": {},
    "emulated, persistent kernels": {"multiprocessors": 132, "schedule": 1},
    "cuda": {},
}


@contextlib.contextmanager
def computing(backend: str) -> Iterator[str]:
    """Has fusedrnn compute by a backend, as long as the context lasts; gives torch's device."""
    if not backend.startswith("emulated"):
        yield backend
        return
    operators = emulated_operators()
    operators.control(False, "", **BACKENDS[backend])
    try:
        torch.set_flush_denormal("flushed" in backend)
        with pytest.MonkeyPatch.context() as patch:
            use(patch, operators)
            yield "cpu"
    finally:
        torch.set_flush_denormal(False)
        operators.control(False, "")
