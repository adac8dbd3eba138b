"""The last states alone, ``return_sequence=False``: values, memory, and changes before backward."""

import pytest
import torch
from layers import KINDS, make, random, states_of
from torch.nn.utils.rnn import PackedSequence

import fusedrnn
from bench.clock import saved_sizes_bytes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_last_states_are_those_of_the_whole_sequence(
    device, kind, bidirectional, num_layers, batch_first, masked
):
    options = {"bidirectional": bidirectional, "num_layers": num_layers, "zoneout": 0.2}
    options |= {"batch_first": batch_first, "dropout": 0.3 if num_layers > 1 else 0.0}
    whole = make(kind, device, **options)
    last = make(kind, device, **options, return_sequence=False)
    last.load_state_dict(whole.state_dict())
    shape = (3, 40) if batch_first else (40, 3)
    input = random(*shape, 3, device=device)
    masks = {}
    if masked:
        masks["reset"] = torch.rand(shape, device=device) < 0.05
        masks["lengths"] = torch.tensor([40, 2, 17])
    results = []
    for rnn in (whole, last):
        torch.manual_seed(7)
        output, state = rnn(input, **masks)
        states = states_of(state)
        if rnn is whole:
            output = torch.cat(list(states[0][-2 if bidirectional else -1 :]), -1)
        loss = output.square().sum() + sum(s.pow(3).sum() for s in states)
        results.append([output, *states, *torch.autograd.grad(loss, [input, *rnn.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


def test_last_state_of_unbatched_and_packed_input():
    rnn = fusedrnn.LSTM(3, 5, bidirectional=True, return_sequence=False)
    output, (h_n, c_n) = rnn(torch.randn(30, 3))
    assert output.shape == (10,) and h_n.shape == c_n.shape == (2, 5)
    sequences = [torch.randn(n, 3) for n in (4, 30, 17)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    output, _ = rnn(packed)
    expected = torch.stack([rnn(sequence)[0] for sequence in sequences])
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_last_state_saves_the_square_root_of_the_sequence(kind):
    rnn = getattr(fusedrnn, kind)(4, 8, return_sequence=False)
    input = torch.randn(1024, 2, 4)
    saved = saved_sizes_bytes(lambda: rnn(input)[0], known=[input, *rnn.parameters()])
    states = 2 if kind == "LSTM" else 1
    assert sum(saved) <= 4 * 33 * states * 2 * 8  # 32 parts, and the end; weights are not copied
    rnn(input)[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in rnn.parameters())


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize(("num_layers", "is_frozen"), [(1, False), (2, False), (2, True)])
def test_a_write_through_flat_weight_is_noticed(num_layers, is_frozen, is_second):
    rnn = fusedrnn.GRU(4, 6, num_layers, bidirectional=True, return_sequence=False)
    for name, weight in rnn.named_parameters():
        weight.requires_grad_(not is_frozen or "_l1" in name)
    _, h_n = rnn(torch.randn(40, 3, 4))
    if is_second:
        h_n[-1].sum().backward(retain_graph=True)
    with torch.no_grad():
        rnn.flat_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h_n[-1].sum().backward()


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_weights_may_take_their_step_within_backward(num_layers, bidirectional):
    """As soon as a weight's gradient is there, nothing of backward looks at the weight again."""
    rnn = fusedrnn.GRU(4, 6, num_layers, bidirectional=bidirectional, return_sequence=False)
    input = torch.randn(40, 3, 4)
    expected = torch.autograd.grad(rnn(input)[1].sum(), list(rnn.parameters()))
    found = {}

    def step(weight):
        found[weight] = weight.grad
        with torch.no_grad():
            weight.sub_(weight.grad)

    for weight in rnn.parameters():
        weight.register_post_accumulate_grad_hook(step)
    rnn(input)[1].sum().backward()
    torch.testing.assert_close([found[weight] for weight in rnn.parameters()], list(expected))


@pytest.mark.parametrize("what", ["weight", "input"])
def test_changes_before_backward_are_noticed_without_the_output(what):
    """Steps run a second time in backward."""
    rnn = fusedrnn.GRU(4, 6, return_sequence=False)
    input = torch.randn(42, 4, requires_grad=True) * 1
    _, h_n = rnn(PackedSequence(input, torch.tensor([3, 1] + [1] * 38)))
    with torch.no_grad():
        (rnn.weight_hh_l0 if what == "weight" else input).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(h_n.sum(), input)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_traced_module_of_last_states_takes_other_lengths(bidirectional):
    rnn = fusedrnn.LSTM(4, 6, 2, bidirectional=bidirectional, return_sequence=False)
    traced = torch.jit.trace(rnn, torch.randn(40, 3, 4))
    for shape in ((90, 5, 4), (3, 1, 4)):
        input = torch.randn(shape)
        torch.testing.assert_close(traced(input), rnn(input))
