"""Weights that are replaced, tied or reparametrized no longer share the buffer."""

import copy

import pytest
import torch
import torch.multiprocessing  # registers how tensors are shared between processes
from flat_weights import INPUT, SIZES, assert_flat, assert_not_flat, assert_right
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusedrnn


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return fusedrnn.StochasticGRU(**SIZES)


def test_replaced_weight(rnn):
    replacement = nn.Parameter(torch.randn(6, 4))
    rnn.weight_hz_l0 = replacement
    assert_not_flat(rnn, r"do not lie in one buffer \(see weight_hz_l0\)")
    assert_right(rnn)
    rnn.flatten_parameters()
    assert_flat(rnn)
    assert rnn.weight_hz_l0 is replacement
    assert_right(rnn)


def test_replaced_first_weight(rnn):
    rnn.weight_ih_l0 = nn.Parameter(torch.randn(12, 5))
    assert_not_flat(rnn, r"do not lie in one buffer \(see weight_zh_l0\)")
    rnn.flatten_parameters()
    assert_flat(rnn)


@pytest.mark.parametrize("replacement", ["strided", "expanded", "from a larger tensor"])
def test_weights_that_are_not_contiguous(rnn, replacement):
    weight = {
        "strided": torch.randn(4, 6).T,
        "expanded": torch.randn(6, 1).expand(6, 4),
        "from a larger tensor": torch.randn(6, 9)[:, 2:6],
    }[replacement]
    rnn.weight_hz_l0 = nn.Parameter(weight)
    assert_right(rnn)
    rnn.flatten_parameters()
    assert_flat(rnn)


def test_weight_transposed_in_place():
    rnn = fusedrnn.StochasticGRU(5, 4, 2)
    rnn.weight_hz_l0.data = rnn.weight_hz_l0.data.T
    expected = rnn.weight_hz_l0.detach().clone()
    assert_not_flat(rnn, r"do not lie in one buffer \(see weight_hz_l0\)")
    assert_right(rnn)
    rnn.flatten_parameters()
    assert_flat(rnn)
    assert torch.equal(rnn.weight_hz_l0, expected)


def test_weight_set_to_a_plain_tensor(rnn):
    weight = rnn.weight_hz_l0
    del rnn.weight_hz_l0
    rnn.weight_hz_l0 = weight * 2
    assert_not_flat(rnn, "weight_hz_l0 is not a plain nn.Parameter")
    assert_right(rnn)
    rnn.flatten_parameters()
    rnn.double()


def test_mixed_dtypes(rnn):
    rnn.weight_hz_l0 = nn.Parameter(rnn.weight_hz_l0.detach().double())
    assert_not_flat(rnn, "weight_hz_l0 is torch.float64 on cpu, but weight_ih_l0 is torch.float32")
    rnn.flatten_parameters()
    assert rnn.weight_hz_l0.dtype == torch.float64
    rnn.double()
    rnn.flatten_parameters()
    assert_flat(rnn)


def test_wrong_shape(rnn):
    rnn.weight_hz_l0.data = torch.randn(6, 7)
    assert_not_flat(rnn, r"weight_hz_l0 must have shape \(6, 4\), got \(6, 7\)")
    rnn.flatten_parameters()
    with pytest.raises(RuntimeError, match="weight"):
        rnn(INPUT)


def test_weights_put_elsewhere_on_purpose_stay_there(rnn):
    """Some trainers keep all parameters of a model in a buffer of their own."""
    vector, end = torch.randn(2 * rnn.flat_weight.numel()), 0
    for weight in reversed(list(rnn.parameters())):
        start, end = end, end + weight.numel()
        weight.data = vector[start:end].view_as(weight)
    rnn.float()
    rnn.load_state_dict(fusedrnn.StochasticGRU(**SIZES).state_dict())
    assert all(w.untyped_storage().data_ptr() == vector.data_ptr() for w in rnn.parameters())
    assert_right(rnn)


def test_tied_layers():
    rnn = fusedrnn.StochasticGRU(4, 4, num_layers=2)
    rnn.weight_zh_l1 = rnn.weight_zh_l0
    assert_not_flat(rnn, "weight_zh_l1 and weight_zh_l0 are one parameter")
    rnn.double()
    rnn.flatten_parameters()
    assert rnn.weight_zh_l1 is rnn.weight_zh_l0
    assert copy.deepcopy(rnn).weight_zh_l1.shape == (12, 4)
    assert_right(rnn, INPUT[..., :4].double())


def test_tied_modules(rnn):
    other = fusedrnn.StochasticGRU(**SIZES)
    other.weight_hz_l0 = rnn.weight_hz_l0
    model = nn.ModuleList([rnn, other]).double()
    assert_flat(rnn)
    assert other.weight_hz_l0 is rnn.weight_hz_l0
    for module in copy.deepcopy(model):
        assert_right(module, INPUT.double())


class Doubled(nn.Module):
    calls = 0

    def forward(self, x):
        Doubled.calls += 1
        return 2 * x


def test_parametrized_weight(rnn):
    original = rnn.weight_hz_l0.detach().clone()
    parametrize.register_parametrization(rnn, "weight_hz_l0", Doubled())
    assert torch.equal(rnn.weight_hz_l0, 2 * original)
    assert_right(rnn)
    Doubled.calls = 0
    assert_not_flat(rnn, "weight_hz_l0 is not a plain nn.Parameter")
    rnn.flatten_parameters()
    rnn.double()
    assert Doubled.calls == 0  # a parametrization may have state, so only forward may run it
    copied = copy.deepcopy(rnn)
    assert_right(copied, INPUT.double())
    parametrize.remove_parametrizations(rnn, "weight_hz_l0")
    assert_right(rnn, INPUT.double())
    rnn.flatten_parameters()
    assert_flat(rnn)
    assert torch.equal(rnn.weight_hz_l0, 2 * original.double())


@pytest.mark.parametrize(
    "change",
    [
        lambda rnn, name: parametrizations.weight_norm(rnn, name),
        lambda rnn, name: parametrizations.spectral_norm(rnn, name).eval(),
        lambda rnn, name: prune.l1_unstructured(rnn, name, 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_reparametrized_weight(rnn, change):
    change(rnn, "weight_zh_l0")
    assert_not_flat(rnn, "weight_zh_l0 is not a plain nn.Parameter")
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
    for _ in range(2):
        rnn(INPUT)  # a hook of forward computes pruned weights
        assert_right(rnn)
        before = rnn.weight_zh_l0.detach().clone()
        rnn(INPUT)[0].sum().backward()
        optimizer.step()
        rnn(INPUT)
        assert not torch.equal(rnn.weight_zh_l0, before)


def test_functional_call(rnn):
    other = fusedrnn.StochasticGRU(**SIZES)
    eps = torch.randn(2, 6, 2, 3)
    weights = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    output, _ = torch.func.functional_call(rnn, weights, (INPUT,), {"eps": eps})
    assert torch.equal(output, other(INPUT, eps=eps)[0])
    output.sum().backward()
    assert all(w.grad is not None for w in weights.values())
    assert all(p.grad is None for p in rnn.parameters())
    assert_flat(rnn)
