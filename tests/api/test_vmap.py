"""vmap, whose rows are folded into one batch or looped over, and what second derivatives cost.

The rows of bench/compatibility check the rest of torch.func.
"""

import warnings

import pytest
import torch
from torch.func import grad, hessian, jacrev, vmap
from torch.nn.utils.rnn import PackedSequence

import fusedrnn
from fusedrnn import _ops, reference


@pytest.fixture(autouse=True)
def _in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def pair(cell, **options):
    """A call of input and weights, by the kernels and by the loop; and weights."""
    rnn = (fusedrnn.GRU if cell == "gru" else fusedrnn.LSTM)(3, 4, **options)
    weights = [weight.detach() for weight in rnn.parameters()]
    ours, truth = getattr(fusedrnn, cell), getattr(reference, cell)
    return lambda x, w: ours(x, w)[0], lambda x, w: truth(x, w)[0], weights


# Chunks of the folded batch have other lengths than those of one call: as many, more or fewer.
@pytest.mark.parametrize(("seq_len", "batch"), [(10, 29), (4, 100), (5, 4), (150, 2), (100, 1)])
def test_chunks_of_a_folded_batch(seq_len, batch):
    ours, truth, weights = pair("lstm")
    x = torch.randn(3, seq_len, batch, 3)

    def few(call):
        return lambda one: torch.stack(
            [call(one, weights)[-1].sum(), call(one, weights).sin().sum()]
        )

    close(jacrev(few(ours))(x[0]), jacrev(few(truth))(x[0]))

    def per_sample(call):
        return vmap(grad(lambda w, one: call(one, w).sin().sum()), (None, 0))(weights, x)

    close(per_sample(ours), per_sample(truth))

    def batched(call):
        one = x[0].clone().requires_grad_()
        output = call(one, weights)
        cotangents = torch.stack([torch.ones_like(output), output.detach()])
        return torch.autograd.grad(output, one, cotangents, is_grads_batched=True)[0]

    close(batched(ours), batched(truth))


def test_a_limit_of_the_workspace_is_one_for_each():
    rnn, x = fusedrnn.GRU(3, 4, workspace_bytes=1), torch.randn(5, 2, 3)
    with pytest.raises(RuntimeError, match="workspace_bytes must be at least") as caught:
        rnn(x)
    rnn.workspace_bytes = int(str(caught.value).split("at least ")[1].split()[0])
    close(vmap(lambda x: rnn(x)[0])(x.expand(20, 5, 2, 3))[7], rnn(x)[0])


@pytest.mark.parametrize("hidden_size", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_batched_second_derivatives(hidden_size, packed):
    rnn = fusedrnn.GRU(3, hidden_size)
    weights = list(rnn.parameters())
    rows = torch.tensor([[0, 1], [2, 3], [4, 5]])

    def ours(data):
        if not packed:
            return rnn(data[rows])[0]
        return rnn(PackedSequence(data[:5], torch.tensor([2, 2, 1])))[0].data

    def truth(data):
        return reference.gru(data[rows], weights, lengths=[3, 2] if packed else None)[0]

    found = []
    for call in (ours, truth):
        data = torch.linspace(-1, 1, 18).view(6, 3).requires_grad_()
        (first,) = torch.autograd.grad(call(data).sin().sum(), data, create_graph=True)
        cotangents = torch.stack([torch.ones_like(first), first.detach()])
        found += torch.autograd.grad(first, data, cotangents, is_grads_batched=True)
    close(*found)


def test_random_numbers_of_each_seed():
    seeds = torch.arange(6).view(2, 3)

    def draw(seed):
        return _ops.draw(seed, 2, 3, 5, stream=1, dtype=torch.float64)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, where there is no rule
        found = vmap(draw)(seeds[0])
        nested = vmap(vmap(draw), in_dims=1)(seeds)
        none = vmap(draw)(seeds[0, :0])
    assert torch.equal(found, torch.stack([draw(seed) for seed in seeds[0]]))
    assert torch.equal(nested, torch.stack([torch.stack([*map(draw, own)]) for own in seeds.t()]))
    assert none.shape == (0, 2, 3, 5)


def test_a_stochastic_cell():
    """Its seed is one, or one for each, as ``randomness`` says."""

    def step(h, x):
        return h + torch.randn_like(h), x + torch.randn_like(h)

    def call(x):
        return fusedrnn.scan(step, torch.zeros(2, 4), x)[1]

    x = torch.zeros(3, 5, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "fusedrnn: torch.func")
        torch.manual_seed(1)
        different = vmap(call, randomness="different")(x)
        same = vmap(call, randomness="same")(x)
    assert different.unique().numel() == x.numel()
    assert torch.equal(same, same[:1].expand_as(same))
    assert same[0].unique().numel() == x[0].numel()


def test_the_cost_of_second_derivatives_is_told_once(monkeypatch):
    monkeypatch.setattr(fusedrnn._autograd, "_has_warned", False)
    ours, _, weights = pair("gru")
    with pytest.warns(UserWarning, match="second derivatives") as seen:
        for _ in range(2):
            hessian(lambda x: ours(x, weights).sum())(torch.randn(4, 2, 3))
    assert sum("fusedrnn" in str(warning.message) for warning in seen) == 1
