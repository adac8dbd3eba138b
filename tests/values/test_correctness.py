"""Values and gradients of all cells, against the plain loop in float64."""

from dataclasses import replace

import pytest
import torch
from cases import (
    ALL_OPTIONS,
    CASES,
    CELLS,
    DTYPE_CASES,
    MASKED,
    Case,
    baseline,
    relative_errors,
    truth,
)
from checks import assert_same

import fusedrnn
from fusedrnn import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop_in_float64(device, case):
    results = case.results(device)
    for name, error in relative_errors(results, truth(case.same_for_torch(), device)).items():
        assert error < 1e-12, name


@pytest.mark.parametrize("case", DTYPE_CASES, ids=str)
def test_error_is_at_most_twice_that_of_torch(device, case):
    """The errors are against float64 on the same inputs, which are numbers of the dtype."""
    if case.seq_len == 1:  # a handful of numbers, where either may be right by luck
        case = replace(case, batch=500)
    results = case.results(device)
    exact, torchs = (of(case.same_for_torch(), device) for of in (truth, baseline))
    # All results of a case count together, for the same reason.
    ours, theirs = (rms(relative_errors(r, exact).values()) for r in (results, torchs))
    assert ours <= 2 * theirs, (ours, theirs)


# Products with few columns or few rows, whose terms GEMMs may add one after another.
NARROW = [
    Case(seq_len=60, batch=100, input_size=1, hidden_size=9, latent_size=5),
    Case(seq_len=60, batch=100, input_size=11, hidden_size=4, latent_size=11),
    # With a gain of 1 the 40 latents make the case chaotic: rounding errors grow a hundred or a
    # hundred thousand times, by luck.
    Case(seq_len=60, batch=100, input_size=64, hidden_size=3, latent_size=40, gain=0.25),
    Case(seq_len=50, batch=128, input_size=5, hidden_size=64, latent_size=3),
    Case(seq_len=50, batch=128, input_size=2, hidden_size=64, latent_size=1),
    Case(seq_len=8, batch=16, input_size=3, hidden_size=700, latent_size=20),
    Case(seq_len=60, batch=1, input_size=16, hidden_size=150, latent_size=120),
    Case(seq_len=10, batch=3, input_size=7, hidden_size=500, latent_size=12),
]
NARROW_CASES = [replace(case, cell=cell) for cell in CELLS for case in NARROW]
NARROW_CASES += [
    Case("lstm", seq_len=60, batch=100, hidden_size=64, proj_size=size) for size in (1, 2, 11)
]


@pytest.mark.parametrize("case", NARROW_CASES, ids=str)
def test_long_sums_are_as_close_as_those_of_torch(device, case):
    """Each result counts by itself, if it has enough numbers not to be right by luck."""
    case = replace(case, dtype=torch.float32)
    results = case.results(device)
    exact, torchs = (of(case, device) for of in (truth, baseline))
    ours, theirs = (relative_errors(r, exact) for r in (results, torchs))
    for name, expected in exact.items():
        if expected.numel() >= 100:
            assert ours[name] <= 2 * theirs[name], name


def rms(errors):
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_long_memory_is_not_lost_in_rounding(device, cell, dtype):
    """With u or f near 1 the state moves by far less than ``dtype`` resolves, for many steps."""
    case = Case(cell, seq_len=600, batch=2, hidden_size=4, latent_size=4, noise="none", dtype=dtype)
    arguments = case.tensors(device)
    bias = arguments.weights[len(arguments.weights) // 2]
    bias[4:8] += 7.0  # opens the update or forget gate
    if cell == "lstm":
        bias[0:4] -= 5.0  # closes the input gate
    results = arguments.call(fusedrnn, **case.options)
    exact = arguments.to(torch.float64).call(reference)
    for ours, expected in zip(results, exact, strict=True):
        assert (ours.double() - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


def test_float16_keeps_its_denormals(device):
    """With u = 1 a state and its gradient are carried unchanged; float's denormals are flushed."""
    size = 1023
    denormals = torch.arange(1, size + 1, device=device).short().view(torch.float16)
    shapes = [(3 * size, 1), (3 * size, 1), (2, size), (3 * size,), (3 * size,), (2,)]
    weights = [torch.zeros(shape, dtype=torch.float16, device=device) for shape in shapes]
    weights[3][size : 2 * size] = 40  # bias of the update gate
    hx = denormals.expand(1, 2, size).clone().requires_grad_()
    input = torch.zeros(3, 2, 1, dtype=torch.float16, device=device)
    output, h_n = fusedrnn.stochastic_gru(input, weights, hx)
    assert torch.equal(output, denormals.expand(3, 2, size))
    (grad,) = torch.autograd.grad(h_n, hx, hx.detach().flip(-1))
    assert torch.equal(grad, hx.flip(-1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_give_the_same_bits_for_any_number_of_threads(case, threads):
    """Weights of 0 make products exact; others are torch's, and may depend on threads."""
    arguments = replace(case, dtype=torch.float32).tensors()
    for weight in arguments.weights:
        if weight.dim() == 2:
            weight.zero_()
    arguments = arguments.to(torch.float32)
    threads(1)
    first = arguments.results(fusedrnn, **case.options)
    threads(2)
    again = arguments.results(fusedrnn, **case.options)
    for name, value in first.items():
        if value.dim() != 2:  # the gradient of a weight is a product
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_from_run_to_run_with_two_threads(case, threads):
    threads(2)
    first, again = (replace(case, dtype=torch.float32).results() for _ in range(2))
    assert_same(first, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ALL_OPTIONS, ids=lambda options: str(Case(**options)))
def test_same_bits_from_run_to_run(device, options, dtype):
    case = Case(seq_len=40, batch=5, hidden_size=36, latent_size=20, chunk_size=6, dtype=dtype)
    case = replace(case, **options)
    first, again = (case.results(device) for _ in range(2))
    assert_same(first, again)


REBUILT = [options for options in ALL_OPTIONS if options.get("recompute", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", REBUILT, ids=lambda options: str(Case(**options)))
def test_recompute_gives_the_same(device, options, dtype):
    case = Case(seq_len=20, batch=7, hidden_size=33, latent_size=20, chunk_size=6, dtype=dtype)
    case = replace(case, **options)
    saved, recomputed = (replace(case, recompute=r).results(device) for r in (False, True))
    accuracy = 10 * torch.finfo(dtype).eps
    errors = relative_errors(saved, {name: t.double() for name, t in recomputed.items()})
    assert max(errors.values()) < accuracy, errors


# --- lengths, resets, NaN ------------------------------------------------------------------------

WITH_LENGTHS = [
    {"lengths": True},
    {"lengths": True, "bidirectional": True},
    {**MASKED, "num_layers": 2},
    {**MASKED, "recompute": False},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", WITH_LENGTHS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_nothing_beyond_the_lengths_counts(device, cell, options, dtype):
    """Input, eps, resets and the output's gradient are NaN beyond the lengths."""
    case = Case(cell, seq_len=21, batch=5, noise="eps", chunk_size=4, dtype=dtype)
    case = replace(case, **options)
    arguments = case.tensors(device).to(dtype)
    expected = arguments.results(fusedrnn, **case.options)
    padding = torch.arange(21)[:, None] >= arguments.lengths  # (T, B)
    padding = padding.to(device)
    with torch.no_grad():
        for tensor in (arguments.input, arguments.grad_output):
            tensor[padding] = torch.nan
        if arguments.eps is not None:
            arguments.eps[:, padding] = torch.nan
    if arguments.reset is not None:
        arguments.reset[padding] ^= True
    results = arguments.results(fusedrnn, **case.options)
    assert_same(results, expected)
    assert not results["output"][padding].any()
    assert not results["grad_input"][padding].any()
    if arguments.eps is not None:
        assert not results["grad_eps"][:, padding].any()


@pytest.mark.parametrize("cell", CELLS)
def test_full_lengths_and_no_resets_change_nothing(device, cell):
    case = Case(cell, seq_len=21, bidirectional=True, num_layers=2, chunk_size=4)
    arguments = case.tensors(device).to(torch.float64)
    expected = arguments.results(fusedrnn, **case.options)
    full = replace(arguments, lengths=torch.full((3,), 21))
    no_reset = replace(arguments, reset=torch.zeros(21, 3, dtype=torch.bool, device=device))
    for masked in (full, no_reset):
        for name, value in masked.results(fusedrnn, **case.options).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_nan_and_inf_pass_through(device, cell, bidirectional):
    case = Case(
        cell,
        seq_len=6,
        batch=3,
        hidden_size=20,
        lengths=True,
        bidirectional=bidirectional,
        dtype=torch.float32,
    )
    for masked in (False, True):
        for bad in (torch.nan, torch.inf, -torch.inf):
            arguments = case.tensors(device)
            arguments.lengths = torch.tensor([6, 4, 5]) if masked else None
            arguments.input[2, 1, 0] = bad
            results = arguments.call(fusedrnn, **case.options)
            expected = arguments.call(reference, **case.sizes)
            torch.testing.assert_close(results, expected, equal_nan=True)
            assert not any(torch.isnan(t[:, [0, 2]]).any() for t in results)  # other rows
    arguments = case.tensors(device)
    arguments.weights[1][0, 0] = torch.nan
    output, *_ = arguments.call(fusedrnn, **case.options)
    assert torch.isnan(output).any()


@pytest.mark.parametrize("cell", CELLS)
def test_a_reset_ends_nan(device, cell):
    case = Case(cell, seq_len=8, chunk_size=3, dtype=torch.float32)
    arguments = case.tensors(device).to(torch.float32)
    with torch.no_grad():
        arguments.hx[0, 1] = torch.nan
    arguments.reset = torch.zeros(8, 3, dtype=torch.bool, device=device)
    arguments.reset[[0, 4], 1] = True
    results = arguments.results(fusedrnn, **case.options)
    assert not any(torch.isnan(t).any() for t in results.values())
    with torch.no_grad():
        arguments.input[2, 1] = torch.nan
    output, *last = arguments.call(fusedrnn, **case.options)
    assert torch.isnan(output[2:4, 1]).all()
    assert not torch.isnan(output[4:]).any() and not any(torch.isnan(t).any() for t in last)
