"""The persistent kernels of forward, thread by thread on the CPU, called by the package.

emulator/fibers.h says what only a GPU can show.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import MASKED, truth
from checks import assert_no_worse, assert_same, with_bits
from emulator.persistent import FLAGS, PACKETS
from persistent_cases import BASE, CASES, FLOAT, FLOAT_CASES, LONG
from speed_sizes import CELLS, SMALL_SIZES, SPEED_SIZES, planned
from tf32 import assert_forward_is_rounded

import fusedrnn
from fusedrnn import _helpers

# Small cases with lengths and resets: two groups of two tiles each.
MASKED_CASES = [
    replace(base, seq_len=5, batch=27, chunk_size=3, **cell, **MASKED)
    for base in (BASE, FLOAT)
    for cell in CELLS
]


def results(case, **options):
    with torch.no_grad():
        every = case.tensors().call(fusedrnn, **(case.options | options))
    return dict(zip(("output", "h_n", "c_n"), every, strict=False))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_single_steps(persistent, case):
    """Errors are against the loop in float64; and both protocols give the same bits."""
    packets = persistent(results, case, exchange=PACKETS, schedule=1)
    assert_no_worse(packets, results(case), truth(case.same_for_torch(), "cpu"))
    assert_same(persistent(results, case, exchange=FLAGS, schedule=2), packets)


@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
def test_floats_are_rounded_to_tf32_and_nothing_else_is(persistent, case):
    """Results are near the loop that rounds by hand, compared with that loop's own error."""
    packets = persistent(results, case, exchange=PACKETS, schedule=1)
    assert_forward_is_rounded(packets, case)
    assert_same(persistent(results, case, exchange=FLAGS, schedule=2), packets)


GPUS = [*_helpers.known_gpus(), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("gpu", GPUS)
def test_speed_sizes_are_of_every_depth_with_one_tile_and_with_several(gpu):
    assert_planned_as_said((size, planned(size, gpu)) for size in SPEED_SIZES)


def test_small_speed_sizes_are_of_these_too(monkeypatch):
    name, capability, _, *others = _helpers.known_gpus()["H100"]

    def planned_with_fewer(size):
        fewer = {name: (name, capability, size.multiprocessors, *others)}
        monkeypatch.setattr(_helpers, "known_gpus", lambda: fewer)
        return planned(size, name)

    assert_planned_as_said([(size, planned_with_fewer(size)) for size in SMALL_SIZES])


def assert_planned_as_said(plans):
    found = set()
    for size, (plan, depth, tiles) in plans:
        is_float = size.case.dtype is torch.float32
        assert plan.forward.backend == plan.backward.backend == "persistent", size
        assert depth == size.depth and tiles >= size.tiles, size
        found.add((size.cell, is_float, depth, tiles > 1))
    assert found == {*itertools.product(range(len(CELLS)), (False, True), (1, 2, 4), (False, True))}


def test_floats_are_stepwise_where_torch_does_not_allow_tf32(persistent):
    with pytest.raises(AssertionError, match="have not been called"):
        persistent(results, FLOAT, tf32=False)
    options = FLOAT.options | {"backend": "persistent"}
    with pytest.raises(RuntimeError, match=r"not possible here: float32 .* torch is not told to"):
        persistent(lambda: FLOAT.tensors().call(fusedrnn, **options), tf32=False)


@pytest.mark.parametrize("case", MASKED_CASES, ids=str)
def test_order_of_threads_and_place_of_rows_make_no_difference(persistent, case):
    """The order of threads varies, and so does the number of tiles in a group."""
    expected = persistent(results, case, exchange=FLAGS)
    for exchange in (PACKETS, FLAGS):
        for schedule, multiprocessors in [(2, 6), (3, 3)]:
            options = {"schedule": schedule, "multiprocessors": multiprocessors}
            assert_same(persistent(results, case, exchange=exchange, **options), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if "noise" not in cell], ids=str)
def test_zoneout(persistent, cell, training):
    case = replace(BASE, seq_len=7, chunk_size=3, **cell, **MASKED)
    zoneout = (0.3, 0.6) if case.cell == "lstm" else 0.3

    def run(case):
        torch.manual_seed(5)  # draws the masks' seed
        return results(case, zoneout=zoneout, training=training)

    exact = case.tensors().to(torch.float64)
    torch.manual_seed(5)
    options = case.options | {"zoneout": zoneout, "training": training}
    exact = dict(zip(("output", "h_n", "c_n"), exact.call(fusedrnn, **options), strict=False))
    ours = persistent(run, case)
    assert_no_worse(ours, run(case), exact)
    assert_same(persistent(run, case, exchange=FLAGS, schedule=2), ours)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients(persistent, cell, recompute):
    """Forward leaves the right output, cell states and pre-activations for backward."""
    case = replace(BASE, seq_len=7, chunk_size=3, recompute=recompute, **cell, **MASKED)
    arguments = case.tensors().to(case.dtype)

    def run():
        return arguments.results(fusedrnn, **case.options)

    assert_no_worse(persistent(run), run(), truth(case.same_for_torch(), "cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cell", ["gru", "stochastic_gru"])
def test_weights_may_have_any_strides(persistent, cell, dtype):
    case = replace(BASE, cell=cell, dtype=dtype)
    arguments = case.tensors()

    def run(weights):
        with torch.no_grad():
            return replace(arguments, weights=weights).call(fusedrnn, **case.options)

    strided = [
        torch.stack([w.mT, w.mT]).movedim(0, -1).contiguous()[..., 1].mT if w.dim() == 2 else w
        for w in arguments.weights
    ]
    assert 2 in strided[1].stride() and 1 not in strided[1].stride()
    both = persistent(run, strided), persistent(run, arguments.weights)
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_nan_and_infinity_go_through(persistent, cell, dtype, exchange):
    """Results are those of single steps, and no thread waits for ever."""
    case = replace(BASE, dtype=dtype, lengths=True, **cell)
    arguments = case.tensors()
    arguments.input[2, 1] = torch.nan
    arguments.input[1, 4, 2] = torch.inf
    arguments.hx[0, 6, :9] = -torch.inf
    with_bits(arguments.hx, 0, 3, slice(None))

    def run():
        with torch.no_grad():
            return arguments.call(fusedrnn, **case.options)

    for ours, theirs in zip(persistent(run, exchange=exchange), run(), strict=True):
        assert ours.isnan().any()
        assert torch.equal(ours.isnan(), theirs.isnan())
    arguments.weights[1][4, 3] = torch.inf
    for ours, theirs in zip(persistent(run, exchange=exchange), run(), strict=True):
        assert ours.isnan().any()
        assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("mask", [{}, {"lengths": True, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_memory_is_preset_once_in_forward_and_for_each_chunk_in_backward(
    persistent, cell, dtype, mask
):
    """With packets, each kernel of forward presets the memory of the next one."""
    case = replace(LONG, dtype=dtype, **cell, **mask)

    def presets(**options):
        forward = persistent(results, case, **options)
        in_forward = persistent.presets
        persistent(lambda: case.tensors().to(dtype).results(fusedrnn, **case.options), **options)
        return forward, in_forward, persistent.presets - in_forward

    directions, chunks = 1 + case.bidirectional, -(-case.seq_len // case.chunk_size)
    by_packets, in_forward, in_backward = presets()
    assert in_forward == directions
    assert in_backward == directions * chunks
    by_flags, in_forward, in_backward = presets(exchange=FLAGS)
    assert in_forward == in_backward == directions * chunks
    assert_same(by_packets, by_flags)
