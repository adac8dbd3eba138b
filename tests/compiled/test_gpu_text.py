"""What nvcc makes of the programs that are printed for GPUs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from gpu_programs import gpu_text, ptxas_says
from nvcc import each_architecture, needs_nvcc
from registry import CASES, Case

QUICK = {"LSTMCell": torch.float32, "late reset, LayerNorm": torch.float64}
QUICK |= {"DreamerV2": torch.bfloat16}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def marked(case: Case, dtype: torch.dtype) -> Any:
    """The quick tests have some of the cells, each in one dtype."""
    marks = [] if QUICK.get(case.name) == dtype else [pytest.mark.slow]
    return pytest.param(case, dtype, id=f"{case}, {str(dtype)[6:]}", marks=marks)


@needs_nvcc
@each_architecture
@pytest.mark.parametrize(
    ("case", "dtype"),
    # Every cell in one dtype, in turn: all in all of them would take nvcc an hour.
    [
        marked(case, QUICK.get(case.name, DTYPES[i % len(DTYPES)]))
        for i, case in enumerate(case for case in CASES if case.compiles)
        if case.name in QUICK or i % 3 == 0
    ],
)
def test_compiles_without_spills(case: Case, dtype: torch.dtype, architecture: str) -> None:
    text = gpu_text(case, dtype)
    said = ptxas_says(text, architecture)
    assert "warning" not in said
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert len(spills) == 2 * text.count("struct Stage")
    assert set(spills) == {"0"}
