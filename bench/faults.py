"""Errors after which a process can use its GPU no more."""

from __future__ import annotations

import re

# As CUDA, torch, its libraries and this package put it. Memory that ran out is no such error.
FAULT = re.compile(
    r"CUDA error|cudaError|CU(BLAS|DNN|SOLVER)_STATUS_\w+"
    r"|illegal memory access|device-side assert|unspecified launch failure|misaligned address"
    r"|illegal instruction|invalid program counter|hardware stack error|uncorrectable ECC",
    re.IGNORECASE,
)


def names_fault(text: str) -> bool:
    """Whether an error's text is that of one after which the GPU is lost to the process."""
    return "out of memory" not in text.lower() and FAULT.search(text) is not None
