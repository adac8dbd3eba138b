"""Wrong options and calls raise what torch.nn raises, in our modules and cells."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
)
from torch_pairs import NAMES

import fusedrnn


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_size": 0},
        {"hidden_size": 0},
        {"num_layers": 0},
        {"hidden_size": 2.0},
        {"input_size": "4"},
        {"num_layers": 1.0},
        {"dropout": -0.1},
        {"dropout": 1.1},
        {"dropout": True},
        {"dropout": "a"},
        {"bias": 1},
        {"batch_first": 1},
        {"foo": 1},
        {"dtype": torch.int64},
    ],
    ids=str,
)
def test_wrong_options_raise_as_in_torch(name, wrong):
    assert_same_error_of_options(name, wrong)


@pytest.mark.parametrize("proj_size", [-1, 4, 5, 2.0, "2", None], ids=str)
def test_wrong_projections_raise_as_in_torch(proj_size):
    assert_same_error_of_options("LSTM", {"proj_size": proj_size})


def assert_same_error_of_options(name, wrong):
    options = {"input_size": 5, "hidden_size": 4} | wrong
    errors = []
    for library in (fusedrnn, nn):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            getattr(library, name)(**options)
        errors.append(caught.type)
    assert errors[0] is errors[1]


def test_flags_that_are_no_bools_raise_as_in_torch(name):
    """torch raises the error in the call, this package in the constructor."""
    for library in (fusedrnn, nn):
        with pytest.raises(TypeError):
            getattr(library, name)(5, 4, bidirectional=1)(torch.ones(3, 2, 5))


@pytest.mark.parametrize("shapes", [((1, 2, 4), (1, 2, 4)), ((1, 2, 3), (1, 2, 3))], ids=str)
def test_wrong_states_of_projections_raise_as_in_torch(shapes):
    for library in (fusedrnn, nn):
        with pytest.raises(RuntimeError):
            library.LSTM(5, 4, proj_size=3)(X, tuple(map(torch.zeros, shapes)))


def zeros(name, *shape, dtype=torch.float32):
    h = torch.zeros(*shape, dtype=dtype)
    return (h, h.clone()) if name.startswith("LSTM") else h


X = torch.ones(7, 2, 5)
PACKED = pack_padded_sequence(X, [7, 3])
WRONG_CALLS = {
    "rank 1": (X[0, 0],),
    "rank 4": (X[None],),
    "width": (X[..., :4],),
    "width of packed": (pack_padded_sequence(X[..., :4], [7, 3]),),
    "no steps": (X[:0],),
    "dtype": (X.double(),),
    "int": (X.long(),),
    "meta": (X.to("meta"),),
    "batch of hx": (X, (1, 3, 4)),
    "layers of hx": (X, (2, 2, 4)),
    "width of hx": (X, (1, 2, 5)),
    "rank of hx": (X, (2, 4)),
    "dtype of hx": (X, (1, 2, 4), torch.float64),
    "unbatched, hx batched": (X[:, 0], (1, 1, 4)),
    "unbatched, width of hx": (X[:, 0], (1, 5)),
    "unbatched, layers of hx": (X[:, 0], (2, 4)),
    "packed, batch of hx": (PACKED, (1, 3, 4)),
    "packed, width of hx": (PACKED, (1, 2, 5)),
}


def assert_same_error(name, *args):
    errors = []
    for library in (fusedrnn, nn):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            getattr(library, name)(5, 4)(*args)
        errors.append(caught)
    assert errors[0].type is errors[1].type, [str(e.value) for e in errors]
    assert str(errors[0].value).startswith("fusedrnn: ")


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_wrong_calls_raise_as_in_torch(name, what):
    x, *hx = WRONG_CALLS[what]
    shape, dtype = (*hx, torch.float32)[:2] if hx else (None, None)
    assert_same_error(name, x, *([zeros(name, *shape, dtype=dtype)] if hx else []))


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 2, 4), (1, 2, 5), (2, 4)], ids=str)
def test_wrong_cell_states_raise_as_in_torch(shape):
    assert_same_error("LSTM", X, (torch.zeros(1, 2, 4), torch.zeros(shape)))


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (X, None),
        (X[0, 0, 0], None),
        (X[0, :, :4], None),
        (X[0, 0, :4], None),
        (X[0], (3, 4)),
        (X[0], (1, 4)),
        (X[0], (2, 5)),
        (X[0], (1, 2, 4)),
        (X[0], (4,)),
        (X[0, 0], (5,)),
        (X[0, 0], (1, 4)),
        (X[0, 0], (1, 1, 4)),
    ],
    ids=lambda value: str(tuple(value.shape) if isinstance(value, torch.Tensor) else value),
)
def test_wrong_calls_of_cells_raise_as_in_torch(name, x, shape):
    cell = f"{name}Cell"
    assert_same_error(cell, x, *([] if shape is None else [zeros(cell, *shape)]))


def test_lstm_cells_take_no_single_tensor():
    assert_same_error("LSTMCell", X[0], torch.zeros(2, 4))


def test_errors_that_differ_from_torchs(name):
    """torch has no check there, and raises AttributeError, IndexError, or nothing."""
    rnn, h = getattr(fusedrnn, name)(5, 4), torch.zeros(1, 2, 4)
    for x in (None, [1.0]):
        with pytest.raises(TypeError, match="input must be a tensor"):
            rnn(x)
    wrong_states = [h, (h,), (h, h, h), (h, None)] if name == "LSTM" else [(h, h), [h]]
    for hx in wrong_states:
        with pytest.raises(TypeError, match="hx must be a"):
            rnn(X, hx)
    cell = getattr(fusedrnn, f"{name}Cell")(5, 4)
    with pytest.raises(ValueError, match="as input is"):  # as torch's module
        cell(X[0].double())
    with pytest.raises(RuntimeError, match="dtype must be one of"):
        getattr(fusedrnn, f"{name}Cell")(5, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="hidden_size must be a positive integer"):
        getattr(fusedrnn, f"{name}Cell")(5, 0)
