"""Bugs seeded in the persistent kernels are noticed by wrong values, or by a wait without end."""

from dataclasses import replace

import pytest
import torch
from cases import Case
from checks import assert_same
from emulator.persistent import FLAGS, PACKETS
from persistent_cases import BASE, FLOAT, LONG, inferred
from speed_sizes import CELLS
from tf32 import assert_backward_is_rounded, assert_forward_is_rounded

import fusedrnn

pytestmark = pytest.mark.slow  # compiles an emulator of its own

NOTHING_IS_SENT, NAN_IS_SENT, NAN_IS_ROUNDED_TO, NOT_ROUNDED, NOT_PRESET = 8, 11, 15, 16, 17
GAVE_UP = "other blocks have not sent their results in time"

each_base = pytest.mark.parametrize("base", [BASE, FLOAT], ids=lambda base: str(base.dtype))


def test_other_roundings_are_noticed_in_forward(persistent):
    case = replace(FLOAT, cell="gru")
    with pytest.raises(AssertionError, match="output"):  # the bug truncates instead of rounding
        assert_forward_is_rounded(persistent(inferred, case, seeded_bug=NOT_ROUNDED), case)


def test_other_roundings_are_noticed_in_backward(chain):
    case = replace(FLOAT, cell="gru", recompute=False)
    assert_backward_is_rounded(chain(case.results), case)
    with pytest.raises(AssertionError, match="grad"):  # the bug truncates instead of rounding
        assert_backward_is_rounded(chain(case.results, backward_bug=NOT_ROUNDED), case)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_what_the_next_kernel_needs_preset_is_missed(persistent, cell):
    """The third chunk would mistake the first one's packets for its own."""
    case = replace(LONG, **cell)
    expected = persistent(inferred, case)
    with pytest.raises(AssertionError):
        assert_same(persistent(inferred, case, seeded_bug=NOT_PRESET), expected)


@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
def test_forward_gives_up_on_what_never_comes(persistent, exchange):
    silent = {"seeded_bug": NOTHING_IS_SENT, "spin_limit": 50, "exchange": exchange}
    with pytest.raises(RuntimeError, match=GAVE_UP):
        persistent(inferred, replace(BASE, cell="stochastic_gru"), **silent)


@each_base
@pytest.mark.parametrize("exchange", [PACKETS, FLAGS])
def test_backward_gives_up_on_what_never_comes(chain, exchange, base):
    silent = {"backward_bug": NOTHING_IS_SENT, "spin_limit": 50, "exchange": exchange}
    with pytest.raises(RuntimeError, match=GAVE_UP):
        chain(base.results, **silent)


@each_base
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_another_nan_would_hang_forward(persistent, cell, base):
    """It would hang if rounding kept the bits of every NaN."""
    case = replace(base, cell=cell)
    arguments = case.tensors()
    arguments.input[2, 1] = torch.nan

    def run():
        with torch.no_grad():
            return arguments.call(fusedrnn, **case.options)

    with pytest.raises(RuntimeError, match=GAVE_UP):
        persistent(run, seeded_bug=NAN_IS_SENT, spin_limit=50)


@each_base
@pytest.mark.parametrize("hidden_size", [37, 40])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_another_nan_would_hang_backward(chain, cell, base, hidden_size):
    """It would hang if rounding kept the bits of every NaN."""

    def run():
        arguments = replace(base, cell=cell, hidden_size=hidden_size).tensors().to(base.dtype)
        arguments.grad_output[2, 1] = torch.nan
        return arguments.results(fusedrnn)

    with pytest.raises(RuntimeError, match=GAVE_UP):
        chain(run, backward_bug=NAN_IS_SENT, spin_limit=50)


@pytest.mark.parametrize("hidden_size", [37, 40])  # by buffers, or by gradient arrays
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cell", ["gru", "stochastic_gru"])
def test_packets_arrive_whichever_nan_rounding_gives(chain, cell, dtype, hidden_size):
    case = Case(cell, seq_len=4, batch=3, hidden_size=hidden_size, latent_size=24, dtype=dtype)

    def run():
        arguments = case.tensors().to(dtype)
        with torch.no_grad():
            arguments.input[1, 1] = torch.nan
            arguments.grad_output[2, 2] = torch.nan
        return arguments.results(fusedrnn, **case.options)

    def results(bug):
        return chain(run, seeded_bug=bug, backward_bug=bug, spin_limit=50)

    expected = chain(run)
    assert expected["output"].isnan().any()
    for name, tensor in results(NAN_IS_ROUNDED_TO).items():
        assert torch.equal(tensor.isnan(), expected[name].isnan()), name
        assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name
    with pytest.raises(RuntimeError, match=GAVE_UP):
        results(NAN_IS_SENT)
