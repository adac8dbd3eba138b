"""New modules, state dicts, copies and reparametrizations, as torch.nn has them."""

import copy
import inspect
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch_pairs import EVERY_OPTIONS, F64, NAMES, PROJECTED, assert_same, loss_of, pair

import fusedrnn


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def parameters_of(function):
    return [
        (p.name, p.default, p.kind)
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "mode")
    ]


def test_signature(name):
    """Signatures are torch's; options that torch lacks follow, by name only."""
    expected = parameters_of(nn.RNNBase.__init__)
    if name == "GRU":  # nn.GRU refuses it
        expected = [p for p in expected if p[0] != "proj_size"]
    actual = parameters_of(getattr(fusedrnn, name))
    assert actual[: len(expected)] == expected
    assert {kind for _, _, kind in actual[len(expected) :]} == {inspect.Parameter.KEYWORD_ONLY}
    cell = f"{name}Cell"
    assert parameters_of(getattr(fusedrnn, cell)) == parameters_of(getattr(nn, cell))


def test_signature_of_forward(name):
    for cls in (name, f"{name}Cell"):
        expected = [p[0] for p in parameters_of(getattr(nn, cls).forward)]
        assert [p[0] for p in parameters_of(getattr(fusedrnn, cls).forward)][:2] == expected


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_new_modules(name, options):
    """Compares names, order, shapes and values of parameters, all_weights, repr and attributes."""
    ours, theirs = pair(name, 5, 4, **options)
    after = torch.rand(1)  # the state of torch's generator
    torch.manual_seed(1)
    getattr(nn, name)(5, 4, **(F64 | options))
    assert torch.equal(torch.rand(1), after)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for ours_of_layer, theirs_of_layer in zip(ours.all_weights, theirs.all_weights, strict=True):
        for a, b in zip(ours_of_layer, theirs_of_layer, strict=True):
            assert torch.equal(a, b)
    assert repr(ours) == repr(theirs)
    attributes = "input_size hidden_size num_layers bias batch_first dropout bidirectional "
    attributes += "proj_size training"
    for attribute in attributes.split():
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    ours.reset_parameters()
    theirs.reset_parameters()
    assert all(p.abs().max() <= 0.5 for p in ours.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_new_cells(name, bias):
    ours, theirs = pair(f"{name}Cell", 5, 4, bias=bias)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    assert (ours.bias_ih is None) == (theirs.bias_ih is None) == (not bias)
    assert (ours.input_size, ours.hidden_size, ours.bias) == (5, 4, bias)


@pytest.mark.parametrize("options", EVERY_OPTIONS[:3], ids=str)
def test_state_dicts_load_both_ways(name, options):
    ours, theirs = pair(name, 5, 4, **options)
    x = torch.randn(3, 2, 5, **F64)
    for to, source in ((ours, theirs), (theirs, ours)):
        source.reset_parameters()
        assert str(to.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
        assert_same(ours(x), theirs(x))
    ours_cell, theirs_cell = pair(f"{name}Cell", 5, 4)
    ours_cell.load_state_dict(theirs_cell.state_dict())
    theirs_cell.load_state_dict(ours_cell.state_dict())


def test_dropout_of_one_layer_warns(name):
    for library in (fusedrnn, nn):
        with pytest.warns(UserWarning, match="dropout") as record:
            getattr(library, name)(5, 4, dropout=0.5)
        assert library is nn or record[0].filename == __file__  # a warning names the caller's file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(library, name)(5, 4, num_layers=2, dropout=0.5)


@pytest.mark.parametrize("options", PROJECTED, ids=str)
def test_new_projected_modules(options):
    ours, theirs = pair("LSTM", 5, 4, **options)
    assert repr(ours) == repr(theirs) and ours.proj_size == theirs.proj_size
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.shape == b.shape and torch.equal(a, b)
    for ours_of_layer, theirs_of_layer in zip(ours.all_weights, theirs.all_weights, strict=True):
        assert all(map(torch.equal, ours_of_layer, theirs_of_layer))
    for to, source in ((ours, theirs), (theirs, ours)):
        source.reset_parameters()
        to.load_state_dict(source.state_dict())
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert repr(copied) == repr(ours) and torch.equal(copied.flat_weight, ours.flat_weight)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("cell", ["", "Cell"])
def test_copies(name, cell, how):
    rnn = getattr(fusedrnn, name + cell)(5, 4)
    if how == "deepcopy":
        other = copy.deepcopy(rnn)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(rnn))
    else:
        torch.save(rnn, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    x = torch.randn(3, 5)
    assert_same(other(x), rnn(x), atol=0)
    assert repr(other) == repr(rnn)
    assert other.flat_weight.data_ptr() != rnn.flat_weight.data_ptr()


def test_construction_without_values(name):
    rnn = getattr(fusedrnn, name)(5, 4, 2, bidirectional=True, device="meta")
    assert all(p.is_meta for p in rnn.parameters())
    rnn.to_empty(device="cpu").load_state_dict(
        getattr(nn, name)(5, 4, 2, bidirectional=True).state_dict()
    )
    assert rnn(torch.randn(3, 2, 5))[0].shape == (3, 2, 8)
    skipped = nn.utils.skip_init(getattr(fusedrnn, name), 5, 4, 2)
    assert not any(p.is_meta for p in skipped.parameters())


def test_flatten_parameters_is_there_and_harmless(name):
    ours, theirs = pair(name, 5, 4, num_layers=2)
    x = torch.randn(3, 2, 5, **F64)
    ours.flatten_parameters()
    assert_same(ours(x), theirs(x))


CHANGES = {
    "weight_norm": lambda rnn: parametrizations.weight_norm(rnn, "weight_hh_l0"),
    "spectral_norm": lambda rnn: parametrizations.spectral_norm(rnn, "weight_hh_l0").eval(),
    "orthogonal": lambda rnn: parametrizations.orthogonal(rnn, "weight_hh_l0"),
    "parametrize": lambda rnn: parametrize.register_parametrization(rnn, "bias_ih_l0", nn.Tanh()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous")
def test_reparametrised_weights(name, change):
    ours, theirs = pair(name, 5, 4)
    for module in (ours, theirs):
        torch.manual_seed(3)
        CHANGES[change](module)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(3, 2, 5, **F64)
    ours_grads, theirs_grads = (
        torch.autograd.grad(loss_of(m(x)), list(m.parameters())) for m in (ours, theirs)
    )
    assert_same(ours(x), theirs(x))
    assert_same(ours_grads, theirs_grads, atol=1e-10)


def test_functional_call(name):
    ours, theirs = pair(name, 5, 4, num_layers=2)
    weights = {key: torch.randn_like(w).requires_grad_() for key, w in ours.named_parameters()}
    x = torch.randn(3, 2, 5, **F64)
    results = [torch.func.functional_call(module, weights, (x,)) for module in (ours, theirs)]
    assert_same(*results)
    grads = [torch.autograd.grad(loss_of(r), list(weights.values())) for r in results]
    assert_same(*grads, atol=1e-10)


def test_training_goes_the_way_of_torchs(name):
    ours, theirs = pair(name, 3, 8, num_layers=2, bidirectional=True)
    x = torch.randn(10, 4, 3, **F64)
    losses = []
    for module in (ours, theirs):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        losses.append([])
        for _ in range(20):
            loss = (module(x)[0] - x.cumsum(0).mean(-1, keepdim=True).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(loss.detach())
    assert_same(*losses, atol=1e-9)
    assert losses[0][-1] < losses[0][0]


def test_public_names_are_those_of_torch():
    for name, cell in itertools.product(NAMES, ["", "Cell"]):
        assert getattr(fusedrnn, name + cell).__name__ == getattr(nn, name + cell).__name__
        assert name + cell in fusedrnn.__all__


def torchs_wrong_calls():
    """Constructor calls and calls that torch's own tests expect to fail."""
    common_modules = pytest.importorskip("torch.testing._internal.common_modules")
    for info in common_modules.module_db:
        if info.module_error_inputs_func is None or info.module_cls.__module__ != nn.GRU.__module__:
            continue
        wrong = info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
        )
        ours = getattr(fusedrnn, info.module_cls.__name__, None)
        yield from ((info.module_cls, ours, w.module_error_input) for w in wrong if ours)


def test_errors_have_the_types_of_torchs():
    def type_of_error(cls, wrong):
        with pytest.raises(Exception) as caught:
            module = cls(*wrong.constructor_input.args, **wrong.constructor_input.kwargs)
            module(*wrong.forward_input.args, **wrong.forward_input.kwargs)
        return caught.type

    count = 0
    for theirs, ours, wrong in torchs_wrong_calls():
        assert type_of_error(ours, wrong) is type_of_error(theirs, wrong), wrong.constructor_input
        count += 1
    assert count >= 20
