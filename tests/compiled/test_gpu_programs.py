"""Compiled cells by the GPU's driver and kernels, emulated, and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu_programs import emulate
from plain import Masks
from registry import CASES, Case
from test_published_cells import SEVERAL, B, T, check_call, error, gradients, leaves_of, seeded
from torch import Tensor
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn import _library
from fusedrnn._compile import operators, ready

SOME = pytest.mark.parametrize("case", SEVERAL, ids=str)
QUICK = {"LSTMCell", "forum", "late reset, LayerNorm"}
SMOOTH = [
    pytest.param(case, id=str(case), marks=[] if case.name in QUICK else [pytest.mark.slow])
    for case in SEVERAL
    if not case.is_discrete
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of what runs the programs, by which tests share them."""
    emulate(monkeypatch)
    return "emulated"


def some_resets(seq_len: int = T, batch: int = B) -> Tensor:
    """That hit first, last and missing steps."""
    reset = torch.zeros(seq_len, batch, dtype=torch.bool)
    reset[0, 0] = reset[2] = reset[4, 1] = reset[4, 2] = True
    return reset


@SOME
def test_equals_the_loop(emulated: str, case: Case) -> None:
    check_call(case, emulated)


@SOME
@pytest.mark.parametrize("chunk_size", [2, T])
def test_lengths_and_resets(emulated: str, case: Case, chunk_size: int) -> None:
    check_call(case, emulated, Masks([3, 5, 1], some_resets()), chunk_size=chunk_size)


@SOME
@pytest.mark.parametrize("kind", ["one row", "sequence"])
def test_other_states_at_resets(emulated: str, case: Case, kind: str) -> None:
    steps = (T,) if kind == "sequence" else ()
    to = case.state(case.cell(), 1 if kind == "one row" else B, *steps)
    check_call(case, emulated, Masks([4, 5, 2], some_resets(), to, bool(steps)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.compiles], ids=str)
def test_all_cells(emulated: str, case: Case) -> None:
    check_call(case, emulated, Masks([3, 5, 1], some_resets()), chunk_size=2)


# Against the CPU.


def judged(case: Case, cell: Any, device: str, masks: Masks, **options: Any) -> list[list[Tensor]]:
    """Values and gradients on a device, of the same cell, inputs and state each time."""
    torch.manual_seed(1)
    cell = copy.deepcopy(cell)
    given = case.inputs(T, B, next(cell.parameters()).dtype), case.state(cell, B)
    x, state = (
        pytree.tree_map(lambda t: t.detach().to(device).requires_grad_(t.requires_grad), tree)
        for tree in given
    )
    rnn = fusedrnn.Recurrent(cell.to(device), compile="require", **options)
    reset = None if masks.reset is None else masks.reset.to(device)
    results = rnn(x, state, masks.lengths, reset, generator=seeded())
    values = [t for t in pytree.tree_leaves(results) if t.is_floating_point()]
    found = gradients(cpu(values), leaves_of(x, state, cell))
    return [cpu(values), cpu(found)]


def cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.cpu() for t in tensors]


def check_against_the_cpu(case: Case, dtype: torch.dtype, masks: Masks, device: str) -> None:
    cell = case.cell(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            emulate(patch)
        ours = judged(case, cell, device, masks, chunk_size=2)
    theirs = judged(case, cell, "cpu", masks, chunk_size=2)
    for mine, other in zip(ours, theirs, strict=True):
        assert error(mine, other) <= 8 * torch.finfo(dtype).eps


ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OF_SMOOTH = pytest.mark.parametrize("case", SMOOTH)
ALL_MASKS = pytest.mark.parametrize(
    "masks", [Masks(), Masks([3, 5, 1], some_resets())], ids=["whole", "masked"]
)


@ALL_DTYPES
@OF_SMOOTH
@ALL_MASKS
def test_equals_the_cpu(case: Case, dtype: torch.dtype, masks: Masks) -> None:
    check_against_the_cpu(case, dtype, masks, "cpu")


@pytest.mark.parametrize("runs", ["compiled", "emulated"])
@pytest.mark.parametrize("case", [case for case in SEVERAL if case.name in QUICK], ids=str)
@ALL_MASKS
def test_fresh_memory_is_written_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
    deterministic: Callable[[bool], None],
    runs: str,
    case: Case,
    masks: Masks,
) -> None:
    """Numbers of fresh memory, which is full of NaN here, get nowhere."""
    if runs == "emulated":
        emulate(monkeypatch)
    cell = case.cell(torch.bfloat16)
    expected = judged(case, cell, "cpu", masks, chunk_size=2)
    deterministic(True)
    found = judged(case, cell, "cpu", masks, chunk_size=2)
    for mine, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.cuda
@ALL_DTYPES
@OF_SMOOTH
@ALL_MASKS
def test_equals_the_cpu_on_a_gpu(case: Case, dtype: torch.dtype, masks: Masks) -> None:
    check_against_the_cpu(case, dtype, masks, "cuda")


# Which programs run where.


def test_a_program_runs_only_where_its_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _library.operators
    cell, x = torch.nn.RNNCell(3, 3), torch.zeros(2, 1, 3)
    numbers = []
    add = operators.add_program

    def adding(*args: Any, **named: Any) -> int:
        numbers.append(add(*args, **named))
        return numbers[-1]

    monkeypatch.setattr(operators, "add_program", adding)
    fusedrnn.Recurrent(cell, compile="require")(x)
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        fusedrnn.Recurrent(cell, compile="require")(x)
        of_gpu = _library.operators
    for run, number in ((known, numbers[1]), (of_gpu, numbers[0])):
        nothing = {"sequences": [x], "last": [], "kept": [], "saved": []}
        with pytest.raises(RuntimeError, match=r"fusedrnn: there is no program \d+ for these"):
            run.program_forward(number, [], [], [], [], [], [], **nothing)


@pytest.mark.parametrize("runs", ["compiled", "emulated"])
@pytest.mark.parametrize(
    ("right", "wrong"), [("math::tanh(", "math::sigmoid("), ("din[0] = ", "din[0] = 1.5f * ")]
)
def test_a_library_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, runs: str, right: str, wrong: str
) -> None:
    """Such as one of a compiler with a bug: values, or gradients alone."""
    if runs == "emulated":
        emulate(monkeypatch)
    build = ready.build

    def build_wrong(text: str, **named: Any) -> Any:
        assert right in text
        return build(text.replace(right, wrong), **named)

    monkeypatch.setattr(ready, "build", build_wrong)
    rnn = fusedrnn.Recurrent(torch.nn.RNNCell(3, 3), compile="require")
    with pytest.raises(RuntimeError, match="the library does not compute what the program does"):
        rnn(torch.zeros(2, 1, 3))
