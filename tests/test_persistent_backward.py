"""The persistent kernels of the adjoint chain, thread by thread on the CPU, under the driver.

What that cannot show, see emulator/fibers.h, a GPU has to.
"""

import functools
import subprocess
from dataclasses import replace

import pytest
import torch
from cases import MASKED, truth
from emulator import emulated_operators, use
from emulator.persistent import FLAGS, FOLDER, PACKETS, compiled
from speed_sizes import SMALL_SIZES
from test_persistent import BASE, CELLS, assert_no_worse, assert_same

import fusedrnn
from fusedrnn import _library

# Widths that fill whole packets, so that blocks exchange through the gradients themselves.
IN_PLACE = [
    {
        **cell,
        "hidden_size": 40,
        "latent_size": 24,
        **({"proj_size": 8} if "proj_size" in cell else {}),
    }
    for cell in CELLS
]
SHAPES = [
    replace(BASE, seq_len=1, batch=1, input_size=1, hidden_size=1, latent_size=1),
    replace(BASE, seq_len=1, batch=9, chunk_size=1),
    replace(BASE, seq_len=7, chunk_size=3, **MASKED),
    replace(BASE, seq_len=7, chunk_size=3, recompute=False, **MASKED),
    replace(BASE, seq_len=4, bias=False, chunk_size=1, **MASKED),
    replace(BASE, dtype=torch.float16, chunk_size=4, **MASKED),
    replace(BASE, hidden_size=16, latent_size=33, batch=8),  # as many units as a block has
    replace(BASE, hidden_size=40, latent_size=7, batch=17, num_layers=2, lengths=True),
    replace(BASE, seq_len=17, batch=3, chunk_size=4),  # chunks that are replayed, and a short one
    replace(BASE, seq_len=17, batch=3, chunk_size=4, bidirectional=True, recompute=False),
]
CASES = [replace(shape, **cell) for cell in CELLS for shape in SHAPES]
CASES += [replace(shape, **cell) for cell in IN_PLACE for shape in (SHAPES[2], SHAPES[9])]
CASES.append(replace(BASE, cell="gru", seq_len=2, batch=2, hidden_size=1024))  # and no more

# Small, and with all that a row can do: two groups, of two tiles each.
MASKED_CASES = [
    replace(BASE, seq_len=5, batch=27, chunk_size=3, **cell, **MASKED) for cell in CELLS + IN_PLACE
]
ZONEOUT = [cell for cell in CELLS if "noise" not in cell]


def results(case, **options):
    return case.tensors().to(case.dtype).results(fusedrnn, **(case.options | options))


@pytest.fixture
def chain(monkeypatch):
    """A call's results by the kernels, under the driver as it is, unless ``is_on`` says otherwise.

    ``options`` are those of the emulation: multiprocessors, schedule (the seed of the order of
    threads), backward_bug and patience (in looks at memory).
    """
    operators = emulated_operators()

    def call(function, *arguments, is_on=True, exchange=PACKETS, **options):
        options = {"multiprocessors": 132, "schedule": 1} | options
        operators.control(False, "", **(options if is_on else {}))
        with monkeypatch.context() as patch:
            use(patch, operators)
            patch.setattr(_library, "exchange_by_flags", exchange == FLAGS)
            found = function(*arguments)
        assert (operators.counts()[3] > 0) == is_on
        return found

    yield call
    operators.control(False, "")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_single_steps(chain, case):
    """Both against the loop in float64; and both protocols give the same bits."""
    packets = chain(results, case, exchange=PACKETS, schedule=1)
    steps = chain(results, case, is_on=False)
    assert_no_worse(packets, steps, truth(case.same_for_torch(), "cpu"))
    assert_same(chain(results, case, exchange=FLAGS, schedule=2), packets)


@pytest.mark.parametrize(
    "size", [size for size in SMALL_SIZES if size.case.dtype is not torch.float32], ids=str
)
def test_speed_sizes(chain, size):
    """Both passes, as in test_error_is_at_most_twice_that_of_single_steps()."""
    case, options = size.case, {"multiprocessors": size.multiprocessors}
    packets = chain(results, case, schedule=1, **options)
    assert_no_worse(packets, chain(results, case, is_on=False), truth(case.same_for_torch(), "cpu"))
    assert_same(chain(results, case, exchange=FLAGS, schedule=2, **options), packets)


@pytest.mark.parametrize("case", MASKED_CASES, ids=str)
def test_order_of_threads_and_place_of_rows_make_no_difference(chain, case):
    """Whichever thread goes first, and however many tiles a group has, down to all in one."""
    expected = chain(results, case, exchange=FLAGS)
    for exchange, schedule, multiprocessors in [(PACKETS, 2, 6), (FLAGS, 2, 3), (PACKETS, 3, 3)]:
        options = {"schedule": schedule, "multiprocessors": multiprocessors}
        assert_same(chain(results, case, exchange=exchange, **options), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cell", ZONEOUT, ids=str)
def test_zoneout(chain, cell, training):
    case = replace(BASE, seq_len=7, chunk_size=3, **cell, **MASKED)
    zoneout = (0.3, 0.6) if case.cell == "lstm" else 0.3

    def run(case):
        torch.manual_seed(5)  # draws the masks' seed
        return results(case, zoneout=zoneout, training=training)

    torch.manual_seed(5)
    exact = case.tensors().to(torch.float64)
    exact = exact.results(fusedrnn, **case.options, zoneout=zoneout, training=training)
    ours = chain(run, case)
    assert_no_worse(ours, chain(run, case, is_on=False), exact)
    assert_same(chain(run, case, exchange=FLAGS, schedule=2), ours)


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("wanted", ["input", "weights", "none of h"])
def test_some_gradients_only(chain, cell, wanted):
    """Also from some cotangents only: those of the output, or those of the last state."""
    case = replace(BASE, chunk_size=3, **cell)
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
        assert (gradient - theirs[name]).norm() < 2e-2 * theirs[name].norm(), name
        assert torch.equal(theirs[name], exact[f"grad_{name}"])


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_from_output_or_last_state_alone(chain, cell, which):
    case = replace(BASE, chunk_size=3, **cell, **MASKED)

    def run():
        arguments = case.tensors().to(case.dtype)
        result = arguments.call(fusedrnn, **case.options)[which]
        wanted = arguments.named()
        cotangent = arguments.cotangents()[which]
        gradients = torch.autograd.grad(result, list(wanted.values()), cotangent)
        return dict(zip(wanted, gradients, strict=True))

    theirs = chain(run, is_on=False)
    for name, gradient in chain(run).items():
        assert (gradient - theirs[name]).norm() <= 2e-2 * theirs[name].norm(), name


@pytest.mark.parametrize("cell", ["gru", "lstm", "stochastic_gru"])
def test_weights_may_lie_in_columns(chain, cell):
    case = replace(BASE, cell=cell)

    def run(lay):
        arguments = case.tensors().to(case.dtype)
        weights = [lay(w.detach()).requires_grad_() for w in arguments.weights]
        return replace(arguments, weights=weights).results(fusedrnn, **case.options)

    in_columns = chain(run, lambda w: w.mT.contiguous().mT if w.dim() == 2 else w)
    assert_same(in_columns, chain(run, lambda w: w))


@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", CELLS + IN_PLACE, ids=str)
def test_nan_and_infinity_go_through(chain, cell, dtype, exchange):
    """As in single steps, and nobody waits for ever."""
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
        arguments.grad_h_n.view(torch.int16)[0, 3] = -1  # the NaN whose bits are all set

    for spoil in (in_input, in_gradient):
        theirs = chain(run, spoil, is_on=False)
        ours = chain(run, spoil, exchange=exchange)
        assert any(tensor.isnan().any() for tensor in ours.values())
        for name, tensor in ours.items():
            assert torch.equal(tensor.isnan(), theirs[name].isnan()), name


@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
def test_gives_up_on_what_never_comes(chain, exchange):
    with pytest.raises(RuntimeError, match="other blocks have not sent their results in time"):
        chain(results, BASE, backward_bug=8, patience=50, exchange=exchange)


@pytest.mark.parametrize("hidden_size", [37, 40])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_another_nan_would_hang(chain, cell, hidden_size):
    """If narrow() let the bits of a NaN through."""

    def run():
        arguments = replace(BASE, cell=cell, hidden_size=hidden_size).tensors().to(BASE.dtype)
        arguments.grad_output[2, 1] = torch.nan
        return arguments.results(fusedrnn)

    with pytest.raises(RuntimeError, match="other blocks have not sent their results in time"):
        chain(run, backward_bug=11, patience=50)


PROGRAM = FOLDER / "persistent_backward.cpp"
KERNELS = ["gru", "lstm", "projected_lstm", "stochastic_gru", "location_gru"]
# Sizes and direction of time: with exchanges through the gradients, and with buffers for them.
PROBLEMS = [(40, 1), (40, -1), (37, 1)]


def run_program(name, flags, cell, hidden, direction, exchange, schedule=1, bug=0):
    """Its exit status, and what it prints: a number that stands for all results."""
    path = compiled(f"chain_{name}", "-g1", *flags, source=PROGRAM)
    command = [path, cell, *map(str, (hidden, direction, exchange, schedule, bug))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def watched(*arguments, **options):
    """Under the thread sanitizer: every access has to be ordered with all others."""
    status, printed = run_program("watched", ["-fsanitize=thread"], *arguments, **options)
    if "FATAL: ThreadSanitizer" in printed:  # of some kernels' layout of memory it makes nothing
        pytest.skip(printed.partition("\n")[0])
    return status, printed


@functools.cache
def undisturbed(cell, hidden, direction):
    status, printed = watched(cell, hidden, direction, PACKETS)
    assert status == 0, printed
    return printed


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("cell", KERNELS)
def test_no_access_is_unordered(cell, problem):
    assert "WARNING" not in undisturbed(cell, *problem)
    assert watched(cell, *problem, FLAGS, schedule=2) == (0, undisturbed(cell, *problem))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
@pytest.mark.parametrize("cell", KERNELS)
def test_no_access_is_out_of_bounds(cell, exchange, problem):
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    status, printed = run_program("bounded", flags, cell, *problem, exchange)
    assert status == 0, printed


BUGS = {
    "no barrier before sums are read": (1, "gru", PACKETS),
    "no barrier after flags are seen": (2, "gru", FLAGS),
    "flags are set without release": (3, "gru", FLAGS),
    "no barrier before flags are set": (4, "gru", FLAGS),
    "a warp ends early": (5, "gru", PACKETS),
    "one slot for all steps": (6, "gru", FLAGS),
    "one buffer of sums instead of two": (7, "gru", PACKETS),
    "nothing is sent": (8, "lstm", PACKETS),
    "a tile too early": (9, "stochastic_gru", FLAGS),
    "packets are not waited for": (10, "stochastic_gru", PACKETS),
    "no barrier after weights are turned": (12, "gru", PACKETS),
    "weights are turned by lanes in step": (13, "gru", PACKETS),
}
BUGS_IN_PLACE = BUGS | {"gradients are not preset": (14, "stochastic_gru", PACKETS)}


@pytest.mark.parametrize(
    ("bug", "hidden"), [(bug, 37) for bug in BUGS] + [(bug, 40) for bug in BUGS_IN_PLACE]
)
def test_bugs_are_caught(bug, hidden):
    number, cell, exchange = BUGS_IN_PLACE[bug]
    expected = undisturbed(cell, hidden, 1)
    for schedule in (1, 2, 3):
        if watched(cell, hidden, 1, exchange, schedule=schedule, bug=number) != (0, expected):
            return
    pytest.fail(f"nobody noticed: {bug}", pytrace=False)


@pytest.mark.parametrize(("cell", "gates"), [("gru", 3), ("lstm", 4)])
@pytest.mark.parametrize(("hidden_size", "packets"), [(64, 0), (63, 8), (65, 9)])
def test_only_widths_that_leave_packets_incomplete_take_memory(cell, gates, hidden_size, packets):
    """Beside the 16 bytes that every exchange takes; arrays of a workspace begin at 256 bytes."""
    batch, chunk_size = 16, 32
    sizes = {"cell": cell, "input_size": 64, "hidden_size": hidden_size, "chunk_size": chunk_size}
    persistent, stepwise = (
        fusedrnn.plan(sizes | {"backend": backend}, (1024, batch, 64), torch.bfloat16, "H100")
        for backend in ("persistent", "stepwise")
    )
    exchange_bytes = 16 + 16 * packets * gates * batch * chunk_size
    taken = persistent.backward_workspace_bytes - stepwise.backward_workspace_bytes
    assert taken == -(-exchange_bytes // 256) * 256
