"""GRU, LSTM and their cells compared with torch.nn's, in every case that torch documents.

They differ on purpose where torch has no check and its code fails by chance: the error then has the
type that the same mistake has elsewhere (test_errors_that_differ_from_torchs).
"""

import pytest
import torch
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pad_packed_sequence,
)
from torch_pairs import (
    EVERY_OPTIONS,
    F64,
    NAMES,
    PROJECTED,
    assert_same,
    assert_same_gradients,
    leaf,
    leaves,
    loss_of,
    pair,
    state,
)

import fusedrnn


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


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
