"""Checks of modules whose weights share one buffer."""

import warnings

import pytest
import torch
import torch.multiprocessing  # registers how tensors are shared between processes
from torch import nn

from fusedrnn import reference

SIZES = {"input_size": 5, "hidden_size": 4, "latent_size": 3, "num_layers": 2}
INPUT = torch.linspace(-1, 1, 6 * 2 * 5).reshape(6, 2, 5)


def assert_flat(rnn):
    """Asserts that every weight is in the buffer, where the layout has it."""
    flat = rnn.flat_weight
    assert flat.dim() == 1 and not flat.requires_grad
    layout = rnn._layout()
    assert flat.numel() == sum(p.numel() for p in rnn.parameters())
    for name, offset, shape in layout:
        weight = getattr(rnn, name)
        part = flat[offset : offset + weight.numel()].view(shape)
        assert part.data_ptr() == weight.data_ptr()
        torch.testing.assert_close(part, weight.detach(), rtol=0, atol=0, equal_nan=True)
        assert weight.is_leaf and isinstance(weight, nn.Parameter)


def assert_not_flat(rnn, match):
    with pytest.raises(RuntimeError, match=match) as error:
        _ = rnn.flat_weight
    assert "flatten_parameters()" in str(error.value)


def assert_right(rnn, input=INPUT):
    """Asserts that output and gradients are the reference's, without a warning."""
    weights = rnn._weights()
    eps = torch.randn(rnn.num_layers, *input.shape[:2], rnn.latent_size).to(input)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = rnn(input, eps=eps)
    expected = reference.stochastic_gru(
        input, weights, num_layers=rnn.num_layers, bias=rnn.bias, eps=eps
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    trained = [p for p in rnn.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(output.square().sum(), trained, allow_unused=True)
        for output in (actual[0], expected[0])
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def values(rnn):
    return {name: p.detach().clone() for name, p in rnn.named_parameters()}


def assert_same_values(rnn, expected):
    actual = dict(rnn.named_parameters())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
