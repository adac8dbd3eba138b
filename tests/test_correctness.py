"""Values and gradients of the stochastic GRU, against the plain loop in float64."""

from dataclasses import replace

import pytest
import torch
from cases import CASES, DTYPES, OPTIONS, Case, reference_results, relative_errors
from torch.autograd import gradcheck

import fusedrnn
from fusedrnn import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop_in_float64(device, case):
    check_equal_to_the_loop(device, case)


def check_equal_to_the_loop(device: str, case: Case) -> None:
    arguments = case.tensors(device).to(torch.float64)
    truth = reference_results(arguments, torch.float64, case)
    results = arguments.results(fusedrnn.stochastic_gru, **case.options)
    for name, error in relative_errors(results, truth).items():
        assert error < 1e-12, name


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_the_loop(device, case, dtype):
    """Both against float64, on the very same inputs, which are numbers of ``dtype``."""
    arguments = replace(case, dtype=dtype).tensors(device).to(dtype)
    truth = reference_results(arguments, torch.float64, case)
    ours = relative_errors(arguments.results(fusedrnn.stochastic_gru, **case.options), truth)
    loop = relative_errors(reference_results(arguments, dtype, case), truth)
    # All results of a case together: one alone may be a handful of numbers, where either side is
    # right by luck.
    assert rms(ours.values()) <= 2 * rms(loop.values()), (ours, loop)


def rms(errors):
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


@pytest.mark.parametrize("options", [{}, {"recompute": False}, {"bias": False}, {"num_layers": 2}])
@pytest.mark.parametrize("noise", ["seed", "eps", "none"])
def test_gradcheck(device, noise, options):
    case = Case(seq_len=4, batch=2, input_size=3, hidden_size=3, latent_size=2, noise=noise)
    case = replace(case, chunk_size=3, **options)
    arguments = case.tensors(device).to(torch.float64)

    def function(*differentiable):
        tensors = list(differentiable)
        input, hx = tensors.pop(0), tensors.pop(0)
        eps = tensors.pop(0) if noise == "eps" else None
        moved = replace(arguments, input=input, hx=hx, eps=eps, weights=tensors)
        return moved.call(fusedrnn.stochastic_gru, **case.options)

    assert gradcheck(function, arguments.differentiable())


@pytest.mark.parametrize("scale", ["sample=False", "zero scale"])
def test_equals_torch_gru_when_the_latent_is_the_state(scale):
    """Z = H, loc = h and scale = 0 make it torch.nn.GRU."""
    size, input_size = 6, 5
    theirs = torch.nn.GRU(input_size, size, num_layers=2, dtype=torch.float64)
    ours = fusedrnn.StochasticGRU(input_size, size, num_layers=2, dtype=torch.float64)
    with torch.no_grad():
        for layer in range(2):
            for to, source in (("ih", "ih"), ("zh", "hh")):
                for kind in ("weight", "bias"):
                    values = getattr(theirs, f"{kind}_{source}_l{layer}")
                    getattr(ours, f"{kind}_{to}_l{layer}").copy_(values)
            identity = torch.cat([torch.eye(size), torch.zeros(size, size)])
            getattr(ours, f"weight_hz_l{layer}").copy_(identity)
            bias = getattr(ours, f"bias_hz_l{layer}")
            bias[:size] = 0
            bias[size:] = -torch.inf if scale == "zero scale" else torch.randn(size)
    input = torch.randn(7, 3, input_size, dtype=torch.float64, requires_grad=True)
    hx = torch.randn(2, 3, size, dtype=torch.float64, requires_grad=True)
    output, h_n = ours(input, hx, sample=scale == "zero scale")
    expected, expected_h_n = theirs(input, hx)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(h_n, expected_h_n, rtol=1e-12, atol=1e-13)

    cotangent = torch.randn_like(output)
    theirs_grad = torch.autograd.grad(
        expected, [input, theirs.weight_ih_l0, theirs.weight_hh_l1], cotangent
    )
    wanted = [input, ours.weight_ih_l0, ours.weight_zh_l1, ours.weight_hz_l0]
    *grads, grad_hz = torch.autograd.grad(output, wanted, cotangent)
    torch.testing.assert_close(grads, list(theirs_grad), rtol=1e-11, atol=1e-12)
    assert grad_hz[:size].abs().sum() > 0  # loc is still learnt,
    assert grad_hz[size:].abs().sum() == 0  # and a scale of zero is flat


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_memory_is_not_lost_in_rounding(device, dtype):
    """With u near 1 the state moves by far less than ``dtype`` resolves, for hundreds of steps."""
    case = Case(seq_len=600, batch=2, hidden_size=4, latent_size=4, noise="none", dtype=dtype)
    arguments = case.tensors(device)
    arguments.weights[3][4:8] += 7.0  # bias of the update gate
    results, _ = arguments.call(fusedrnn.stochastic_gru, **case.options)
    truth, _ = arguments.to(torch.float64).call(reference.stochastic_gru)
    assert (results.double() - truth).norm() / truth.norm() < 4 * torch.finfo(dtype).eps


def test_float16_keeps_its_denormals(device):
    """With u = 1 the state is carried as it is, and so is its gradient; float's are flushed."""
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
def test_same_bits_from_run_to_run_and_for_any_number_of_threads(case, threads):
    """GEMMs are torch's; at these sizes they too do not depend on threads, as stages never do."""
    arguments = replace(case, dtype=torch.float32).tensors().to(torch.float32)
    threads(1)
    first = arguments.results(fusedrnn.stochastic_gru, **case.options)
    threads(2)
    for _ in range(2):
        again = arguments.results(fusedrnn.stochastic_gru, **case.options)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits_from_run_to_run(device, options, dtype):
    case = Case(seq_len=40, batch=5, hidden_size=36, latent_size=20, chunk_size=6, dtype=dtype)
    case = replace(case, **options)
    arguments = case.tensors(device).to(dtype)
    first, again = (arguments.results(fusedrnn.stochastic_gru, **case.options) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("noise", ["seed", "eps"])
def test_recompute_gives_the_same(device, noise):
    case = Case(seq_len=20, batch=7, hidden_size=33, latent_size=20, noise=noise, chunk_size=6)
    arguments = replace(case, dtype=torch.float32).tensors(device).to(torch.float32)
    kept, rebuilt = (
        arguments.results(fusedrnn.stochastic_gru, **replace(case, recompute=r).options)
        for r in (False, True)
    )
    for name, error in relative_errors(kept, rebuilt).items():
        assert error < 2e-6, name


def test_nan_and_inf_pass_through(device):
    case = Case(seq_len=6, batch=3, hidden_size=20, dtype=torch.float32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        arguments = case.tensors(device)
        arguments.input[2, 1, 0] = bad
        output, h_n = arguments.call(fusedrnn.stochastic_gru, **case.options)
        truth, _ = arguments.call(reference.stochastic_gru)
        torch.testing.assert_close(output, truth, equal_nan=True)
        assert torch.equal(output[-1], h_n[0]) or torch.isnan(h_n).any()
        assert not torch.isnan(output[:, 0]).any()  # other rows of the batch are not touched
    arguments = case.tensors(device)
    arguments.weights[2][0, 0] = torch.nan
    output, _ = arguments.call(fusedrnn.stochastic_gru, **case.options)
    assert torch.isnan(output).any()
