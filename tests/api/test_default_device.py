"""What a call makes by itself is where its input is, whatever torch.set_default_device says."""

import pytest
import torch
from torch import nn

import fusedrnn

CALLS = {
    "plain": {},
    "lengths": {"lengths": [6, 2]},
    "reset": {"reset": torch.arange(12).reshape(6, 2) % 5 == 3},
    "reset_to": {
        "reset": torch.arange(12).reshape(6, 2) % 5 == 3,
        "reset_to": torch.ones(1, 2, 4),
    },
    "all": {
        "lengths": [6, 2],
        "reset": torch.arange(12).reshape(6, 2) % 5 == 3,
        "reset_to": torch.ones(1, 2, 4),
    },
}


@pytest.mark.parametrize("arguments", CALLS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: fusedrnn.GRU(3, 4),
        lambda: fusedrnn.GRU(3, 4, return_sequence=False),
        lambda: fusedrnn.Recurrent(nn.GRUCell(3, 4), compile="require"),
        lambda: fusedrnn.Recurrent(nn.GRUCell(3, 4), compile="never"),
    ],
    ids=["GRU", "last state", "compiled", "in Python"],
)
def test_another_default_device(make, arguments):
    rnn, x, given = make(), torch.randn(6, 2, 3, requires_grad=True), dict(CALLS[arguments])
    if isinstance(rnn, fusedrnn.Recurrent) and "reset_to" in given:
        given["reset_to"] = given["reset_to"][0]
    expected = rnn(x, **given)
    with torch.device("meta"):
        actual = rnn(x, **given)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for y in (*actual, *expected):
        y.square().sum().backward(retain_graph=True)
