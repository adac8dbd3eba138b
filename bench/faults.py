"""Errors after which a process can no longer use its GPU."""

from __future__ import annotations

import re

# The words of CUDA, torch, its libraries and this package. Exhausted memory is no such error.
FAULT = re.compile(
    r"CUDA error|cudaError|CU(BLAS|DNN|SOLVER)_STATUS_\w+"
    r"|illegal memory access|device-side assert|unspecified launch failure|misaligned address"
    r"|illegal instruction|invalid program counter|hardware stack error|uncorrectable ECC",
    re.IGNORECASE,
)


def names_fault(text: str) -> bool:
    """Whether an error's text says that the process has lost its GPU."""
    return "out of memory" not in text.lower() and FAULT.search(text) is not None
