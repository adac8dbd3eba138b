"""In 16 bits, a GPU multiplies rounded gradients of pre-activations, the CPU unrounded ones.  The
pre-activations themselves are rounded nowhere.

``pytest -s`` prints the errors that docs/numerics.md shows.
"""

from dataclasses import replace

import pytest
import torch
from cases import Case, relative_errors, truth
from emulator import emulated_operators, use

CELLS = [
    {"cell": "gru"},
    {"cell": "lstm"},
    {"cell": "lstm", "proj_size": 24},
]
STOCHASTIC = {"cell": "stochastic_gru", "latent_size": 24}
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SUMS = 1e-5  # relative error of a sum in float32


@pytest.fixture(params=["stepwise", "persistent", pytest.param("cuda", marks=pytest.mark.cuda)])
def on_gpu(request):
    """Results of a case by the GPU backend: emulated in one of two ways, or on a GPU."""
    if request.param == "cuda":
        return lambda case: {name: t.cpu() for name, t in case.results("cuda").items()}
    gpu, is_persistent = request.getfixturevalue("gpu"), request.param == "persistent"

    def emulated(case):
        found = gpu(case.results, multiprocessors=132 if is_persistent else 0, schedule=1)
        assert (gpu.counts["backward_kernels"] > 0) == is_persistent
        return found

    return emulated


@each_dtype
@pytest.mark.parametrize("cell", [*CELLS, STOCHASTIC], ids=str)
def test_gradients_are_within_two_roundings(on_gpu, cell, dtype):
    """The CPU's gradients, which are rounded once, are within one rounding."""
    case = Case(seq_len=20, batch=8, input_size=40, hidden_size=40, dtype=dtype, **cell)
    rounding, exact = 0.5 * torch.finfo(dtype).eps, truth(case, "cpu")
    gradients = {name: t for name, t in exact.items() if name.startswith("grad")}
    cpu, gpu = (relative_errors(found, gradients) for found in (case.results(), on_gpu(case)))
    print(f"\n{case}: CPU {max(cpu.values()):.1e}, GPU {max(gpu.values()):.1e}")
    for name in gradients:
        assert cpu[name] <= rounding and gpu[name] <= 2 * rounding, name
    assert max(cpu.values()) < max(gpu.values())


@each_dtype
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_single_number_is_as_exact_as_the_terms_of_its_sum(on_gpu, cell, dtype):
    """The gradient of a single input number is the sum of the gradients of all pre-activations (the
    bias's gradients) times weights.  A single step of these cells rounds nothing else.
    """
    rounding = 0.5 * torch.finfo(dtype).eps
    one = Case(seq_len=1, batch=1, input_size=1, dtype=dtype, **cell)
    errors = {}
    for hidden_size in range(33, 65):
        case = replace(one, hidden_size=hidden_size)
        weights, exact = case.tensors().weights, truth(case, "cpu")
        bias = next(i for i, w in enumerate(weights) if w.dim() == 1)
        terms = exact[f"grad_weights[{bias}]"] * weights[0][:, 0].double()
        size = exact["grad_input"].abs().item()
        assert terms.sum().item() == pytest.approx(exact["grad_input"].item(), abs=1e-12)
        all_terms = terms.abs().sum().item()
        cpu, gpu = (
            (found["grad_input"] - exact["grad_input"]).abs().item()
            for found in (case.results(), on_gpu(case))
        )
        assert cpu <= rounding * size + SUMS * all_terms
        assert gpu <= rounding * size + (rounding + SUMS) * all_terms
        errors[hidden_size] = cpu / size, gpu / size
    worst = [max(error) for error in zip(*errors.values(), strict=True)]
    print(f"\n{one}")
    for sizes, (cpu, gpu) in {"40": errors[40], "33 to 64": worst}.items():
        print(f"  hidden_size={sizes}: CPU {cpu:.1e}, GPU {gpu:.1e}")
    assert 2 * worst[0] < worst[1]


# --- if pre-activations were rounded too ---------------------------------------------------------


def scaled(problem, input=1.0, weight=1.0, bias=0.0):
    """Arguments with the input and its weight scaled, and all gates shifted."""
    first = next(i for i, w in enumerate(problem.weights) if w.dim() == 1)
    weights = list(problem.weights)
    weights[0], weights[first] = weights[0] * weight, weights[first] + bias
    return replace(problem, input=problem.input * input, weights=weights)


PROBLEMS = {  # steps, and arguments of scaled()
    "T = 16": (16, {}),
    "256": (256, {}),
    "input x 10": (64, {"input": 10}),
    "gates + 8": (64, {"bias": 8}),
    "sums of 1e5": (16, {"input": 1e4, "weight": 10}),
}


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("name", ["gru", "lstm", "stochastic_gru"])
def test_rounded_preactivations_would_cost_accuracy(monkeypatch, name, dtype):
    """In 16 bits the sums that backward begins with would take half the memory; errors grow."""
    pytest.importorskip("rich")
    from bench import numerics

    operators = emulated_operators()
    use(monkeypatch, operators)

    def rounding(*arguments):
        """Runs forward, and has backward round its sums of products."""
        operators.control(False, "")
        output = numerics.CELLS[name][numerics.OURS](*arguments)
        operators.control(False, "", rounds_sums=True)
        return output

    growth = {}
    for label, (seq_len, how) in PROBLEMS.items():
        problem = scaled(numerics.problem(name, seq_len, dtype, "cpu"), **how)
        truth, *found = (
            problem.results(cell, of_dtype)[1:]
            for cell, of_dtype in (
                (numerics.CELLS[name][numerics.LOOP], torch.float64),
                (numerics.CELLS[name][numerics.OURS], dtype),
                (rounding, dtype),
            )
        )
        operators.control(False, "")
        unrounded, rounded = (
            [float((a - b).norm()) for a, b in zip(r, truth, strict=True)] for r in found
        )
        growth[label] = max(b / a for a, b in zip(unrounded, rounded, strict=True))
    print(f"\n{name}, {dtype}: " + ", ".join(f"{k}: {v:.2f}" for k, v in growth.items()))
    assert growth["gates + 8"] > 1.1 and growth["input x 10"] > 1.1
