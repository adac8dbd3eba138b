"""Every cell, dtype, backend and option on numbers of hostile scales: see the folder's docstring.

FUSEDRNN_EXHAUSTIVE=1 tries every option with every change. Otherwise a change meets one option.
"""

from __future__ import annotations

import os

import pytest
import torch
from cases import DTYPES

from calls import BACKENDS, computing
from calls.draw import HOSTILE, hostile, scales
from calls.judge import judge
from calls.trial import Trial

EXHAUSTIVE = os.environ.get("FUSEDRNN_EXHAUSTIVE") == "1"
QUICK = 6  # of so many changes one is tried by `make test`, another one for each cell and dtype
QUICK_OR_NOT = [
    pytest.param(True, id="one change of six"),
    pytest.param(False, id="the other changes", marks=pytest.mark.slow),
]
HERE = [backend for backend in BACKENDS if backend != "cuda"]
BACKENDS_OF = [
    pytest.param(HERE, id="cpu and emulation"),
    pytest.param(["cuda"], id="cuda", marks=pytest.mark.cuda),
]


@pytest.fixture(autouse=True)
def _one_thread(threads):
    """Uses one thread, because tensors are small and threads would only wait for each other."""
    threads(1)


@pytest.mark.ci_has_every(3)
@pytest.mark.timeout(6 * 3600 if EXHAUSTIVE else 600)
@pytest.mark.parametrize("is_quick", QUICK_OR_NOT)
@pytest.mark.parametrize("backends", BACKENDS_OF)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", HOSTILE)
def test_errors_are_at_most_twice_those_of_torch(cell, dtype, backends, is_quick):
    wrong, first = [], list(HOSTILE).index(cell) + DTYPES.index(dtype)
    for i, (call, some) in enumerate(scales(cell, dtype, backends, EXHAUSTIVE)):
        if ((i + first) % QUICK == 0) != is_quick:
            continue
        trial = Trial(call)  # all backends share its truth
        for backend in some:
            with computing(backend) as device:
                findings = judge(trial, trial.ours(device))
            wrong += [f"{call}, {backend}: {finding}" for finding in findings if finding.is_wrong]
    assert not wrong, "\n".join(wrong[:20])


# --- that what is wrong would be noticed ---------------------------------------------------------


def a_trial(change):
    """A call that is right, and its results, which may be changed."""
    trial = Trial(hostile("gru", torch.float32, change, "none"))
    results = trial.ours()
    assert not wrongs(trial, results)
    return trial, {name: tensor.clone() for name, tensor in results.items()}


def wrongs(trial, results):
    return [finding for finding in judge(trial, results) if finding.is_wrong]


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_hx", "grad_weights[0]"])
@pytest.mark.parametrize("factor", [0.0, 1.001])
def test_one_wrong_row_is_noticed(name, factor):
    """The wrong row is the smallest of the batch, or one of a weight."""
    trial, results = a_trial("input rows x 1e-6 .. 1e6")
    rows = results[name] if "weights" in name else results[name].movedim(-2, 0)
    rows[0] *= factor
    assert {finding.result for finding in wrongs(trial, results)} == {name}


def test_one_wrong_unit_is_noticed():
    trial, results = a_trial("input rows x 1e-6 .. 1e6")
    results["output"][..., 7] *= 1.001
    assert [finding.row for finding in wrongs(trial, results)][-1] == "unit 7"


def test_nan_is_neither_made_nor_hidden():
    trial, results = a_trial("NaN and inf in input")
    made = results | {"output": results["output"].clone()}
    made["output"][0, 1, 0] = torch.nan
    assert {finding.wrong for finding in wrongs(trial, made)} == {"NaN or inf"}
    hidden = results | {"output": results["output"].nan_to_num()}
    assert {finding.wrong for finding in wrongs(trial, hidden)} == {"hides a NaN"}
