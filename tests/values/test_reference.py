"""The oracle itself, compared with torch.nn.GRU, known answers of Philox and explicit formulas."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves as leaves

import fusedrnn
from fusedrnn import reference

F64 = torch.float64


def gru_as_stochastic(gru: torch.nn.GRU, logvar: float) -> list[torch.Tensor]:
    """Weights that make the stochastic cell the given GRU if it draws nothing: loc = h."""
    hidden_size, weights = gru.hidden_size, []
    for k in range(gru.num_layers):
        w_ih, w_hh, b_ih, b_hh = (
            getattr(gru, f"{name}_l{k}").detach()
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        w_hz = torch.cat(
            [torch.eye(hidden_size, dtype=w_hh.dtype), torch.zeros_like(w_hh[:hidden_size])]
        )
        b_hz = torch.zeros_like(b_hh[: 2 * hidden_size])
        b_hz[hidden_size:] = logvar
        weights += [w_ih, w_hh, w_hz, b_ih, b_hh, b_hz]
    return [w.requires_grad_() for w in weights]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("library", [reference, fusedrnn])
def test_equals_gru_if_the_latent_is_the_state(library, num_layers, batch_first, sample):
    """It is where nothing is drawn, or with a scale of zero."""
    torch.manual_seed(0)
    options = {"num_layers": num_layers, "batch_first": batch_first}
    gru = torch.nn.GRU(5, 7, **options, dtype=F64)
    weights = gru_as_stochastic(gru, logvar=-torch.inf if sample else 1.0)
    x = torch.randn(*((3, 11) if batch_first else (11, 3)), 5, dtype=F64, requires_grad=True)
    hx = torch.randn(num_layers, 3, 7, dtype=F64, requires_grad=True)
    expected = gru(x, hx)
    actual = library.stochastic_gru(x, weights, hx, **options, sample=sample)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    cotangent = torch.randn_like(expected[0])
    last = getattr(gru, f"weight_hh_l{num_layers - 1}")
    wanted = torch.autograd.grad(expected[0], [x, gru.weight_ih_l0, last], cotangent)
    ours = [x, weights[0], weights[-5], weights[2]]
    *found, of_latent = torch.autograd.grad(actual[0], ours, cotangent)
    torch.testing.assert_close(found, list(wanted), rtol=1e-11, atol=1e-12)
    assert of_latent[:7].any() and not of_latent[7:].any()  # loc is still learnt


MODULES = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "stochastic_gru": fusedrnn.StochasticGRU}


def with_loop(cell, *sizes, **options):
    """A module, of torch if it has the cell, and our loop over its weights."""
    torch.manual_seed(0)
    module = MODULES[cell](*sizes, **options, dtype=F64)

    def loop(x, hx=None, **named):
        names = ("num_layers", "bias", "batch_first", "bidirectional")
        options = {name: getattr(module, name) for name in names}
        return getattr(reference, cell)(x, list(module.parameters()), hx, **options, **named)

    return module, loop


def noise(cell, *shape):
    return {"eps": torch.randn(*shape, dtype=F64)} if cell == "stochastic_gru" else {}


def state(cell, *shape):
    h, c = torch.randn(2, *shape, dtype=F64)
    return (h, c) if cell == "lstm" else h


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_equals_torch(cell, bias, bidirectional, batch_first):
    module, loop = with_loop(
        cell, 5, 7, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    )
    x = torch.randn(3, 3, 5, dtype=F64)
    hx = state(cell, 4 if bidirectional else 2, 3, 7)
    for args in ((x,), (x, hx)):
        torch.testing.assert_close(loop(*args), module(*args), rtol=0, atol=1e-12)
    lengths = [1, 3, 2]
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
    output, last = module(packed, hx)
    expected = pad_packed_sequence(output, batch_first, total_length=3)[0], last
    torch.testing.assert_close(loop(x, hx, lengths=lengths), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_steps_are_those_of_torchs_cells(cell):
    module = {"gru": torch.nn.GRUCell, "lstm": torch.nn.LSTMCell}[cell](5, 7, dtype=F64)
    x, hx = torch.randn(3, 5, dtype=F64), state(cell, 3, 7)
    args = (x, *hx) if cell == "lstm" else (x, hx)
    actual = getattr(reference, f"{cell}_step")(*args, *module.parameters())
    torch.testing.assert_close(actual, module(x, hx), rtol=0, atol=1e-14)


@pytest.mark.parametrize("cell", MODULES)
def test_resets_cut_the_sequence(cell):
    """Steps before a reset do not influence later ones, and get no gradient from them."""
    _, loop = with_loop(cell, 5, 7)
    x, hx = torch.randn(6, 2, 5, dtype=F64, requires_grad=True), state(cell, 1, 2, 7)
    drawn, reset = noise(cell, 1, 6, 2, 7), torch.zeros(6, 2, dtype=torch.bool)
    reset[[2, 3]] = True

    def piece(steps, *hx):
        return loop(x[steps], *hx, **{name: eps[:, steps] for name, eps in drawn.items()})

    output, last = loop(x, hx, reset=reset, **drawn)
    pieces = [piece(slice(2), hx), piece(slice(2, 3)), piece(slice(3, 6))]
    assert torch.equal(output, torch.cat([piece[0] for piece in pieces]))
    assert all(map(torch.equal, last, pieces[-1][1]))
    (grad,) = torch.autograd.grad(output[3:].sum(), x)
    assert grad[3:].all() and not grad[:3].any()
    reset[:, 1] = False
    output, _ = loop(x, hx, reset=reset, **drawn)
    assert torch.equal(output[:, 1], loop(x, hx, **drawn)[0][:, 1])


@pytest.mark.parametrize("cell", MODULES)
def test_a_padded_row_is_the_sequence_by_itself(cell):
    _, loop = with_loop(cell, 5, 7, num_layers=2, bidirectional=True)
    x, drawn = torch.randn(6, 2, 5, dtype=F64), noise(cell, 4, 6, 2, 7)
    output, last = loop(x, lengths=[6, 4], **drawn)
    row, last_of_row = loop(x[:4, 1:], **{n: eps[:, :4, 1:] for n, eps in drawn.items()})
    torch.testing.assert_close(output[:4, 1:], row)
    for ours, expected in zip(leaves(last), leaves(last_of_row), strict=True):
        torch.testing.assert_close(ours[:, 1:], expected)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_other_direction_is_the_sequence_turned_around(cell):
    module, loop = with_loop(cell, 5, 7, bidirectional=True)
    x, reset = torch.randn(6, 2, 5, dtype=F64), torch.rand(6, 2) < 0.4
    weights = list(module.parameters())
    turned, _ = getattr(reference, cell)(
        x.flip(0), weights[len(weights) // 2 :], reset=reset.flip(0)
    )
    assert torch.equal(loop(x, reset=reset)[0][..., 7:], turned.flip(0))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_what_stands_behind_the_lengths_does_nothing(cell):
    module, loop = with_loop(cell, 5, 7, 2, bidirectional=True)
    x, reset = torch.randn(6, 2, 5, dtype=F64), torch.rand(6, 2) < 0.4
    results = []
    for padding in (1.0, torch.nan):
        x[4:, 1] = padding
        reset[4:, 1] ^= True
        leaf = x.clone().requires_grad_()
        output, _ = loop(leaf, lengths=torch.tensor([6, 4]), reset=reset)
        grads = torch.autograd.grad(output.square().sum(), [leaf, *module.parameters()])
        results.append([output, *grads])
    assert not results[0][0][4:, 1].any()
    assert all(map(torch.equal, *results))


def make_weights(input_size=4, hidden_size=3, latent_size=2, num_layers=1, bias=True, dtype=F64):
    weights = []
    for k in range(num_layers):
        shapes = [
            (3 * hidden_size, hidden_size if k else input_size),
            (3 * hidden_size, latent_size),
            (2 * latent_size, hidden_size),
        ]
        if bias:
            shapes += [(3 * hidden_size,), (3 * hidden_size,), (2 * latent_size,)]
        weights += [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    return weights


def test_step_equals_the_formulas_unit_by_unit():
    torch.manual_seed(1)
    weights = make_weights()
    w_ih, w_zh, w_hz, b_ih, b_zh, b_hz = (w.detach() for w in weights)
    x, h, eps = (torch.randn(2, n, dtype=F64) for n in (4, 3, 2))
    actual = reference.stochastic_gru_step(x, h, *weights, eps)
    for b in range(2):
        p = w_hz @ h[b] + b_hz
        z = torch.stack([p[i] + eps[b, i] * (p[2 + i] / 2).exp() for i in range(2)])
        side, gate = w_ih @ x[b] + b_ih, w_zh @ z + b_zh
        for i in range(3):
            r = 1 / (1 + (-side[i] - gate[i]).exp())
            u = 1 / (1 + (-side[3 + i] - gate[3 + i]).exp())
            n = (side[6 + i] + r * gate[6 + i]).tanh()
            expected = (1 - u) * n + u * h[b, i]
            torch.testing.assert_close(actual[b, i], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(bias, dtype):
    weights = make_weights(num_layers=2, bias=bias, dtype=dtype)
    x = torch.randn(5, 3, 4, dtype=dtype)
    output, h_n = reference.stochastic_gru(x, weights, num_layers=2, bias=bias)
    assert (output.shape, h_n.shape) == ((5, 3, 3), (2, 3, 3))
    assert output.dtype == h_n.dtype == dtype
    assert torch.equal(output[-1], h_n[-1])


def test_no_bias_is_zero_bias():
    weights = make_weights(num_layers=2)
    for k in range(2):
        for bias in weights[6 * k + 3 : 6 * k + 6]:
            bias.data.zero_()
    x = torch.randn(5, 3, 4, dtype=F64)
    with_bias = reference.stochastic_gru(x, weights, num_layers=2, seed=1)
    without = [w for w in weights if w.dim() == 2]
    torch.testing.assert_close(
        reference.stochastic_gru(x, without, num_layers=2, bias=False, seed=1), with_bias
    )


def test_wrong_number_of_weights():
    with pytest.raises(ValueError, match="12 tensors, got 6"):
        reference.stochastic_gru(torch.randn(5, 3, 4, dtype=F64), make_weights(), num_layers=2)


def test_seed_is_the_noise_of_philox_normal():
    weights, x = make_weights(num_layers=2), torch.randn(5, 3, 4, dtype=F64)
    eps = torch.stack([reference.philox_normal(-9, 5, 3, 2, layer, F64) for layer in range(2)])
    by_eps = reference.stochastic_gru(x, weights, num_layers=2, eps=eps)
    by_seed = reference.stochastic_gru(x, weights, num_layers=2, seed=torch.tensor([-9]))
    assert all(torch.equal(a, b) for a, b in zip(by_eps, by_seed, strict=True))
    by_batch = reference.stochastic_gru(
        x.transpose(0, 1), weights, num_layers=2, batch_first=True, eps=eps
    )
    assert torch.equal(by_batch[0].transpose(0, 1), by_eps[0])


def test_without_seed_the_noise_is_torchs():
    weights, x = make_weights(), torch.randn(5, 3, 4, dtype=F64)
    torch.manual_seed(5)
    first = reference.stochastic_gru(x, weights)[0]
    second = reference.stochastic_gru(x, weights)[0]
    torch.manual_seed(5)
    assert torch.equal(reference.stochastic_gru(x, weights)[0], first)
    assert not torch.equal(first, second)


# The known answers of Random123, the library of the authors of Philox: philox4x32-10.
KNOWN_ANSWERS = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return torch.tensor([int(word, 16) for word in text.split()], dtype=torch.int64)


def test_philox_known_answers():
    counters, keys, expected = (
        torch.stack([words(row[i]) for row in KNOWN_ANSWERS]) for i in range(3)
    )
    assert torch.equal(reference.philox4x32(counters, keys), expected)
    grid = reference.philox4x32(counters[:, None], keys[None])
    assert grid.shape == (3, 3, 4)
    assert torch.equal(grid.diagonal().T, expected)


def test_normals_come_from_the_words_of_their_place():
    seed = -(2**61) + 12345
    normals = reference.philox_normal(seed, 3, 2, 6, layer=4, dtype=F64)
    counter = torch.tensor([2, 1, 1, 4])  # t, b, z // 4, layer
    key = torch.tensor([seed % 2**32, (seed >> 32) % 2**32])
    w = reference.philox4x32(counter, key).to(F64)
    radius = (-2 * ((torch.floor(w[0] / 2) + 0.5) / 2**31).log()).sqrt()
    angle = torch.pi * w[1] / 2**31  # unsigned: the same angle, a turn further on
    expected = torch.stack([radius * angle.cos(), radius * angle.sin()])
    torch.testing.assert_close(normals[2, 1, 4:6], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normals_are_rounded_last(dtype):
    exact = reference.philox_normal(1, 3, 4, 5, dtype=F64)
    assert torch.equal(reference.philox_normal(1, 3, 4, 5, dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cell", ["gru", "lstm", "stochastic_gru"])
def test_masks_are_those_of_the_kernels(cell, training):
    """A module draws its mask's seed after that of its noise, from torch's generator."""
    module = {"gru": "GRU", "lstm": "LSTM", "stochastic_gru": "StochasticGRU"}[cell]
    zoneout = (0.3, 0.6) if cell == "lstm" else 0.3
    options = {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "zoneout": zoneout}
    rnn = getattr(fusedrnn, module)(3, 5, dtype=F64, **options).train(training)
    x, lengths = torch.randn(6, 4, 3, dtype=F64), [6, 5, 2, 1]
    noise = {"sample": False} if cell == "stochastic_gru" else {}
    torch.manual_seed(9)
    output, state = rnn(x, lengths=lengths, **noise)
    torch.manual_seed(9)
    seed = torch.randint(-(2**62), 2**62, (1,)) if training else None
    found = getattr(reference, cell)(
        x, list(rnn.parameters()), **options, **noise, lengths=lengths, mask_seed=seed
    )
    torch.testing.assert_close(found, (output, state))
