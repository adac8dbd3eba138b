"""The last states alone by persistent kernels, replayed chunks, and a second stream."""

from dataclasses import replace

import pytest
import torch
from cases import relative_errors
from checks import assert_same
from last_states_cases import Stacked, in_parts, layer_by_layer

from fusedrnn import _helpers
from fusedrnn._cells import CELLS
from fusedrnn._ops import LayerTensors

REPLAY, OVERLAP = _helpers.TUNING["replay"], _helpers.TUNING["overlap"]
FORWARD, BACKWARD = "persistent_forward", "persistent_backward"
BASE = Stacked(seq_len=40, hidden_size=12, chunk_size=3, dtype=torch.bfloat16)
CASES = [
    replace(BASE, cell=cell, mask=mask)
    for cell in CELLS
    for mask in ("", "lengths reset", "packed")
]
CASES += [replace(BASE, cell=cell, num_layers=1, reverse=True, mask="reset") for cell in CELLS]


@pytest.fixture
def run(gpu):
    """Calls a function of a case on an emulated GPU."""

    def call(function, case, tuning=0, **options):
        return gpu(lambda: function(case, case.tensors(), tuning=tuning), **options)

    return call


def truth_of(case):
    wide = [
        t.double() if t is not None and t.is_floating_point() else t for t in case.tensors().flat()
    ]
    return layer_by_layer(case, LayerTensors.of(wide))


def assert_as_right(found, whole, truth):
    ours, theirs = relative_errors(found, truth), relative_errors(whole, truth)
    for name, error in ours.items():
        assert error <= 2 * theirs[name] + torch.finfo(torch.bfloat16).eps, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_persistent_kernels(run, gpu, case):
    truth = truth_of(case)
    found = run(in_parts, case)
    assert gpu.counts["forward_kernels"] > 0 and gpu.counts["backward_kernels"] > 0
    assert_as_right(found, run(layer_by_layer, case), truth)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_order_of_streams_makes_no_difference(run, gpu, case):
    expected = run(in_parts, case)
    assert gpu.counts["splits"] == 0
    for order in (0, 1, 2):
        assert_same(run(in_parts, case, tuning=OVERLAP, streams_order=order), expected)
        assert gpu.counts["splits"] > 0


@pytest.mark.parametrize("cell", CELLS)
def test_replayed_chunks_give_the_same_bits(run, gpu, cell):
    case = replace(BASE, cell=cell, seq_len=300, batch=2, chunk_size=2, dtype=torch.float32)
    expected = run(in_parts, case, multiprocessors=0)
    assert gpu.counts["replays"] == 0
    assert_same(run(in_parts, case, tuning=REPLAY, multiprocessors=0), expected)
    assert gpu.counts["replays"] > 0


@pytest.mark.parametrize("refused", [FORWARD, BACKWARD])
@pytest.mark.parametrize("cell", CELLS)
def test_single_steps_make_up_for_a_kernel_that_is_refused(run, gpu, cell, refused):
    case = replace(BASE, cell=cell, mask="lengths reset")
    truth, whole = truth_of(case), run(layer_by_layer, case, multiprocessors=0)
    assert_as_right(run(in_parts, case, refused_kernel=refused), whole, truth)
    assert gpu.counts["forward_kernels" if refused == FORWARD else "backward_kernels"] == 1
