"""Weights in shared memory, on the meta device, and in processes that train together."""

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

import fusedrnn


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return fusedrnn.StochasticGRU(**SIZES)


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


def test_shared_memory(rnn):
    rnn.share_memory()
    assert all(p.is_shared() for p in rnn.parameters())
    assert_flat(rnn)
    # Pickled as for another process.
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(rnn)
    other = pickle.loads(buffer.getvalue())
    with torch.no_grad():
        rnn.flat_weight.fill_(3)
    assert all((p == 3).all() for p in other.parameters())
    assert_flat(other)


def test_weights_in_shared_memory_are_not_moved(rnn):
    rnn.weight_hz_l0 = nn.Parameter(torch.randn(6, 4))
    rnn.share_memory()
    rnn.flatten_parameters()
    assert all(p.is_shared() for p in rnn.parameters())
    assert_right(rnn)


def test_meta_device():
    rnn = fusedrnn.StochasticGRU(**SIZES, device="meta")
    assert all(p.is_meta for p in rnn.parameters())
    assert_not_flat(rnn, "weight_ih_l0 is a torch.strided tensor on device meta")
    rnn.flatten_parameters()
    rnn.double()
    assert copy.deepcopy(rnn).weight_hz_l1.is_meta
    rnn.to_empty(device="cpu").reset_parameters()
    assert_flat(rnn)
    assert_right(rnn, INPUT.double())


def test_device_context():
    with torch.device("meta"):
        model = nn.Sequential(fusedrnn.StochasticGRU(**SIZES), fusedrnn.StochasticGRUCell(4, 4))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert_flat(model[0])
    assert_flat(model[1])


def test_skip_init():
    rnn = nn.utils.skip_init(fusedrnn.StochasticGRU, **SIZES)
    assert rnn.weight_ih_l0.device.type == "cpu"
    assert_flat(rnn)
    assert_flat(nn.utils.skip_init(fusedrnn.StochasticGRUCell, 5, 4))


def test_to_meta_and_back(rnn):
    rnn.to("meta")
    rnn.to_empty(device="cpu")
    assert_flat(rnn)


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
