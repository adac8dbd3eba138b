"""Persistent kernels on a GPU: behaviour that their emulation (test_persistent.py) cannot show."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import MASKED, Case, relative_errors, truth
from checks import assert_no_worse, assert_same
from emulator import emulated_operators, use
from persistent_cases import (
    BASE,
    CASES,
    FLOAT_CASES,
    IN_PLACE,
    inferred,
    spoil_gradient,
    spoil_input,
)
from speed_sizes import CELLS, SMALL_SIZES, SPEED_SIZES, tf32_allowed
from tf32 import rounded_truth

import fusedrnn
from fusedrnn import _tuning as tuning

pytestmark = pytest.mark.cuda


def results(case, backend="persistent", device="cuda"):
    return inferred(case, device, backend=backend)


def trained(case, backend="persistent"):
    arguments = case.tensors("cuda").to(case.dtype)
    return arguments.results(fusedrnn, **case.options, backend=backend)


def assert_values(monkeypatch, run, case):
    """Asserts the bounds of errors, and that both protocols and repeated runs give the same bits.

    In float32, errors may also be those of the loop that rounds to TF32 by hand, because cuBLASLt
    may round nothing in small products.
    """
    with tf32_allowed():
        packets = run(case)
        exact = truth(case.same_for_torch(), "cuda")
        by_hand = None
        if case.dtype is torch.float32:
            by_hand = rounded_truth(case, "cuda", of_all=True)
        assert_no_worse(packets, run(case, "stepwise"), exact, by_hand)
        assert_same(run(case), packets)
        monkeypatch.setattr(tuning.switches, "exchange_by_flags", True)
        assert_same(run(case), packets)


@pytest.mark.parametrize(
    "case", CASES + [case for case in FLOAT_CASES if case.hidden_size > 1], ids=str
)
def test_error_is_at_most_twice_that_of_single_steps(monkeypatch, case):
    assert_values(monkeypatch, results, case)


@pytest.mark.parametrize("size", SPEED_SIZES, ids=str)
def test_speed_sizes(monkeypatch, size):
    """Outputs and all gradients are right at the sizes of the claims of speed."""
    assert_values(monkeypatch, trained, size.case)


# Cases of every depth that are small enough for the emulation.
DEEP = [size.case for size in SMALL_SIZES if size.tiles == 1 and size.case.dtype != torch.float32]


@pytest.mark.parametrize("case", CASES + DEEP, ids=str)
def test_the_emulation_is_the_kernel(monkeypatch, case):
    """Numbers differ only by the order in which tensor cores add, which is not documented."""
    on_gpu = results(case)
    operators = emulated_operators()
    operators.control(False, "", 132, 1)
    use(monkeypatch, operators)
    emulated = results(case, device="cpu")
    same = [torch.equal(on_gpu[name].cpu(), value) for name, value in emulated.items()]
    print(f"{sum(same)} of {len(same)} results have the same bits")
    errors = relative_errors({n: t.cpu() for n, t in on_gpu.items()}, emulated)
    assert max(errors.values()) < torch.finfo(case.dtype).eps


def test_integers_give_the_same_bits_as_the_emulation(monkeypatch):
    """With small integers, products and sums are exact in any order."""
    weights = [torch.randint(-2, 3, shape).bfloat16() for shape in [(192, 16), (192, 64)]]
    input = torch.randint(-1, 2, (5, 9, 16)).bfloat16()
    hx = torch.randint(-1, 2, (1, 9, 64)).bfloat16()
    options = {"bias": False, "backend": "persistent"}
    output, _ = fusedrnn.gru(input.cuda(), [w.cuda() for w in weights], hx.cuda(), **options)
    operators = emulated_operators()
    operators.control(False, "", 132, 1)
    use(monkeypatch, operators)
    expected, _ = fusedrnn.gru(input, weights, hx, **options)
    assert torch.equal(output[0].cpu(), expected[0])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS + IN_PLACE, ids=str)
def test_training(monkeypatch, cell, dtype, recompute):
    case = replace(BASE, dtype=dtype, seq_len=21, chunk_size=4, num_layers=2, **cell, **MASKED)
    assert_values(monkeypatch, trained, replace(case, recompute=recompute))


def test_streams_and_threads_at_the_same_time():
    """Kernels whose blocks wait for each other must not wait for room that another one holds."""
    cases = [
        replace(BASE, seq_len=200, batch=batch, hidden_size=size, latent_size=size, cell=cell)
        for batch, size in [(16, 256), (70, 512)]
        for cell in ("gru", "stochastic_gru")
    ]
    expected = [results(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in range(4)]
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(streams[i % 4]):
            values = results(cases[i % 4])
            busy @ busy
        streams[i % 4].synchronize()
        return values

    with ThreadPoolExecutor(4) as pool:
        for i, values in enumerate(pool.map(run, range(32))):
            assert_same(values, expected[i % 4])


@pytest.mark.parametrize("by_flags", [False, True])
def test_a_cuda_graph(monkeypatch, by_flags):
    monkeypatch.setattr(tuning.switches, "exchange_by_flags", by_flags)
    case = replace(BASE, cell="stochastic_gru", seq_len=21, chunk_size=4)
    arguments = case.tensors("cuda")

    def run():
        with torch.no_grad():
            return arguments.call(fusedrnn, **case.options, backend="persistent")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()
    for seed in (5, 6, 5):
        arguments.seed.fill_(seed)
        graph.replay()
        for ours, expected in zip(kept, run(), strict=True):
            assert torch.equal(ours, expected)


def long_training(cell):
    case = replace(BASE, seq_len=200, batch=16, hidden_size=256, chunk_size=8, **cell)
    arguments = case.tensors("cuda").to(case.dtype)
    return lambda: arguments.results(fusedrnn, **case.options, backend="persistent")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_second_stream_gives_the_same_bits(monkeypatch, cell):
    train = long_training(cell)
    expected = train()
    monkeypatch.setattr(tuning.switches, "overlap_chunks", True)
    for _ in range(10):
        assert_same(train(), expected)


def test_a_second_stream_in_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(tuning.switches, "overlap_chunks", True)
    train = long_training({"cell": "stochastic_gru"})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = train()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = train()
    for _ in range(10):
        graph.replay()
        assert_same(captured, expected)


@pytest.mark.parametrize("by_flags", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_nan_and_infinity_do_not_hang(monkeypatch, cell, dtype, by_flags):
    """Both passes end; backward also if only the gradient has NaN or infinity."""
    monkeypatch.setattr(tuning.switches, "exchange_by_flags", by_flags)
    case = replace(BASE, dtype=dtype, **cell)

    def run(spoil, backend):
        arguments = case.tensors("cuda").to(dtype)
        with torch.no_grad():
            spoil(arguments)
        return arguments.results(fusedrnn, **case.options, backend=backend)

    for spoil in (spoil_input, spoil_gradient):
        with tf32_allowed():
            ours, theirs = (run(spoil, backend) for backend in ("persistent", "stepwise"))
        torch.cuda.synchronize()
        assert any(tensor.isnan().any() for tensor in ours.values())
        for name, tensor in ours.items():
            assert torch.equal(tensor.isnan(), theirs[name].isnan()), name


def test_auto_takes_what_the_plan_says():
    case = Case("gru", seq_len=40, batch=16, hidden_size=256, dtype=torch.bfloat16)
    rnn = fusedrnn.GRU(5, 256, device="cuda", dtype=torch.bfloat16)
    assert fusedrnn.plan(rnn, (40, 16, 5)).forward.backend == "persistent"
    assert_same(results(case, "auto"), results(case))
