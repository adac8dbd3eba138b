"""Memory, noise, strides, the processor's modes, and the shapes that tracers are told.

What a feature of torch does is checked by the rows of bench/compatibility.
"""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy
import pytest
import torch
from cases import CELLS, MASKED, Case, operator_arguments
from checks import allocations
from layouts import strided

import fusedrnn
from bench.clock import saved_sizes_bytes
from fusedrnn import reference

CASE = Case(seq_len=20, batch=6, chunk_size=8, dtype=torch.float32)
MASKED_CASE = replace(CASE, **MASKED, cell="lstm", num_layers=2)


@pytest.fixture(params=[*(replace(CASE, cell=cell) for cell in CELLS), MASKED_CASE], ids=str)
def case(request):
    return request.param


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def call(case, arguments, **options):
    return arguments.call(fusedrnn, **(case.options | options))


# --- memory --------------------------------------------------------------------------------------


def test_no_memory_for_gradients_that_nobody_needs(cell):
    case = Case(cell, seq_len=64, batch=8, input_size=512, chunk_size=4, dtype=torch.float32)
    arguments = case.tensors()
    arguments.weights[0].requires_grad_()
    output = call(case, arguments)[0]
    events = allocations(lambda: output.backward(arguments.grad_output))
    assert max(events) < arguments.input.nbytes / 2  # a gradient of the input would be larger


def saved_bytes(case, arguments, **options):
    """Of each tensor that is saved for backward, without the arguments; in falling order."""
    known = [t for t in arguments.differentiable() if t is not None]
    sizes = saved_sizes_bytes(lambda: call(case, arguments, **options)[0], known)
    return [size for size in sizes if size > 8]  # not the version of the flat buffer, nor the seed


@pytest.mark.parametrize("bidirectional", [False, True])
def test_saves_its_arguments_and_the_output_and_little_else(cell, bidirectional):
    """An LSTM also saves one c for each chunk, and recompute=False the pre-activations."""
    case = replace(CASE, cell=cell, bidirectional=bidirectional)
    arguments = case.tensors().to(torch.float32)
    directions, state = 2 if bidirectional else 1, case.batch * case.hidden_size * 4
    chunks = -(-case.seq_len // case.chunk_size)
    states = [directions * chunks * state] if cell == "lstm" else []
    output = directions * case.seq_len * state
    assert saved_bytes(case, arguments) == sorted([output, *states], reverse=True)
    columns = 4 * case.hidden_size + 2 * case.latent_size * (cell == "stochastic_gru")
    pre_activations = directions * case.seq_len * case.batch * columns * 4
    saved = saved_bytes(case, arguments, recompute=False)
    assert saved == sorted([pre_activations, output, *states], reverse=True)


def test_nothing_is_kept_without_gradients(cell):
    case = replace(CASE, cell=cell, seq_len=200)
    constants = case.tensors()
    variables = constants.to(torch.float32)
    output_size = 200 * 6 * 7 * 4
    for recompute in (True, False):
        sizes = allocations(lambda r=recompute: call(case, constants, recompute=r))
        assert max(sizes) == output_size
        with torch.no_grad():
            sizes = allocations(lambda r=recompute: call(case, variables, recompute=r))
        assert max(sizes) == output_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [True, False])
def test_number_of_allocations_does_not_depend_on_the_length(case, recompute, dtype):
    counts = []
    for seq_len in (16, 64, 256):
        longer = replace(case, seq_len=seq_len, dtype=dtype)
        arguments = longer.tensors().to(dtype)

        def train(arguments=arguments):
            output = call(case, arguments, recompute=recompute)[0]
            output.backward(arguments.grad_output)
            for tensor in arguments.differentiable():
                tensor.grad = None

        train()
        counts.append(len(allocations(train)))
    assert counts[0] == counts[1] == counts[2]


# --- eps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 - 1, -(2**62)])
def test_any_seed_gives_the_noise_of_the_reference(device, seed):
    case = Case(seq_len=5, num_layers=2, bidirectional=True, chunk_size=2)
    arguments = replace(case.tensors(device), seed=torch.tensor([seed], device=device))
    ours = arguments.call(fusedrnn, **case.options)
    torch.testing.assert_close(ours, arguments.call(reference, **case.sizes))


def test_eps_is_standard_normal_and_independent():
    first, layer, other = (
        reference.philox_normal(torch.tensor([seed]), 256, 64, 32, layer, torch.float64)
        for seed, layer in ((5, 0), (5, 1), (6, 0))
    )
    n = first.numel()
    kurtosis = (first**4).mean() / (first**2).mean() ** 2
    assert abs(first.mean()) < 5 * n**-0.5
    assert abs(first.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs(kurtosis - 3) < 5 * (24 / n) ** 0.5
    pairs = {
        "steps": (first[1:], first[:-1]),
        "rows": (first[:, 1:], first[:, :-1]),
        "units": (first[..., 1:], first[..., :-1]),
        "units of one Philox call": (first[..., 0::4], first[..., 1::4]),
        "layers": (first, layer),
        "calls": (first, other),
    }
    for name, (a, b) in pairs.items():
        for f in (lambda x: x, lambda x: x**2 - 1):  # correlations of numbers and of squares
            correlation = (f(a) * f(b)).mean() / f(first).square().mean()
            assert abs(correlation) < 5 * a.numel() ** -0.5, name


# --- lengths -------------------------------------------------------------------------------------

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
LENGTHS = [6, 2, 3]
KINDS_OF_LENGTHS = {
    **{f"tensor of {name}": torch.tensor(LENGTHS).to(getattr(torch, name)) for name in INTEGERS},
    **{f"array of {name}": numpy.array(LENGTHS, dtype=name) for name in INTEGERS},
    **{f"list of {name}": list(numpy.array(LENGTHS, dtype=name)) for name in INTEGERS},
    "list of tensors": list(torch.tensor(LENGTHS, dtype=torch.int32)),
    "list of all kinds": [torch.tensor(6), 2, numpy.int16(3)],
    "tuple": tuple(LENGTHS),
}


@pytest.mark.parametrize("kind", KINDS_OF_LENGTHS)
def test_lengths_are_integers_of_any_kind(kind):
    x, given = torch.randn(6, 3, 4), KINDS_OF_LENGTHS[kind]
    rnn, cell = fusedrnn.GRU(4, 5), torch.nn.GRUCell(4, 5)
    for call in (
        lambda lengths: rnn(x, lengths=lengths),
        lambda lengths: fusedrnn.functional.gru(x, list(rnn.parameters()), lengths=lengths),
        lambda lengths: fusedrnn.Recurrent(cell, compile="never")(x, lengths=lengths),
    ):
        torch.testing.assert_close(call(given), call(LENGTHS), rtol=0, atol=0)


# --- shapes and strides --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_strides_do_not_matter(device, case, dtype):
    case = replace(case, dtype=dtype, noise="eps")
    dense = case.tensors(device).to(dtype)
    expected = dense.results(fusedrnn, **case.options)

    arguments = dense.with_differentiable(map(strided, dense.differentiable()))
    for name in ("lengths", "reset", "grad_output", "grad_h_n", "grad_c_n"):
        if getattr(dense, name) is not None:
            setattr(arguments, name, strided(getattr(dense, name)))
    for name, value in arguments.results(fusedrnn, **case.options).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


# --- the processor -------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", [False, True])
def test_the_floating_point_mode_is_left_as_it_was(flush):
    arguments = Case(seq_len=4, batch=64, hidden_size=300, latent_size=300).tensors()
    arguments = arguments.to(torch.float32)
    denormal = torch.full((200_000,), 1e-40)  # large enough for all threads
    torch.set_flush_denormal(flush)  # sets this thread's mode
    try:
        arguments.results(fusedrnn)
        assert (denormal[:8] * 1.0 == 0).all() == flush
    finally:
        torch.set_flush_denormal(False)
    assert (denormal * 1.0 != 0).all()


def test_threads_have_small_stacks_and_are_left_as_they_were():
    """A thread of Python, and threads of torch's pool; sizes that use all kinds of products."""
    code = """
        import threading, torch, fusedrnn
        def train(dtype):
            rnn = fusedrnn.GRU(256, 256, dtype=dtype)
            rnn(torch.randn(2, 130, 256, dtype=dtype))[0].sum().backward()
        threading.stack_size(96 << 10)
        for dtype in (torch.float32, torch.float64):
            torch.set_num_threads(2)
            thread = threading.Thread(target=train, args=(dtype,))
            thread.start()
            thread.join()
        rnn = fusedrnn.StochasticGRU(64, 300, 300)
        x = torch.randn(4, 64, 64)
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            rnn(x)
            assert (torch.full((200_000,), 1e-40) * 1.0 != 0).all()  # no denormal is flushed
    """
    environment = os.environ | {"OMP_STACKSIZE": "96k"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)


# --- operators under tracers ---------------------------------------------------------------------


OPCHECK = [Case(cell, chunk_size=4, noise=n) for cell in CELLS for n in ("seed", "eps", "none")][2:]
OPCHECK += [Case(cell, chunk_size=4, noise="eps", **MASKED) for cell in CELLS]


@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck(case):
    raw = operator_arguments(case, case.tensors(), chunk_size=case.chunk_size)
    raw = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, raw)
    tests = ("test_schema", "test_faketensor")
    for save_gates in (False, True):
        forward = raw | {"save_gates": save_gates}
        torch.library.opcheck(torch.ops.fusedrnn.forward.default, (), forward, test_utils=tests)
    output, h_n, c_n, _, cell_states = torch.ops.fusedrnn.forward(**raw)
    has_cell_state = raw["cx"] is not None
    bits = [1, 2, 4 * has_cell_state, 8 * (raw["eps"] is not None)]
    bits += [16 << i for i in range(len(raw["weights"]))]
    for needs in (0, *{*bits}, sum(bits)):
        backward = raw | {"grad_output": output, "grad_h_n": h_n, "output": output, "needs": needs}
        backward |= {"grad_c_n": c_n if has_cell_state else None}
        backward |= {"chunk_cell_states": cell_states if has_cell_state else None}
        torch.library.opcheck(torch.ops.fusedrnn.backward.default, (), backward, test_utils=tests)


# --- autocast, which keeps converted copies of weights -------------------------------------------


def test_autocast_forgets_its_copies_whatever_the_default_dtype():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    fusedrnn._autocast._witnesses.clear()

    def output():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rnn(x)[0]

    torch.set_default_dtype(torch.bfloat16)
    try:
        first = output()
    finally:
        torch.set_default_dtype(torch.float32)
    rnn.flat_weight.mul_(2)
    assert not torch.equal(output(), first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, _ = rnn(x)
        rnn.weight_hh_l0.detach().mul_(2)
        assert not torch.equal(rnn(x)[0], first)


def test_autocast_of_fake_tensors_keeps_nothing():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    fusedrnn._autocast._witnesses.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = rnn(mode.from_tensor(x))[0]
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert type(rnn(x)[0]) is torch.Tensor


@pytest.mark.parametrize("make", [fusedrnn.GRU, fusedrnn.LSTMCell])
def test_autocast_converts_weights_once(make):
    rnn, x = make(3, 4), torch.randn(5, 3)
    places = {weight.data_ptr() for weight in rnn.parameters()}

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_cast = func is torch.ops.aten._to_copy.default
            self.casts += is_cast and args[0].data_ptr() in places
            return func(*args, **(kwargs or {}))

    def casts_of(*modes, calls=5):
        with torch.autocast("cpu", dtype=torch.bfloat16), Count() as count:
            for mode in modes:
                with mode:
                    outputs = [rnn(x)[0] for _ in range(calls)]
        return count.casts, outputs[0]

    casts, output = casts_of(torch.enable_grad())
    assert casts == 4
    assert casts_of(torch.no_grad())[0] == 4
    # Copies without a graph must not serve where gradients are wanted.
    casts, output = casts_of(torch.no_grad(), torch.enable_grad())
    assert casts == 8
    for weight in rnn.parameters():
        weight.data.mul_(2)  # which autograd does not notice; the graph of `output` has copies
    assert not torch.equal(casts_of(torch.enable_grad())[1], output)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert {p.grad.dtype for p in rnn.parameters()} == {torch.float32}
