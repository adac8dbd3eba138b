"""GRU, LSTM and their cells beside torch.nn's, in every corner that torch's documentation names.

Where we differ on purpose: where torch's code runs into an error without looking for it, ours has
the type that the same mistake has elsewhere (test_errors_that_differ_from_torchs).
"""

import copy
import inspect
import io
import itertools
import pickle
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
    unpad_sequence,
)

import fusedrnn

F64 = {"dtype": torch.float64}
NAMES = ["GRU", "LSTM"]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def pair(name, *sizes, **options):
    """Ours and torch's, with the same weights, in float64."""
    options = F64 | options
    torch.manual_seed(1)
    ours = getattr(fusedrnn, name)(*sizes, **options)
    torch.manual_seed(1)
    return ours, getattr(nn, name)(*sizes, **options)


def state(name, *shape, dtype=torch.float64):
    """What the module ``name`` takes as hx."""
    h, c = torch.randn(2, *shape, dtype=dtype)
    return (h, c) if name.startswith("LSTM") else h


def leaves(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def assert_same(actual, expected, atol=1e-12):
    actual, expected = leaves(actual), leaves(expected)
    assert [t.shape for t in actual] == [t.shape for t in expected]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def loss_of(result):
    return sum((t.double() ** 2).sum() for t in leaves(result) if t.is_floating_point())


def assert_same_gradients(ours, theirs, *args, **kwargs):
    """Values, and gradients of weights and of floating arguments."""
    wanted = [t for t in leaves(args) if t.is_floating_point()]
    grads = []
    for module in (ours, theirs):
        result = module(*args, **kwargs)
        grads.append(torch.autograd.grad(loss_of(result), [*wanted, *module.parameters()]))
    assert_same(ours(*args, **kwargs), theirs(*args, **kwargs))
    assert_same(*grads, atol=1e-10)


def leaf(tensor):
    return tensor.clone().requires_grad_()


# --- constructors --------------------------------------------------------------------------------


def parameters_of(function):
    return [
        (p.name, p.default, p.kind)
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "mode")
    ]


def test_signature(name):
    """As documented; what torch does not have comes after, by name only."""
    expected = parameters_of(nn.RNNBase.__init__)
    if name == "GRU":  # which refuses it
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


EVERY_OPTIONS = [
    {},
    {"num_layers": 2, "bias": False},
    {"num_layers": 3, "bidirectional": True},
    {"batch_first": True, "num_layers": 2, "dropout": 0.25},
    {"bidirectional": True, "dtype": torch.float16},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", EVERY_OPTIONS, ids=str)
def test_new_modules(name, options):
    """Names, order, shapes and values of the parameters; all_weights; repr; attributes."""
    ours, theirs = pair(name, 5, 4, **options)
    after = torch.rand(1)  # torch's generator has gone as far
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_size": 0},
        {"hidden_size": 0},
        {"num_layers": 0},
        {"hidden_size": 2.0},
        {"input_size": "4"},
        {"num_layers": 1.0},
        {"dropout": -0.1},
        {"dropout": 1.1},
        {"dropout": True},
        {"dropout": "a"},
        {"bias": 1},
        {"batch_first": 1},
        {"foo": 1},
        {"dtype": torch.int64},
    ],
    ids=str,
)
def test_wrong_options_raise_as_in_torch(name, wrong):
    assert_same_error_of_options(name, wrong)


@pytest.mark.parametrize("proj_size", [-1, 4, 5, 2.0, "2", None], ids=str)
def test_wrong_projections_raise_as_in_torch(proj_size):
    assert_same_error_of_options("LSTM", {"proj_size": proj_size})


def assert_same_error_of_options(name, wrong):
    options = {"input_size": 5, "hidden_size": 4} | wrong
    errors = []
    for library in (fusedrnn, nn):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            getattr(library, name)(**options)
        errors.append(caught.type)
    assert errors[0] is errors[1]


def test_flags_that_are_no_bools_raise_as_in_torch(name):
    """There from the call on, ours from the constructor on."""
    for library in (fusedrnn, nn):
        with pytest.raises(TypeError):
            getattr(library, name)(5, 4, bidirectional=1)(torch.ones(3, 2, 5))


def test_dropout_of_one_layer_warns(name):
    for library in (fusedrnn, nn):
        with pytest.warns(UserWarning, match="dropout") as record:
            getattr(library, name)(5, 4, dropout=0.5)
        assert library is nn or record[0].filename == __file__  # where the caller is
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(library, name)(5, 4, num_layers=2, dropout=0.5)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("options", EVERY_OPTIONS[:3], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("with_hx", [False, True])
def test_shapes_values_and_gradients(name, options, batch_first, batched, with_hx):
    ours, theirs = pair(name, 5, 4, batch_first=batch_first, **options)
    rows = ours.num_layers * (2 if ours.bidirectional else 1)
    x = leaf(torch.randn(7, 2, 5, **F64) if batched else torch.randn(7, 5, **F64))
    hx = state(name, rows, *((2 if not batch_first else 7,) if batched else ()), 4)
    hx = tuple(map(leaf, hx)) if isinstance(hx, tuple) else leaf(hx)
    assert_same_gradients(ours, theirs, x, *([hx] if with_hx else []))


def test_an_empty_batch(name):
    ours, theirs = pair(name, 5, 4, bidirectional=True)
    assert_same(ours(torch.randn(3, 0, 5, **F64)), theirs(torch.randn(3, 0, 5, **F64)))


def test_hx_need_not_be_contiguous(name):
    ours, theirs = pair(name, 5, 4, num_layers=2)
    x = torch.randn(3, 2, 5, **F64)
    for make in (
        lambda: torch.randn(2, 2, 4, **F64).transpose(0, 1),
        lambda: torch.randn(2, 1, 4, **F64).expand(2, 2, 4),
        lambda: torch.randn(2, 2, 8, **F64)[..., ::2],
    ):
        hx = (make(), make()) if name == "LSTM" else make()
        assert_same(ours(x, hx), theirs(x, hx))
        strided = torch.randn(2, 5, 3, **F64).permute(2, 0, 1)
        assert_same(ours(strided, hx), theirs(strided, hx))


def test_lstm_takes_a_list_as_hx():
    ours, theirs = pair("LSTM", 5, 4)
    hx = list(state("LSTM", 1, 2, 4))
    assert_same(ours(torch.ones(3, 2, 5, **F64), hx), theirs(torch.ones(3, 2, 5, **F64), hx))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (5,), (0, 5)], ids=str)
@pytest.mark.parametrize("with_hx", [False, True])
def test_cells(name, shape, with_hx, bias):
    ours, theirs = pair(f"{name}Cell", 5, 4, bias)
    x = leaf(torch.randn(shape, **F64))
    hx = state(name, *shape[:-1], 4)
    hx = tuple(map(leaf, hx)) if isinstance(hx, tuple) else leaf(hx)
    assert_same_gradients(ours, theirs, x, *([hx] if with_hx else []))


def test_a_cell_in_a_loop_is_the_module(name):
    rnn, _ = pair(name, 5, 4)
    cell, _ = pair(f"{name}Cell", 5, 4)
    cell.load_state_dict({key.removesuffix("_l0"): w for key, w in rnn.state_dict().items()})
    x, now = torch.randn(6, 3, 5, **F64), None
    outputs = []
    for step in x:
        now = cell(step, now)
        outputs.append(leaves(now)[0])
    output, last = rnn(x)
    assert_same(torch.stack(outputs), output)
    assert_same([t.unsqueeze(0) for t in leaves(now)], last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_conversion_of_the_dtype(name, dtype):
    ours, theirs = (m.to(dtype) for m in pair(name, 5, 4))
    x = torch.randn(3, 2, 5, dtype=dtype)
    for a, b in zip(leaves(ours(x)), leaves(theirs(x)), strict=True):
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_the_half_and_the_double_method(name):
    rnn = getattr(fusedrnn, name)(5, 4)
    for convert, dtype in (("double", torch.float64), ("half", torch.float16)):
        getattr(rnn, convert)()
        assert {p.dtype for p in rnn.parameters()} == {dtype}
        assert rnn(torch.randn(3, 2, 5, dtype=dtype))[0].dtype == dtype


def test_train_and_eval_both_have_gradients(name):
    x = torch.randn(3, 2, 5, **F64)
    ours, theirs = pair(name, 5, 4, num_layers=2)
    for mode in (True, False):
        assert_same_gradients(ours.train(mode), theirs.train(mode), leaf(x))


# --- projections ----------------------------------------------------------------------------------

PROJECTED = [{"proj_size": 3, **options} for options in EVERY_OPTIONS[:4]]


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


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("options", PROJECTED, ids=str)
def test_projections(options, batched):
    ours, theirs = pair("LSTM", 5, 4, **options)
    ours, theirs = ours.eval(), theirs.eval()  # without dropout
    rows, batch = ours.num_layers * (2 if ours.bidirectional else 1), (2,) if batched else ()
    x = leaf(torch.randn(*((2, 7) if ours.batch_first and batched else (7, *batch)), 5, **F64))
    h, c = (leaf(torch.randn(rows, *batch, width, **F64)) for width in (3, 4))
    assert_same_gradients(ours, theirs, x)
    assert_same_gradients(ours, theirs, x, (h, c))
    if batched:
        lengths = [3, 7]
        packed = pack_padded_sequence(x, lengths, ours.batch_first, enforce_sorted=False)
        output, last = theirs(packed, (h, c))
        padded, _ = pad_packed_sequence(output, ours.batch_first)
        assert_same(ours(x, (h, c), lengths=lengths), (padded, last))
        output, last = ours(packed, (h, c))
        assert_same((pad_packed_sequence(output, ours.batch_first)[0], last), (padded, last))


def test_the_last_state_of_a_projection():
    ours, theirs = pair("LSTM", 5, 4, 2, bidirectional=True, proj_size=3)
    ours.return_sequence = False
    x = leaf(torch.randn(70, 2, 5, **F64))
    (last, states), (_, expected) = ours(x), theirs(x)
    assert_same((last, states), (torch.cat([*expected[0][-2:]], -1), expected))
    grads = [
        torch.autograd.grad(loss_of(s), [x, *m.parameters()])
        for s, m in ((states, ours), (expected, theirs))
    ]
    assert_same(*grads, atol=1e-10)


@pytest.mark.parametrize("shapes", [((1, 2, 4), (1, 2, 4)), ((1, 2, 3), (1, 2, 3))], ids=str)
def test_wrong_states_of_projections_raise_as_in_torch(shapes):
    for library in (fusedrnn, nn):
        with pytest.raises(RuntimeError):
            library.LSTM(5, 4, proj_size=3)(X, tuple(map(torch.zeros, shapes)))


# --- dropout -------------------------------------------------------------------------------------


def test_the_output_itself_is_never_dropped(name):
    rnn = getattr(fusedrnn, name)(5, 4, 2, dropout=0.9)
    assert (rnn(torch.randn(50, 3, 5))[0] != 0).all()


def test_dropout_of_zero_and_of_one(name):
    x = torch.randn(6, 3, 5, **F64)
    for p in (0.0, 1.0):
        ours, theirs = pair(name, 5, 4, num_layers=3, bidirectional=True, dropout=p)
        assert_same_gradients(ours, theirs, leaf(x))
        assert_same_gradients(ours.eval(), theirs.eval(), leaf(x))


def test_dropout_is_seeded(name):
    rnn, x = getattr(fusedrnn, name)(5, 4, 2, dropout=0.5), torch.randn(6, 3, 5)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(rnn(x)[0])
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    rnn.eval()
    assert torch.equal(rnn(x)[0], rnn(x)[0])


# --- sequences of different lengths ---------------------------------------------------------------

LENGTHS = {
    "sorted": [7, 5, 5, 1],
    "unsorted": [3, 7, 1, 5],
    "shorter than the tensor": [2, 6, 1, 3],
}


def to_pack(name, options, lengths):
    ours, theirs = pair(name, 5, 4, **options)
    rows = ours.num_layers * (2 if ours.bidirectional else 1)
    shape = (4, 7, 5) if ours.batch_first else (7, 4, 5)
    hx = state(name, rows, 4, 4)
    hx = tuple(map(leaf, hx)) if isinstance(hx, tuple) else leaf(hx)
    return ours, theirs, leaf(torch.randn(shape, **F64)), hx, LENGTHS[lengths]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", EVERY_OPTIONS[:3], ids=str)
def test_packed_sequences(name, options, batch_first, lengths):
    """Output, its order, hx and h_n permuted as in torch; the same as the padded batch."""
    options = options | {"batch_first": batch_first}
    ours, theirs, x, hx, lengths = to_pack(name, options, lengths)
    is_sorted = lengths == sorted(lengths, reverse=True)
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=is_sorted)

    for args in ((), (hx,)):
        grads = []
        for module in (ours, theirs):
            result = module(packed, *args)
            wanted = [x, *leaves(args), *module.parameters()]
            grads.append(
                torch.autograd.grad(
                    result[0].data.square().sum() + loss_of(result[1]), wanted, retain_graph=True
                )
            )
        assert_same(*grads, atol=1e-10)
        output, last = ours(packed, *args)
        expected, expected_last = theirs(packed, *args)
        assert isinstance(output, PackedSequence)
        for actual, wanted in zip(output, expected, strict=True):
            if wanted is None:
                assert actual is None
            else:
                torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
        assert_same(last, expected_last)

        padded, _ = pad_packed_sequence(output, batch_first, total_length=7)
        assert_same(ours(x, *args, lengths=lengths), (padded, last))
        for same in (torch.tensor(lengths), numpy.array(lengths), list(numpy.array(lengths))):
            assert_same(ours(x, *args, lengths=same), (padded, last))


def test_helpers_for_lists_of_sequences(name):
    ours, theirs = pair(name, 5, 4, bidirectional=True)
    sequences = [torch.randn(n, 5, **F64) for n in (2, 6, 3)]
    results = []
    for module in (ours, theirs):
        output, last = module(pack_sequence(sequences, enforce_sorted=False))
        results.append([*unpack_sequence(output), last])
    assert_same(*results)
    lengths = torch.tensor([2, 6, 3])
    output, last = ours(pad_sequence(sequences), lengths=lengths)
    assert_same([*unpad_sequence(output, lengths), last], results[0])


def test_a_packed_sequence_and_resets(name):
    rnn, _ = pair(name, 5, 4, num_layers=2, bidirectional=True, batch_first=True)
    x, reset = torch.randn(3, 6, 5, **F64), torch.rand(3, 6) < 0.4
    packed = pack_padded_sequence(x, [4, 6, 1], True, enforce_sorted=False)
    output, last = rnn(packed, reset=reset)
    padded, _ = pad_packed_sequence(output, batch_first=True)
    assert_same(rnn(x, lengths=[4, 6, 1], reset=reset), (padded, last))
    with pytest.raises(ValueError, match="lengths must not be given for a PackedSequence"):
        rnn(packed, lengths=[4, 6, 1])


# --- errors --------------------------------------------------------------------------------------


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


def assert_same_error(name, *args):
    errors = []
    for library in (fusedrnn, nn):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            getattr(library, name)(5, 4)(*args)
        errors.append(caught)
    assert errors[0].type is errors[1].type, [str(e.value) for e in errors]
    assert str(errors[0].value).startswith("fusedrnn: ")


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_wrong_calls_raise_as_in_torch(name, what):
    x, *hx = WRONG_CALLS[what]
    shape, dtype = (*hx, torch.float32)[:2] if hx else (None, None)
    assert_same_error(name, x, *([zeros(name, *shape, dtype=dtype)] if hx else []))


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 2, 4), (1, 2, 5), (2, 4)], ids=str)
def test_wrong_cell_states_raise_as_in_torch(shape):
    assert_same_error("LSTM", X, (torch.zeros(1, 2, 4), torch.zeros(shape)))


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (X, None),
        (X[0, 0, 0], None),
        (X[0, :, :4], None),
        (X[0, 0, :4], None),
        (X[0], (3, 4)),
        (X[0], (1, 4)),
        (X[0], (2, 5)),
        (X[0], (1, 2, 4)),
        (X[0], (4,)),
        (X[0, 0], (5,)),
        (X[0, 0], (1, 4)),
        (X[0, 0], (1, 1, 4)),
    ],
    ids=lambda value: str(tuple(value.shape) if isinstance(value, torch.Tensor) else value),
)
def test_wrong_calls_of_cells_raise_as_in_torch(name, x, shape):
    cell = f"{name}Cell"
    assert_same_error(cell, x, *([] if shape is None else [zeros(cell, *shape)]))


def test_lstm_cells_take_no_single_tensor():
    assert_same_error("LSTMCell", X[0], torch.zeros(2, 4))


def test_errors_that_differ_from_torchs(name):
    """torch's are what its code runs into: AttributeError, IndexError, or none."""
    rnn, h = getattr(fusedrnn, name)(5, 4), torch.zeros(1, 2, 4)
    for x in (None, [1.0]):
        with pytest.raises(TypeError, match="input must be a tensor"):
            rnn(x)
    wrong_states = [h, (h,), (h, h, h), (h, None)] if name == "LSTM" else [(h, h), [h]]
    for hx in wrong_states:
        with pytest.raises(TypeError, match="hx must be a"):
            rnn(X, hx)
    cell = getattr(fusedrnn, f"{name}Cell")(5, 4)
    with pytest.raises(ValueError, match="as input is"):  # of the module torch's is one too
        cell(X[0].double())
    with pytest.raises(RuntimeError, match="dtype must be one of"):
        getattr(fusedrnn, f"{name}Cell")(5, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="hidden_size must be a positive integer"):
        getattr(fusedrnn, f"{name}Cell")(5, 0)


# --- what torch does with modules -----------------------------------------------------------------


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
    """Constructions and calls that torch's own tests expect to fail."""
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
