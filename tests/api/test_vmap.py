"""vmap and nested forward mode where rows are folded, looped over, or none at all."""

import functools
import warnings

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap
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


def loss(call, weights, x):
    return call(x, weights).sin().sum()


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


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_forward_mode_of_forward_mode(cell):
    ours, truth, weights = pair(cell)
    x, v = torch.randn(2, 5, 2, 3)

    def along(f):
        return lambda x: jvp(f, (x,), (v,))[1]

    def product(f):
        return lambda x: (grad(f)(x) * v).sum()

    for transforms in (
        (along, along),
        (along, along, product),
        (along, product, along),
        (product, along, along),
        (along, along, along),
        (jacfwd, jacfwd),
    ):
        found = []
        for call in (ours, truth):
            transformed = functools.partial(loss, call, weights)
            for transform in reversed(transforms):
                transformed = transform(transformed)
            found.append(transformed(x))
        close(*found)


def test_lengths_of_each():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(3, 5, 2, 3)
    lengths = torch.tensor([[5, 3], [2, 1], [4, 5]])
    found = vmap(lambda x, n: rnn(x, lengths=n)[0])(x, lengths)
    close(found, torch.stack([rnn(one, lengths=n)[0] for one, n in zip(x, lengths, strict=True)]))
    with pytest.raises(RuntimeError, match=r"lengths must be in \[1, 5\], got 0"):
        vmap(lambda x, n: rnn(x, lengths=n)[0])(x, lengths - 1)


@pytest.mark.parametrize("options", [{}, {"return_sequence": False}])
def test_of_no_examples(options):
    rnn, x = fusedrnn.LSTM(3, 4, **options), torch.randn(0, 5, 2, 3)
    shape = (2, 4) if options else (5, 2, 4)
    assert vmap(lambda x: rnn(x)[0])(x).shape == (0, *shape)
    gradients = vmap(
        grad(lambda w, x: torch.func.functional_call(rnn, w, (x,))[0].sum()), (None, 0)
    )
    for name, found in gradients(dict(rnn.named_parameters()), x).items():
        assert found.shape == (0, *rnn.get_parameter(name).shape)


def test_a_limit_of_the_workspace_is_one_for_each():
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    least = next(n for n in range(1000, 10**6, 500) if fits(rnn, x, n))
    rnn.workspace_bytes = least
    close(vmap(lambda x: rnn(x)[0])(x.expand(20, 5, 2, 3))[7], rnn(x)[0])


def fits(rnn, x, workspace_bytes):
    rnn.workspace_bytes = workspace_bytes
    try:
        rnn(x)
    except RuntimeError:
        return False
    return True


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


def test_gradients_have_versions_of_their_own():
    """One may be changed in place while a graph has saved another."""
    rnn, x = fusedrnn.GRU(3, 4), torch.randn(5, 2, 3)
    first, second, *_ = torch.autograd.grad(rnn(x)[0].sin().sum(), list(rnn.parameters()))
    scale = torch.ones((), requires_grad=True)
    total = (scale * first).square().sum()
    second.clamp_(-1, 1)
    total.backward()
    close(scale.grad, 2 * first.square().sum())


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
