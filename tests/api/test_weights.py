"""Parameters are named and in one flat buffer, whatever torch does to modules."""

import copy

import pytest
import torch
import torch.multiprocessing  # registers how tensors are shared between processes
from flat_weights import (
    INPUT,
    SIZES,
    assert_flat,
    assert_not_flat,
    assert_right,
    assert_same_values,
    values,
)
from torch import nn

import fusedrnn
from fusedrnn import cells
from fusedrnn.cells import Sizes


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return fusedrnn.StochasticGRU(**SIZES)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_new_modules_are_flat(num_layers, bias):
    rnn = fusedrnn.StochasticGRU(5, 4, 3, num_layers, bias)
    assert_flat(rnn)
    assert_right(rnn)
    for cls in (fusedrnn.GRU, fusedrnn.LSTM, fusedrnn.StochasticGRU):
        assert_flat(cls(5, 4, num_layers=num_layers, bias=bias, bidirectional=True))


def test_new_cells_are_flat():
    for bias in (False, True):
        for cls in (fusedrnn.GRUCell, fusedrnn.LSTMCell, fusedrnn.StochasticGRUCell):
            assert_flat(cls(5, 4, bias=bias))


def test_the_layout_is_that_of_the_library(rnn):
    layout = cells.layout("stochastic_gru", Sizes(5, 4, 3, 4), 2, 1, True)
    assert [name for name, _, _ in layout] == list(rnn.state_dict())
    assert [tuple(shape) for _, _, shape in layout] == [tuple(p.shape) for p in rnn.parameters()]


def test_the_flat_weight_is_an_alias(rnn):
    rnn.flat_weight.zero_()
    assert all(not p.any() for p in rnn.parameters())
    with torch.no_grad():
        rnn.bias_hz_l1.fill_(2)
    assert rnn.flat_weight.sum() == 2 * rnn.bias_hz_l1.numel()


def test_writing_to_the_flat_weight_between_forward_and_backward_is_noticed(rnn):
    output, _ = rnn(INPUT)
    rnn.flat_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_parameters_are_independent_leaves(rnn):
    """An in-place step on one weight must not look to autograd like a change of another."""
    assert not any(p._is_view() for p in rnn.parameters())
    for module in (rnn, copy.deepcopy(rnn), rnn.double()):
        versions = [p._version for p in module.parameters()]
        with torch.no_grad():
            module.weight_ih_l0.add_(1)
        assert [p._version for p in module.parameters()] == [versions[0] + 1, *versions[1:]]


def test_flatten_parameters_is_harmless(rnn):
    before, flat = values(rnn), rnn.flat_weight
    rnn.flatten_parameters()
    assert_same_values(rnn, before)
    assert rnn.flat_weight.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_conversion(rnn, dtype):
    before = values(rnn)
    assert rnn.to(dtype) is rnn
    assert_flat(rnn)
    assert rnn.flat_weight.dtype == dtype
    assert_same_values(rnn, {name: value.to(dtype) for name, value in before.items()})


def test_conversion_within_a_larger_module(rnn):
    model = nn.Sequential(nn.Linear(5, 5), rnn).double()
    assert_flat(rnn)
    assert_right(rnn, INPUT.double())
    model.float()
    assert_flat(rnn)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_move_to_the_gpu_and_back(rnn):
    before = values(rnn)
    rnn.cuda()
    assert rnn.flat_weight.is_cuda
    assert_flat(rnn)
    assert_flat(copy.deepcopy(rnn))
    rnn.cpu()
    assert_flat(rnn)
    assert_same_values(rnn, before)


def test_conversion_with_swapped_tensors(rnn):
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        rnn.double()
        assert_flat(rnn)
        other = fusedrnn.StochasticGRU(**SIZES, dtype=torch.float64)
        rnn.load_state_dict(other.state_dict())
        assert_flat(rnn)
        assert_same_values(rnn, values(other))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def test_inference_mode_leaves_weights_trainable(rnn):
    rnn.weight_hz_l0 = nn.Parameter(torch.ones_like(rnn.weight_hz_l0))
    with torch.inference_mode():
        rnn.flatten_parameters()
        rnn.float()
    assert_flat(rnn)
    assert_right(rnn)


def test_modules_made_in_inference_mode(rnn):
    with torch.inference_mode():
        modules = copy.deepcopy(rnn), fusedrnn.StochasticGRU(**SIZES), copy.deepcopy(rnn).double()
    for module in modules:
        assert module.weight_ih_l0.is_inference()
        assert_flat(module)
        module.weight_hz_l0 = nn.Parameter(torch.ones_like(module.weight_hz_l0))
        assert_not_flat(module, "but weight_ih_l0 is .* made in inference mode")
        module.flatten_parameters()


def test_optimizers_made_earlier_stay_valid(rnn):
    parameters = list(rnn.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    rnn.double()
    rnn.weight_zh_l1.data = rnn.weight_zh_l1.data.clone()
    rnn.flatten_parameters()
    assert all(a is b for a, b in zip(parameters, rnn.parameters(), strict=True))
    before = values(rnn)
    rnn(INPUT.double())[0].sum().backward()
    optimizer.step()
    for name, weight in rnn.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] - 0.1 * weight.grad)
    assert_flat(rnn)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_and_clipping(rnn, foreach):
    optimizer = torch.optim.AdamW(rnn.parameters(), lr=0.1, foreach=foreach)
    for _ in range(3):
        before = values(rnn)
        optimizer.zero_grad()
        rnn(INPUT)[0].sum().backward()
        nn.utils.clip_grad_norm_(rnn.parameters(), 0.5)
        optimizer.step()
        assert all(not torch.equal(before[n], p) for n, p in rnn.named_parameters())
    assert_flat(rnn)


def test_freezing_one_weight(rnn):
    rnn.weight_hz_l0.requires_grad_(False)
    assert_flat(rnn)
    assert_right(rnn)
    rnn.double()
    assert not rnn.weight_hz_l0.requires_grad
    assert_flat(rnn)
    rnn(INPUT.double())[0].sum().backward()
    assert rnn.weight_hz_l0.grad is None
    assert rnn.weight_hz_l1.grad is not None
