"""Behaviour that users of torch.nn expect, apart from values.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from cases import CELLS, MASKED, MODULES, Case, operator_arguments
from checks import allocations, gradients

import fusedrnn
from fusedrnn import reference
from fusedrnn.cells import Sizes, layout

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


# --- gradients -----------------------------------------------------------------------------------


def test_backward_twice_and_with_retain_graph_gives_the_same(case):
    arguments = case.tensors().to(torch.float32)
    for recompute in (True, False):
        results = call(case, arguments, recompute=recompute)
        cotangents, wanted = arguments.cotangents(), arguments.differentiable()
        first = gradients(results, cotangents, wanted, retain_graph=True)
        second = gradients(results, cotangents, wanted)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            gradients(results, cotangents, wanted)


@pytest.mark.parametrize("through", [0, 1, 2])
def test_backward_through_one_result_alone(case, through):
    arguments = case.tensors().to(torch.float64)
    wanted = arguments.differentiable()
    through = min(through, len(arguments.cotangents()) - 1)
    grads = []
    for library, options in ((fusedrnn, case.options), (reference, case.sizes)):
        result = arguments.call(library, **options)[through]
        cotangent = arguments.cotangents()[through]
        # h_n of a layer does not depend on the weights of the next one.
        grads.append(gradients([result], [cotangent], wanted, materialize_grads=True))
    for ours, loop in zip(*grads, strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-10, atol=1e-12)


def test_gradients_of_exactly_the_inputs_that_need_them(case):
    everything = replace(case, noise="eps").tensors().to(torch.float64)
    wanted = everything.differentiable()
    full = gradients(call(case, everything)[:1], [everything.grad_output], wanted)
    for chosen, expected in zip(wanted, full, strict=True):
        for tensor in wanted:
            tensor.requires_grad_(tensor is chosen)
            tensor.grad = None
        call(case, everything)[0].backward(everything.grad_output)
        torch.testing.assert_close(chosen.grad, expected, rtol=1e-12, atol=1e-14)
        assert all(tensor.grad is None for tensor in wanted if tensor is not chosen)
    for tensor in wanted:
        tensor.requires_grad_(False)
    assert not any(result.requires_grad for result in call(case, everything))


def test_no_memory_for_gradients_that_nobody_needs(cell):
    case = Case(cell, seq_len=64, batch=8, input_size=512, chunk_size=4, dtype=torch.float32)
    arguments = case.tensors()
    arguments.weights[0].requires_grad_()
    output = call(case, arguments)[0]
    events = allocations(lambda: output.backward(arguments.grad_output))
    assert max(events) < arguments.input.nbytes / 2  # a gradient of the input would be larger


# --- memory --------------------------------------------------------------------------------------


def saved_storages(case, arguments, **options):
    """Storages that are saved for backward, without those of the arguments and the output."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call(case, arguments, **options)[0]
    known = [output, *arguments.differentiable(), arguments.seed]
    known = [t.untyped_storage().data_ptr() for t in known if t is not None]
    assert known[0] in saved
    found = [tensor for pointer, tensor in saved.items() if pointer not in known]
    return [tensor for tensor in found if tensor.nbytes > 0]  # not the version of the flat buffer


@pytest.mark.parametrize("bidirectional", [False, True])
def test_saves_its_arguments_and_the_output_and_little_else(cell, bidirectional):
    """An LSTM also saves one c for each chunk, and recompute=False the pre-activations."""
    case = replace(CASE, cell=cell, bidirectional=bidirectional)
    arguments = case.tensors().to(torch.float32)
    directions, state = 2 if bidirectional else 1, case.batch * case.hidden_size * 4
    chunks = -(-case.seq_len // case.chunk_size)
    states = [directions * chunks * state] if cell == "lstm" else []
    assert [t.nbytes for t in saved_storages(case, arguments)] == states
    columns = 4 * case.hidden_size + 2 * case.latent_size * (cell == "stochastic_gru")
    pre_activations = directions * case.seq_len * case.batch * columns * 4
    saved = saved_storages(case, arguments, recompute=False)
    assert sorted(t.nbytes for t in saved) == sorted([pre_activations, *states])


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


def drawn_eps(
    seed, seq_len, batch, latent_size, num_layers=1, bidirectional=False, chunk_size=None
):
    """The noise that the kernels use, read from layers that are built to show it: h' = tanh(z)."""
    size, directions = latent_size, 2 if bidirectional else 1
    parameters = layout("stochastic_gru", Sizes(*[size] * 4), num_layers, directions, True)
    weights = []
    for name, _, shape in parameters:
        weights.append(torch.zeros(shape, dtype=torch.float64, device=seed.device))
        if name.startswith("weight_zh"):
            weights[-1][2 * size :] = torch.eye(size)  # n = tanh(z)
        if name.startswith("bias_ih"):
            weights[-1][:size], weights[-1][size : 2 * size] = 50.0, -50.0  # r = 1, u = 0
    input = torch.zeros(seq_len, batch, size, dtype=torch.float64, device=seed.device)
    eps = []
    for layers in range(1, num_layers + 1):  # only the last layer of a stack shows its noise
        output, _ = fusedrnn.stochastic_gru(
            input,
            weights[: 6 * layers * directions],
            num_layers=layers,
            bidirectional=bidirectional,
            seed=seed,
            chunk_size=chunk_size,
        )
        eps += torch.atanh(output).split(size, -1)
    return torch.stack(eps)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 - 1, -(2**62)])
def test_eps_is_philox_of_seed_step_row_unit_and_layer(device, seed, bidirectional):
    seed = torch.tensor([seed], device=device)
    eps = drawn_eps(seed, 5, 3, 11, 2, bidirectional, chunk_size=2)
    assert len(eps) == (4 if bidirectional else 2)
    for layer, drawn in enumerate(eps):
        expected = reference.philox_normal(seed, 5, 3, 11, layer, torch.float64)
        torch.testing.assert_close(drawn, expected, rtol=1e-6, atol=1e-9)


def test_eps_does_not_depend_on_chunks_or_on_the_size_of_the_batch():
    seed = torch.tensor([99])
    whole = drawn_eps(seed, 40, 6, 9)
    assert torch.equal(whole, drawn_eps(seed, 40, 6, 9, chunk_size=7))
    assert torch.equal(whole[:, :13, :4], drawn_eps(seed, 13, 4, 9))


def test_eps_is_standard_normal_and_independent():
    eps = drawn_eps(torch.tensor([5]), 256, 64, 32, num_layers=2)
    other = drawn_eps(torch.tensor([6]), 256, 64, 32)[0]
    first = eps[0]
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
        "layers": (first, eps[1]),
        "calls": (first, other),
    }
    for name, (a, b) in pairs.items():
        for f in (lambda x: x, lambda x: x**2 - 1):  # correlations of numbers and of squares
            correlation = (f(a) * f(b)).mean() / f(first).square().mean()
            assert abs(correlation) < 5 * a.numel() ** -0.5, name


def test_sources_of_the_seed():
    rnn = fusedrnn.StochasticGRU(5, 7)
    input = torch.randn(4, 3, 5)
    torch.manual_seed(1)
    first = rnn(input)[0]
    second = rnn(input)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, rnn(input)[0])
    state = torch.get_rng_state()
    third = rnn(input)[0]
    torch.set_rng_state(state)
    assert torch.equal(third, rnn(input)[0])
    torch.manual_seed(1)
    rnn(input, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first, rnn(input)[0])  # an own generator leaves torch's alone
    assert torch.equal(first, rnn(input, generator=torch.Generator().manual_seed(1))[0])


# --- shapes and strides --------------------------------------------------------------------------


def test_an_empty_batch_works(case):
    arguments = replace(case, batch=0).tensors().to(torch.float32)
    output, *last = call(case, arguments)
    assert output.shape == arguments.grad_output.shape
    assert all(t.shape == arguments.hx.shape for t in last)
    (output.sum() + sum(t.sum() for t in last)).backward()
    assert arguments.input.grad.shape == arguments.input.shape
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in arguments.weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_strides_do_not_matter(device, case, dtype):
    case = replace(case, dtype=dtype, noise="eps")
    dense = case.tensors(device).to(dtype)
    expected = dense.results(fusedrnn, **case.options)

    def strided(tensor):
        """Copies with gaps, and with the last two dimensions swapped in memory."""
        dims = tensor.dim()
        if tensor.is_floating_point():
            gaps = torch.full([2 * n for n in tensor.shape], torch.nan).to(tensor)
        else:
            gaps = torch.ones([2 * n for n in tensor.shape]).to(tensor)
        if dims > 1:
            gaps = gaps.transpose(-1, -2).contiguous().transpose(-1, -2)
        view = gaps[tuple([slice(1, None, 2)] * dims)]
        view.copy_(tensor.detach())
        return view.requires_grad_(tensor.requires_grad)

    arguments = dense.with_differentiable(map(strided, dense.differentiable()))
    for name in ("lengths", "reset", "grad_output", "grad_h_n", "grad_c_n"):
        if getattr(dense, name) is not None:
            setattr(arguments, name, strided(getattr(dense, name)))
    for name, value in arguments.results(fusedrnn, **case.options).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_expanded_inputs_work(cell):
    case = replace(CASE, cell=cell)
    arguments = case.tensors()
    row = torch.randn(1, 1, 5, requires_grad=True)
    state = torch.randn(1, 1, 7, requires_grad=True)
    arguments.cx = None if arguments.cx is None else state.expand(1, 6, 7)
    expanded = replace(arguments, input=row.expand(20, 6, 5), hx=state.expand(1, 6, 7))
    dense = replace(expanded, input=expanded.input.contiguous(), hx=expanded.hx.contiguous())
    results = []
    for a in (expanded, dense):
        output = call(case, a)[0]
        results.append([output, *gradients([output.sum()], None, [row, state])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


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


def test_threads_that_a_call_starts_are_left_as_they_were():
    code = """
import torch, fusedrnn
rnn = fusedrnn.StochasticGRU(64, 300, 300)
x = torch.randn(4, 64, 64)
for threads in (1, 2, 1, 2):
    torch.set_num_threads(threads)
    rnn(x)
    assert (torch.full((200_000,), 1e-40) * 1.0 != 0).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_stack(dtype):
    # A thread of Python, and threads of torch's pool; sizes that use all kinds of products.
    code = f"""
        import threading, torch, fusedrnn
        def train():
            rnn = fusedrnn.GRU(256, 256, dtype=torch.{dtype})
            rnn(torch.randn(2, 130, 256, dtype=torch.{dtype}))[0].sum().backward()
        torch.set_num_threads(2)
        threading.stack_size(96 << 10)
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    """
    environment = os.environ | {"OMP_STACKSIZE": "96k"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)


# --- torch's own machinery -----------------------------------------------------------------------


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


def test_checkpoint_computes_the_same_again(cell):
    """The second run draws the same noise."""
    rnn = MODULES[cell](5, 7, num_layers=2, bidirectional=True)
    input = torch.randn(4, 3, 5, requires_grad=True)
    options = {"lengths": torch.tensor([4, 2, 3]), "reset": torch.rand(4, 3) < 0.3}

    def run(x):
        return rnn(x, **options)[0]

    grads = []
    for wrap in (False, True):
        torch.manual_seed(2)
        output = (
            torch.utils.checkpoint.checkpoint(run, input, use_reentrant=False)
            if wrap
            else run(input)
        )
        grads.append(gradients([output.square().sum()], None, [input, *rnn.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_func_grad(case):
    arguments = case.tensors()

    def loss(weight):
        weights = [weight, *arguments.weights[1:]]
        return call(case, replace(arguments, weights=weights))[0].sum()

    weight = arguments.weights[0].requires_grad_()
    (expected,) = gradients([loss(weight)], None, [weight])
    torch.testing.assert_close(torch.func.grad(loss)(weight.detach()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_in_its_dtype(cell, dtype):
    rnn = MODULES[cell](5, 7, bidirectional=True)
    input, state = torch.randn(4, 3, 5), torch.zeros(2, 3, 7)
    with torch.autocast("cpu", dtype=dtype):
        output, last = rnn(input, (state, state) if cell == "lstm" else state)
    for result in (output, *(last if cell == "lstm" else (last,))):
        assert result.dtype == dtype
    output.float().sum().backward()
    assert rnn.weight_ih_l0.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert rnn(input)[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert MODULES[cell](5, 7).double()(input.double())[0].dtype == torch.float64
        with pytest.raises(ValueError, match=r"got torch\.int64"):
            rnn(input.long())


def test_meta_tensors_have_the_right_shapes(cell):
    rnn = MODULES[cell](5, 7, num_layers=2, bidirectional=True, device="meta")
    output, last = rnn(torch.empty(4, 3, 5, device="meta"))
    assert output.shape == (4, 3, 14) and output.is_meta
    assert all(t.shape == (4, 3, 7) for t in (last if cell == "lstm" else (last,)))
