"""Options that every cell has: dropout, zoneout, and dropped weights."""

from __future__ import annotations

import math

import pytest
import torch
from layers import KINDS, make, random, states_of

import fusedrnn
from fusedrnn import functional

DROPPED = {"dropout": 0.4, "num_layers": 2}
ZONED = {"zoneout": 0.3}
PAIR = {"zoneout": (0.3, 0.6)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [DROPPED, ZONED, DROPPED | ZONED], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(device, kind, bidirectional, options, training):
    """It also shows that backward draws the same masks, in chunks, with lengths and resets."""
    is_lstm = kind.endswith("LSTM")
    options = options | (PAIR if is_lstm and "zoneout" in options else {})
    rnn = make(kind, device, 2, 3, bidirectional=bidirectional, chunk_size=2, **options)
    rnn.train(training)
    rows = rnn.num_layers * (2 if bidirectional else 1)
    leaves = [random(5, 2, 2, device=device)]
    widths = [rnn.proj_size or 3, 3] if is_lstm else [3]
    leaves += [random(rows, 2, width, device=device) for width in widths]
    reset = torch.zeros(5, 2, dtype=torch.bool, device=device)
    reset[2, 0] = reset[1, 1] = True

    def run(input, h, c=None, *_):
        torch.manual_seed(5)
        hx = h if c is None else (h, c)
        output, state = rnn(input, hx, reset=reset, lengths=[5, 3])
        return output, *states_of(state)

    weights = list(rnn.parameters())
    count = len(leaves)
    inputs = [*leaves, *weights]
    assert torch.autograd.gradcheck(lambda *t: run(*t[:count]), inputs, fast_mode=True)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_recompute_change_nothing(device, kind, recompute):
    results = []
    for chunk_size in (20, 3):
        torch.manual_seed(1)
        rnn = make(kind, device, chunk_size=chunk_size, recompute=recompute, zoneout=0.5, **DROPPED)
        input = random(20, 4, 3, device=device)
        output, _ = rnn(input)
        results.append([output, *torch.autograd.grad(output.sum(), [input, *rnn.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def test_zoneout_of_gru_is_that_of_the_paper():
    """In evaluation every state is the expectation; in training each unit is old or new."""
    rnn = make("GRU", "cpu", 3, 50, zoneout=0.3)
    input, h = torch.randn(1, 40, 3).double(), torch.randn(1, 40, 50).double()
    plain = functional.gru(input, list(rnn.parameters()), h)[0]
    torch.testing.assert_close(rnn.eval()(input, h)[0], 0.3 * h + 0.7 * plain)
    output = rnn.train()(input, h)[0]
    kept = output == h
    assert torch.where(kept, h, plain).equal(output)
    assert abs(kept.double().mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / kept.numel())


@pytest.mark.parametrize(("kind", "width"), [("LSTM", 50), ("ProjectedLSTM", 49)])
def test_zoneout_of_lstm_is_that_of_the_paper(kind, width):
    """h and c have their own probabilities; the new h comes from the new c before zoneout.

    It applies to an h that has been projected.
    """
    rnn = make(kind, "cpu", 3, 50, zoneout=(0.2, 0.6))
    input, h = torch.randn(1, 40, 3).double(), torch.randn(1, 40, width).double()
    c = torch.randn(1, 40, 50).double()
    options = {"proj_size": rnn.proj_size} if rnn.proj_size else {}
    _, (new_h, new_c) = functional.lstm(input, list(rnn.parameters()), (h, c), **options)
    _, (h_n, c_n) = rnn.eval()(input, (h, c))
    torch.testing.assert_close(h_n, 0.2 * h + 0.8 * new_h)
    torch.testing.assert_close(c_n, 0.6 * c + 0.4 * new_c)
    _, (h_n, c_n) = rnn.train()(input, (h, c))
    kept_h, kept_c = h_n == h, c_n == c
    assert torch.where(kept_h, h, new_h).equal(h_n) and torch.where(kept_c, c, new_c).equal(c_n)
    both = kept_h[..., :width] & kept_c[..., :width]
    for kept, p in ((kept_h, 0.2), (kept_c, 0.6), (both, 0.12)):
        assert abs(kept.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / kept.numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dropout_between_layers(device, dtype):
    """The second layer sees zeros and scaled values, in the same places whatever the chunk."""
    size = 64
    weights = [torch.zeros(3 * size, size), torch.zeros(3 * size, size)] * 2
    weights[0][2 * size :] = torch.eye(size)  # n = tanh(x), h = n / 2
    weights[2][2 * size :] = 0.1 * torch.eye(size)
    weights = [w.to(device, dtype) for w in weights]
    input = torch.full((12, 30, size), 0.5, device=device, dtype=dtype)
    below = functional.gru(input, weights[:2], bias=False)[0]
    outputs = []
    for chunk_size in (12, 5):
        torch.manual_seed(2)
        output, _ = functional.gru(
            input, weights, num_layers=2, bias=False, dropout=0.25, chunk_size=chunk_size
        )
        outputs.append(output)
    torch.testing.assert_close(*outputs)
    first = outputs[0][0]  # h = tanh(0.1 x) / 2
    dropped = first == 0
    assert abs(dropped.double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / dropped.numel())
    centred = dropped.double() - 0.25
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((a * b).mean()) < 4 * 0.25 * 0.75 / math.sqrt(a.numel())  # no correlation
    expected = torch.tanh(0.1 * below[0].double() / 0.75) / 2
    torch.testing.assert_close(first[~dropped].double(), expected[~dropped], rtol=0.02, atol=1e-4)


def test_dropout_masks_differ_between_steps_rows_layers_and_calls(device):
    rnn = make("GRU", device, 4, 40, num_layers=4, dropout=0.5)
    input = torch.randn(2, 2, 4, dtype=torch.float64, device=device)
    first, second = rnn(input)[0], rnn(input)[0]
    assert not torch.equal(first, second)
    assert torch.equal(rnn.eval()(input)[0], rnn(input)[0])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_extreme_probabilities(device, p):
    rnn = make("GRU", device, num_layers=2, dropout=p, zoneout=p)
    input = random(4, 2, 3, device=device)
    output, h_n = rnn(input)
    plain, _ = functional.gru(input, list(rnn.parameters()), num_layers=2)
    torch.testing.assert_close(output, plain if p == 0 else torch.zeros_like(plain))
    assert h_n.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "StochasticGRU"])
def test_what_zoneout_keeps_does_not_look_at_what_is_new(device, kind, training):
    """Where a unit keeps its value, a NaN in the new value has no effect, forward and backward."""
    is_lstm = kind == "LSTM"
    rnn = make(kind, device, zoneout=(1.0, 1.0) if is_lstm else 1.0, chunk_size=2)
    rnn.train(training)
    input = random(5, 2, 3, device=device)
    with torch.no_grad():
        input[1, 0], input[3, 1] = torch.nan, torch.inf
    states = [random(1, 2, 5, device=device) for _ in range(2 if is_lstm else 1)]
    output, state = rnn(input, tuple(states) if is_lstm else states[0])
    for initial, last in zip(states, states_of(state), strict=True):
        assert torch.equal(initial, last)
    assert torch.equal(output, states[0].expand_as(output))
    cotangent = torch.randn_like(output)
    grad_input, *grads = torch.autograd.grad(output, [input, *states], cotangent)
    torch.testing.assert_close(grads[0], cotangent.sum(0, keepdim=True))
    assert not grad_input.any() and not any(grad.any() for grad in grads[1:])


@pytest.mark.parametrize("p", [0.3, 0.999, 1 - 1e-6, 1 - 1e-9])
@pytest.mark.parametrize("kind", KINDS)
def test_expectation_of_zoneout_near_1(device, kind, p):
    """The share of the new value, 1 - p, is too small to be computed from p in float32."""
    rnn = make(kind, device, zoneout=p).eval()
    input = random(6, 2, 3, device=device)
    noise = {"eps": torch.randn(1, 6, 2, 5)} if kind == "StochasticGRU" else {}
    results = []
    for dtype in (torch.float64, torch.float32):
        rnn, x = rnn.to(dtype), input.detach().to(dtype).requires_grad_()
        output, _ = rnn(x, **{name: eps.to(device, dtype) for name, eps in noise.items()})
        gradients = torch.autograd.grad(output.sum(), [x, *rnn.parameters()])
        results.append([t.double() for t in (output, *gradients)])
    for exact, found in zip(*results, strict=True):
        assert (found - exact).norm() < 1e-5 * exact.norm()
    rnn.flat_weight.data.fill_(torch.nan)
    assert rnn(x, **{name: eps.to(device) for name, eps in noise.items()})[0].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_weight_dropout(device, kind):
    """Dropped elements count as zero; input weights and biases stay as they are."""
    rnn = make(kind, device, weight_dropout=0.5)
    recurrent = {"weight_hh_l0", "weight_hr_l0", "weight_zh_l0", "weight_hz_l0"}
    input = random(6, 2, 3, device=device)
    torch.manual_seed(3)
    output = rnn(input)[0]
    output.sum().backward()
    for name, weight in rnn.named_parameters():
        zeros = (weight.grad == 0).double().mean()
        assert (0.2 < zeros < 0.9) if name in recurrent else zeros == 0, name
    options = {} if kind != "StochasticGRU" else {"sample": False}
    same = rnn.eval()(input, **options)[0]
    assert torch.equal(same, rnn(input, **options)[0])


@pytest.mark.parametrize("name", ["dropout", "zoneout", "weight_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "x", None, True])
def test_what_is_no_probability_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"fusedrnn: {name} must be a probability in \[0, 1\]"):
        fusedrnn.GRU(3, 4, num_layers=2, **{name: value})
    weights = list(fusedrnn.GRU(3, 4).parameters())
    with pytest.raises(ValueError, match=rf"fusedrnn: {name} must be a probability in \[0, 1\]"):
        fusedrnn.gru(torch.zeros(2, 1, 3), weights, **{name: value})


@pytest.mark.parametrize(
    ("kind", "zoneout"),
    [("GRU", (0.1, 0.2)), ("StochasticGRU", (0.1, 0.2)), ("LSTM", (0.1,)), ("LSTM", (0.1, 2.0))],
)
def test_pairs_that_mean_nothing_are_refused(kind, zoneout):
    with pytest.raises(ValueError, match="fusedrnn: zoneout must be"):
        getattr(fusedrnn, kind)(3, 4, zoneout=zoneout)
    name = {"GRU": "gru", "LSTM": "lstm", "StochasticGRU": "stochastic_gru"}[kind]
    weights = list(getattr(fusedrnn, kind)(3, 4).parameters())
    with pytest.raises(ValueError, match="fusedrnn: zoneout must be"):
        getattr(fusedrnn, name)(torch.zeros(2, 1, 3), weights, zoneout=zoneout)


def test_a_pair_is_a_tuple():
    with pytest.raises(ValueError, match=r"zoneout must be .*, or a tuple of two, got list"):
        fusedrnn.LSTM(3, 4, zoneout=[0.1, 0.2])
