"""StochasticGRU and its cell as users see them: everything of torch.nn.GRU, and the latent.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

import copy
import inspect

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn import StochasticGRU, StochasticGRUCell, call, modules, options, reference

SIZES = ("input_size", "hidden_size", "latent_size", "num_layers")


def sizes_of(cls):
    return SIZES if cls is StochasticGRU else SIZES[:3]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Constructors


@pytest.mark.parametrize("cls", [StochasticGRU, StochasticGRUCell])
@pytest.mark.parametrize("value", [0, -1, -(2**40)])
def test_sizes_must_be_positive(cls, value):
    for name in sizes_of(cls):
        kwargs = {"input_size": 3, "hidden_size": 4} | {name: value}
        message = f"^fusedrnn: {name} must be a positive integer, got {value}$"
        with pytest.raises(ValueError, match=message):
            cls(**kwargs)


@pytest.mark.parametrize("cls", [StochasticGRU, StochasticGRUCell])
@pytest.mark.parametrize("value", [True, 2.0, "4", (4,)])
def test_sizes_must_be_integers(cls, value):
    for name in sizes_of(cls):
        kwargs = {"input_size": 3, "hidden_size": 4} | {name: value}
        kind = type(value).__name__
        with pytest.raises(TypeError, match=f"^fusedrnn: {name} must be an int, got {kind}$"):
            cls(**kwargs)


@pytest.mark.parametrize("name", ["input_size", "hidden_size", "num_layers"])
def test_sizes_must_not_be_none(name):
    with pytest.raises(TypeError, match=f"fusedrnn: {name} must be an int, got NoneType"):
        StochasticGRU(**({"input_size": 3, "hidden_size": 4} | {name: None}))


@pytest.mark.parametrize("name", ["bias", "batch_first", "bidirectional", "recompute"])
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_must_be_bools(name, value):
    message = f"^fusedrnn: {name} must be a bool, got {type(value).__name__}$"
    with pytest.raises(TypeError, match=message):
        StochasticGRU(3, 4, **{name: value})


def test_chunk_size():
    assert StochasticGRU(3, 4, chunk_size=1).chunk_size == 1
    with pytest.raises(ValueError, match="fusedrnn: chunk_size must be a positive integer, got 0"):
        StochasticGRU(3, 4, chunk_size=0)
    for value in (True, 8.0, "auto"):
        with pytest.raises(TypeError, match="fusedrnn: chunk_size must be an int"):
            StochasticGRU(3, 4, chunk_size=value)


def test_workspace_bytes():
    assert StochasticGRU(3, 4, workspace_bytes=2**20).workspace_bytes == 2**20
    message = "fusedrnn: workspace_bytes must be a positive integer, got 0"
    with pytest.raises(ValueError, match=message):
        StochasticGRU(3, 4, workspace_bytes=0)
    for value in (2.0, True):
        with pytest.raises(TypeError, match="fusedrnn: workspace_bytes must be an int"):
            StochasticGRU(3, 4, workspace_bytes=value)
    with pytest.raises(ValueError, match="chunk_size and workspace_bytes exclude each other"):
        StochasticGRU(3, 4, chunk_size=2, workspace_bytes=2**20)


@pytest.mark.parametrize("cls", [StochasticGRU, StochasticGRUCell])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int64])
def test_dtypes_that_are_not_supported(cls, dtype):
    names = "torch.float32, torch.float64, torch.bfloat16, torch.float16"
    with pytest.raises(RuntimeError, match=f"fusedrnn: dtype must be one of {names}, got {dtype}"):
        cls(3, 4, dtype=dtype)
    with pytest.raises(RuntimeError, match="fusedrnn: dtype"):
        cls(2**20, 2**20, 2**20, dtype=dtype)  # refused before any memory is asked for


def test_dtype_must_be_a_dtype():
    with pytest.raises(TypeError, match=r"fusedrnn: dtype must be a torch\.dtype, got str"):
        StochasticGRU(3, 4, dtype="float32")


def test_the_default_dtype():
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            assert StochasticGRU(3, 4).weight_ih_l0.dtype == dtype
    finally:
        torch.set_default_dtype(default)


def test_unknown_arguments():
    with pytest.raises(TypeError, match="proj_size"):
        StochasticGRU(3, 4, proj_size=0)


def test_options_that_torch_does_not_have_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        StochasticGRU(3, 4, 5, 1, True, False, 0.0, False, None, None, 0.1)


@pytest.mark.parametrize("name", ["GRU", "LSTM", "StochasticGRU", "gru", "lstm", "stochastic_gru"])
def test_help_has_every_option(name):
    """help() shows each option's type, default and meaning, from one definition for all."""
    function = getattr(fusedrnn, name)
    parameters = inspect.signature(function).parameters
    for option in options.NAMES:
        assert parameters[option].default == options.FIELDS[option].default
        assert not isinstance(parameters[option].annotation, str), "help() would show it in quotes"
        assert f"    {option}: " in inspect.getdoc(function)
    assert "options: See" not in function.__doc__


def test_the_bias_of_a_cell_must_have_a_truth():
    with pytest.raises(TypeError, match=r"^fusedrnn: bias must be a bool, got Tensor"):
        StochasticGRUCell(3, 4, bias=torch.ones(2))


def test_options_that_are_no_plain_attributes():
    class Annealed(fusedrnn.GRU):
        recompute = property(lambda self: False, lambda self, value: None)

    rnn, x = Annealed(3, 4), torch.zeros(5, 2, 3)
    assert rnn(x)[0].shape == (5, 2, 4) and "recompute=False" in repr(rnn)
    rnn.dropout = nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"^fusedrnn: dropout must be a probability .*got Dropout"):
        rnn(x)


def test_projections_are_of_an_lstm_alone():
    rnn = fusedrnn.GRU(3, 4)
    rnn.proj_size = 2
    with pytest.raises(ValueError, match="proj_size must be 0 without an LSTM, got 2"):
        rnn(torch.zeros(5, 2, 3))


def test_latent_size_is_the_hidden_size_by_default():
    assert StochasticGRU(3, 4).latent_size == 4
    assert StochasticGRUCell(3, 4).latent_size == 4


# Parameters


@pytest.mark.parametrize("bias", [False, True])
def test_names_and_shapes_of_the_parameters(bias):
    rnn = StochasticGRU(5, 4, 3, num_layers=2, bias=bias)
    expected = []
    for k, width in enumerate((5, 4)):
        shapes = {"weight_ih": (12, width), "weight_zh": (12, 3), "weight_hz": (6, 4)}
        if bias:
            shapes |= {"bias_ih": (12,), "bias_zh": (12,), "bias_hz": (6,)}
        expected += [(f"{name}_l{k}", shape) for name, shape in shapes.items()]
    assert [(name, tuple(p.shape)) for name, p in rnn.named_parameters()] == expected
    assert hasattr(rnn, "bias_hz_l0") == bias

    cell = StochasticGRUCell(5, 4, 3, bias=bias)
    of_layer = [(name[:-3], shape) for name, shape in expected if name.endswith("_l0")]
    assert [(name, tuple(p.shape)) for name, p in cell.named_parameters()] == of_layer
    assert (cell.bias_hz is None) == (not bias)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_initialised_with_the_draws_of_torch(dtype):
    """It calls uniform_ once per parameter, in order of registration, as torch.nn.GRU does."""
    torch.manual_seed(7)
    rnn = StochasticGRU(5, 16, 3, num_layers=2, dtype=dtype)
    torch.manual_seed(7)
    for name, weight in rnn.named_parameters():
        drawn = torch.empty(weight.shape, dtype=dtype).uniform_(-0.25, 0.25)
        assert torch.equal(weight, drawn), name
    torch.manual_seed(7)
    cell = StochasticGRUCell(5, 16, 3, dtype=dtype)
    assert torch.equal(cell.weight_zh, rnn.weight_zh_l0)


def test_initialised_from_the_distribution_of_gru():
    torch.manual_seed(7)
    gru = nn.GRU(64, 64, 2)
    for module in (gru, StochasticGRU(64, 64, num_layers=2)):
        weights = torch.cat([p.detach().flatten() for p in module.parameters()]) * 8
        assert -1 <= weights.min() < -0.999 and 0.999 < weights.max() <= 1
        assert abs(weights.mean()) < 0.01 and abs(weights.var() - 1 / 3) < 0.01
    # The first weight has the same shape in both, so it gets the same numbers.
    torch.manual_seed(7)
    assert torch.equal(StochasticGRU(64, 64, num_layers=2).weight_ih_l0, gru.weight_ih_l0)


def test_reset_parameters():
    rnn = StochasticGRU(3, 4)
    before = rnn.flat_weight.clone()
    rnn.reset_parameters()
    assert (rnn.flat_weight != before).all()


def test_state_dicts_are_strict():
    rnn = StochasticGRU(5, 4, 3)
    state_dict = rnn.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_ih_l1"):
        StochasticGRU(5, 4, 3, num_layers=2).load_state_dict(state_dict)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias_ih_l0"):
        StochasticGRU(5, 4, 3, bias=False).load_state_dict(state_dict)
    with pytest.raises(RuntimeError, match="size mismatch for weight_zh_l0"):
        StochasticGRU(5, 4, 2).load_state_dict(state_dict)
    with pytest.raises(RuntimeError, match="Missing key"):
        rnn.load_state_dict(nn.GRU(5, 4).state_dict())
    other = StochasticGRU(5, 4, 3)
    assert str(other.load_state_dict(state_dict)) == "<All keys matched successfully>"
    assert torch.equal(other.flat_weight, rnn.flat_weight)


# repr


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(StochasticGRU(12, 32)) == "StochasticGRU(12, 32)"
    assert repr(StochasticGRU(12, 32, latent_size=32)) == "StochasticGRU(12, 32)"
    assert (
        repr(StochasticGRU(12, 32, latent_size=8, num_layers=2, batch_first=True))
        == "StochasticGRU(12, 32, latent_size=8, num_layers=2, batch_first=True)"
    )
    assert (
        repr(StochasticGRU(12, 32, bias=False, recompute=False, chunk_size=16))
        == "StochasticGRU(12, 32, bias=False, recompute=False, chunk_size=16)"
    )
    assert repr(StochasticGRUCell(12, 32)) == "StochasticGRUCell(12, 32)"
    assert (
        repr(StochasticGRUCell(12, 32, 8, bias=False))
        == "StochasticGRUCell(12, 32, latent_size=8, bias=False)"
    )


# Forward


@pytest.mark.parametrize("with_hx", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_shapes_are_those_of_gru(num_layers, batch_first, batched, with_hx):
    rnn = StochasticGRU(5, 4, 3, num_layers, batch_first=batch_first)
    gru = nn.GRU(5, 4, num_layers, batch_first=batch_first)
    x = torch.randn(7, 2, 5) if batched else torch.randn(7, 5)
    hx = torch.randn(num_layers, *x.shape[1:-1], 4) if with_hx else None
    if batched and batch_first:
        x = x.transpose(0, 1)
    actual, expected = rnn(x, hx), gru(x, hx)
    assert [tuple(t.shape) for t in actual] == [tuple(t.shape) for t in expected]
    output, h_n = actual
    assert output.dtype == h_n.dtype == torch.float32
    last = output[:, -1] if batched and batch_first else output[-1]
    assert torch.equal(last, h_n[-1])


def test_equals_gru_if_the_latent_is_the_state():
    gru = nn.GRU(5, 4, 2, dtype=torch.float64)
    rnn = StochasticGRU(5, 4, num_layers=2, dtype=torch.float64)
    state_dict = {}
    for name, value in gru.state_dict().items():
        state_dict[name.replace("hh", "zh")] = value
    for k in range(2):
        state_dict[f"weight_hz_l{k}"] = torch.eye(8, 4)
        state_dict[f"bias_hz_l{k}"] = torch.zeros(8)
    rnn.load_state_dict(state_dict)
    x, hx = torch.randn(9, 3, 5, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(rnn(x, hx, sample=False), gru(x, hx), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_argument_is_passed_on(batch_first, bidirectional, bias):
    rnn = StochasticGRU(
        5,
        4,
        3,
        2,
        bias,
        batch_first,
        bidirectional=bidirectional,
        recompute=not bias,
        chunk_size=2,
        dtype=torch.float64,
    )
    rows = 4 if bidirectional else 2
    x, hx = torch.randn(7, 7, 5, dtype=torch.float64), torch.randn(rows, 7, 4, dtype=torch.float64)
    eps = torch.randn(rows, 7, 7, 3, dtype=torch.float64)
    lengths, reset = torch.randint(1, 8, (7,)), torch.rand(7, 7) < 0.3
    for kwargs in (
        {"eps": eps},
        {"sample": False},
        {"eps": eps, "lengths": lengths},
        {"eps": eps, "reset": reset},
        {"sample": False, "lengths": lengths},
    ):
        expected = reference.stochastic_gru(
            x,
            list(rnn.parameters()),
            hx,
            num_layers=2,
            bias=bias,
            batch_first=batch_first,
            bidirectional=bidirectional,
            **kwargs,
        )
        torch.testing.assert_close(rnn(x, hx, **kwargs), expected)


def test_a_packed_sequence_is_a_batch_with_lengths():
    """hx, eps and reset belong to the rows as they were before packing sorted them."""
    rnn = StochasticGRU(5, 4, 3, 2, bidirectional=True, dtype=torch.float64)
    x, hx = torch.randn(7, 3, 5, dtype=torch.float64), torch.randn(4, 3, 4, dtype=torch.float64)
    eps, reset = torch.randn(4, 7, 3, 3, dtype=torch.float64), torch.rand(7, 3) < 0.3
    lengths = torch.tensor([3, 7, 5])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, h_n = rnn(packed, hx, eps=eps, reset=reset)
    output, _ = nn.utils.rnn.pad_packed_sequence(output)
    expected = rnn(x, hx, eps=eps, reset=reset, lengths=lengths)
    torch.testing.assert_close((output, h_n), expected)


def test_options_without_influence_on_the_result_are_passed_on(monkeypatch):
    calls = []

    def spy(*args, **kwargs):
        calls.append(vars(args[4]))
        return call.run(*args, **kwargs)

    monkeypatch.setattr(modules.stochastic_gru, "run", spy)
    for kwargs in (
        {"recompute": True, "chunk_size": None, "workspace_bytes": 2**20},
        {"recompute": False, "chunk_size": 3, "workspace_bytes": None},
    ):
        StochasticGRU(5, 4, **kwargs)(torch.randn(7, 2, 5))
        assert calls.pop().items() >= kwargs.items()


def test_noise():
    rnn = StochasticGRU(5, 4, 3)
    x = torch.randn(7, 2, 5)

    def seeded(seed):
        return rnn(x, generator=torch.Generator().manual_seed(seed))[0]

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    torch.manual_seed(3)
    first, second = rnn(x)[0], rnn(x)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(rnn(x)[0], first)
    assert torch.equal(rnn(x, sample=False)[0], rnn(x, sample=False)[0])


def test_a_generator_of_ones_own_leaves_torchs_alone():
    rnn, x = StochasticGRU(5, 4), torch.randn(7, 2, 5)
    state = torch.get_rng_state()
    rnn(x, generator=torch.Generator())
    rnn(x, sample=False)
    rnn(x, eps=torch.zeros(1, 7, 2, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_chunk_size_does_not_change_the_noise():
    rnn = StochasticGRU(5, 4, num_layers=2, dtype=torch.float64)
    x = torch.randn(50, 2, 5, dtype=torch.float64)
    outputs = []
    for chunk_size in (None, 1, 7, 50):
        rnn.chunk_size = chunk_size
        outputs.append(rnn(x, generator=torch.Generator().manual_seed(0))[0])
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_train_and_eval_do_the_same():
    rnn, x = StochasticGRU(5, 4), torch.randn(7, 2, 5)
    results = []
    for training in (True, False):
        rnn.train(training).zero_grad()
        output, _ = rnn(x, generator=torch.Generator().manual_seed(0))
        output.sum().backward()
        results.append([output, *(p.grad for p in rnn.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_float8_is_refused_in_forward():
    dtype = torch.float8_e4m3fn
    with pytest.raises(ValueError, match="float8"):
        StochasticGRU(5, 4).to(dtype)(torch.randn(7, 2, 5).to(dtype))


def test_copies_compute_the_same():
    rnn, x = StochasticGRU(5, 4, num_layers=2), torch.randn(7, 2, 5)
    expected = rnn(x, sample=False)
    for other in (copy.deepcopy(rnn), copy.deepcopy(nn.Sequential(rnn))[0]):
        assert all(torch.equal(a, b) for a, b in zip(other(x, sample=False), expected, strict=True))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_lowers_the_loss(optimizer, recompute):
    rnn = StochasticGRU(1, 8, 4, recompute=recompute)
    head = nn.Linear(8, 1)
    optimizer = optimizer([*rnn.parameters(), *head.parameters()], lr=0.02)
    x = torch.randn(12, 16, 1)
    target = x.cumsum(0).tanh()
    losses = []
    for _ in range(60):
        loss = (head(rnn(x)[0]) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


# The cell


def cell_of(rnn):
    cell = StochasticGRUCell(
        rnn.input_size, rnn.hidden_size, rnn.latent_size, rnn.bias, dtype=rnn.weight_ih_l0.dtype
    )
    cell.load_state_dict({name.removesuffix("_l0"): w for name, w in rnn.state_dict().items()})
    return cell


@pytest.mark.parametrize("bias", [False, True])
def test_cell_in_a_loop_equals_the_module(bias):
    rnn = StochasticGRU(5, 4, 3, bias=bias, dtype=torch.float64)
    cell = cell_of(rnn)
    x, hx = torch.randn(6, 2, 5, dtype=torch.float64), torch.randn(1, 2, 4, dtype=torch.float64)
    eps = torch.randn(1, 6, 2, 3, dtype=torch.float64)
    h, states = hx[0], []
    for t in range(6):
        h = cell(x[t], h, eps=eps[0, t])
        states.append(h)
    output = torch.stack(states)
    expected, _ = rnn(x, hx, eps=eps)
    torch.testing.assert_close(output, expected)
    ours = torch.autograd.grad(output.square().sum(), list(cell.parameters()))
    theirs = torch.autograd.grad(expected.square().sum(), list(rnn.parameters()))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("with_hx", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_shapes_of_the_cell_are_those_of_gru_cell(batch, with_hx):
    cell, gru = StochasticGRUCell(5, 4, 3), nn.GRUCell(5, 4)
    x, hx = torch.randn(*batch, 5), torch.randn(*batch, 4) if with_hx else None
    assert cell(x, hx).shape == gru(x, hx).shape


def test_cell_without_a_batch():
    cell = StochasticGRUCell(5, 4, 3)
    x, h, eps = torch.randn(5), torch.randn(4), torch.randn(3)
    expected = cell(x[None], h[None], eps=eps[None])[0]
    assert torch.equal(cell(x, h, eps=eps), expected)
    assert torch.equal(cell(x, eps=eps), cell(x, torch.zeros(4), eps=eps))


def test_noise_of_the_cell():
    cell, x = StochasticGRUCell(5, 4), torch.randn(2, 5)
    h = torch.randn(2, 4)

    def seeded(seed):
        return cell(x, h, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    assert not torch.equal(cell(x, h), cell(x, h))
    assert torch.equal(cell(x, h, sample=False), cell(x, h, eps=torch.zeros(2, 4)))


def test_ranks_that_the_cell_refuses():
    cell = StochasticGRUCell(5, 4, 3)
    x = torch.randn(2, 5)
    with pytest.raises(ValueError, match="fusedrnn: input must have 1 or 2 dimensions, got 3"):
        cell(x[None])
    with pytest.raises(RuntimeError, match=r"hx must have shape \(2, 4\), got \(4,\)"):
        cell(x, torch.randn(4))
    with pytest.raises(RuntimeError, match=r"fusedrnn: hx must have shape \(4,\), got \(1, 4\)"):
        cell(x[0], torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"fusedrnn: eps must have 2 dimension\(s\)"):
        cell(x, eps=torch.randn(1, 2, 3))


def test_widths_that_the_cell_refuses():
    cell = StochasticGRUCell(5, 4, 3)
    for args, kwargs in [
        ((torch.randn(2, 6),), {}),
        ((torch.randn(2, 5), torch.randn(2, 5)), {}),
        ((torch.randn(2, 5), torch.randn(3, 4)), {}),
        ((torch.randn(2, 5),), {"eps": torch.randn(2, 4)}),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=r"^fusedrnn: "):
            cell(*args, **kwargs)


def test_public_names():
    assert fusedrnn.StochasticGRU is StochasticGRU
    assert fusedrnn.StochasticGRUCell is StochasticGRUCell
