"""torch's FlopCounterMode: an operator counts as its products do in a loop in plain torch."""

import pytest
import torch
from cases import MODULES
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

import fusedrnn
from fusedrnn import reference

T, B, INPUT, HIDDEN, LATENT = 6, 3, 4, 5, 7
OPTIONS = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "num_layers": 2}]


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def make(cell, **options):
    sizes = (INPUT, HIDDEN, LATENT) if cell == "stochastic_gru" else (INPUT, HIDDEN)
    return MODULES[cell](*sizes, **options)


def states_of(rnn):
    rows = rnn.num_layers * (2 if rnn.bidirectional else 1)
    hx = torch.randn(rows, B, rnn.proj_size or HIDDEN, requires_grad=True)
    if isinstance(rnn, fusedrnn.LSTM):
        return hx, torch.randn(rows, B, HIDDEN, requires_grad=True)
    return hx


def loop(rnn, x, hx):
    cell = {module: name for name, module in MODULES.items()}[type(rnn)]
    named = {"num_layers": rnn.num_layers, "bias": rnn.bias, "bidirectional": rnn.bidirectional}
    if isinstance(hx, tuple):
        return reference.lstm(x, [*rnn.parameters()], hx, **named, proj_size=rnn.proj_size)
    noise = {}
    if cell == "stochastic_gru":
        rows = hx.shape[0]
        noise["eps"] = torch.randn(rows, T, B, LATENT)
    return getattr(reference, cell)(x, [*rnn.parameters()], hx, **named, **noise)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cell", [*MODULES, "projected"])
def test_products_are_those_of_a_loop(cell, options):
    rnn = make("lstm", proj_size=3, **options) if cell == "projected" else make(cell, **options)
    x, hx = torch.randn(T, B, INPUT, requires_grad=True), states_of(rnn)
    forward = flops(lambda: loop(rnn, x, hx))
    assert forward > 0
    assert flops(lambda: rnn(x, hx)) == forward
    expected, outputs = loop(rnn, x, hx)[0].sum(), {}
    backward = flops(expected.backward)
    for recompute in (True, False):
        rnn.recompute = recompute
        outputs[recompute] = rnn(x, hx)[0].sum()
    assert flops(outputs[False].backward) == backward
    again = forward
    if cell == "projected":  # what a projection makes is the output, and is not computed again
        projections = [w for name, w in rnn.named_parameters() if name.startswith("weight_hr")]
        again -= sum(2 * T * B * w.numel() for w in projections)
    assert flops(outputs[True].backward) == backward + again


def test_what_is_frozen_is_not_counted():
    rnn, x = make("gru").requires_grad_(False), torch.randn(T, B, INPUT)
    rnn.weight_hh_l0.requires_grad_()
    output = rnn(x)[0].sum()
    products = 2 * T * B * 3 * HIDDEN
    # Recomputed gates; then the state's gradient, and that of one weight.
    assert flops(output.backward) == products * (INPUT + HIDDEN + HIDDEN + HIDDEN)


def test_without_noise_half_of_the_latents_projection_is_left_out():
    rnn, x = make("stochastic_gru"), torch.randn(T, B, INPUT)
    products = 2 * T * B * HIDDEN * (3 * INPUT + 3 * LATENT + LATENT)
    assert flops(lambda: rnn(x, sample=False)) == products
    assert flops(lambda: rnn(x)) == products + 2 * T * B * HIDDEN * LATENT


@pytest.mark.parametrize("cell", ["gru", "lstm", "stochastic_gru"])
def test_a_step_is_one_of_a_sequence(cell):
    kinds = [fusedrnn.GRUCell, fusedrnn.LSTMCell, fusedrnn.StochasticGRUCell]
    kind = kinds[["gru", "lstm", "stochastic_gru"].index(cell)]
    sizes = (INPUT, HIDDEN, LATENT) if cell == "stochastic_gru" else (INPUT, HIDDEN)
    step, x = kind(*sizes), torch.randn(B, INPUT)
    whole = flops(lambda: make(cell)(torch.randn(T, B, INPUT)))
    assert flops(lambda: step(x)) == whole / T
    with torch.no_grad():
        assert flops(lambda: step(x)) == whole / T


def test_rows_of_a_packed_batch_are_counted():
    rnn, lengths = make("gru"), torch.tensor([6, 4, 1])
    packed = pack_padded_sequence(torch.randn(T, B, INPUT), lengths)
    assert flops(lambda: rnn(packed)) == 2 * 11 * 3 * HIDDEN * (INPUT + HIDDEN)


def test_last_states_alone():
    """Backward goes through the layers forward once more."""
    rnn, x = make("lstm", num_layers=2), torch.randn(T, B, INPUT)
    forward = flops(lambda: rnn(x))
    output = rnn(x)[0].sum()
    backward = flops(output.backward)
    rnn.return_sequence = False
    assert flops(lambda: rnn(x)) == forward
    output = rnn(x)[0].sum()
    assert flops(output.backward) == backward + forward
    for name, weight in rnn.named_parameters():
        weight.requires_grad_(name == "weight_hh_l1")
    output = rnn(x)[0].sum()
    of_one = 2 * T * B * 4 * HIDDEN * HIDDEN  # both matrices of the upper layer are square
    assert flops(output.backward) == forward + (2 + 1 + 1) * of_one
