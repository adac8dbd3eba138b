"""Parameters are named and in one flat buffer, whatever torch does to modules.

Also copies, state dicts and saved files of these modules.
"""

import copy
import io
import pickle

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
from fusedrnn import _cells as cells
from fusedrnn._cells import Sizes

MODULES = [fusedrnn.GRU, fusedrnn.LSTM, fusedrnn.StochasticGRU]
CELLS = [fusedrnn.GRUCell, fusedrnn.LSTMCell, fusedrnn.StochasticGRUCell]


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
    for cls in MODULES:
        assert_flat(cls(5, 4, num_layers=num_layers, bias=bias, bidirectional=True))


def test_new_cells_are_flat():
    for bias in (False, True):
        for cls in CELLS:
            assert_flat(cls(5, 4, bias=bias))


def test_the_layout_is_that_of_the_library(rnn):
    layout = cells.layout("stochastic_gru", Sizes(5, 4, 3, 4), 2, 1, True)
    assert [name for name, _, _ in layout] == list(rnn.state_dict())
    assert not list(rnn.buffers())
    assert [tuple(shape) for _, _, shape in layout] == [tuple(p.shape) for p in rnn.parameters()]


def test_the_flat_weight_is_an_alias(rnn):
    rnn.flat_weight.zero_()
    assert all(not p.any() for p in rnn.parameters())
    with torch.no_grad():
        rnn.bias_hz_l1.fill_(2)
    assert rnn.flat_weight.sum() == 2 * rnn.bias_hz_l1.numel()


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


# --- copies and files ---------------------------------------------------------------------------


def loaded(saved, **options):
    """What a file gives back."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": lambda module: loaded(module, weights_only=False),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(rnn, how):
    rnn.weight_hz_l0.requires_grad_(False)
    copied = COPIES[how](nn.Sequential(nn.Linear(5, 5), rnn))[1]
    assert_right(copied)
    assert not copied.weight_hz_l0.requires_grad
    others = [cls(5, 4, bias=False) for cls in (*MODULES, *CELLS)]
    others.append(fusedrnn.LSTM(5, 4, 2, proj_size=3))
    for module, other in ((rnn, copied), *((m, COPIES[how](m)) for m in others)):
        assert_flat(other)
        assert_flat(module)
        assert_same_values(other, values(module))
        assert repr(other) == repr(module)
        assert other.flat_weight.data_ptr() != module.flat_weight.data_ptr()
        assert_flat(copy.deepcopy(other).double())


def test_averaged_model(rnn):
    averaged = torch.optim.swa_utils.AveragedModel(rnn, avg_fn=lambda a, b, n: (a + b) / 2)
    averaged.update_parameters(rnn)
    with torch.no_grad():
        rnn.flat_weight.add_(2)
    expected = rnn.flat_weight - 1
    averaged.update_parameters(rnn)
    assert_flat(averaged.module)
    torch.testing.assert_close(averaged.module.flat_weight, expected)


@pytest.mark.parametrize("what", ["module", "state_dict"])
def test_saved_files_hold_each_weight_once(what):
    rnn = fusedrnn.StochasticGRU(64, 64, num_layers=4)
    file = io.BytesIO()
    torch.save(rnn if what == "module" else rnn.state_dict(), file)
    assert rnn.flat_weight.nbytes < file.tell() < rnn.flat_weight.nbytes + 16384


def test_a_copied_state_dict_holds_each_weight_once(rnn):
    copied = copy.deepcopy(rnn.state_dict())
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in copied.values()}
    assert sum(storage.nbytes() for storage in storages.values()) == rnn.flat_weight.nbytes
    assert len(storages) == len(copied)


def test_saved_parts_are_no_larger_than_they_are():
    """One weight, and the part of a state dict that belongs to an adapter."""
    rnn = fusedrnn.LSTM(64, 64, num_layers=4)
    biases = {name: w for name, w in rnn.state_dict().items() if name.startswith("bias")}
    for part in (rnn.weight_hh_l2, rnn.weight_hh_l2.detach(), biases):
        file = io.BytesIO()
        torch.save(part, file)
        size = sum(w.nbytes for w in (part.values() if isinstance(part, dict) else [part]))
        assert file.tell() < size + 4096


def test_load_state_dict_copies_into_the_buffer(rnn):
    other = fusedrnn.StochasticGRU(**SIZES)
    memory = other.flat_weight.data_ptr()
    other.load_state_dict(loaded(rnn.state_dict()))
    assert other.flat_weight.data_ptr() == memory
    assert_flat(other)
    assert_same_values(other, values(rnn))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("separate", [False, True])
def test_load_state_dict_by_assignment(rnn, separate, device):
    """The tensors of the checkpoint may each have their own memory."""
    state_dict = values(rnn) if separate else loaded(rnn.state_dict())
    other = fusedrnn.StochasticGRU(**SIZES, device=device)
    other.load_state_dict(state_dict, assign=True)
    assert_flat(other)
    assert_same_values(other, values(rnn))
    assert_right(other)


def test_load_part_of_a_state_dict_by_assignment(rnn):
    other = fusedrnn.StochasticGRU(**SIZES)
    expected = values(other) | {"weight_hz_l1": rnn.weight_hz_l1.detach().clone()}
    other.load_state_dict({"weight_hz_l1": expected["weight_hz_l1"]}, strict=False, assign=True)
    assert_flat(other)
    assert_same_values(other, expected)


def test_assigned_weights_of_another_module_stay_shared(rnn):
    other = fusedrnn.StochasticGRU(**SIZES)
    other.load_state_dict(rnn.state_dict(), assign=True)
    assert_flat(other)
    assert other.flat_weight.data_ptr() == rnn.flat_weight.data_ptr()
