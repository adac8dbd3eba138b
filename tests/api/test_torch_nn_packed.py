"""Packed sequences and torch's helpers for them, compared with torch.nn."""

import numpy
import pytest
import torch
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
    unpad_sequence,
)
from torch_pairs import EVERY_OPTIONS, F64, NAMES, assert_same, leaf, leaves, loss_of, pair, state


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


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
    """Output, order, hx and h_n are torch's, and the values are the padded batch's."""
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
