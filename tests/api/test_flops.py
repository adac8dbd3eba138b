"""torch's FlopCounterMode, besides what the rows of bench/compatibility compare with a loop."""

import pytest
import torch
from cases import MODULES
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

import fusedrnn

T, B, INPUT, HIDDEN, LATENT = 6, 3, 4, 5, 7


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def make(cell, **options):
    sizes = (INPUT, HIDDEN, LATENT) if cell == "stochastic_gru" else (INPUT, HIDDEN)
    return MODULES[cell](*sizes, **options)


def test_what_is_frozen_is_not_counted():
    rnn, x = make("gru", recompute=True).requires_grad_(False), torch.randn(T, B, INPUT)
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
    kind = getattr(fusedrnn, f"{MODULES[cell].__name__}Cell")
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
    rnn, x = make("lstm", num_layers=2, recompute=True), torch.randn(T, B, INPUT)
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
