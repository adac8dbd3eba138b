"""StochasticGRU and its cell as users see them: everything of torch.nn.GRU, and the latent."""

import inspect
import re

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn import StochasticGRU, StochasticGRUCell
from fusedrnn import _call as call
from fusedrnn import _modules as modules
from fusedrnn import _options as options

SIZES = ("input_size", "hidden_size", "latent_size", "num_layers")
WRONG = {  # of options, by values, errors and what they say
    SIZES: [
        *((n, ValueError, f"must be a positive integer, got {n}") for n in (0, -1, -(2**40))),
        *((n, TypeError, "must be an int, got") for n in (True, 2.0, "4", (4,))),
    ],
    ("input_size", "hidden_size", "num_layers"): [(None, TypeError, "must be an int, got None")],
    ("bias", "batch_first", "bidirectional"): [
        (value, TypeError, f"must be a bool, got {type(value).__name__}")
        for value in (1, 0, None, "yes")
    ],
    ("recompute",): [
        (value, TypeError, f"must be a bool or None, got {type(value).__name__}")
        for value in (1, 0, "yes")
    ],
    ("chunk_size", "workspace_bytes"): [
        (0, ValueError, "must be a positive integer, got 0"),
        *((value, TypeError, "must be an int") for value in (True, 8.0, "auto")),
    ],
    ("dtype",): [("float32", TypeError, "must be a torch.dtype, got str")],
}
OF_CELLS = (*SIZES[:3], "dtype")


# Constructors


@pytest.mark.parametrize("names", WRONG, ids=str)
def test_wrong_options(names):
    for name in names:
        for value, error, message in WRONG[names]:
            for cls in (StochasticGRU, *([StochasticGRUCell] if name in OF_CELLS else [])):
                with pytest.raises(error, match=f"^fusedrnn: {name} {re.escape(message)}"):
                    cls(**({"input_size": 3, "hidden_size": 4} | {name: value}))


def test_options_that_exclude_each_other():
    assert StochasticGRU(3, 4, chunk_size=1).chunk_size == 1
    assert StochasticGRU(3, 4, workspace_bytes=2**20).workspace_bytes == 2**20
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


def test_the_default_dtype():
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            assert StochasticGRU(3, 4).weight_ih_l0.dtype == dtype
    finally:
        torch.set_default_dtype(default)


def test_options_that_torch_does_not_have_are_keywords():
    with pytest.raises(TypeError, match="proj_size"):
        StochasticGRU(3, 4, proj_size=0)
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
    """It is the call that makes the module."""
    for written in (
        "StochasticGRU(12, 32)",
        "StochasticGRU(12, 32, latent_size=8, num_layers=2, batch_first=True)",
        "StochasticGRU(12, 32, bias=False, recompute=False, chunk_size=16)",
        "StochasticGRUCell(12, 32)",
        "StochasticGRUCell(12, 32, latent_size=8, bias=False)",
    ):
        assert repr(eval(written)) == written
    assert repr(StochasticGRU(12, 32, latent_size=32)) == "StochasticGRU(12, 32)"


# Forward


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


@pytest.mark.parametrize("make", [StochasticGRU, StochasticGRUCell])
def test_noise(make):
    """It is drawn from torch's generator or one's own, in training and in evaluation."""
    rnn, x = make(5, 4, 3), torch.randn(*((7, 2) if make is StochasticGRU else (2,)), 5)

    def output(**arguments):
        results = rnn(x, **arguments)
        return results[0] if make is StochasticGRU else results

    def seeded(seed):
        return output(generator=torch.Generator().manual_seed(seed))

    state, first = torch.get_rng_state(), seeded(1)
    assert torch.equal(first, seeded(1)) and not torch.equal(first, seeded(2))
    assert torch.equal(first, (rnn.eval(), seeded(1))[1])
    zeros = torch.zeros(*((1, 7, 2) if make is StochasticGRU else (2,)), 3)
    torch.testing.assert_close(output(sample=False), output(eps=zeros))
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn from torch's generator
    second, third = output(), output()
    assert not torch.equal(second, third)
    torch.set_rng_state(state)
    assert torch.equal(output(), second) and torch.equal(output(), third)


# The cell


def test_noise_of_a_single_row():
    cell = StochasticGRUCell(5, 4, 3)
    x, h, eps = torch.randn(5), torch.randn(4), torch.randn(3)
    assert torch.equal(cell(x, h, eps=eps), cell(x[None], h[None], eps=eps[None])[0])
    assert torch.equal(cell(x, eps=eps), cell(x, torch.zeros(4), eps=eps))


@pytest.mark.parametrize(
    ("shapes", "error", "message"),  # of input, hx and eps
    [
        (((1, 2, 5),), ValueError, "input must have 1 or 2 dimensions, got 3"),
        (((2, 5), (4,)), RuntimeError, "hx must have shape (2, 4), got (4,)"),
        (((5,), (1, 4)), RuntimeError, "hx must have shape (4,), got (1, 4)"),
        (((2, 5), (2, 4), (1, 2, 3)), ValueError, "eps must have 2 dimension(s)"),
        (((2, 6),), RuntimeError, "input must have 5 features (input_size), got shape (2, 6)"),
        (((2, 5), (2, 5)), RuntimeError, ""),
        (((2, 5), (3, 4)), RuntimeError, ""),
        (((2, 5), (2, 4), (2, 4)), RuntimeError, "eps must have shape (2, 3), got (2, 4)"),
    ],
)
def test_shapes_that_the_cell_refuses(shapes, error, message):
    x, *others = map(torch.randn, shapes)
    named = dict(zip(("hx", "eps"), others, strict=False))
    with pytest.raises(error, match=f"^fusedrnn: {re.escape(message)}"):
        StochasticGRUCell(5, 4, 3)(x, **named)
