"""What nvcc makes of the programs that are printed for GPUs."""

from __future__ import annotations

import re

import pytest
import torch
from nvcc import each_architecture, needs_nvcc
from recurrent.registry import CASES, Case
from runtime.gpu_programs import gpu_text, ptxas_says

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IN_CI = {"LSTMCell": torch.float32, "late reset, LayerNorm": torch.float64}
IN_CI |= {"DreamerV2": torch.bfloat16}


@needs_nvcc
@each_architecture
@pytest.mark.parametrize(
    ("case", "dtype"),
    # Every cell in one dtype, in turn: all in all of them would take nvcc an hour.
    [
        pytest.param(
            case,
            IN_CI.get(case.name, DTYPES[i % len(DTYPES)]),
            id=str(case),
            marks=[] if case.name in IN_CI else [pytest.mark.nightly],
        )
        for i, case in enumerate(case for case in CASES if case.compiles)
        if case.name in IN_CI or i % 3 == 0
    ],
)
def test_compiles_without_spills(case: Case, dtype: torch.dtype, architecture: str) -> None:
    text = gpu_text(case, dtype)
    said = ptxas_says(text, architecture)
    assert "warning" not in said
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert len(spills) == 2 * text.count("struct Stage")
    assert set(spills) == {"0"}
