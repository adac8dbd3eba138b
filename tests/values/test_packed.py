"""A PackedSequence is read in place, and gives the bits of a padded batch with lengths."""

import pytest
import torch
from cases import CELLS, MODULES
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils._pytree import tree_leaves, tree_map

import fusedrnn
from bench.clock import saved_sizes_bytes

LENGTHS = [[9, 9, 4, 1], [3, 11, 7, 7, 1], [5], [2, 2, 2], [1, 20, 1]]
OPTIONS = [
    {},
    {"bidirectional": True, "num_layers": 2, "dropout": 0.5},
    {"chunk_size": 3, "recompute": False, "zoneout": 0.3},
    {"chunk_size": 1, "bias": False, "bidirectional": True},
    {"workspace_bytes": 2**23, "num_layers": 2},
    {"return_sequence": False, "num_layers": 2},
    {"return_sequence": False, "bidirectional": True},
    {"proj_size": 3, "bidirectional": True, "chunk_size": 4},
]


def in_order(order, tree):
    """Tensors with their rows in another order."""
    return tree_map(lambda leaf: None if leaf is None else leaf[:, order], tree)


def both(cell, options, lengths, dtype, reset=False, device="cpu"):
    """Results and gradients of a packed call, and of the same batch with lengths."""
    if options.get("proj_size") and cell != "lstm":
        pytest.skip("an option of the LSTM")
    torch.manual_seed(1)
    rnn = MODULES[cell](5, 7, dtype=dtype, device=device, **options)
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    steps, batch = max(lengths), len(lengths)
    widths = [rnn.proj_size or 7] + [7] * (cell == "lstm")
    states = [torch.randn(layers, batch, n, dtype=dtype, device=device) for n in widths]
    x = torch.randn(steps, batch, 5, dtype=dtype, device=device)
    is_reset = torch.rand(steps, batch, device=device) < 0.3 if reset else None
    cotangent = torch.randn(steps, batch, 64, dtype=dtype, device=device)

    def run(is_packed):
        leaves = [t.clone().requires_grad_() for t in (x, *states)]
        hx = leaves[1] if len(leaves) == 2 else tuple(leaves[1:])
        torch.manual_seed(2)  # for noise and masks
        if is_packed:
            data = pack_padded_sequence(leaves[0], torch.tensor(lengths), enforce_sorted=False)
            output, last = rnn(data, hx, reset=is_reset)
        else:
            sorted_lengths, order = torch.tensor(lengths).sort(descending=True, stable=True)
            rows, start, reset = in_order(order, (leaves[0], hx, is_reset))
            output, last = rnn(rows, start, reset=reset, lengths=sorted_lengths)
            inverse = order.argsort()
            last = in_order(inverse, last)
            if rnn.return_sequence:
                output = pack_padded_sequence(output, sorted_lengths)
            else:
                output = output[inverse]
        results = [output.data if isinstance(output, PackedSequence) else output]
        results += tree_leaves(last)
        ones = [cotangent.flatten()[: t.numel()].view(t.shape) for t in results]
        grads = torch.autograd.grad(results, [*leaves, *rnn.parameters()], ones)
        return [*results, *grads]

    return run(True), run(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_packed_rows_give_the_bits_of_padded_ones(device, cell, options, lengths, dtype):
    packed, padded = both(cell, options, lengths, dtype, device=device)
    for ours, expected in zip(packed, padded, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_resets_of_packed_rows(device, cell, options):
    packed, padded = both(cell, options, LENGTHS[1], torch.float32, reset=True, device=device)
    for ours, expected in zip(packed, padded, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_packed_rows_of_persistent_kernels(emulator, monkeypatch, cell, overlap):
    monkeypatch.setattr(fusedrnn._tuning.switches, "overlap_chunks", overlap)
    emulator.control(False, "", multiprocessors=132)
    options = {"bidirectional": True, "chunk_size": 4}
    packed, padded = both(cell, options, LENGTHS[1], torch.bfloat16, reset=True)
    assert emulator.counts()[2] > 0 and emulator.counts()[3] > 0
    for ours, expected in zip(packed, padded, strict=True):
        assert torch.equal(ours, expected)


FALLING = [30, 29, 29, 12, 7, 7, 2, 1]
MIXED = [2, 12, 1, 29, 7, 30, 7, 29]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [FALLING, MIXED], ids=["falling", "mixed"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_sequences_of_a_ragged_batch_are_as_alone(device, cell, lengths, options):
    """The fewer rows are active, the more steps a chunk has; NaN in padding goes nowhere."""
    if options.get("proj_size") and cell != "lstm":
        pytest.skip("an option of the LSTM")
    torch.manual_seed(1)
    # Masks are drawn for a row's place in the batch, which a sequence alone does not have.
    options = options | {"chunk_size": 2, "dropout": 0.0, "zoneout": 0.0}
    if "workspace_bytes" in options:
        del options["chunk_size"]
    rnn = MODULES[cell](5, 7, dtype=torch.float64, device=device, **options)
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    widths = [rnn.proj_size or 7] + [7] * (cell == "lstm")
    batch = len(lengths)
    x = torch.randn(30, batch, 5, dtype=torch.float64, device=device)
    reset = torch.rand(30, batch, device=device) < 0.1
    states = [torch.randn(layers, batch, n, dtype=torch.float64, device=device) for n in widths]
    for b, n in enumerate(lengths):
        x[n:, b] = torch.nan

    def run(some, steps, **masks):
        """Last states, outputs by row, and gradients, of some rows of the batch."""
        leaves = [x[:steps, some].clone(), *(s[:, some].clone() for s in states)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        hx = leaves[1] if len(leaves) == 2 else tuple(leaves[1:])
        output, last = rnn(leaves[0], hx, reset=reset[:steps, some], **masks)
        results = [*tree_leaves(last)] + [output] * rnn.return_sequence
        loss = sum(result.nan_to_num().sin().sum() for result in results)
        grads = torch.autograd.grad(loss, [*leaves, *rnn.parameters()])
        return results, grads[: len(leaves)], grads[len(leaves) :]

    results, grads, of_weights = run(list(range(batch)), 30, lengths=torch.tensor(lengths))
    sums = [torch.zeros_like(w) for w in of_weights]
    for b, n in enumerate(lengths):
        ours, own, weights = run([b], n)
        for together, alone in zip([*results, *grads], [*ours, *own], strict=True):
            steps = n if together.shape[0] == 30 else None
            torch.testing.assert_close(together[:steps, b : b + 1], alone)
            assert steps is None or not together[n:, b].any()
        sums = [total + w for total, w in zip(sums, weights, strict=True)]
    torch.testing.assert_close(list(of_weights), sums)


def test_nothing_is_saved_of_steps_that_are_not_there():
    """There is one long row among short ones: padded, the batch would have ten times the rows."""
    lengths = torch.tensor([1000] + [10] * 99)
    rnn = fusedrnn.GRU(8, 16)
    data = pack_padded_sequence(torch.randn(1000, 100, 8), lengths)
    rows = len(data.data)
    assert rows == 1990
    assert rnn(data)[0].data.shape == (rows, 16)
    saved = saved_sizes_bytes(lambda: rnn(data)[0].data, known=[])
    weights = sum(w.numel() for w in rnn.parameters())
    # The bytes of input, output and initial states; batch sizes have 8 bytes each.
    assert sum(saved) == 4 * (rows * (8 + 16) + 100 * 16 + weights) + 8 * 1000


def test_gradients_of_packed_rows_that_are_no_neighbours(device):
    data = torch.randn(40, 10, dtype=torch.float64, device=device)[::2, ::2]
    cotangent = torch.randn(7, 20, dtype=torch.float64, device=device).t()
    rnn = fusedrnn.GRU(5, 7, dtype=torch.float64, device=device)
    sizes = torch.tensor([5, 5, 4, 3, 2, 1])
    results = []
    for rows, gradient in ((data, cotangent), (data.contiguous(), cotangent.contiguous())):
        leaf = rows.detach().requires_grad_()
        output, _ = rnn(PackedSequence(leaf, sizes))
        results.append((output.data, *torch.autograd.grad(output.data, leaf, gradient)))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_packed_rows_are_counted_in_the_limit_of_the_workspace():
    rnn = fusedrnn.LSTM(5, 7, bidirectional=True)
    packed = pack_sequence([torch.randn(n, 5) for n in (9, 4, 4, 1)])
    with pytest.raises(RuntimeError, match="workspace_bytes must be at least") as caught:
        rnn.workspace_bytes = 1
        rnn(packed)
    rnn.workspace_bytes = int(str(caught.value).split("at least ")[1].split()[0])
    output, _ = rnn(packed)
    output.data.sum().backward()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_a_traced_module_takes_other_batches():
    rnn = fusedrnn.GRU(4, 6).requires_grad_(False)

    def last(data, sizes):
        return rnn(PackedSequence(data, sizes))[1]

    def batch(*lengths):
        packed = pack_sequence([torch.randn(n, 4) for n in lengths])
        return packed.data, packed.batch_sizes

    traced = torch.jit.trace(last, batch(9, 5, 2))
    for lengths in ((9, 5, 2), (9, 4), (7, 7, 7, 1)):
        example = batch(*lengths)
        torch.testing.assert_close(traced(*example), last(*example))


# --- made by hand, and wrong ---------------------------------------------------------------------

DATA = torch.zeros(12, 5)
SIZES = torch.tensor([3, 3, 3, 2, 1])
ORDER = torch.tensor([2, 0, 1])
WRONG = {
    "batch_sizes must be positive and never rise": [
        ([3, 3, 3, 0, 2, 1], None),
        ([3, 3, 3, -1, 2, 2], None),
        ([3, 2, 3, 3, 1], None),
        ([-3, -3], None),
    ],
    "batch_sizes must add up to the 12 rows": [
        ([3, 3, 3, 2], None),
        ([3, 3, 3, 3, 1], None),
        ([2**62, 2**62, 2**62, 2**62], None),
    ],
    "batch_sizes must be int64 of 1 dimension": [([[3, 3], [3, 3]], None), ([6.0, 6.0], None)],
    "at least one step": [(torch.empty(0, dtype=torch.int64), None)],
    "sorted_indices must be in .0, 3.": [(SIZES, [0, 1, 3]), (SIZES, [0, -1, 2])],
    "must be permutations": [(SIZES, [0, 0, 2])],
    "sorted_indices must have shape": [(SIZES, [0, 1]), (SIZES, [[0, 1, 2]])],
    "sorted_indices must be int64": [(SIZES, [0.0, 1.0, 2.0])],
}


def made_by_hand(data, sizes, order):
    """A PackedSequence made without torch's own checks."""
    order = None if order is None else torch.as_tensor(order)
    return PackedSequence._make([data, torch.as_tensor(sizes), order, order])


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("cell", CELLS)
def test_wrong_packed_sequences_are_refused(cell, message):
    rnn = MODULES[cell](5, 7)
    state = torch.get_rng_state()
    for sizes, order in WRONG[message]:
        with pytest.raises((ValueError, RuntimeError), match=f"^fusedrnn: .*{message}"):
            rnn(made_by_hand(DATA, sizes, order))
    assert torch.equal(state, torch.get_rng_state())


def test_one_order_of_two():
    packed = PackedSequence._make([DATA, SIZES, ORDER, None])
    with pytest.raises(TypeError, match="unsorted_indices must be a tensor, got NoneType"):
        fusedrnn.GRU(5, 7)(packed)


def test_what_belongs_to_a_packed_sequence_has_the_shapes_of_the_padded_one():
    rnn = fusedrnn.StochasticGRU(5, 7, 6)
    packed = PackedSequence(DATA, SIZES, ORDER)
    with pytest.raises(RuntimeError, match=r"hx must have shape \(1, 3, 7\), got \(1, 2, 7\)"):
        rnn(packed, torch.zeros(1, 2, 7))
    with pytest.raises(RuntimeError, match=r"eps must have shape \(1, 5, 3, 6\), got \(1, 12, 6\)"):
        rnn(packed, eps=torch.zeros(1, 12, 6))
    with pytest.raises(RuntimeError, match=r"reset must have shape \(5, 3\), got \(3, 5\)"):
        rnn(packed, reset=torch.zeros(3, 5, dtype=torch.bool))
