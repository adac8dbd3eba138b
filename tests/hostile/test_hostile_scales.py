"""Every cell, dtype, backend and option on numbers of hostile scales: see the folder hostile.

FUSEDRNN_EXHAUSTIVE=1 tries every option with every change. Otherwise a change meets one option, and
some backends skip changes.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from cases import DTYPES

from hostile import BACKENDS, CELLS, Hostile, cases, has_case
from hostile.judge import judge

EXHAUSTIVE = os.environ.get("FUSEDRNN_EXHAUSTIVE") == "1"
# Backends vary fastest, because they share a cached truth.
PLACES = [
    pytest.param(cell, dtype, backend, marks=[pytest.mark.cuda] if backend == "cuda" else [])
    for cell in CELLS
    for dtype in DTYPES
    for backend in BACKENDS
    if has_case(backend, dtype)
]


@pytest.fixture(autouse=True)
def _one_thread(threads):
    """Uses one thread, because tensors are small and threads would only wait for each other."""
    threads(1)


@pytest.mark.timeout(6 * 3600 if EXHAUSTIVE else 600)
@pytest.mark.parametrize(("cell", "dtype", "backend"), PLACES)
def test_errors_are_at_most_twice_those_of_torch(cell, dtype, backend):
    wrong = []
    for case in cases(cell, dtype, backend, EXHAUSTIVE):
        findings = judge(case, case.ours(backend))
        wrong += [f"{case}: {finding}" for finding in findings if finding.is_wrong]
    assert not wrong, "\n".join(wrong[:20])


# --- that what is wrong would be noticed ---------------------------------------------------------

GRU = Hostile("gru", torch.float32, "input rows x 1e-6 .. 1e6", "none")
POISONED = replace(GRU, change="NaN and inf in input")


def wrongs(case, results):
    return [finding for finding in judge(case, results) if finding.is_wrong]


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_hx", "grad_weights[0]"])
@pytest.mark.parametrize("factor", [0.0, 1.001])
def test_one_wrong_row_is_noticed(name, factor):
    """The wrong row is the smallest of the batch, or one of a weight."""
    results = GRU.ours()
    assert not wrongs(GRU, results)
    results[name] = results[name].clone()
    rows = results[name] if "weights" in name else results[name].movedim(-2, 0)
    rows[0] *= factor
    assert {finding.result for finding in wrongs(GRU, results)} == {name}


def test_one_wrong_unit_is_noticed():
    results = GRU.ours()
    results["output"] = results["output"].clone()
    results["output"][..., 7] *= 1.001
    assert [finding.row for finding in wrongs(GRU, results)][-1] == "unit 7"


def test_nan_is_neither_made_nor_hidden():
    results = POISONED.ours()
    assert not wrongs(POISONED, results)
    made = results | {"output": results["output"].clone()}
    made["output"][0, 1, 0] = torch.nan
    assert {finding.wrong for finding in wrongs(POISONED, made)} == {"NaN or inf"}
    hidden = results | {"output": results["output"].nan_to_num()}
    assert {finding.wrong for finding in wrongs(POISONED, hidden)} == {"hides a NaN"}
