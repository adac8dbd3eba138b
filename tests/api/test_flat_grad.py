"""All gradients of a module as one tensor."""

import pytest
import torch
from torch.nn.utils import parametrizations

import fusedrnn

INPUT = torch.linspace(-1, 1, 6 * 2 * 5).reshape(6, 2, 5)


def make(**options):
    torch.manual_seed(0)
    return fusedrnn.LSTM(5, 4, 2, **options)


def train(rnn):
    (rnn(INPUT)[0] if rnn.return_sequence else rnn(INPUT)[1][0]).square().sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True},
        {"proj_size": 2},
        {"bias": False},
        {"num_layers": 3, "return_sequence": False},
    ],
    ids=str,
)
def test_gradients_of_a_layer_lie_side_by_side(options):
    rnn = fusedrnn.LSTM(5, 4, **options)
    assert rnn.flat_grad is None
    for _ in range(2):  # the second one adds
        train(rnn)
        flat = rnn.flat_grad
        assert flat.shape == rnn.flat_weight.shape and not flat.requires_grad
        assert torch.equal(flat, torch.cat([w.grad.flatten() for w in rnn.parameters()]))
    flat.mul_(2)
    assert torch.equal(flat, torch.cat([w.grad.flatten() for w in rnn.parameters()]))
    flat.zero_()
    assert not any(w.grad.any() for w in rnn.parameters())


def test_gradients_that_do_not():
    rnn = make()
    train(rnn)
    assert rnn.flat_grad is None  # of two layers
    rnn = fusedrnn.GRU(5, 4)
    rnn.weight_hh_l0.requires_grad_(False)
    train(rnn)
    assert rnn.flat_grad is None  # one is frozen
    rnn = fusedrnn.GRU(5, 4)
    parametrizations.weight_norm(rnn, "weight_hh_l0")
    train(rnn)
    assert rnn.flat_grad is None
    rnn = fusedrnn.GRU(5, 4)
    train(rnn)
    rnn.weight_hh_l0.grad = rnn.weight_hh_l0.grad.to_sparse()
    assert rnn.flat_grad is None


def test_training_by_flat_tensors():
    """One tensor for an optimizer, an all-reduce or a norm, of any number of layers."""
    rnn, other = make(bidirectional=True), make(bidirectional=True)
    flat = rnn.flat_weight
    rnn.flat_grad = flat.grad = torch.zeros_like(flat)
    ours = torch.optim.Adam([flat], lr=0.1)
    theirs = torch.optim.Adam(other.parameters(), lr=0.1)
    for _ in range(3):
        flat.grad.zero_()
        other.zero_grad()
        train(rnn)
        train(other)
        assert rnn.flat_grad.data_ptr() == flat.grad.data_ptr()
        ours.step()
        theirs.step()
    torch.testing.assert_close(rnn.flat_weight, other.flat_weight)
    rnn.flat_grad = None
    assert rnn.flat_grad is None and all(w.grad is None for w in rnn.parameters())


def test_gradients_that_are_set_have_versions_of_their_own():
    rnn = make()
    rnn.flat_grad = torch.zeros_like(rnn.flat_weight)
    version = rnn.bias_hh_l1.grad._version
    rnn.weight_ih_l0.grad.add_(1)
    assert rnn.bias_hh_l1.grad._version == version


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (1.0, TypeError, "must be a Tensor or None, got"),
        (torch.zeros(3), ValueError, r"of shape \(336,\) .* got shape \(3,\)"),
        (torch.zeros(336).double(), ValueError, "float32 on cpu, got .*float64"),
        (torch.zeros(336, device="meta"), ValueError, "on cpu, got .* on meta"),
        (torch.zeros(672)[::2], ValueError, "must be contiguous"),
    ],
)
def test_wrong_flat_gradients(value, error, match):
    rnn = make()
    train(rnn)
    before = [w.grad for w in rnn.parameters()]
    with pytest.raises(error, match=match):
        rnn.flat_grad = value
    assert all(w.grad is g for w, g in zip(rnn.parameters(), before, strict=True))
    parametrizations.weight_norm(rnn, "weight_hh_l1")
    with pytest.raises(RuntimeError, match="cannot be set because weight_hh_l1 is not a plain"):
        rnn.flat_grad = torch.zeros(336)
