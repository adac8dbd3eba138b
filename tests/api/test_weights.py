"""Named parameters and one flat buffer at once, through whatever torch does to modules."""

import contextlib
import copy
import io
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler to share memory
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusedrnn
from fusedrnn import cells, reference
from fusedrnn.cells import Sizes

SIZES = {"input_size": 5, "hidden_size": 4, "latent_size": 3, "num_layers": 2}
INPUT = torch.linspace(-1, 1, 6 * 2 * 5).reshape(6, 2, 5)


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return fusedrnn.StochasticGRU(**SIZES)


def assert_flat(rnn):
    """The buffer holds every weight where the layout says, and is the weights' own memory."""
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
    """Without a warning, output and gradients are what the reference makes of the weights."""
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
    """Also from a checkpoint whose tensors have a memory of their own each."""
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
    assert Doubled.calls == 0  # a parametrization may have state: nothing but forward may run it
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
        rnn(INPUT)  # pruned weights are made by a hook of the forward pass
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


def test_replica_as_in_data_parallel(rnn):
    """DataParallel's copies hold plain tensors, that are not leaves, as attributes."""
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
    # As another process would get it.
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
