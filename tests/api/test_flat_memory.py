"""The memory of weights: one allocation, a storage for each weight, and how long it lives."""

import copy
import gc
import io
import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from cases import allow_tf32
from flat_weights import assert_flat
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
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


@pytest.mark.parametrize("way", ["share_memory", "sent", "sent in a model"])
def test_a_flat_weight_follows_to_shared_memory(way):
    """An optimizer may hold it, and goes on training the weights."""
    rnn = make()
    first, second = rnn.flat_weight, rnn.flat_weight
    before = first.clone()
    if way == "share_memory":
        rnn.share_memory()
    else:
        model = rnn if way == "sent" else nn.Sequential(rnn)
        ForkingPickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(model)
    assert torch.equal(rnn.flat_weight, before)
    for flat in (first, second):
        flat.add_(1)
    assert torch.equal(rnn.flat_weight, before + 1 + 1)
    assert_flat(rnn)
    output, _ = rnn(torch.randn(3, 2, 5))
    first.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_tensors_that_are_shared_one_by_one():
    rnn = make()
    for weight in rnn.parameters():
        weight.share_memory_()
    with pytest.raises(RuntimeError, match=r"call share_memory\(\) of the module before its tens"):
        _ = rnn.flat_weight
    rnn(torch.randn(3, 2, 5))[0].sum().backward()


def test_files_with_one_storage():
    """As of a module in shared memory: each weight has its own after loading."""
    rnn = make()
    state = rnn.share_memory().state_dict()
    other = make()
    other.load_state_dict(loaded(state), assign=True)
    kept = loaded(state)
    third = make()
    third.load_state_dict(kept, assign=True)  # the file's tensors live on
    for module in (other, third, loaded(rnn), pickle.loads(pickle.dumps(rnn))):
        assert_flat(module)
        assert torch.equal(module.flat_weight, rnn.flat_weight)
        assert all(w.untyped_storage().nbytes() == w.nbytes for w in module.parameters())


def test_flatten_parameters_in_forward():
    """Code for nn.LSTM calls it there; tracers see nothing of it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = make()

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    model, x = Model(), torch.randn(3, 2, 5)
    expected = model(x)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(lambda x: model(x), tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        torch.testing.assert_close(traced(x), expected)
    traced = torch.jit.trace(model, (x,))
    torch.testing.assert_close(traced(x), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    allow_tf32(True)  # torch.export does not run where TF32 is forbidden
    for is_strict in (False, True):
        exported = torch.export.export(model, (x,), strict=is_strict)
        torch.testing.assert_close(exported.module()(x), expected)


def test_under_fake_tensors():
    rnn = make()
    with FakeTensorMode(allow_non_fake_inputs=True):
        rnn.flatten_parameters()
        rnn.load_state_dict(rnn.state_dict())
        dir(rnn)
        copy.deepcopy(rnn)
    assert_flat(rnn)


def test_negative_views_are_not_flat():
    rnn = fusedrnn.GRU(5, 4)
    zeros = torch.zeros_like(rnn.flat_weight)
    with pytest.raises(ValueError, match="flat_grad must be"):
        rnn.flat_grad = torch._neg_view(zeros)
    for slot in rnn._slots:
        getattr(rnn, slot.name).grad = torch._neg_view(slot.view(zeros))
    assert rnn.flat_grad is None
    for slot in rnn._slots:
        getattr(rnn, slot.name).data = torch._neg_view(slot.view(zeros + 1))
    with pytest.raises(RuntimeError, match="do not lie in one buffer"):
        _ = rnn.flat_weight
    rnn.flatten_parameters()
    assert (rnn.flat_weight == -1).all()


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

    before = len(_buffers._buffers)  # of modules that other tests have left
    for _ in range(200):
        make()
    assert len(_buffers._buffers) < before + 1000


def test_a_process_that_is_forked_while_a_thread_makes_a_module():
    from fusedrnn import _buffers

    with _buffers._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            make()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_every_attribute_that_is_listed_can_be_read():
    """torch.jit.trace reads them all."""
    for rnn in (make(), make(device="meta"), parametrizations.weight_norm(make(), "weight_hh_l1")):
        for name in dir(rnn):
            getattr(rnn, name)
    assert "flat_weight" in dir(make()) and "flat_weight" not in dir(rnn)
