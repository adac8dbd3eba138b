"""What a user of torch.nn expects of the operator beyond its values."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import Case
from torch.profiler import ProfilerActivity, profile

import fusedrnn
from fusedrnn import reference
from fusedrnn._library import layout

CASE = Case(seq_len=20, batch=6, chunk_size=8, dtype=torch.float32)


def call(arguments, **options):
    return arguments.call(fusedrnn, **(CASE.options | options))


def gradients(outputs, cotangents, inputs, **options):
    return torch.autograd.grad(outputs, inputs, cotangents, **options)


# --- gradients -----------------------------------------------------------------------------------


def test_backward_twice_and_with_retain_graph_gives_the_same():
    arguments = CASE.tensors().to(torch.float32)
    for recompute in (True, False):
        output, h_n = call(arguments, recompute=recompute)
        cotangents = [arguments.grad_output, arguments.grad_h_n]
        wanted = arguments.differentiable()
        first = gradients([output, h_n], cotangents, wanted, retain_graph=True)
        second = gradients([output, h_n], cotangents, wanted)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            gradients([output, h_n], cotangents, wanted)


@pytest.mark.parametrize("through", ["output", "h_n"])
def test_backward_through_one_result_alone(through):
    arguments = CASE.tensors().to(torch.float64)
    wanted = arguments.differentiable()
    grads = []
    for function in (fusedrnn.stochastic_gru, reference.stochastic_gru):
        output, h_n = arguments.call(function)
        result, cotangent = (
            (output, arguments.grad_output) if through == "output" else (h_n, arguments.grad_h_n)
        )
        grads.append(gradients([result], [cotangent], wanted))
    for ours, loop in zip(*grads, strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-10, atol=1e-12)


def test_gradients_of_exactly_the_inputs_that_need_them():
    everything = CASE.tensors().to(torch.float64)
    everything = replace(everything, seed=None, eps=torch.randn(1, 20, 6, 6).double())
    everything.eps.requires_grad_()
    wanted = everything.differentiable()
    full = gradients([call(everything)[0]], [everything.grad_output], wanted)
    for chosen, expected in zip(wanted, full, strict=True):
        for tensor in wanted:
            tensor.requires_grad_(tensor is chosen)
            tensor.grad = None
        call(everything)[0].backward(everything.grad_output)
        torch.testing.assert_close(chosen.grad, expected, rtol=1e-12, atol=1e-14)
        assert all(tensor.grad is None for tensor in wanted if tensor is not chosen)
    for tensor in wanted:
        tensor.requires_grad_(False)
    assert not call(everything)[0].requires_grad


def test_no_memory_for_gradients_that_nobody_needs():
    arguments = Case(seq_len=64, batch=8, input_size=512, chunk_size=4, dtype=torch.float32)
    arguments = arguments.tensors()
    arguments.weights[0].requires_grad_()
    output, _ = arguments.call(fusedrnn, chunk_size=4)
    events = allocations(lambda: output.backward(arguments.grad_output))
    assert max(events) < arguments.input.nbytes / 2  # a gradient of the input would be as large


def test_modules_train_the_same_in_train_and_eval_mode():
    rnn = fusedrnn.StochasticGRU(5, 7)
    input = torch.randn(4, 3, 5)
    grads = []
    for mode in (True, False):
        rnn.train(mode).zero_grad()
        output, _ = rnn(input, generator=torch.Generator().manual_seed(3))
        output.square().sum().backward()
        grads.append([p.grad.clone() for p in rnn.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_second_derivatives_are_refused():
    arguments = CASE.tensors().to(torch.float64)
    output, _ = call(arguments)
    (grad,) = gradients([output.sum()], None, [arguments.input], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        (grad.sum() + arguments.input.sum()).backward()


# --- memory --------------------------------------------------------------------------------------


def allocations(function):
    """Sizes in bytes of what torch's allocator gave out while ``function`` ran."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
    return [size for size in sizes if size > 0]


def saved_storages(arguments, **options):
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = call(arguments, **options)
    given = {t.untyped_storage().data_ptr() for t in [*arguments.differentiable(), arguments.seed]}
    return output, {pointer: t for pointer, t in saved.items() if pointer not in given}


def test_saves_its_arguments_and_the_output_and_nothing_else():
    arguments = CASE.tensors().to(torch.float32)
    output, saved = saved_storages(arguments)
    assert list(saved) == [output.untyped_storage().data_ptr()]
    output, saved = saved_storages(arguments, recompute=False)
    kept = [t for p, t in saved.items() if p != output.untyped_storage().data_ptr()]
    hidden, latent = CASE.hidden_size, CASE.latent_size
    pre_activations = CASE.seq_len * CASE.batch * (4 * hidden + 2 * latent) * 4
    assert len(kept) == 1 and kept[0].nbytes == pre_activations


def test_nothing_is_kept_without_gradients():
    case = replace(CASE, seq_len=200)
    constants = case.tensors()
    variables = constants.to(torch.float32)
    output_size = 200 * 6 * 7 * 4
    for recompute in (True, False):
        sizes = allocations(lambda r=recompute: call(constants, recompute=r))
        assert max(sizes) == output_size
        with torch.no_grad():
            sizes = allocations(lambda r=recompute: call(variables, recompute=r))
        assert max(sizes) == output_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [True, False])
def test_number_of_allocations_does_not_depend_on_the_length(recompute, dtype):
    counts = []
    for seq_len in (16, 64, 256):
        case = replace(CASE, seq_len=seq_len, dtype=dtype)
        arguments = case.tensors().to(dtype)

        def train(arguments=arguments):
            output, _ = call(arguments, recompute=recompute)
            output.backward(arguments.grad_output)
            for tensor in arguments.differentiable():
                tensor.grad = None

        train()
        counts.append(len(allocations(train)))
    assert counts[0] == counts[1] == counts[2]


# --- eps -----------------------------------------------------------------------------------------


def drawn_eps(seed, seq_len, batch, latent_size, num_layers=1, **options):
    """The noise that the kernels use, read back through a layer built to show it: h' = tanh(z)."""
    size = latent_size
    weights = []
    for _ in range(num_layers):
        shapes = [s for _, _, s in layout("stochastic_gru", size, size, size, 1, True)]
        weight_ih, weight_zh, weight_hz, bias_ih, bias_zh, bias_hz = map(torch.zeros, shapes)
        weight_zh[2 * size :] = torch.eye(size)  # n = tanh(z)
        bias_ih[:size], bias_ih[size : 2 * size] = 50.0, -50.0  # r = 1, u = 0
        weights += [weight_ih, weight_zh, weight_hz, bias_ih, bias_zh, bias_hz]
    weights = [w.double() for w in weights]
    input = torch.zeros(seq_len, batch, size, dtype=torch.float64)
    outputs = []
    for layer in range(num_layers):  # a stack shows its last layer only
        output, _ = fusedrnn.stochastic_gru(
            input, weights[: 6 * (layer + 1)], num_layers=layer + 1, seed=seed, **options
        )
        outputs.append(torch.atanh(output))
    return torch.stack(outputs)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 - 1, -(2**62)])
def test_eps_is_philox_of_seed_step_row_unit_and_layer(seed):
    eps = drawn_eps(torch.tensor([seed]), 5, 3, 11, num_layers=2, chunk_size=2)
    for layer in range(2):
        expected = reference.philox_normal(seed, 5, 3, 11, layer, torch.float64)
        torch.testing.assert_close(eps[layer], expected, rtol=1e-6, atol=1e-9)


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
        for f in (lambda x: x, lambda x: x**2 - 1):  # correlation, and that of the squares
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
    assert torch.equal(first, rnn(input)[0])  # a generator of one's own leaves torch's alone
    assert torch.equal(first, rnn(input, generator=torch.Generator().manual_seed(1))[0])


# --- shapes and strides --------------------------------------------------------------------------


def test_an_empty_batch_works():
    arguments = replace(CASE, batch=0).tensors().to(torch.float32)
    output, h_n = call(arguments)
    assert output.shape == (20, 0, 7) and h_n.shape == (1, 0, 7)
    (output.sum() + h_n.sum()).backward()
    assert arguments.input.grad.shape == arguments.input.shape
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in arguments.weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_strides_do_not_matter(dtype):
    case = replace(CASE, dtype=dtype, noise="eps")
    dense = case.tensors().to(dtype)
    expected = dense.results(fusedrnn.stochastic_gru, **case.options)

    def strided(tensor):
        """The same values with gaps, and with the last two dimensions swapped in memory."""
        dims = tensor.dim()
        gaps = torch.full([2 * n for n in tensor.shape], torch.nan).to(dtype)
        if dims > 1:
            gaps = gaps.transpose(-1, -2).contiguous().transpose(-1, -2)
        view = gaps[tuple([slice(1, None, 2)] * dims)]
        view.copy_(tensor.detach())
        return view.requires_grad_()

    arguments = replace(
        dense,
        input=strided(dense.input),
        hx=strided(dense.hx),
        eps=strided(dense.eps),
        weights=[strided(w) for w in dense.weights],
        grad_output=strided(dense.grad_output).detach(),
        grad_h_n=strided(dense.grad_h_n).detach(),
    )
    for name, value in arguments.results(fusedrnn.stochastic_gru, **case.options).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_expanded_inputs_work():
    arguments = CASE.tensors()
    row = torch.randn(1, 1, 5, requires_grad=True)
    state = torch.randn(1, 1, 7, requires_grad=True)
    expanded = replace(
        arguments, input=row.expand(20, 6, 5), hx=state.expand(1, 6, 7), grad_output=None
    )
    dense = replace(expanded, input=expanded.input.contiguous(), hx=expanded.hx.contiguous())
    results = []
    for a in (expanded, dense):
        output, _ = call(a)
        results.append([output, *gradients([output.sum()], None, [row, state])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


# --- the processor -------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", [False, True])
def test_the_floating_point_mode_is_left_as_it_was(flush):
    arguments = Case(seq_len=4, batch=64, hidden_size=300, latent_size=300).tensors()
    arguments = arguments.to(torch.float32)
    denormal = torch.full((200_000,), 1e-40)  # large enough for all threads
    torch.set_flush_denormal(flush)  # this thread's
    try:
        arguments.results(fusedrnn.stochastic_gru)
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


# --- torch's own machinery -----------------------------------------------------------------------


def test_opcheck():
    arguments = CASE.tensors().to(torch.float64)
    eps = torch.randn(20, 6, 6).double()
    for noise in ((eps, None), (None, arguments.seed), (None, None)):
        forward = ("stochastic_gru", arguments.input, arguments.hx[0], arguments.weights, *noise)
        forward = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, forward)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch.ops.fusedrnn.forward.default, (*forward, 0, 8, False), test_utils=tests
        )
        torch.library.opcheck(
            torch.ops.fusedrnn.forward.default, (*forward, 0, 8, True), test_utils=tests
        )
        output, h_n, _ = torch.ops.fusedrnn.forward(*forward, 0, 8, False)
        cell, *rest = forward
        for needs in (0, 1, 2, 8, 4 * (noise[0] is not None) + 3 + 8 * 63):
            backward = (output, h_n, cell, *rest[:2], output, None, *rest[2:], 0, 8, needs)
            torch.library.opcheck(torch.ops.fusedrnn.backward.default, backward, test_utils=tests)


@pytest.mark.parametrize("recompute", [True, False])
def test_compile_fullgraph(recompute):
    rnn = fusedrnn.StochasticGRU(5, 7, num_layers=2, batch_first=True, recompute=recompute)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    input = torch.randn(3, 4, 5, requires_grad=True)
    for options in ({"sample": False}, {"eps": torch.randn(2, 4, 3, 7)}):
        results = []
        for module in (rnn, compiled):
            output, h_n = module(input, **options)
            grads = gradients([output.sum() + h_n.sum()], None, [input, *rnn.parameters()])
            results.append([output, h_n, *grads])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected)
    assert compiled(input)[0].shape == (3, 4, 7)


def test_checkpoint_draws_the_same_noise_again():
    rnn = fusedrnn.StochasticGRU(5, 7)
    input = torch.randn(4, 3, 5, requires_grad=True)
    grads = []
    for wrap in (False, True):
        torch.manual_seed(2)
        output = (
            torch.utils.checkpoint.checkpoint(lambda x: rnn(x)[0], input, use_reentrant=False)
            if wrap
            else rnn(input)[0]
        )
        grads.append(gradients([output.square().sum()], None, [input, *rnn.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_func_grad():
    arguments = CASE.tensors()

    def loss(weight):
        weights = [weight, *arguments.weights[1:]]
        return replace(arguments, weights=weights).call(fusedrnn.stochastic_gru)[0].sum()

    weight = arguments.weights[0].requires_grad_()
    (expected,) = gradients([loss(weight)], None, [weight])
    torch.testing.assert_close(torch.func.grad(loss)(weight.detach()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_in_its_dtype(dtype):
    rnn = fusedrnn.StochasticGRU(5, 7)
    input = torch.randn(4, 3, 5)
    with torch.autocast("cpu", dtype=dtype):
        output, h_n = rnn(input, torch.zeros(1, 3, 7), sample=False)
    assert output.dtype == h_n.dtype == dtype
    output.float().sum().backward()
    assert rnn.weight_ih_l0.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert rnn(input)[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert fusedrnn.StochasticGRU(5, 7).double()(input.double())[0].dtype == torch.float64
        with pytest.raises(ValueError, match=r"got torch\.int64"):
            rnn(input.long())


def test_meta_tensors_have_the_right_shapes():
    rnn = fusedrnn.StochasticGRU(5, 7, num_layers=2, device="meta")
    output, h_n = rnn(torch.empty(4, 3, 5, device="meta"))
    assert output.shape == (4, 3, 7) and h_n.shape == (2, 3, 7) and output.is_meta
