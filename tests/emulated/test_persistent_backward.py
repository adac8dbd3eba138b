"""The persistent kernels of backward_data, thread by thread on the CPU, called by the driver.

emulator/fibers.h says what only a GPU can show.
"""

from dataclasses import replace

import pytest
import torch
from cases import MASKED, relative_errors, truth
from checks import assert_no_worse, assert_same, with_bits
from emulator.persistent import FLAGS, PACKETS
from persistent_cases import BASE, FLOAT, FLOAT_SHAPES, IN_PLACE
from speed_sizes import CELLS, SMALL_SIZES, tf32_allowed
from tf32 import assert_backward_is_rounded, rounded_truth

import fusedrnn

SHAPES = [
    replace(BASE, seq_len=1, batch=1, input_size=1, hidden_size=1, latent_size=1),
    replace(BASE, seq_len=1, batch=9, chunk_size=1),
    replace(BASE, seq_len=7, chunk_size=3, **MASKED),
    replace(BASE, seq_len=7, chunk_size=3, recompute=False, **MASKED),
    replace(BASE, seq_len=4, bias=False, chunk_size=1, **MASKED),
    replace(BASE, dtype=torch.float16, chunk_size=4, **MASKED),
    replace(BASE, hidden_size=16, latent_size=33, batch=8),  # a block has 16 units
    replace(BASE, hidden_size=40, latent_size=7, batch=17, num_layers=2, lengths=True),
    replace(BASE, seq_len=17, batch=3, chunk_size=4),  # chunks that are replayed, and a short one
    replace(BASE, seq_len=17, batch=3, chunk_size=4, bidirectional=True, recompute=False),
]
CASES = [replace(shape, **cell) for cell in CELLS for shape in SHAPES]
CASES += [replace(shape, **cell) for cell in IN_PLACE for shape in (SHAPES[2], SHAPES[9])]
CASES.append(replace(BASE, cell="gru", seq_len=2, batch=2, hidden_size=1024))  # the limit

# float32 through TF32. Pre-activations are saved, since the emulation's products would recompute
# them without rounding.
FLOAT_LONG = replace(FLOAT, seq_len=17, batch=3, chunk_size=4, bidirectional=True)
FLOAT_CASES = [replace(shape, **cell) for cell in CELLS for shape in (*FLOAT_SHAPES, FLOAT_LONG)]
FLOAT_CASES += [
    replace(shape, **cell) for cell in IN_PLACE for shape in (FLOAT_SHAPES[2], FLOAT_LONG)
]
FLOAT_CASES.append(replace(FLOAT, cell="gru", seq_len=2, batch=2, hidden_size=512))  # the limit
FLOAT_CASES = [replace(case, recompute=False) for case in FLOAT_CASES]
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


def results(case, **options):
    return case.tensors().to(case.dtype).results(fusedrnn, **(case.options | options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_single_steps(chain, case):
    """Errors are against the loop in float64; and both protocols give the same bits."""
    packets = chain(results, case, exchange=PACKETS, schedule=1)
    steps = chain(results, case, is_on=False)
    assert_no_worse(packets, steps, truth(case.same_for_torch(), "cpu"))
    assert_same(chain(results, case, exchange=FLAGS, schedule=2), packets)


@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
def test_floats_are_rounded_to_tf32_and_nothing_else_is(chain, case):
    """Results are near the loop that rounds by hand, compared with that loop's own error."""
    packets = chain(results, case, exchange=PACKETS, schedule=1)
    assert_backward_is_rounded(packets, case)
    assert_same(chain(results, case, exchange=FLAGS, schedule=2), packets)


def test_floats_are_stepwise_where_torch_does_not_allow_tf32(chain):
    assert_same(chain(results, FLOAT, tf32=False, is_on=False), chain(results, FLOAT, is_on=False))
    with pytest.raises(AssertionError):
        chain(results, FLOAT, tf32=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", SMALL_SIZES, ids=str)
def test_speed_sizes(chain, size):
    """Compares both passes as test_error_is_at_most_twice_that_of_single_steps() does.

    In float32, errors are at most twice those of the loop that rounds by hand.
    """
    case, options = size.case, {"multiprocessors": size.multiprocessors}
    packets = chain(results, case, schedule=1, **options)
    is_float = case.dtype is torch.float32
    theirs = rounded_truth(case) if is_float else chain(results, case, is_on=False)
    assert_no_worse(packets, theirs, truth(case.same_for_torch(), "cpu"))
    assert_same(chain(results, case, exchange=FLAGS, schedule=2, **options), packets)


@pytest.mark.parametrize("case", MASKED_CASES, ids=str)
def test_order_of_threads_and_place_of_rows_make_no_difference(chain, case):
    """The order of threads varies, and so does the number of tiles in a group."""
    expected = chain(results, case, exchange=FLAGS)
    for exchange, schedule, multiprocessors in [(PACKETS, 2, 6), (FLAGS, 2, 3), (PACKETS, 3, 3)]:
        options = {"schedule": schedule, "multiprocessors": multiprocessors}
        assert_same(chain(results, case, exchange=exchange, **options), expected)


@pytest.mark.parametrize("training", [True, False])
@each_base
@pytest.mark.parametrize("cell", ZONEOUT, ids=str)
def test_zoneout(chain, cell, base, training):
    case = replace(base, seq_len=7, chunk_size=3, **cell, **MASKED)
    zoneout = (0.3, 0.6) if case.cell == "lstm" else 0.3

    def run(case):
        torch.manual_seed(5)  # draws the masks' seed
        return results(case, zoneout=zoneout, training=training)

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


def assert_close(gradient, expected, name):
    allowed = THROUGH_TF32 if gradient.dtype is torch.float32 else 2e-2
    assert (gradient - expected).norm() <= allowed * expected.norm(), name


@each_base
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("wanted", ["input", "weights", "none of h"])
def test_some_gradients_only(chain, cell, base, wanted):
    """Also with some cotangents only: the output's, or the last states'."""
    case = replace(base, chunk_size=3, **cell)
    exact = chain(results, case, is_on=False)

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


@each_base
@pytest.mark.parametrize("cell", ["gru", "lstm", "stochastic_gru"])
def test_weights_may_lie_in_columns(chain, cell, base):
    case = replace(base, cell=cell)

    def run(lay):
        arguments = case.tensors().to(case.dtype)
        weights = [lay(w.detach()).requires_grad_() for w in arguments.weights]
        return replace(arguments, weights=weights).results(fusedrnn, **case.options)

    in_columns = chain(run, lambda w: w.mT.contiguous().mT if w.dim() == 2 else w)
    assert_same(in_columns, chain(run, lambda w: w))


@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cell", CELLS + IN_PLACE, ids=str)
def test_nan_and_infinity_go_through(chain, cell, dtype, exchange):
    """Results are those of single steps, and no thread waits for ever."""
    case = replace(BASE, dtype=dtype, lengths=True, **cell)

    def run(spoil):
        arguments = case.tensors().to(dtype)
        with torch.no_grad():
            spoil(arguments)
        return arguments.results(fusedrnn, **case.options)

    def in_input(arguments):
        arguments.input[2, 1] = torch.nan
        arguments.hx[0, 6, :9] = -torch.inf

    def in_gradient(arguments):
        arguments.grad_output[1, 4, 2] = torch.inf
        with_bits(arguments.grad_h_n, 0, 3)

    for spoil in (in_input, in_gradient):
        theirs = chain(run, spoil, is_on=False)
        ours = chain(run, spoil, exchange=exchange)
        assert any(tensor.isnan().any() for tensor in ours.values())
        for name, tensor in ours.items():
            assert torch.equal(tensor.isnan(), theirs[name].isnan()), name


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
