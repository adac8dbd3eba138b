"""No result depends on old contents of memory, although nothing presets weights' gradients.

Fresh memory is NaN here. The operators are called directly, since modules return only gradients
that were asked for.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import CELLS, MASKED, Case, operator_arguments

from fusedrnn import _helpers, _library

BASE = Case(seq_len=7, batch=3, input_size=2, chunk_size=3, dtype=torch.float32)
EVERY = [
    *(replace(BASE, cell=cell) for cell in CELLS),
    replace(BASE, cell="stochastic_gru", noise="none"),  # reads only half of a weight
    replace(BASE, cell="lstm", proj_size=2),
]
OPTIONS = [
    {},
    {"bias": False},
    {"seq_len": 1, "batch": 1},
    {"chunk_size": 7},
    {"bidirectional": True, "recompute": False},
    {"reset": True, "bias": False, "recompute": False},
    {"lengths": True, "seq_len": 21},
    MASKED,
]
SIZES = [1, 2, 3, 4, 5, 13]  # torch does the products for 13
FIRST_AHEAD, SECOND_AHEAD = 0, 1
TUNING = _helpers.TUNING["replay"] + _helpers.TUNING["overlap"]


EMULATED = pytest.mark.emulated
SLOW = [
    pytest.param(which, marks=[pytest.mark.slow, EMULATED]) for which in ("emulated", FIRST_AHEAD)
]


@pytest.fixture(params=["cpu", pytest.param(SECOND_AHEAD, marks=EMULATED), *SLOW])
def dtypes(request):
    """Chooses the backend: the CPU, a GPU's kernels for single steps, or its persistent kernels.

    With the last, a second stream makes the gradients of weights as early or as late as it may.
    Returns the dtypes that the backend has.
    """
    if request.param == "cpu":
        return [torch.float32, torch.bfloat16]
    emulator = request.getfixturevalue("emulator")
    if request.param == "emulated":
        return [torch.float32, torch.bfloat16]
    emulator.control(False, "", multiprocessors=132, streams_order=request.param)
    return [torch.bfloat16]


@pytest.fixture
def fresh(deterministic):
    """Fills fresh memory with NaN, or stops doing so."""

    def fill(on):
        deterministic(on)
        assert not on or torch.empty(64).isnan().all()

    return fill


def all_weights(case):
    return (1 << len(case.tensors().weights)) - 1


class Call:
    """A call of the operators. lengths: replace the case's lengths."""

    def __init__(self, case, lengths=None, packed=False):
        a = case.tensors()
        a.lengths = a.lengths if lengths is None else torch.tensor(lengths)
        batch_sizes = None
        if packed:  # rows in falling order of length
            taken = torch.arange(case.seq_len).unsqueeze(1) < a.lengths
            batch_sizes, a.lengths = taken.sum(1), None
            a.input, a.grad_output = a.input[taken], a.grad_output[taken]
        raw = operator_arguments(
            case, a, batch_sizes=batch_sizes, chunk_size=case.chunk_size or 0, tuning=TUNING
        )
        save_gates = not case.recompute
        self.results = _library.operators.forward(**raw, save_gates=save_gates)
        output, _, _, saved_gates, cell_states = self.results
        self.arguments = raw | {
            "grad_output": a.grad_output,
            "grad_h_n": a.grad_h_n,
            "grad_c_n": a.grad_c_n,
            "output": output,
            "saved_gates": saved_gates if save_gates else None,
            "chunk_cell_states": None if a.cx is None else cell_states,
        }

    def gradients(self, weights):
        """Gradients of input, hx, cx, and of the weights whose bits are set in ``weights``."""
        needs = 1 + 2 + 4 * (self.arguments["cx"] is not None) + 16 * weights
        *others, flat = _library.operators.backward(**self.arguments, needs=needs)
        shapes = [w.numel() for w in self.arguments["weights"]]
        return others, flat.split(shapes) if weights else ()


def check(fresh, case, subsets, **options):
    """Asserts that NaN in fresh memory reaches no result, and unwanted gradients are zeros."""
    fresh(False)
    call = Call(case, **options)
    expected_results = call.results
    expected_others, expected = call.gradients(all_weights(case))
    fresh(True)
    call = Call(case, **options)
    for found, result in zip(call.results, expected_results, strict=True):
        assert torch.equal(found, result)
    for wanted in subsets:
        others, weights = call.gradients(wanted)
        for found, other in zip(others, expected_others, strict=True):
            assert torch.equal(found, other)
        for i, found in enumerate(weights):
            all_of_it = expected[i] if wanted >> i & 1 else torch.zeros_like(expected[i])
            assert torch.equal(found, all_of_it), (i, bin(wanted))


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_all_gradients(dtypes, fresh, case, options):
    for size, dtype in itertools.product(SIZES, dtypes):
        sizes = {"hidden_size": size, "latent_size": size + 1}
        if case.proj_size:  # less than hidden_size
            sizes = {"hidden_size": size + 1, "proj_size": size}
        sized = replace(case, **sizes, **options, dtype=dtype)
        check(fresh, sized, [all_weights(sized)])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_some_gradients(dtypes, fresh, case, bidirectional):
    case = replace(case, bidirectional=bidirectional, dtype=dtypes[0])
    every = all_weights(case)
    alone = [1 << i for i in range(every.bit_length())]
    check(fresh, case, [0, *alone, *(every - bit for bit in alone)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [[7, 7, 2], [2, 1, 1]])  # to the last chunk, to the first
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_short_rows(dtypes, fresh, case, lengths, packed):
    for bidirectional in (False, True):
        sized = replace(case, seq_len=max(lengths) if packed else 7, dtype=dtypes[0])
        sized = replace(sized, bidirectional=bidirectional)
        check(fresh, sized, [all_weights(sized)], lengths=lengths, packed=packed)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_without_rows_all_are_zeros(dtypes, fresh, case):
    case = replace(case, batch=0, dtype=dtypes[0])
    fresh(True)
    for wanted in (all_weights(case), 0b101):
        _, weights = Call(case).gradients(wanted)
        assert len(weights) > 0 and not any(grad.any() for grad in weights)
