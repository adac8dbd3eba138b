"""Copies, state dicts and saved files of modules whose weights share one buffer."""

import copy
import io
import pickle

import pytest
import torch
import torch.multiprocessing  # registers how tensors are shared between processes
from flat_weights import SIZES, assert_flat, assert_right, assert_same_values, values
from torch import nn

import fusedrnn


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return fusedrnn.StochasticGRU(**SIZES)


def copied_by(how, module):
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(rnn, how):
    rnn.weight_hz_l0.requires_grad_(False)
    model = copied_by(how, nn.Sequential(nn.Linear(5, 5), rnn))
    copied = model[1]
    assert_flat(copied)
    assert_same_values(copied, values(rnn))
    assert not copied.weight_hz_l0.requires_grad
    assert copied.flat_weight.data_ptr() != rnn.flat_weight.data_ptr()
    assert_right(copied)
    assert_flat(rnn)


def test_cells_survive_copies():
    cell = fusedrnn.StochasticGRUCell(5, 4, bias=False)
    assert_flat(copy.deepcopy(cell).double())


def test_averaged_model(rnn):
    averaged = torch.optim.swa_utils.AveragedModel(rnn, avg_fn=lambda a, b, n: (a + b) / 2)
    averaged.update_parameters(rnn)
    with torch.no_grad():
        rnn.flat_weight.add_(2)
    expected = rnn.flat_weight - 1
    averaged.update_parameters(rnn)
    assert_flat(averaged.module)
    torch.testing.assert_close(averaged.module.flat_weight, expected)


def test_state_dict_holds_the_named_weights_only(rnn):
    names = [
        f"{name}_l{k}"
        for k in range(2)
        for name in ("weight_ih", "weight_zh", "weight_hz", "bias_ih", "bias_zh", "bias_hz")
    ]
    assert list(rnn.state_dict()) == names == [name for name, _ in rnn.named_parameters()]
    assert not list(rnn.buffers())


@pytest.mark.parametrize("what", ["module", "state_dict"])
def test_saved_files_hold_each_weight_once(what):
    rnn = fusedrnn.StochasticGRU(64, 64, num_layers=4)
    file = io.BytesIO()
    torch.save(rnn if what == "module" else rnn.state_dict(), file)
    assert rnn.flat_weight.nbytes < file.tell() < rnn.flat_weight.nbytes + 16384


def test_a_copied_state_dict_holds_each_weight_once(rnn):
    storages = {w.untyped_storage().data_ptr() for w in copy.deepcopy(rnn.state_dict()).values()}
    assert len(storages) == 1


def loaded(state_dict, **kwargs):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, **kwargs)


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
