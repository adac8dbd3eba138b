"""The persistent kernels of both passes, thread by thread on the CPU, called by the package.

A training step runs both, and its outputs and gradients are compared. emulator/fibers.h says what
only a GPU can show.

Longer than 350 lines, because the tests of both passes share their cases.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import MASKED, relative_errors, truth
from checks import assert_no_worse, assert_same
from emulator.persistent import FLAGS, PACKETS
from persistent_cases import (
    BASE,
    FLOAT,
    FLOAT_SHAPES,
    IN_PLACE,
    LONG,
    SHAPES,
    inferred,
    spoil_gradient,
    spoil_input,
)
from speed_sizes import CELLS, SMALL_SIZES, SPEED_SIZES, planned, tf32_allowed
from tf32 import assert_backward_is_rounded, assert_forward_is_rounded, rounded_truth

import fusedrnn
from fusedrnn import _helpers

LONGER = replace(BASE, seq_len=17, batch=3, chunk_size=4)  # replayed chunks, and a short one
OF_TRAINING = [
    *SHAPES,
    replace(SHAPES[2], recompute=False),
    LONGER,
    replace(LONGER, bidirectional=True, recompute=False),
]
CASES = [replace(shape, **cell) for cell in CELLS for shape in OF_TRAINING]
CASES += [replace(shape, **cell) for cell in IN_PLACE for shape in (SHAPES[2], OF_TRAINING[-1])]
WIDEST = replace(BASE, cell="gru", seq_len=2, batch=2, hidden_size=1024)

# float32 through TF32. Pre-activations are saved, since the emulation's products would recompute
# them without rounding.
FLOAT_LONG = replace(LONGER, dtype=torch.float32, bidirectional=True)
FLOAT_CASES = [replace(shape, **cell) for cell in CELLS for shape in (*FLOAT_SHAPES, FLOAT_LONG)]
FLOAT_CASES += [
    replace(shape, **cell) for cell in IN_PLACE for shape in (FLOAT_SHAPES[2], FLOAT_LONG)
]
FLOAT_CASES = [replace(case, recompute=False) for case in FLOAT_CASES]
FLOAT_WIDEST = replace(WIDEST, dtype=torch.float32, hidden_size=512, recompute=False)
# Tolerance of gradients through TF32; the errors of the loop that rounds by hand are smaller.
THROUGH_TF32 = 2**-10

# Small cases with lengths and resets: two groups of two tiles each.
MASKED_CASES = [
    replace(base, seq_len=5, batch=27, chunk_size=3, **cell, **MASKED)
    for base in (BASE, FLOAT)
    for cell in CELLS + IN_PLACE
]
ZONEOUT = [cell for cell in CELLS if "noise" not in cell]
each_base = pytest.mark.parametrize("base", [BASE, FLOAT], ids=lambda base: str(base.dtype))


def in_turn(cases, *slow, every=4):
    """Of so many cases, one is quick. Lists go through shapes faster than through cells."""
    quick = cases[::every]
    return [
        pytest.param(case, marks=[pytest.mark.slow] * (case not in quick))
        for case in (*cases, *slow)
    ]


def outputs_of(found):
    return {name: t for name, t in found.items() if not name.startswith("grad")}


# --- values --------------------------------------------------------------------------------------


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("case", in_turn(CASES, WIDEST), ids=str)
def test_error_is_at_most_twice_that_of_single_steps(chain, case):
    """Errors are against the loop in float64; and both protocols give the same bits."""
    packets = chain(case.results, exchange=PACKETS, schedule=1)
    steps = chain(case.results, is_on=False)
    assert_no_worse(packets, steps, truth(case.same_for_torch(), "cpu"))
    assert_same(chain(case.results, exchange=FLAGS, schedule=2), packets)


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("case", in_turn(FLOAT_CASES, FLOAT_WIDEST), ids=str)
def test_floats_are_rounded_to_tf32_and_nothing_else_is(chain, case):
    """Results are near the loop that rounds by hand, compared with that loop's own error."""
    packets = chain(case.results, exchange=PACKETS, schedule=1)
    assert_forward_is_rounded(outputs_of(packets), case)
    assert_backward_is_rounded(packets, case)
    assert_same(chain(case.results, exchange=FLAGS, schedule=2), packets)


@each_base
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_inference_has_the_bits_of_training(persistent, chain, cell, base):
    case = replace(base, chunk_size=3, **cell, **MASKED)
    assert_same(persistent(inferred, case), chain(case.results))


def test_floats_are_stepwise_where_torch_does_not_allow_tf32(chain):
    assert_same(chain(FLOAT.results, tf32=False, is_on=False), chain(FLOAT.results, is_on=False))
    with pytest.raises(AssertionError, match="have not been called"):
        chain(FLOAT.results, tf32=False)
    with pytest.raises(RuntimeError, match=r"not possible here: float32 .* torch is not told to"):
        chain(lambda: FLOAT.results(backend="persistent"), tf32=False)


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("case", in_turn(MASKED_CASES, every=5), ids=str)
def test_order_of_threads_and_place_of_rows_make_no_difference(chain, case):
    """The order of threads varies, and so does the number of tiles in a group."""
    expected = chain(case.results, exchange=FLAGS)
    for exchange, schedule, multiprocessors in [(PACKETS, 2, 6), (FLAGS, 2, 3), (PACKETS, 3, 3)]:
        options = {"schedule": schedule, "multiprocessors": multiprocessors}
        assert_same(chain(case.results, exchange=exchange, **options), expected)


@pytest.mark.parametrize("training", [True, False])
@each_base
@pytest.mark.parametrize("cell", ZONEOUT, ids=str)
def test_zoneout(chain, cell, base, training):
    case = replace(base, seq_len=7, chunk_size=3, **cell, **MASKED)
    zoneout = (0.3, 0.6) if case.cell == "lstm" else 0.3

    def run(case):
        torch.manual_seed(5)  # draws the masks' seed
        return case.results(zoneout=zoneout, training=training)

    torch.manual_seed(5)
    exact = case.tensors().to(torch.float64)
    exact = exact.results(fusedrnn, **case.options, zoneout=zoneout, training=training)
    ours = chain(run, case)
    if base is FLOAT:
        for name, error in relative_errors(ours, exact).items():
            assert error < THROUGH_TF32, (name, error)
    else:
        assert_no_worse(ours, chain(run, case, is_on=False), exact)
    assert_same(chain(run, case, exchange=FLAGS, schedule=2), ours)


def strided(weight):
    """A copy none of whose strides is 1."""
    return torch.stack([weight.mT, weight.mT]).movedim(0, -1).contiguous()[..., 1].mT


@pytest.mark.parametrize("lay", [lambda w: w.mT.contiguous().mT, strided], ids=["columns", "gaps"])
@each_base
@pytest.mark.parametrize("cell", ["gru", "lstm", "stochastic_gru"])
def test_weights_may_have_any_strides(chain, cell, base, lay):
    case = replace(base, cell=cell)

    def run(lay):
        arguments = case.tensors().to(case.dtype)
        weights = [lay(w.detach()) if w.dim() == 2 else w.detach() for w in arguments.weights]
        weights = [w.requires_grad_() for w in weights]
        return replace(arguments, weights=weights).results(fusedrnn, **case.options)

    assert_same(chain(run, lay), chain(run, lambda w: w))


# --- some gradients only -------------------------------------------------------------------------


def assert_close(gradient, expected, name):
    allowed = THROUGH_TF32 if gradient.dtype is torch.float32 else 2e-2
    assert (gradient - expected).norm() <= allowed * expected.norm(), name


@each_base
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("wanted", ["input", "weights", "none of h"])
def test_some_gradients_only(chain, cell, base, wanted):
    case = replace(base, chunk_size=3, **cell)
    exact = chain(case.results, is_on=False)

    def run():
        arguments = case.tensors().to(case.dtype)
        named = arguments.named()
        others = {"input": ["input"], "weights": ["weights[0]", "weights[1]"]}
        names = others.get(wanted, [n for n in named if n not in ("hx", "cx")])
        for name in named.keys() - set(names):
            named[name].requires_grad_(False)
        outputs = arguments.call(fusedrnn, **case.options)
        tensors = [named[name] for name in names]
        gradients = torch.autograd.grad(outputs, tensors, arguments.cotangents())
        return dict(zip(names, gradients, strict=True))

    ours, theirs = chain(run), chain(run, is_on=False)
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], name)
        assert torch.equal(theirs[name], exact[f"grad_{name}"])


@each_base
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_from_output_or_last_state_alone(chain, cell, base, which):
    case = replace(base, chunk_size=3, **cell, **MASKED)

    def run():
        arguments = case.tensors().to(case.dtype)
        result = arguments.call(fusedrnn, **case.options)[which]
        wanted = arguments.named()
        cotangent = arguments.cotangents()[which]
        gradients = torch.autograd.grad(result, list(wanted.values()), cotangent)
        return dict(zip(wanted, gradients, strict=True))

    theirs = chain(run, is_on=False)
    for name, gradient in chain(run).items():
        assert_close(gradient, theirs[name], name)


# --- NaN and infinity ----------------------------------------------------------------------------


def in_input(arguments):
    spoil_input(arguments)
    arguments.hx[0, 6, :9] = -torch.inf


def in_weights(arguments):
    arguments.weights[1][4, 3] = torch.inf


NAN_CASES = [
    replace(BASE, dtype=dtype, lengths=True, **cell)
    for cell in CELLS + IN_PLACE
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("case", in_turn(NAN_CASES, every=4), ids=str)
def test_nan_and_infinity_go_through(chain, case):
    """Results are those of single steps, and no thread waits for ever."""

    def run(spoil):
        arguments = case.tensors().to(case.dtype)
        with torch.no_grad():
            spoil(arguments)
        return arguments.results(fusedrnn, **case.options)

    for spoil in (in_input, in_weights, spoil_gradient):
        theirs = chain(run, spoil, is_on=False)
        for exchange in (PACKETS, FLAGS):
            ours = chain(run, spoil, exchange=exchange)
            assert any(tensor.isnan().any() for tensor in ours.values())
            # A gradient of zero times infinity depends on what is multiplied at all.
            compared = outputs_of(ours) if spoil is in_weights else ours
            for name, tensor in compared.items():
                assert torch.equal(tensor.isnan(), theirs[name].isnan()), name


# --- sizes at which persistent kernels are claimed to be fast ------------------------------------

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


# Five goes through all cells, dtypes and depths.
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=pytest.mark.nightly if i % 5 else pytest.mark.slow)
        for i, size in enumerate(SMALL_SIZES)
    ],
    ids=str,
)
def test_speed_sizes(chain, size):
    """Compares both passes as test_error_is_at_most_twice_that_of_single_steps() does.

    In float32, errors are at most twice those of the loop that rounds by hand.
    """
    case, options = size.case, {"multiprocessors": size.multiprocessors}
    packets = chain(case.results, schedule=1, **options)
    is_float = case.dtype is torch.float32
    theirs = rounded_truth(case) if is_float else chain(case.results, is_on=False)
    assert_no_worse(packets, theirs, truth(case.same_for_torch(), "cpu"))
    assert_same(chain(case.results, exchange=FLAGS, schedule=2, **options), packets)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [{}, {"lengths": True, "bidirectional": True}], ids=str)
@each_base
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_memory_is_preset_once_in_forward_and_for_each_chunk_in_backward(
    persistent, chain, cell, base, mask
):
    """With packets, each kernel of forward presets the memory of the next one."""
    case = replace(LONG, dtype=base.dtype, **cell, **mask)

    def presets(**options):
        persistent(inferred, case, **options)
        chain(case.results, **options)
        return persistent.presets, chain.presets - persistent.presets

    directions, chunks = 1 + case.bidirectional, -(-case.seq_len // case.chunk_size)
    assert presets() == (directions, directions * chunks)
    assert presets(exchange=FLAGS) == (directions * chunks, directions * chunks)


@pytest.mark.parametrize(("cell", "gates"), [("gru", 3), ("lstm", 4)])
@pytest.mark.parametrize(
    ("dtype", "hidden_size", "packets"),
    [
        (torch.bfloat16, 64, 0),
        (torch.bfloat16, 63, 8),
        (torch.bfloat16, 65, 9),
        (torch.float32, 64, 16),  # never in place, because the array holds pre-activations
        (torch.float32, 61, 16),
    ],
    ids=str,
)
def test_only_what_is_not_sent_in_place_takes_memory(cell, gates, dtype, hidden_size, packets):
    """Every exchange takes 16 bytes more, and arrays of a workspace start at multiples of 256."""
    batch, chunk_size = 16, 32
    sizes = {"cell": cell, "input_size": 64, "hidden_size": hidden_size, "chunk_size": chunk_size}
    with tf32_allowed():
        persistent, stepwise = (
            fusedrnn.plan(sizes | {"backend": backend}, (1024, batch, 64), dtype, "H100")
            for backend in ("persistent", "stepwise")
        )
    assert persistent.backward.backend == "persistent"

    def aligned(size_bytes):
        return -(-size_bytes // 256) * 256

    expected = aligned(16 + 16 * packets * gates * batch * chunk_size)
    if dtype is torch.bfloat16:
        # Persistent kernels have separate arrays for gradients. Single steps put gradients in place
        # of later steps' numbers, with extra memory for one step. A GRU has two such arrays.
        for blocks in (1, 3) if cell == "gru" else (4,):
            step = 2 * batch * blocks * hidden_size  # bytes of a step's gradients
            apart = aligned(2 * step * chunk_size) + aligned(step * chunk_size)
            ahead = aligned(2 * step + (chunk_size - 1) * step) + step * chunk_size
            reversed_ = aligned(step) + 2 * step * chunk_size
            expected += apart - aligned(max(ahead, reversed_))
    taken = persistent.backward.workspace_bytes - stepwise.backward.workspace_bytes
    assert taken == expected
