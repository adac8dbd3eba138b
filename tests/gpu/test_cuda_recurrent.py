"""Steps in Python on a GPU: the results of the CPU, and those of a plain loop."""

from __future__ import annotations

import copy
import gc
import threading
import warnings

import pytest
import torch
from torch import nn

import fusedrnn

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
def test_recurrent_as_on_the_cpu(dtype):
    """Each call has other weights, and a memory of its own, the same for all rows."""
    torch.manual_seed(0)
    expected = fusedrnn.Recurrent(Noisy().to(dtype))
    rnn = fusedrnn.Recurrent(copy.deepcopy(expected.cell).cuda())
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


def gru():
    return fusedrnn.Recurrent(nn.GRUCell(H, H).cuda())


def loop(rnn, x):
    """The output of a plain loop over the cell."""
    h, outputs = x.new_zeros(BATCH, H), []
    for step in x.unbind(0):
        outputs.append(rnn.cell(step, h))
        h = outputs[-1].to(x.dtype)  # autocast may give another one
    return torch.stack(outputs)


def test_recurrent_calls_before_their_backward():
    """Results of earlier calls stay as they are."""
    rnn = gru()
    inputs = [torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True) for _ in range(4)]
    outputs = [rnn(x)[0] for x in inputs]
    for x, output in reversed(list(zip(inputs, outputs, strict=True))):
        found = torch.autograd.grad(output.square().sum(), [x, *rnn.parameters()])
        wanted = loop(rnn, x)
        torch.testing.assert_close(output, wanted)
        exact = torch.autograd.grad(wanted.square().sum(), [x, *rnn.parameters()])
        torch.testing.assert_close(found, exact)


def test_recurrent_memory_does_not_grow():
    rnn = gru()
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    reserved = []
    for _ in range(30):
        rnn(x)[0].sum().backward()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[5]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("has_stream", [False, True])
def test_recurrent_on_other_streams_and_in_threads(has_stream, is_shared):
    """Of one module in all threads or one in each, on one stream or on one for each."""
    rnn = gru()
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    wanted = loop(rnn, x)
    exact = torch.autograd.grad(wanted.sum(), [*rnn.parameters()])
    rnn(x)[0].sum().backward()
    torch.cuda.synchronize()
    errors = []

    def work():
        try:
            own = rnn if is_shared else copy.deepcopy(rnn)
            with torch.cuda.stream(torch.cuda.Stream() if has_stream else None):
                for _ in range(10):
                    output = own(x)[0]
                    found = torch.autograd.grad(output.sum(), [*own.parameters()])
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
    rnn = gru()
    for _ in range(3):
        x = torch.randn(SEQ_LEN, BATCH, H, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            found, wanted = rnn(x)[0], loop(rnn, x)
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        mine = torch.autograd.grad(found.sum(), [x, *rnn.parameters()])
        theirs = torch.autograd.grad(wanted.sum(), [x, *rnn.parameters()])
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)


def test_recurrent_in_a_graph_of_the_user():
    rnn = gru()
    x = torch.randn(SEQ_LEN, BATCH, H, device="cuda")
    with torch.no_grad():
        rnn(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = rnn(x)[0]
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(output, loop(rnn, x))


def test_recurrent_memory_ends_with_the_call():
    """Without the garbage collector."""
    rnn = gru()
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
