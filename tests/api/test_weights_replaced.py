"""Weights that are replaced, tied or reparametrized no longer share the buffer.

Also weights in shared memory, on the meta device, and in processes that train together.
"""

import contextlib
import copy
import io
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
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
from torch.nn.utils import parametrize

import fusedrnn


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return fusedrnn.StochasticGRU(**SIZES)


@pytest.mark.parametrize(
    ("name", "seen", "weight"),
    [
        ("weight_hz_l0", "weight_hz_l0", torch.randn(6, 4)),
        ("weight_ih_l0", "weight_zh_l0", torch.randn(12, 5)),
        ("weight_hz_l0", "weight_hz_l0", torch.randn(4, 6).T),
        ("weight_hz_l0", "weight_hz_l0", torch.randn(6, 1).expand(6, 4)),
        ("weight_hz_l0", "weight_hz_l0", torch.randn(6, 9)[:, 2:6]),
    ],
    ids=["dense", "first", "strided", "expanded", "from a larger tensor"],
)
def test_replaced_weight(rnn, name, seen, weight):
    replacement = nn.Parameter(weight)
    setattr(rnn, name, replacement)
    assert_not_flat(rnn, rf"do not lie in one buffer \(see {seen}\)")
    assert_right(rnn)
    rnn.flatten_parameters()
    assert_flat(rnn)
    assert getattr(rnn, name) is replacement
    assert_right(rnn)


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


# --- other memory -------------------------------------------------------------------------------


def test_replica_as_in_data_parallel(rnn):
    """DataParallel's replicas hold plain tensors that are not leaves, as attributes."""
    replica = rnn._replicate_for_data_parallel()
    for name, p in rnn.named_parameters():
        setattr(replica, name, p * 1)
    assert_not_flat(replica, "weight_ih_l0 is not a plain nn.Parameter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replica(INPUT)[0].sum().backward()
    assert all(p.grad is not None for p in rnn.parameters())
    assert_flat(rnn)


def sent(module):
    """What another process gets."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(module)
    return pickle.loads(buffer.getvalue())


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_module_in_another_process(rnn, is_shared):
    """The memory is one, and flat on both sides."""
    rnn.weight_hz_l0.requires_grad_(False)
    model, kept = nn.Sequential(nn.Linear(5, 5), rnn), rnn.weight_ih_l0
    if is_shared:
        model.share_memory()
    other = sent(model)
    with torch.no_grad():
        model[0].weight.fill_(3)
        rnn.flat_weight.fill_(3)
        other[1].bias_hz_l0.fill_(4)
    assert all(p.is_shared() for p in (*model.parameters(), *other.parameters()))
    assert rnn.weight_ih_l0 is kept and not other[1].weight_hz_l0.requires_grad
    for name, weight in other.named_parameters():
        if name.startswith(("0.weight", "1.")):
            assert (weight == (4 if name == "1.bias_hz_l0" else 3)).all()
    assert_flat(rnn)
    assert_flat(other[1])
    assert_same_values(other[1], values(rnn))


def test_a_module_that_is_not_flat_in_another_process(rnn):
    rnn.weight_hz_l0 = nn.Parameter(torch.randn(6, 4))
    other = sent(rnn)
    with torch.no_grad():
        rnn.weight_hz_l0.fill_(3)
    assert (other.weight_hz_l0 == 3).all()
    assert_same_values(other, values(rnn))


def test_weights_in_shared_memory_are_not_moved(rnn):
    rnn.weight_hz_l0 = nn.Parameter(torch.randn(6, 4))
    rnn.share_memory()
    rnn.flatten_parameters()
    assert all(p.is_shared() for p in rnn.parameters())
    assert_right(rnn)


def in_the_context_of_meta():
    with torch.device("meta"):
        return fusedrnn.StochasticGRU(**SIZES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fusedrnn.StochasticGRU(**SIZES, device="meta"),
        in_the_context_of_meta,
        lambda: fusedrnn.StochasticGRU(**SIZES).to("meta"),
    ],
    ids=["device", "context", "to"],
)
def test_meta_device(make):
    rnn = make()
    assert all(p.is_meta for p in rnn.parameters())
    assert_not_flat(rnn, "weight_ih_l0 is a torch.strided tensor on device meta")
    rnn.flatten_parameters()
    rnn.double()
    assert copy.deepcopy(rnn).weight_hz_l1.is_meta
    rnn.to_empty(device="cpu").reset_parameters()
    assert_flat(rnn)
    assert_right(rnn, INPUT.double())


def test_modules_made_without_values():
    for name in ("GRU", "LSTM", "StochasticGRU", "GRUCell", "LSTMCell", "StochasticGRUCell"):
        rnn = nn.utils.skip_init(getattr(fusedrnn, name), 5, 4)
        assert all(p.device.type == "cpu" for p in rnn.parameters())
        assert_flat(rnn)
        with torch.device("meta"):
            rnn = getattr(fusedrnn, name)(5, 4)
        assert all(p.is_meta for p in rnn.parameters())
        assert_flat(rnn.to_empty(device="cpu"))


def test_fake_tensors(rnn):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = fusedrnn.StochasticGRU(**SIZES)
        assert_not_flat(fake, "weight_ih_l0 is not a plain nn.Parameter")
        fake.flatten_parameters()


@contextlib.contextmanager
def one_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


gloo = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@gloo
def test_distributed_data_parallel(rnn):
    with one_process_group():
        model = nn.parallel.DistributedDataParallel(rnn, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = values(rnn)
        for _ in range(2):
            optimizer.zero_grad()
            model(INPUT)[0].sum().backward()
            optimizer.step()
        assert all(not torch.equal(before[n], p) for n, p in rnn.named_parameters())
        assert_flat(rnn)
        assert_right(rnn)


@gloo
def test_all_reduce_of_the_flat_weight(rnn):
    with one_process_group():
        before = values(rnn)
        dist.all_reduce(rnn.flat_weight)
        assert_same_values(rnn, before)


@gloo
def test_fully_sharded(rnn):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected, _ = rnn(INPUT, sample=False)
    full = values(rnn)
    with one_process_group():
        fully_shard(rnn, mesh=init_device_mesh("cpu", (1,)))
        assert_not_flat(rnn, "weight_ih_l0 is not a plain nn.Parameter")
        rnn.flatten_parameters()
        optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
        output, _ = rnn(INPUT, sample=False)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        optimizer.step()
        assert all(
            not torch.equal(full[name], weight.full_tensor())
            for name, weight in rnn.state_dict().items()
        )
