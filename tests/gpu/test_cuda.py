"""Behaviour that only a GPU can show; tests that take ``device`` compare values there.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

import copy
import gc
import importlib.util
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cases
import pytest
import torch
import torch.multiprocessing
from cases import DTYPES, OPTIONS, Case, operator_arguments, relative_errors
from checks import assert_same
from flat_weights import assert_flat
from torch import nn

import fusedrnn
from fusedrnn import _tuning as tuning
from fusedrnn import reference

pytestmark = pytest.mark.cuda

# Ten chunks and a short one, so that eight of them are replayed.
CASE = Case(seq_len=41, batch=3, hidden_size=12, latent_size=6, chunk_size=4, dtype=torch.float32)


def results(arguments, case):
    return arguments.results(fusedrnn, **case.options)


def copied(arguments, scale=1.0):
    """Copies made on the current stream, as fresh leaves."""

    def copy_of(tensor):
        if tensor is None or not tensor.is_floating_point():
            return tensor
        return (tensor.detach() * scale).requires_grad_(tensor.requires_grad)

    names = ("input", "hx", "eps", "grad_output", "grad_h_n")
    copies = {name: copy_of(getattr(arguments, name)) for name in names}
    return replace(arguments, weights=[copy_of(w) for w in arguments.weights], **copies)


# --- the same as on the CPU ----------------------------------------------------------------------


def test_a_generator_of_the_cpu_gives_the_same_sample():
    rnn = fusedrnn.StochasticGRU(5, 7, num_layers=2, dtype=torch.float64)
    input = torch.randn(9, 3, 5, dtype=torch.float64)
    on_cpu, _ = rnn(input, generator=torch.Generator().manual_seed(3))
    on_gpu, _ = rnn.cuda()(input.cuda(), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-12, atol=1e-12)


def test_sources_of_the_seed():
    rnn, input = fusedrnn.StochasticGRU(5, 7).cuda(), torch.randn(4, 3, 5, device="cuda")
    torch.manual_seed(1)
    first, second = rnn(input)[0], rnn(input)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, rnn(input)[0])
    state = torch.cuda.get_rng_state()
    rnn(input, sample=False)
    rnn(input, generator=torch.Generator("cuda").manual_seed(1))
    assert torch.equal(state, torch.cuda.get_rng_state())


def test_denormals_are_numbers():
    """With u = 1 the state is carried unchanged."""
    weights = [torch.zeros(s, device="cuda") for s in ((12, 1), (12, 1), (2, 4), 12, 12, 2)]
    weights[3][4:8] = 200.0  # the bias of the update gate
    hx = torch.full((1, 2, 4), 1e-40, device="cuda")
    output, _ = fusedrnn.stochastic_gru(torch.zeros(3, 2, 1, device="cuda"), weights, hx)
    assert torch.equal(output, hx.expand(3, 2, 4)) and output.all()


# --- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, {"noise": "eps"}], ids=str)
def test_same_bits_if_chunks_are_replayed_or_not(monkeypatch, options, dtype):
    case = replace(CASE, dtype=dtype, **options)
    arguments = case.tensors("cuda").to(dtype)
    replayed = results(arguments, case)
    monkeypatch.setattr(tuning.switches, "replay_chunks", False)
    assert_same(replayed, results(arguments, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"recompute": False, "noise": "eps"}], ids=str)
def test_same_bits_with_deterministic_algorithms(deterministic, options, dtype):
    """Deterministic algorithms also fill fresh memory with NaN."""
    case = replace(CASE, dtype=dtype, **options)
    arguments = case.tensors("cuda").to(dtype)
    deterministic(False)
    expected = results(arguments, case)
    deterministic(True)
    assert_same(results(arguments, case), expected)


def test_same_bits_in_several_threads():
    def train(seed):
        case = replace(CASE, batch=2 + seed % 3)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            arguments = case.tensors("cuda").to(torch.float32)
            values = results(arguments, case)
        stream.synchronize()
        return values

    expected = [train(seed) for seed in range(3)]
    with ThreadPoolExecutor(4) as pool:
        for seed, values in enumerate(pool.map(train, range(24))):
            assert_same(values, expected[seed % 3])


# --- TF32 ----------------------------------------------------------------------------------------


@pytest.fixture
def allow_tf32():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    return cases.allow_tf32


def test_tf32_only_where_torch_allows_it(allow_tf32):
    case = Case("stochastic_gru", 32, 32, 64, 128, 128, dtype=torch.float32)
    arguments = case.tensors("cuda").to(torch.float32)
    allow_tf32(False)
    truth = arguments.to(torch.float64).results(reference, **case.sizes)
    loop = relative_errors(arguments.to(torch.float32).results(reference, **case.sizes), truth)
    exact = relative_errors(results(arguments, case), truth)
    allow_tf32(True)
    rounded = relative_errors(results(arguments, case), truth)
    for name in truth:
        assert exact[name] < 2 * loop[name] + 1e-7, name
        assert 10 * exact[name] < rounded[name] < 1e-2, name


def test_tf32_is_asked_for_at_the_time_of_the_call(allow_tf32):
    """Backward rounds what forward has rounded, since it computes the same steps again."""
    case = Case("stochastic_gru", 16, 32, 64, 128, 128, dtype=torch.float32)
    arguments = case.tensors("cuda").to(torch.float32)

    def train(in_forward, in_backward):
        allow_tf32(in_forward)
        output, _ = arguments.call(fusedrnn)
        allow_tf32(in_backward)
        (grad,) = torch.autograd.grad(output, arguments.weights[0], arguments.grad_output)
        return output, grad

    output, grad = train(False, False)
    same_output, same_grad = train(False, True)
    other_output, other_grad = train(True, False)
    assert torch.equal(output, same_output) and torch.equal(grad, same_grad)
    assert not torch.equal(output, other_output) and not torch.equal(grad, other_grad)


# --- streams and graphs --------------------------------------------------------------------------


def test_work_is_enqueued_on_the_current_stream_and_not_waited_for():
    arguments = CASE.tensors("cuda").to(torch.float32)
    expected = results(arguments, CASE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(copied(arguments, scale=0.5), CASE)  # uses memory and leaves other values in it
        torch.cuda._sleep(1_000_000_000)  # half a second
        values = results(copied(arguments), CASE)
    assert not stream.query()
    stream.synchronize()
    assert_same(values, expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_nothing_waits_for_the_gpu(recompute):
    rnn = fusedrnn.StochasticGRU(5, 7, num_layers=2, recompute=recompute, chunk_size=4).cuda()
    input = torch.randn(41, 3, 5, device="cuda", requires_grad=True)

    def train():
        output, h_n = rnn(input)
        (output.sum() + h_n.sum()).backward()

    train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recompute", [True, False])
def test_number_of_allocations_does_not_depend_on_the_length(recompute, dtype):
    counts = set()
    for seq_len in (16, 64, 256):
        case = replace(CASE, seq_len=seq_len, recompute=recompute, dtype=dtype)
        arguments = case.tensors("cuda").to(dtype)
        results(arguments, case)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        results(arguments, case)
        counts.add(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert len(counts) == 1


def captured(step):
    """A CUDA graph of ``step`` and its results, captured after the warm-up that torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    return graph, kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"recompute": False, "num_layers": 2}], ids=str)
def test_training_in_a_cuda_graph(options, dtype):
    case = replace(CASE, dtype=dtype, **options)
    arguments = case.tensors("cuda").to(dtype)
    graph, kept = captured(lambda: results(arguments, case))
    outputs = []
    for seed in (5, 6):
        with torch.no_grad():
            for tensor in (*arguments.differentiable(), arguments.grad_output):
                tensor.copy_(0.5 * torch.randn_like(tensor))
            arguments.seed.fill_(seed)
        graph.replay()
        assert_same(kept, results(arguments, case))
        outputs.append(kept["output"].detach().clone())
    assert not torch.equal(*outputs)


def test_inference_in_a_cuda_graph():
    arguments = CASE.tensors("cuda")
    with torch.no_grad():
        graph, kept = captured(lambda: arguments.call(fusedrnn, **CASE.options))
        outputs = []
        for seed in (5, 6, 5):
            arguments.seed.fill_(seed)
            graph.replay()
            expected = arguments.call(fusedrnn, **CASE.options)
            assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
            outputs.append(kept[0].clone())
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])


def test_a_cuda_graph_draws_a_new_sample_in_every_replay():
    rnn, input = fusedrnn.StochasticGRU(5, 7).cuda(), torch.randn(9, 3, 5, device="cuda")
    graph, output = captured(lambda: rnn(input)[0])
    outputs = []
    for _ in range(3):
        graph.replay()
        outputs.append(output.detach().clone())
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])

    weights = list(rnn.parameters())

    def seeded():
        seed = torch.randint(2**62, (1,), device="cuda")
        return seed, fusedrnn.stochastic_gru(input, weights, seed=seed)[0]

    graph, (seed, output) = captured(seeded)
    for _ in range(2):
        graph.replay()
        assert torch.equal(output, fusedrnn.stochastic_gru(input, weights, seed=seed)[0])


# --- memory --------------------------------------------------------------------------------------


@pytest.fixture
def allow_memory():
    """Lets torch reserve at most so many more bytes than it has reserved."""

    def allow(more):
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    yield allow
    torch.cuda.set_per_process_memory_fraction(1.0)


LARGE = Case(
    "stochastic_gru", 512, 64, 512, 512, 8, dtype=torch.float32
)  # 64 MiB of input and of output
MIB = 2**20


def test_out_of_memory_in_forward(allow_memory):
    arguments = LARGE.tensors("cuda")
    expected, _ = arguments.call(fusedrnn)
    expected = expected.cpu()
    before = torch.cuda.memory_allocated()
    allow_memory(32 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"fusedrnn: out of memory: .* the output"):
        arguments.call(fusedrnn)
    allow_memory(1024 * MIB)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(arguments.call(fusedrnn)[0].cpu(), expected)


def test_out_of_memory_in_backward(allow_memory):
    arguments = LARGE.tensors("cuda").to(torch.float32)
    output, _ = arguments.call(fusedrnn, chunk_size=LARGE.seq_len)
    wanted = arguments.differentiable()

    def backward():
        grads = torch.autograd.grad(output, wanted, arguments.grad_output, retain_graph=True)
        return [grad.cpu() for grad in grads]

    expected = backward()
    before = torch.cuda.memory_allocated()
    for room, what in ((32, "the gradient of the input"), (200, "the workspace")):
        allow_memory(room * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=rf"fusedrnn: out of memory: .* {what}"):
            backward()
        allow_memory(1024 * MIB)
        assert torch.cuda.memory_allocated() == before
    assert all(torch.equal(a, b) for a, b in zip(backward(), expected, strict=True))


@pytest.mark.parametrize(
    ("hidden_size", "latent_size"), [(512, 8), (8, 768)], ids=["gates", "latents"]
)
def test_64_bit_indices(hidden_size, latent_size):
    """A few rows of the batch give the same alone as among all rows, in one chunk."""
    seq_len, batch, dtype = 64, 22_000, torch.bfloat16
    assert seq_len * batch * max(3 * hidden_size, 2 * latent_size) > 2**31
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_()

    input, eps = normal(seq_len, batch, 8), normal(1, seq_len, batch, latent_size)
    weights = [
        normal(3 * hidden_size, 8, scale=0.3),
        normal(3 * hidden_size, latent_size, scale=latent_size**-0.5),
        normal(2 * latent_size, hidden_size, scale=hidden_size**-0.5),
    ]
    rows = torch.tensor([0, 1, batch // 2, batch - 2, batch - 1], device="cuda")
    grad_output = torch.zeros(seq_len, batch, hidden_size, device="cuda", dtype=dtype)
    grad_output[:, rows] = normal(seq_len, len(rows), hidden_size).detach()

    def train(input, eps, grad_output, **options):
        output, _ = fusedrnn.stochastic_gru(input, weights, eps=eps, bias=False, **options)
        grads = torch.autograd.grad(output, [input, eps, *weights], grad_output)
        names = ("output", "input", "eps", "weight_ih", "weight_zh", "weight_hz")
        return dict(zip(names, (output.detach(), *grads), strict=True))

    ours = train(input, eps, grad_output, chunk_size=seq_len)
    # Gradients are zero elsewhere, so the weights' gradients come from these rows.
    elsewhere = torch.ones(batch, dtype=torch.bool, device="cuda").index_fill_(0, rows, False)
    assert not ours["input"][:, elsewhere].any()
    for name, batch_dim in (("output", 1), ("input", 1), ("eps", 2)):
        ours[name] = ours[name].index_select(batch_dim, rows)
    few = (input.detach()[:, rows], eps.detach()[:, :, rows])
    alone = train(*(t.requires_grad_() for t in few), grad_output[:, rows])
    for name, error in relative_errors(ours, {n: v.double() for n, v in alone.items()}).items():
        assert error < 4 * torch.finfo(dtype).eps, name


# --- devices -------------------------------------------------------------------------------------

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_devices
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_second_of_two_devices(options):
    case = replace(CASE, **options)
    first = results(case.tensors("cuda:0").to(torch.float32), case)
    second = results(case.tensors("cuda:1").to(torch.float32), case)
    assert torch.cuda.current_device() == 0
    assert all(value.device == torch.device("cuda", 1) for value in second.values())
    for name, error in relative_errors({n: v.to(0) for n, v in second.items()}, first).items():
        assert error < 1e-5, name


@two_devices
def test_data_parallel_over_two_devices():
    rnn = fusedrnn.StochasticGRU(5, 7, batch_first=True).cuda()
    input = torch.randn(6, 9, 5, device="cuda")
    output, _ = nn.DataParallel(rnn)(input, sample=False)
    torch.testing.assert_close(output, rnn(input, sample=False)[0])


@two_devices
def test_arguments_on_two_devices_are_refused():
    arguments = CASE.tensors("cuda:0")
    moved = replace(arguments, hx=arguments.hx.to("cuda:1"))
    with pytest.raises(RuntimeError, match="hx must be on cuda:0 as input is, got cuda:1"):
        moved.call(fusedrnn)


@pytest.mark.parametrize("what", ["input", "hx", "eps", "seed", "weights"])
def test_arguments_on_the_cpu_are_refused(what):
    arguments = replace(CASE, noise="eps" if what == "eps" else "seed").tensors("cuda")
    value = getattr(arguments, what)
    value = [value[0].cpu(), *value[1:]] if what == "weights" else value.cpu()
    state = torch.cuda.get_rng_state()
    name = "weight_ih_l0" if what in ("input", "weights") else what
    where = "cuda:0 as input is, got cpu"
    if what == "input":
        where = 'cpu as input is, got cuda:0; or move the input by .to("cuda:0")'
    with pytest.raises(RuntimeError, match=re.escape(f"fusedrnn: {name} must be on {where}")):
        replace(arguments, **{what: value}).call(fusedrnn)
    assert torch.equal(state, torch.cuda.get_rng_state())
    torch.cuda.synchronize()  # raises an error if a kernel has read beyond memory


def test_the_operator_itself_reads_no_memory_of_the_cpu():
    a = CASE.tensors("cuda")
    good = operator_arguments(CASE, a)
    changes = [
        {"hx": a.hx.cpu()},
        {"seed": a.seed.cpu()},
        {"weights": [a.weights[0].cpu(), *a.weights[1:]]},
        {"eps": torch.zeros(1, 41, 3, 6), "seed": None},
        {"reset": torch.zeros(41, 3, dtype=torch.bool)},
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="must be on the device of input"):
            torch.ops.fusedrnn.forward(**(good | change))
    output, _, _, saved, _ = torch.ops.fusedrnn.forward(**good, save_gates=True)
    backward = good | {"grad_output": output, "grad_h_n": None, "grad_c_n": None, "output": output}
    for change in ({"saved_gates": saved.cpu()}, {"grad_output": output.cpu()}):
        with pytest.raises(RuntimeError, match="fusedrnn: "):
            torch.ops.fusedrnn.backward(**(backward | change), needs=3)


# --- modules -------------------------------------------------------------------------------------


def test_moved_and_copied_modules_compute_the_same():
    rnn = fusedrnn.StochasticGRU(5, 7, num_layers=2).to("cuda")
    assert rnn.flat_weight.is_cuda
    assert rnn.weight_ih_l0.data_ptr() == rnn.flat_weight.data_ptr()
    input = torch.randn(9, 3, 5, device="cuda")
    expected, _ = rnn(input, sample=False)
    for other in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert other.flat_weight.is_cuda
        assert torch.equal(other(input, sample=False)[0], expected)


def test_each_weight_has_a_storage_of_its_own():
    for rnn in (fusedrnn.LSTM(5, 7, 2).cuda(), fusedrnn.LSTM(5, 7, 2, device="cuda")):
        assert_flat(rnn)
        assert all(w.untyped_storage().nbytes() == w.nbytes for w in rnn.parameters())


def fill(rnn, value, done):
    with torch.no_grad():
        rnn.flat_weight.fill_(value)
    torch.cuda.synchronize()
    done.set()


def test_a_module_in_another_process():
    context = torch.multiprocessing.get_context("spawn")
    rnn, done = fusedrnn.GRU(5, 7, 2).cuda(), context.Event()
    worker = context.Process(target=fill, args=(rnn, 3.0, done))
    worker.start()
    assert done.wait(120)
    worker.join()
    assert all((w == 3).all() for w in rnn.parameters())
    assert_flat(rnn)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_compile_fullgraph():
    rnn = fusedrnn.StochasticGRU(5, 7, num_layers=2, batch_first=True).cuda()
    compiled = torch.compile(rnn, fullgraph=True)
    input = torch.randn(3, 9, 5, device="cuda", requires_grad=True)
    eps = torch.randn(2, 9, 3, 7, device="cuda")
    values = []
    for module in (rnn, compiled):
        output, h_n = module(input, eps=eps)
        loss = output.square().sum() + h_n.sum()
        values.append([output, h_n, *torch.autograd.grad(loss, [input, *rnn.parameters()])])
    torch.testing.assert_close(*values)
