"""A second stream during persistent kernels, in any order of work that the streams allow.

The emulation collects the work of both streams and runs it when the call joins them: one stream as
far ahead of the other as the waits between them allow, or both in random order.
"""

from dataclasses import replace

import pytest
import torch
from cases import MASKED, Case, allow_tf32
from checks import assert_same
from emulator import emulated_operators

import fusedrnn

BASE = Case("gru", 9, 3, 5, 12, 6, chunk_size=2, dtype=torch.bfloat16)
CASES = [
    BASE,
    replace(BASE, recompute=False),
    replace(BASE, cell="lstm", **MASKED, num_layers=2),
    replace(BASE, cell="lstm", proj_size=5),
    replace(BASE, cell="lstm", recompute=False, bidirectional=True),
    replace(BASE, cell="stochastic_gru"),
    replace(BASE, cell="stochastic_gru", noise="eps", **MASKED),
    replace(BASE, cell="stochastic_gru", noise="none", num_layers=2),
    replace(BASE, cell="stochastic_gru", dtype=torch.float16, bias=False),
]
FIRST_AHEAD, SECOND_AHEAD = 0, 1
ORDERS = [FIRST_AHEAD, SECOND_AHEAD, 2, 3]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_order_of_streams_makes_no_difference(gpu, case):
    expected = gpu(case.results)
    assert gpu.counts["splits"] == 0
    for order in ORDERS:
        assert_same(gpu(case.results, overlap=True, streams_order=order), expected)
        passes, directions = 2, 2 if case.bidirectional else 1
        assert gpu.counts["splits"] == passes * directions * case.num_layers


def test_copies_and_dropout(gpu):
    """Copies by torch, and masks that are drawn twice, are in the order of their stream."""
    torch.manual_seed(3)
    module = fusedrnn.GRU(
        5, 12, 2, batch_first=True, bidirectional=True, dropout=0.5, chunk_size=2
    ).bfloat16()
    input = torch.randn(3, 9, 5).bfloat16().requires_grad_()

    def run():
        torch.manual_seed(4)
        output, h_n = module(input)
        (output.mul(output).sum() + h_n.sum()).backward()
        grads = [input.grad, *(p.grad for p in module.parameters())]
        module.zero_grad()
        input.grad = None
        return dict(enumerate([output.detach(), h_n.detach(), *grads]))

    expected = gpu(run)
    for order in ORDERS:
        assert_same(gpu(run, overlap=True, streams_order=order), expected)
        assert gpu.counts["splits"] == 8


@pytest.mark.parametrize("stream", [FIRST_AHEAD, SECOND_AHEAD])
def test_a_missing_wait_is_noticed(gpu, deterministic, stream):
    """It is noticed in the order that lets this stream run ahead, because fresh memory is NaN."""
    deterministic(True)
    expected = gpu(BASE.results)
    found = gpu(BASE.results, overlap=True, streams_order=stream, missing_wait=stream)
    assert any(not torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("order", ORDERS)
def test_floats_through_tf32_have_a_kernel_in_both_passes(gpu, order):
    case = replace(BASE, dtype=torch.float32)
    allow_tf32(True)
    expected = gpu(case.results)
    assert_same(gpu(case.results, overlap=True, streams_order=order), expected)
    assert gpu.counts["splits"] == 2


@pytest.mark.parametrize(
    ("multiprocessors", "options"),
    [
        (1, {}),  # the kernel takes all of them
        (132, {"chunk_size": 9}),  # a single chunk needs none
        (132, {"backend": "stepwise"}),
    ],
)
def test_one_stream_where_a_second_has_nothing_to_do(gpu, multiprocessors, options):
    gpu(lambda: BASE.results(**options), multiprocessors=multiprocessors, overlap=True)
    assert gpu.counts["splits"] == 0


def test_a_failure_leaves_nothing_behind(gpu):
    expected = gpu(BASE.results, overlap=True)
    with pytest.raises(RuntimeError, match=r"column_sums_partial .* failed to launch"):
        gpu(failing, BASE, overlap=True)
    assert_same(gpu(BASE.results, overlap=True), expected)


def failing(case):
    output, *_ = case.tensors().to(case.dtype).call(fusedrnn, **case.options)
    emulated_operators().control(False, "column_sums_partial", multiprocessors=132)
    output.sum().backward()
