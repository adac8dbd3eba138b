"""Cells that users write, on a GPU: with CUDA graphs and without, the results of the CPU."""

from __future__ import annotations

import copy
import gc
import re
import threading
import warnings

import pytest
import torch
from torch import nn

import fusedrnn
from docs.examples.gated_cells import MinimalGatedUnitCell

pytestmark = pytest.mark.cuda

SEQ_LEN, BATCH, H = 30, 3, 8  # chunks of six steps


class Noisy(nn.Module):
    """Draws, and reads a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(2 * H, 2 * H), nn.Dropout(0.25)
        self.memory = None

    def forward(self, x, h):
        loc, scale = self.linear(torch.cat([x, h], -1)).chunk(2, -1)
        scale = nn.functional.softplus(scale)
        z = torch.distributions.Normal(loc, scale, validate_args=False).rsample()
        weights = (self.memory * h).sum(-1).softmax(0)
        h = torch.tanh(self.dropout(z) + (weights[..., None] * self.memory).sum(0))
        return {"z": z, "is_positive": z > 0}, h


@pytest.fixture(autouse=True)
def steps_in_python(monkeypatch):
    monkeypatch.setenv("FUSEDRNN_COMPILE", "0")  # runtime/test_gpu_programs.py has the others


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fusedrnn")
        yield


def results(rnn, x, memory, start, seed, **named):
    """Output, state and all gradients, on the CPU."""
    leaves = [leaf.clone().requires_grad_() for leaf in (x, memory, start)]
    rnn.cell.memory = leaves[1]
    generator = torch.Generator().manual_seed(seed)
    output, h = rnn(leaves[0], leaves[2], generator=generator, **named)
    loss = output["z"].square().sum() + h.sin().sum()
    gradients = torch.autograd.grad(loss, [*leaves, *rnn.parameters()])
    return [t.detach().cpu() for t in (*output.values(), h, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_recurrent_as_on_the_cpu(has_graphs, dtype):
    """Each call has other weights, and a memory of its own, the same for all rows."""
    torch.manual_seed(0)
    expected = fusedrnn.Recurrent(Noisy().to(dtype))
    rnn = fusedrnn.Recurrent(copy.deepcopy(expected.cell).cuda(), cuda_graphs=has_graphs)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {}
    for seed in range(4):
        x, memory = torch.randn(SEQ_LEN, BATCH, H), torch.randn(5, 1, H)
        given = [leaf.to(dtype) for leaf in (x, memory, torch.randn(BATCH, H))]
        wanted = results(expected, *given, seed, lengths=[SEQ_LEN, 7, 20])
        found = results(rnn, *(leaf.cuda() for leaf in given), seed, lengths=[SEQ_LEN, 7, 20])
        torch.testing.assert_close(found, wanted, **tolerance)
        with torch.no_grad():
            for ours, theirs in zip(rnn.parameters(), expected.parameters(), strict=True):
                theirs.mul_(0.9)
                ours.copy_(theirs)
    found = rnn.explain(torch.randn(SEQ_LEN, BATCH, H, device="cuda", dtype=dtype), given[2].cuda())
    assert found.is_recorded == has_graphs, found.record_reason


def gru_pair():
    cell = nn.GRUCell(H, H).cuda()
    return fusedrnn.Recurrent(cell, cuda_graphs=True), fusedrnn.Recurrent(cell)


def test_recurrent_calls_before_their_backward():
    """Graphs share memory; results of earlier calls stay as they are."""
    rnn, expected = gru_pair()
    inputs = [torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True) for _ in range(4)]
    outputs = [rnn(x)[0] for x in inputs]
    for x, output in reversed(list(zip(inputs, outputs, strict=True))):
        found = torch.autograd.grad(output.square().sum(), [x, *rnn.parameters()])
        wanted = expected(x)[0]
        torch.testing.assert_close(output, wanted)
        exact = torch.autograd.grad(wanted.square().sum(), [x, *rnn.parameters()])
        torch.testing.assert_close(found, exact)


def test_recurrent_memory_does_not_grow():
    rnn, _ = gru_pair()
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    reserved = []
    for _ in range(30):
        rnn(x)[0].sum().backward()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[5]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("has_stream", [False, True])
def test_recurrent_on_other_streams_and_in_threads(has_stream, is_shared):
    """Of one module in all threads or one in each, on one stream or on one for each.

    A step is taken again with other tensors in the place of the weights, so parameters are listed
    before.
    """
    rnn, expected = gru_pair()
    weights = [*rnn.parameters()]
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    wanted = expected(x)[0]
    exact = torch.autograd.grad(wanted.sum(), [*rnn.parameters()])
    rnn(x)[0].sum().backward()
    torch.cuda.synchronize()
    errors = []

    def work():
        try:
            own = rnn if is_shared else copy.deepcopy(rnn)
            with torch.cuda.stream(torch.cuda.Stream() if has_stream else None):
                own_weights = weights if is_shared else [*own.parameters()]
                for _ in range(10):
                    output = own(x)[0]
                    found = torch.autograd.grad(output.sum(), own_weights)
                    torch.testing.assert_close(output, wanted)
                    torch.testing.assert_close(found, exact)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_recurrent_under_autocast():
    rnn, expected = gru_pair()
    for _ in range(3):
        x = torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            found, wanted = rnn(x)[0], expected(x)[0]
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        mine = torch.autograd.grad(found.sum(), [x, *rnn.parameters()])
        theirs = torch.autograd.grad(wanted.sum(), [x, *rnn.parameters()])
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)


def test_recurrent_in_a_graph_of_the_user():
    """Then a call records none of its own."""
    rnn, expected = gru_pair()
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    with torch.no_grad():
        rnn(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = rnn(x)[0]
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(output, expected(x)[0])


def test_recurrent_steps_that_wait_are_not_recorded():
    class Waiting(nn.Module):
        def forward(self, x, h):
            return torch.tanh(x * x.sum().item() + h)

    rnn = fusedrnn.Recurrent(Waiting(), cuda_graphs=True)
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    h = torch.zeros(BATCH, H, device="cuda")
    assert "waits for the values of a tensor" in rnn.explain(x, h).record_reason
    for _ in range(2):
        rnn(x, h)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_recurrent_recordings_that_fail_leave_torch_as_it_was(place):
    """What breaks off a recording is the reason; then torch draws, frees memory and records."""

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            if place == "forward" and torch.cuda.is_current_stream_capturing():
                h.sum().item()
            return h.clone()

        @staticmethod
        def backward(ctx, g):
            if place == "backward" and torch.cuda.is_current_stream_capturing():
                g.sum().item()
            return g.clone()

    class Cell(nn.Module):
        def forward(self, x, h):
            return torch.tanh(Waiting.apply(h) + x)

    rnn = fusedrnn.Recurrent(Cell(), cuda_graphs=True)
    expected = fusedrnn.Recurrent(rnn.cell)
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True)
    h = torch.zeros(BATCH, H, device="cuda")
    (exact,) = torch.autograd.grad(expected(x, h)[0].sum(), x)
    rnn(x, h)[0].sum().backward()
    with pytest.warns(UserWarning, match="without CUDA graphs.*captur"):
        (found,) = torch.autograd.grad(rnn(x, h)[0].sum(), x)
    torch.testing.assert_close(found, exact)
    assert "captur" in rnn.explain(x, h).record_reason
    torch.rand(3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    large = torch.empty(2**26, device="cuda")
    large.record_stream(torch.cuda.Stream())
    del large
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
    other, plain = gru_pair()
    for _ in range(3):
        torch.testing.assert_close(other(x)[0], plain(x)[0])
    assert other.explain(x).is_recorded


@pytest.mark.parametrize("is_scalar", [False, True])
def test_recurrent_gradients_that_wait_are_not_recorded(is_scalar):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))  # on the CPU

        def forward(self, x, h):
            return torch.tanh(x + (h * self.scale if is_scalar else h.prod(-1, keepdim=True)))

    rnn = fusedrnn.Recurrent(Cell(), cuda_graphs=True)
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True)
    h = torch.zeros(BATCH, H, device="cuda")
    reason = "copies from one device to another" if is_scalar else "waits .* in backward"
    assert re.search(reason, rnn.explain(x, h).record_reason)
    for _ in range(3):
        rnn(x, h)[0].sum().backward()


def test_recurrent_memory_ends_with_the_call():
    """Without the garbage collector."""
    rnn, _ = gru_pair()
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    for _ in range(3):
        rnn(x)[0].sum().backward()
    allocated = []
    gc.disable()
    try:
        for _ in range(5):
            rnn(x)[0].sum().backward()
            allocated.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert allocated[-1] == allocated[0]


def test_recurrent_recorded():
    cell = MinimalGatedUnitCell(H, H).cuda()
    rnn = fusedrnn.Recurrent(cell, compile="never", cuda_graphs=True)
    expected = fusedrnn.Recurrent(cell)
    for _ in range(3):
        x = torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True)
        found, wanted = rnn(x)[0], expected(x)[0]
        torch.testing.assert_close(found, wanted)
        mine = torch.autograd.grad(found.sum(), [x, *rnn.parameters()])
        theirs = torch.autograd.grad(wanted.sum(), [x, *rnn.parameters()])
        torch.testing.assert_close(mine, theirs)
