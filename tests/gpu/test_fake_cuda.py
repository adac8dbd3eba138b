"""The code that calls CUDA, over a fake of CUDA: launches, streams, graphs, GEMMs, errors.

``tests/fake_cuda`` compiles ``csrc/ops/ops_cuda.cpp`` and all of ``csrc/cuda/`` as they are. It
carries out what they ask for in any order that the streams allow, and notes what CUDA forbids. It
cannot show PTX (see test_ptx.py), registers, the algorithms of cuBLASLt, or time.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

from dataclasses import replace

import pytest
import torch
from cases import MASKED, Case, allow_tf32, relative_errors, truth
from checks import assert_same
from emulator import use
from fake_cuda import fake_operators
from layouts import shifted, transposed, with_gaps, with_wide_rows
from speed_sizes import CELLS

import fusedrnn
from fusedrnn import _checks as checks
from fusedrnn import _ops, reference
from fusedrnn import _tuning as tuning

pytestmark = pytest.mark.slow  # compiles all of csrc/cuda

# Enough chunks for some to be replayed, and a short one; units of two blocks.
BASE = Case(seq_len=7, batch=3, hidden_size=19, latent_size=17, chunk_size=2)
IN_PLACE = {"hidden_size": 24, "latent_size": 16}  # whole packets
OPTIONS = [{}, {"recompute": False}, {"chunk_size": 4, **MASKED}, IN_PLACE]
CASES = [
    replace(BASE, dtype=dtype, **(cell | options))
    for options in OPTIONS
    for cell in CELLS
    for dtype in (torch.float64, torch.bfloat16)
]
CASES += [
    replace(BASE, batch=11, dtype=dtype, **cell)
    for cell in CELLS
    for dtype in (torch.float32, torch.float16)
]
CASES.append(replace(BASE, num_layers=2, **MASKED, dtype=torch.bfloat16))
# Errors against the loop in float64, in addition to twice those of the operators for the CPU. In
# 16 bits, backward multiplies rounded gradients.
ALLOWED = {
    torch.float64: 1e-13,
    torch.float32: 5e-7,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}
TF32 = 2**-9
# Orders of work that is not ordered: as enqueued, reversed, random.
ORDERS = [0, 1, 2]


def results(arguments, case, **options):
    return arguments.results(fusedrnn, **(case.options | options))


@pytest.fixture
def gpu(monkeypatch):
    """A case's results by the fake GPU, which must not have found a fault.

    ``options`` are the fake's. ``layout`` changes the arguments after they are made.
    """
    operators = fake_operators()

    def call(case, layout=lambda a: a, by_flags=False, overlap=False, replay=True, **options):
        operators.control(**options)
        operators.take_notes()
        with monkeypatch.context() as patch:
            use(patch, operators)
            patch.setattr(tuning.switches, "exchange_by_flags", by_flags)
            patch.setattr(tuning.switches, "overlap_chunks", overlap)
            patch.setattr(tuning.switches, "replay_chunks", replay)
            patch.setattr(checks, "lengths", lengths_on_the_host)
            found = results(layout(on_gpu(case.tensors(), case)), case)
        call.launches, call.cooperative, call.gemms, call.replays, call.waits = operators.counts()
        assert operators.take_notes() == ""
        assert operators.last_error() == 0
        return found

    check_lengths = checks.lengths

    def lengths_on_the_host(*arguments):
        """A copy of lengths stays on the CPU, as they do."""
        operators.use_gpu_memory(False)
        try:
            return check_lengths(*arguments)
        finally:
            operators.use_gpu_memory(True)

    def on_gpu(arguments, case):
        arguments = arguments.to(case.dtype)
        operators.use_gpu_memory(False)
        lengths = None if arguments.lengths is None else arguments.lengths.clone()
        operators.use_gpu_memory(True)
        return replace(arguments, lengths=lengths)

    call.operators = operators
    operators.use_gpu_memory(True)
    yield call
    operators.use_gpu_memory(False)
    operators.control()


def assert_right(ours, case, tf32=False):
    exact = truth(case.same_for_torch(), "cpu")
    theirs = relative_errors(results(case.tensors().to(case.dtype), case), exact)
    allowed = TF32 if tf32 else ALLOWED[case.dtype]
    for name, error in relative_errors(ours, exact).items():
        assert error <= 2 * theirs[name] + allowed, (name, error, theirs[name])


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(gpu, case):
    assert_right(gpu(case, order=2, own_stream=True), case)
    is_persistent = case.dtype in (torch.bfloat16, torch.float16)
    assert (gpu.cooperative > 0) == is_persistent
    assert (gpu.replays > 0) == (not is_persistent and not case.lengths)


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("width", [10, 12])
def test_random_numbers_by_themselves(gpu, width, dtype):
    """One kernel draws them, and reads the seed on the GPU."""
    gpu.operators.control(own_stream=True)
    seed = torch.tensor([5])
    for distribution in (_ops.NORMAL, _ops.UNIFORM):
        arguments = (seed, 7, 5, 3, width, 2, distribution, dtype)
        drawn = gpu.operators.draw(*arguments)
        expected = torch.ops.fusedrnn.draw(*arguments)
        allowed = 2 * ALLOWED[dtype]
        torch.testing.assert_close(drawn, expected, rtol=allowed, atol=allowed)
    assert gpu.operators.counts()[0] == 2  # launches
    assert gpu.operators.counts()[4] == 0  # waits
    assert gpu.operators.take_notes() == "" and gpu.operators.last_error() == 0


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_of_the_output_alone(gpu, monkeypatch, cell):
    """The gradients of the last states are zeros, in memory that was not preset."""
    case = replace(BASE, **cell)

    def gradients(library, arguments, **options):
        output, *_ = arguments.call(library, **options)
        return torch.autograd.grad(output, arguments.differentiable(), arguments.grad_output)

    expected = gradients(reference, case.tensors().to(case.dtype), **case.sizes)
    use(monkeypatch, gpu.operators)
    gpu.operators.control(order=1, own_stream=True)
    ours = gradients(fusedrnn, case.tensors().to(case.dtype), **case.options)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert gpu.operators.take_notes() == ""


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_recorded_chunks_give_the_same_bits(gpu, cell):
    case = replace(BASE, **cell)
    expected = gpu(case, replay=False)
    assert gpu.replays == 0
    for order in ORDERS:
        assert_same(gpu(case, order=order, own_stream=order > 0), expected)
        assert gpu.replays > 0


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_values_through_tf32(gpu, cell):
    """Both passes run a persistent kernel for each chunk."""
    case = replace(BASE, dtype=torch.float32, **cell)
    allow_tf32(True)
    ours = gpu(case)
    assert_right(ours, case, tf32=True)
    assert gpu.cooperative == 2 * -(-case.seq_len // case.chunk_size) and gpu.replays == 0
    assert_same(gpu(case, by_flags=True, order=3), ours)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_both_protocols_give_the_same_bits(gpu, cell):
    case = replace(BASE, batch=11, dtype=torch.bfloat16, **cell, **MASKED)
    assert_same(gpu(case, by_flags=True, order=2), gpu(case, order=1))


@pytest.mark.parametrize("masked", [{}, {"reset": True, "recompute": False}], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_second_stream(gpu, cell, masked):
    case = replace(BASE, dtype=torch.bfloat16, **cell, **masked)
    expected = gpu(case)
    assert gpu.waits == 0
    for order in ORDERS:
        own = order > 0
        assert_same(gpu(case, overlap=True, order=order, own_stream=own), expected)
        assert gpu.waits > 0


@pytest.mark.parametrize("cell", [{"cell": "lstm"}, {"cell": "stochastic_gru"}], ids=str)
def test_few_multiprocessors(gpu, cell):
    """Blocks have several tiles, and so much shared memory that it needs permission."""
    case = replace(BASE, seq_len=2, batch=200, hidden_size=60, dtype=torch.bfloat16, **cell)
    assert_right(gpu(case, device=1), case)
    assert gpu.cooperative > 0


def trained(arguments):
    for tensor in arguments.differentiable():
        tensor.requires_grad_()
    return arguments


def with_weights(arguments, change):
    weights = [change(w.detach()) if w.dim() == 2 else w for w in arguments.weights]
    return trained(replace(arguments, weights=weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [transposed, with_gaps, with_wide_rows, shifted])
def test_memory_of_any_layout(gpu, change, dtype):
    case = replace(BASE, noise="eps", input_size=8, dtype=dtype, **IN_PLACE)

    def layout(arguments):
        arguments = with_weights(arguments, change)
        if change is transposed:  # only for matrices
            return arguments
        names = ("input", "eps", "grad_output")
        changed = {name: change(getattr(arguments, name).detach()) for name in names}
        return trained(replace(arguments, **changed))

    assert_right(gpu(case, layout), case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_that_is_recorded(gpu, monkeypatch, overlap, dtype):
    """Forward reads the contents of its arguments at the time when the graph is launched."""
    operators = gpu.operators
    case = replace(BASE, dtype=dtype)
    expected = gpu(case)
    operators.control()
    arguments = case.tensors().to(dtype)
    values = [t.detach().clone() for t in arguments.differentiable()]
    use(monkeypatch, operators)
    monkeypatch.setattr(tuning.switches, "overlap_chunks", overlap)
    with torch.no_grad():
        arguments.call(fusedrnn, **case.options)  # algorithms cannot be chosen while recording
        operators.begin_recording()
        output, h_n = arguments.call(fusedrnn, **case.options)
        operators.end_recording()
        for tensor in arguments.differentiable():
            tensor.zero_()
        operators.replay()
        assert not torch.equal(output, expected["output"])
        for tensor, value in zip(arguments.differentiable(), values, strict=True):
            tensor.copy_(value)
        operators.replay()
    assert_same({"output": output, "h_n": h_n}, {n: expected[n] for n in ("output", "h_n")})
    assert operators.take_notes() == ""


# --- failures ------------------------------------------------------------------------------------

SMALL = replace(BASE, hidden_size=5, latent_size=3, chunk_size=1)
FAILED = "failed to launch: the operation cannot be performed in the present state"


@pytest.mark.parametrize("replay", [False, True])
def test_a_launch_that_fails(gpu, replay):
    """Any launch may fail, also while recording: it is reported once, and later calls work."""
    expected = gpu(SMALL, replay=replay)
    for number in range(gpu.launches):
        with pytest.raises(RuntimeError, match=FAILED):
            gpu(SMALL, replay=replay, failing_launch=number)
        assert gpu.operators.take_notes().count("it was told to fail") == 1
        assert gpu.operators.last_error() == 0
    assert_same(gpu(SMALL, replay=replay), expected)


def test_a_launch_that_fails_beside_a_second_stream(gpu):
    case = replace(BASE, cell="lstm", dtype=torch.bfloat16)
    expected = gpu(case, overlap=True)
    for number in range(0, gpu.launches, 3):
        with pytest.raises(RuntimeError, match=FAILED):
            gpu(case, overlap=True, failing_launch=number)
        assert gpu.operators.last_error() == 0
    assert_same(gpu(case, overlap=True), expected)


def test_a_gpu_that_others_use_too(gpu):
    """A grid whose blocks wait for each other is refused if they cannot all run.

    Single steps then replace it. The driver counts all multiprocessors, not the free ones. A
    refused kernel is not tried again.
    """
    case = replace(BASE, cell="lstm", dtype=torch.float16)
    with pytest.raises(AssertionError, match="2 blocks at once on 1 multiprocessors"):
        gpu(case, free_multiprocessors=1)  # the fake then refuses the grid
    for free in (1, -1):
        ours = gpu(case, free_multiprocessors=free, forgets=False)
        assert gpu.cooperative == 0
        assert_right(ours, case)
    gpu(case, device=1, forgets=False)
    assert gpu.cooperative > 0


NO_ALGORITHM, NO_SEARCH, NO_PRODUCT, EXACT = 1, 2, 3, 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("obstacle", [NO_ALGORITHM, NO_SEARCH, NO_PRODUCT])
def test_products_without_cublaslt(gpu, obstacle, dtype):
    """The sizes are of no other test, since algorithms that were found are remembered."""
    case = replace(BASE, input_size=23, hidden_size=25 + obstacle, latent_size=13, dtype=dtype)
    assert_right(gpu(case, no_gemm=obstacle), case)
    assert gpu.gemms == gpu.replays == 0
    assert_right(gpu(case, no_gemm=obstacle, overlap=True), case)


def test_torch_rounds_no_product_that_may_not_be_rounded(gpu):
    """torch's matrix products have their own switch, so they get float64, which is not rounded."""
    case = replace(BASE, input_size=31, hidden_size=33, dtype=torch.float32)
    as_float = gpu(case, no_gemm=NO_ALGORITHM)
    as_double = gpu(case, no_gemm=NO_ALGORITHM, torch_tf32=True)
    assert_right(as_double, case)
    assert any(not torch.equal(as_float[name], as_double[name]) for name in as_float)


def test_long_sums_of_float32_are_made_in_parts(gpu):
    """This concerns gradients of weights over 600 rows, and of the input over 144 columns."""
    small = Case("gru", seq_len=10, batch=20, hidden_size=32, chunk_size=10, dtype=torch.float32)
    large = replace(small, batch=60, hidden_size=72)
    for case, more in ((small, 0), (large, 3 * 2 + 1)):
        counts = []
        for dtype in (torch.float64, torch.float32):
            assert_right(gpu(replace(case, dtype=dtype)), replace(case, dtype=dtype))
            counts.append(gpu.gemms)
        assert counts[1] - counts[0] == more


def test_one_algorithm_serves_about_as_many_rows(gpu):
    """It is chosen for the most rows, whichever come first, and replaced if unsupported."""
    searches = {}
    for batch in range(65, 97):
        case = replace(BASE, seq_len=2, batch=batch, input_size=27, dtype=torch.float64)
        before = gpu.operators.searches()
        expected = gpu(case, replay=False)
        searches[batch] = gpu.operators.searches() - before
        assert_same(gpu(case, replay=False, no_gemm=EXACT), expected)
    # And once for each alignment of the memory after these rows.
    most = max(searches.values())
    assert [batch for batch, count in searches.items() if 2 * count > most] == [65, 73, 81, 89]
    assert sum(searches.values()) < 8 * most


def test_an_algorithm_of_its_own_is_found_before_a_recording(gpu, monkeypatch):
    """The first call finds it, if the algorithm for similar numbers of rows is unsupported."""
    case = replace(BASE, batch=33, input_size=29, dtype=torch.float64)
    gpu(case, no_gemm=EXACT, replay=False)
    arguments = case.tensors().to(case.dtype)
    use(monkeypatch, gpu.operators)
    with torch.no_grad():
        for _ in range(2):
            arguments.call(fusedrnn, **case.options)
        gpu.operators.begin_recording()
        arguments.call(fusedrnn, **case.options)
        gpu.operators.end_recording()
    assert gpu.operators.take_notes() == ""


# --- faults that have to be noticed --------------------------------------------------------------

# Faults that csrc/ would have if it left a call out, in the order of tests/fake_cuda/fake.h.
FAULTS = {
    "a wait of the first stream": {"overlap": True},
    "a wait of the second stream": {"overlap": True},
    "shared memory that is not asked for": {"device": 1, "batch": 200, "hidden_size": 60},
    "a launch that is not cooperative": {},
    "a grid without its last block": {"batch": 30},
    "blocks of half as many threads": {"batch": 30},
    "memory that is not preset": {},
    "an error that is not cleared": {"failing_launch": 3},
    "matrices without their strides": {"layout": with_wide_rows},
    "a matrix that is not transposed": {"input_size": 3 * 19},  # square
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(gpu, fault):
    options = dict(FAULTS[fault])
    sizes = {name: options.pop(name) for name in tuple(options) if name in Case.__annotations__}
    case = replace(BASE, seq_len=5, dtype=torch.bfloat16, **sizes)
    if change := options.pop("layout", None):
        options["layout"] = lambda arguments: with_weights(arguments, change)
    number = options.pop("failing_launch", -1)
    expected, cooperative = gpu(case, **options), gpu.cooperative
    for order in ORDERS:
        bug = {"bug": 1 + list(FAULTS).index(fault), "failing_launch": number, "order": order}
        try:
            ours = gpu(case, **options, **bug)
        except (RuntimeError, AssertionError):  # a refusal, or a finding of the fake
            break
        if any(not torch.equal(ours[name], expected[name]) for name in expected):
            break
        if gpu.cooperative != cooperative:  # the driver would have refused it
            break
    else:
        pytest.fail("nobody has noticed")
    assert number < 0 or gpu.operators.last_error() != 0
    gpu.operators.take_notes()
