"""The memory of weights: one allocation, a storage for each weight, and how long it lives."""

import copy
import gc
import io
import pickle

import pytest
import torch
from flat_weights import assert_flat
from torch import nn
from torch.nn.utils import parametrizations

import fusedrnn


def make(**options):
    torch.manual_seed(0)
    return fusedrnn.LSTM(5, 4, 2, **options)


def loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_one_storage(rnn):
    """As weights were before each had a storage, and as files of that time have them."""
    flat = rnn.flat_weight.clone()
    return {slot.name: slot.view(flat) for slot in rnn._slots}


def pickled_before(rnn):
    state = vars(rnn) | {"_flat_version": torch.empty(0), "_first_id": id(rnn)}
    state["_parameters"] = {n: nn.Parameter(w) for n, w in in_one_storage(rnn).items()}
    state.pop("_flat_buffer")
    other = fusedrnn.LSTM.__new__(fusedrnn.LSTM)
    other.__setstate__(state)
    assert "_flat_version" not in vars(other)
    return other


WAYS = {
    "new": lambda rnn: rnn,
    "double": lambda rnn: rnn.double(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda rnn: pickle.loads(pickle.dumps(rnn)),
    "save": loaded,
    "pickled before": pickled_before,
    "meta": lambda rnn: rnn.to("meta").to_empty(device="cpu"),
    "converted": lambda rnn: fusedrnn.convert(nn.Sequential(nn.LSTM(5, 4)))[0][0],
    "inference mode": torch.inference_mode()(copy.deepcopy),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_weight_has_a_storage_of_its_own(way):
    rnn = WAYS[way](make())
    assert_flat(rnn)
    for weight in rnn.parameters():
        storage = weight.untyped_storage()
        assert (storage.data_ptr(), storage.nbytes()) == (weight.data_ptr(), weight.nbytes)
        assert weight.storage_offset() == 0


def test_cells_have_them_too():
    for cls in (fusedrnn.GRUCell, fusedrnn.LSTMCell, fusedrnn.StochasticGRUCell):
        cell = cls(3, 4)
        assert all(w.untyped_storage().nbytes() == w.nbytes for w in cell.parameters())


def test_a_weight_keeps_the_memory_and_a_module_does_not():
    """A trainer that replaces all weights, as FSDP does, frees their memory."""
    rnn = make()
    memory = rnn._flat_buffer
    kept, expected = rnn.bias_hh_l1.detach(), rnn.bias_hh_l1.detach().clone()
    for name, weight in list(rnn.named_parameters()):
        setattr(rnn, name, nn.Parameter(weight.detach().clone()))
    del weight
    gc.collect()
    assert not memory.is_gone()
    assert torch.equal(kept, expected)
    del kept
    gc.collect()
    assert memory.is_gone()
    rnn(torch.randn(3, 2, 5))[0].sum().backward()
    rnn.flatten_parameters()
    assert_flat(rnn)


def test_a_flat_weight_keeps_the_memory():
    flat = make().flat_weight
    expected = flat.clone()
    gc.collect()
    assert torch.equal(flat, expected)


def test_torch_may_give_a_flat_weight_other_memory():
    """As it does when it sends a tensor to another process: the weights must not go with it."""
    rnn = make()
    expected = [weight.detach().clone() for weight in rnn.parameters()]
    rnn.flat_weight.share_memory_().zero_()
    rnn.flat_weight.untyped_storage()._share_filename_cpu_()
    with pytest.raises(RuntimeError, match="not resizable"):
        rnn.flat_weight.untyped_storage().resize_(0)
    gc.collect()
    torch.zeros_like(rnn.flat_weight).fill_(3)  # what was free would be used
    assert all(map(torch.equal, rnn.parameters(), expected))
    assert_flat(rnn)


def test_memory_that_somebody_else_uses_stays_as_it_is():
    """A trainer may keep all weights in a vector of its own, and resize or share that."""
    rnn = make()
    vector = rnn.flat_weight.clone()
    for slot in rnn._slots:
        getattr(rnn, slot.name).data = slot.view(vector)
    for change in (
        rnn.float,
        rnn.flatten_parameters,
        lambda: rnn.load_state_dict(rnn.state_dict()),
    ):
        change()
        storages = {w.untyped_storage().data_ptr() for w in rnn.parameters()}
        assert storages == {vector.data_ptr()}
        assert_flat(rnn)
    vector.zero_()
    assert not rnn.bias_hh_l1.any()
    vector.share_memory_()
    assert_flat(rnn)


def test_neighbours_by_chance_are_not_flat():
    """Allocators may place tensors side by side, each of which can be freed alone."""
    rnn = make()
    memory = rnn.flat_weight.clone()
    for slot in rnn._slots:
        setattr(rnn, slot.name, nn.Parameter(torch.from_dlpack(slot.view(memory))))
    with pytest.raises(RuntimeError, match="do not lie in one buffer"):
        _ = rnn.flat_weight
    rnn.flatten_parameters()
    assert_flat(rnn)
    assert torch.equal(rnn.flat_weight, memory)


def test_weights_of_a_module_that_is_gone_are_still_flat():
    rnn, other = make(), make()
    for name, weight in make().named_parameters():
        setattr(rnn, name, weight)
        getattr(other, name).data = weight.data
    gc.collect()
    assert_flat(rnn)
    assert_flat(other)


def test_what_is_known_of_memory_is_forgotten():
    from fusedrnn import _buffers

    for _ in range(200):
        make()
    assert len(_buffers._buffers) < 1000


def test_every_attribute_that_is_listed_can_be_read():
    """torch.jit.trace reads them all."""
    for rnn in (make(), make(device="meta"), parametrizations.weight_norm(make(), "weight_hh_l1")):
        for name in dir(rnn):
            getattr(rnn, name)
    assert "flat_weight" in dir(make()) and "flat_weight" not in dir(rnn)


# --- gradients ----------------------------------------------------------------------------------

INPUT = torch.linspace(-1, 1, 6 * 2 * 5).reshape(6, 2, 5)


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
