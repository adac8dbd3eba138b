"""Attributes of modules that change, or come from a subclass, also in copies and old pickles."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fusedrnn
from fusedrnn import _options as options


def test_a_pickle_of_an_older_release_gets_the_defaults_of_newer_options():
    rnn = fusedrnn.LSTM(3, 4, num_layers=2)
    state = {name: value for name, value in vars(rnn).items() if name not in options.NAMES}
    state["num_layers"] = 2
    copied = fusedrnn.LSTM.__new__(fusedrnn.LSTM)
    copied.__setstate__(state)
    x = torch.randn(5, 2, 3)
    assert torch.equal(copied(x)[0], rnn(x)[0])
    assert repr(copied) == repr(rnn)
    assert copied._all_weights == rnn._all_weights


class OwnZoneout(fusedrnn.GRU):
    """A subclass whose zoneout is a property, kept under another name."""

    zoneout = property(lambda self: self._own, lambda self, value: setattr(self, "_own", value))


class ScaledZoneout(fusedrnn.GRU):
    """A subclass whose zoneout is a property, kept under the same name."""

    scale = 1.0
    zoneout = property(
        lambda self: self.scale * self.__dict__["zoneout"],
        lambda self, value: self.__dict__.update(zoneout=value),
    )


@pytest.mark.parametrize("cls", [OwnZoneout, ScaledZoneout])
@pytest.mark.parametrize(
    "copied", [lambda rnn: rnn, copy.deepcopy, lambda rnn: pickle.loads(pickle.dumps(rnn))]
)
def test_an_option_may_be_a_property_of_a_subclass(cls, copied):
    rnn, x = copied(cls(3, 4, zoneout=1.0)), torch.randn(5, 2, 3)
    assert not rnn(x)[0].any(), "a unit keeps its state, which is zero"
    rnn.scale = 0.0
    rnn._own = 0.0
    assert rnn(x)[0].all()


def test_what_is_no_option_stays_one_in_a_copy():
    rnn = fusedrnn.GRU(3, 4, num_layers=2)
    rnn.dropout, rnn.zoneout = nn.Dropout(), nn.Parameter(torch.zeros(1))
    for module in (rnn, copy.deepcopy(rnn)):
        with pytest.raises(ValueError, match=r"dropout must be a probability .*got Dropout"):
            module(torch.randn(5, 2, 3))


def test_options_that_exclude_each_other_can_be_copied():
    rnn = fusedrnn.GRU(3, 4, chunk_size=2)
    rnn.workspace_bytes = 10**6
    copied = copy.deepcopy(rnn)
    with pytest.raises(ValueError, match="exclude each other"):
        copied(torch.randn(5, 2, 3))
    copied.chunk_size = None
    copied(torch.randn(5, 2, 3))


@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell"])
def test_biases_of_cells_may_be_set_later(name):
    """As in torch.nn, whose cells pass on whatever their biases are."""
    x, ours, theirs = torch.randn(2, 3), getattr(fusedrnn, name), getattr(nn, name)
    rows = 12 if name == "GRUCell" else 16
    biases = {"bias_ih": nn.Parameter(torch.randn(rows)), "bias_hh": nn.Parameter(torch.ones(rows))}
    for bias, later in ((False, biases), (True, dict.fromkeys(biases))):
        cell, expected = ours(3, 4, bias=bias), theirs(3, 4, bias=bias)
        cell.load_state_dict(expected.state_dict())
        for module in (cell, expected):
            module.bias = not bias  # torch.nn looks at the biases alone
            for key, value in later.items():
                setattr(module, key, value)
        for module in (cell, copy.deepcopy(cell)):
            torch.testing.assert_close(module(x), expected(x))
    with pytest.raises(TypeError, match=r"weights\[2\] must be a tensor, got NoneType"):
        cell = ours(3, 4)
        cell.bias_ih = None
        cell(x)
