"""GRU, LSTM and their cells have torch.nn's signatures, weights, warnings and types of errors.

Values and gradients are compared by the rows of bench/compatibility, whose loop is compared with
torch's layers by values/test_reference.py.
"""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence

import fusedrnn

NAMES = ["GRU", "LSTM"]
OPTIONS = [
    {},
    {"num_layers": 2, "bias": False},
    {"num_layers": 3, "bidirectional": True},
    {"batch_first": True, "num_layers": 2, "dropout": 0.25},
    {"bidirectional": True, "dtype": torch.float16},
    {"dtype": torch.bfloat16},
]
OF_EACH = [(name, options) for name in NAMES for options in OPTIONS]
OF_EACH += [("LSTM", {"proj_size": 3, **options}) for options in OPTIONS[:4]]
ATTRIBUTES = "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size"


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def pair(name, *sizes, **options):
    """Our module and torch's, made after the same seed, which must leave the same one behind."""
    made = []
    for library in (fusedrnn, nn):
        torch.manual_seed(1)
        made.append(getattr(library, name)(*sizes, **({"dtype": torch.float64} | options)))
        made.append(torch.rand(1))
    assert torch.equal(made[1], made[3])
    return made[0], made[2]


def parameters_of(function):
    return [
        (p.name, p.default, p.kind)
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "mode")
    ]


def test_signatures(name):
    """Signatures are torch's; options that torch lacks follow, by name only."""
    expected = parameters_of(nn.RNNBase.__init__)
    if name == "GRU":  # nn.GRU refuses it
        expected = [p for p in expected if p[0] != "proj_size"]
    actual = parameters_of(getattr(fusedrnn, name))
    assert actual[: len(expected)] == expected
    assert {kind for _, _, kind in actual[len(expected) :]} == {inspect.Parameter.KEYWORD_ONLY}
    cell = f"{name}Cell"
    assert parameters_of(getattr(fusedrnn, cell)) == parameters_of(getattr(nn, cell))
    for cls in (name, cell):
        expected = [p[0] for p in parameters_of(getattr(nn, cls).forward)]
        assert [p[0] for p in parameters_of(getattr(fusedrnn, cls).forward)][:2] == expected
        assert getattr(fusedrnn, cls).__name__ == cls and cls in fusedrnn.__all__


def assert_same_weights(ours, theirs):
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(("name", "options"), OF_EACH, ids=str)
def test_new_modules(name, options):
    """Compares names, order, shapes and values of parameters, repr, attributes, and loading."""
    ours, theirs = pair(name, 5, 4, **options)
    assert_same_weights(ours, theirs)
    for ours_of_layer, theirs_of_layer in zip(ours.all_weights, theirs.all_weights, strict=True):
        assert all(map(torch.equal, ours_of_layer, theirs_of_layer))
    for attribute in (*ATTRIBUTES.split(), "training", "mode"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    for to, source in ((ours, theirs), (theirs, ours)):
        source.reset_parameters()
        assert all(p.abs().max() <= 0.5 for p in source.parameters())
        assert str(to.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
        assert_same_weights(ours, theirs)


def replica(rnn):
    """As DataParallel makes it: with plain tensors for parameters."""
    made = rnn._replicate_for_data_parallel()
    for name, weight in rnn.named_parameters():
        setattr(made, name, weight.clone())
    return made


COPIES = {
    "itself": lambda rnn: rnn,
    "deepcopy": copy.deepcopy,
    "unpickled": lambda rnn: pickle.loads(pickle.dumps(rnn)),
    "replica": replica,
    "parametrized": lambda rnn: parametrize.register_parametrization(
        rnn, "weight_hh_l0", nn.Identity()
    ),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(("name", "options"), OF_EACH, ids=str)
def test_names_of_weights_by_layer(name, options, copied):
    """What published code reads of torch.nn's layers, most often to initialise them."""
    made, theirs = pair(name, 5, 4, **options)
    ours = copied(made)
    assert ours._all_weights == theirs._all_weights
    assert ours._flat_weights_names == theirs._flat_weights_names
    assert isinstance(ours._flat_weights, list)
    for key, weight in zip(ours._flat_weights_names, ours._flat_weights, strict=True):
        assert torch.equal(getattr(ours, key), weight)
    for names in ours._all_weights:  # as forget biases are set
        for key in filter(lambda name: "bias" in name, names):
            getattr(ours, key).data[4:8].fill_(1.0)
            assert getattr(ours, key)[4:8].eq(1).all()


def test_names_of_weights_of_a_stochastic_gru():
    rnn = fusedrnn.StochasticGRU(5, 4, 3, num_layers=2, bidirectional=True)
    first = ["weight_ih", "weight_zh", "weight_hz", "bias_ih", "bias_zh", "bias_hz"]
    ends = ["_l0", "_l0_reverse", "_l1", "_l1_reverse"]
    assert rnn._all_weights == [[f"{name}{end}" for name in first] for end in ends]
    assert fusedrnn.StochasticGRU(5, 4, bias=False)._all_weights == [
        [f"{name}_l0" for name in first[:3]]
    ]
    assert [w.shape for w in rnn._flat_weights] == [w.shape for w in rnn.parameters()]
    assert rnn.mode == "STOCHASTIC_GRU"


def test_a_list_of_weights_may_be_refreshed_but_does_not_set_them():
    """Wrappers that drop weights set them by name, and then refresh torch.nn's list."""
    rnn, x = fusedrnn.LSTM(5, 4), torch.randn(3, 2, 5)
    dropped = rnn.weight_hh_l0.detach() * 0
    expected = rnn(x)[0]
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    assert torch.equal(rnn(x)[0], expected)
    for wrong in ([dropped, *rnn._flat_weights[1:]], [], None):
        with pytest.raises(RuntimeError, match="fusedrnn: weights must be set by name"):
            rnn._flat_weights = wrong
    with pytest.raises(RuntimeError, match="fusedrnn: weights must be set by name"):
        rnn._flat_weights[1] = dropped
    rnn._parameters["weight_hh_l0"] = dropped
    rnn._flat_weights[1] = rnn._parameters["weight_hh_l0"]
    assert rnn._flat_weights[1] is dropped
    assert not torch.equal(rnn(x)[0], expected)


@pytest.mark.parametrize("bias", [True, False])
def test_new_cells(name, bias):
    ours, theirs = pair(f"{name}Cell", 5, 4, bias=bias)
    assert_same_weights(ours, theirs)
    assert (ours.bias_ih is None) == (theirs.bias_ih is None) == (not bias)
    assert (ours.input_size, ours.hidden_size, ours.bias) == (5, 4, bias)
    theirs.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def test_dropout_of_one_layer_warns(name):
    for library in (fusedrnn, nn):
        with pytest.warns(UserWarning, match="dropout") as record:
            getattr(library, name)(5, 4, dropout=0.5)
        assert library is nn or record[0].filename == __file__  # a warning names the caller's file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(library, name)(5, 4, num_layers=2, dropout=0.5)


# --- errors --------------------------------------------------------------------------------------


def errors_of(call):
    """What a call with our library and one with torch.nn raise."""
    errors = []
    for library in (fusedrnn, nn):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            call(library)
        errors.append(caught)
    return errors


def assert_same_error(name, *args):
    ours, theirs = errors_of(lambda library: getattr(library, name)(5, 4)(*args))
    assert ours.type is theirs.type, (ours.value, theirs.value)
    assert str(ours.value).startswith("fusedrnn: ")


WRONG_OPTIONS = [
    *({size: 0} for size in ("input_size", "hidden_size", "num_layers")),
    *({"hidden_size": 2.0}, {"input_size": "4"}, {"num_layers": 1.0}),
    *({"dropout": value} for value in (-0.1, 1.1, True, "a")),
    *({"bias": 1}, {"batch_first": 1}, {"foo": 1}, {"dtype": torch.int64}),
]
WRONG_PROJECTIONS = [{"proj_size": size} for size in (-1, 4, 5, 2.0, "2", None)]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(n, w) for n in NAMES for w in WRONG_OPTIONS] + [("LSTM", w) for w in WRONG_PROJECTIONS],
    ids=str,
)
def test_wrong_options_raise_as_in_torch(name, wrong):
    options = {"input_size": 5, "hidden_size": 4} | wrong
    ours, theirs = errors_of(lambda library: getattr(library, name)(**options))
    assert ours.type is theirs.type


def test_flags_that_are_no_bools_raise_as_in_torch(name):
    """torch raises the error in the call, this package in the constructor."""
    errors_of(lambda library: getattr(library, name)(5, 4, bidirectional=1)(torch.ones(3, 2, 5)))


@pytest.mark.parametrize("shapes", [((1, 2, 4), (1, 2, 4)), ((1, 2, 3), (1, 2, 3))], ids=str)
def test_wrong_states_of_projections_raise_as_in_torch(shapes):
    states = tuple(map(torch.zeros, shapes))
    for error in errors_of(lambda library: library.LSTM(5, 4, proj_size=3)(X, states)):
        assert error.type is RuntimeError


def zeros(name, *shape, dtype=torch.float32):
    h = torch.zeros(*shape, dtype=dtype)
    return (h, h.clone()) if name.startswith("LSTM") else h


X = torch.ones(7, 2, 5)
PACKED = pack_padded_sequence(X, [7, 3])
WRONG_CALLS = {
    "rank 1": (X[0, 0],),
    "rank 4": (X[None],),
    "width": (X[..., :4],),
    "width of packed": (pack_padded_sequence(X[..., :4], [7, 3]),),
    "no steps": (X[:0],),
    "dtype": (X.double(),),
    "int": (X.long(),),
    "meta": (X.to("meta"),),
    "batch of hx": (X, (1, 3, 4)),
    "layers of hx": (X, (2, 2, 4)),
    "width of hx": (X, (1, 2, 5)),
    "rank of hx": (X, (2, 4)),
    "dtype of hx": (X, (1, 2, 4), torch.float64),
    "unbatched, hx batched": (X[:, 0], (1, 1, 4)),
    "unbatched, width of hx": (X[:, 0], (1, 5)),
    "unbatched, layers of hx": (X[:, 0], (2, 4)),
    "packed, batch of hx": (PACKED, (1, 3, 4)),
    "packed, width of hx": (PACKED, (1, 2, 5)),
}
WRONG_STEPS = [(X,), (X[0, 0, 0],), (X[0, :, :4],), (X[0, 0, :4],)]
WRONG_STEPS += [(X[0], shape) for shape in ((3, 4), (1, 4), (2, 5), (1, 2, 4), (4,))]
WRONG_STEPS += [(X[0, 0], shape) for shape in ((5,), (1, 4), (1, 1, 4))]


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_wrong_calls_raise_as_in_torch(name, what):
    x, *hx = WRONG_CALLS[what]
    shape, dtype = (*hx, torch.float32)[:2] if hx else (None, None)
    assert_same_error(name, x, *([zeros(name, *shape, dtype=dtype)] if hx else []))


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 2, 4), (1, 2, 5), (2, 4)], ids=str)
def test_wrong_cell_states_raise_as_in_torch(shape):
    assert_same_error("LSTM", X, (torch.zeros(1, 2, 4), torch.zeros(shape)))


def test_wrong_calls_of_cells_raise_as_in_torch(name):
    cell = f"{name}Cell"
    for x, *shapes in WRONG_STEPS:
        assert_same_error(cell, x, *(zeros(cell, *shape) for shape in shapes))
    if name == "LSTM":
        assert_same_error(cell, X[0], torch.zeros(2, 4))


def test_errors_that_differ_from_torchs(name):
    """torch has no check there, and raises AttributeError, IndexError, or nothing."""
    rnn, h = getattr(fusedrnn, name)(5, 4), torch.zeros(1, 2, 4)
    for x in (None, [1.0]):
        with pytest.raises(TypeError, match="input must be a tensor"):
            rnn(x)
    wrong_states = [h, (h,), (h, h, h), (h, None)] if name == "LSTM" else [(h, h), [h]]
    for hx in wrong_states:
        with pytest.raises(TypeError, match="hx must be a"):
            rnn(X, hx)
    cell = getattr(fusedrnn, f"{name}Cell")(5, 4)
    with pytest.raises(ValueError, match="as input is"):  # as torch's module
        cell(X[0].double())
    with pytest.raises(RuntimeError, match="dtype must be one of"):
        getattr(fusedrnn, f"{name}Cell")(5, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="hidden_size must be a positive integer"):
        getattr(fusedrnn, f"{name}Cell")(5, 0)


def test_calls_that_torchs_own_tests_expect_to_fail():
    common_modules = pytest.importorskip("torch.testing._internal.common_modules")
    count = 0
    for info in common_modules.module_db:
        if info.module_error_inputs_func is None or info.module_cls.__module__ != nn.GRU.__module__:
            continue
        for wrong in info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
        ):
            made, types = wrong.module_error_input.constructor_input, []
            called = wrong.module_error_input.forward_input
            for cls in (getattr(fusedrnn, info.module_cls.__name__, None), info.module_cls):
                if cls is None:
                    break
                with pytest.raises(Exception) as caught:
                    cls(*made.args, **made.kwargs)(*called.args, **called.kwargs)
                types.append(caught.type)
            assert len({*types}) <= 1, made
            count += len(types) == 2
    assert count >= 20
