"""Compiled cells by the GPU's driver and kernels, emulated, and on a GPU, against the CPU.

test_published_cells.py compares the emulation to the plain loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compiler.interpreted import have_own_programs
from recurrent.registry import BY_NAME, Case
from runtime.gpu_programs import emulate
from runtime.plain import Masks
from test_published_cells import MASKS, SEVERAL, B, T, error, gradients, leaves_of, seeded
from torch import Tensor
from torch.utils import _pytree as pytree

import fusedrnn
from fusedrnn import _library
from fusedrnn._compiler import pipeline, program_operators

SMOOTH = [case for case in SEVERAL if not case.is_discrete]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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


def marked(case: Case, dtype: torch.dtype) -> Any:
    """CI has three cells in two dtypes; the quick tests have one of these."""
    in_turn = {"LSTMCell": torch.float32, "ForumCell": torch.float64}
    in_turn |= {"late reset, LayerNorm": torch.bfloat16}
    marks = [pytest.mark.slow if in_turn.get(case.name) == dtype else pytest.mark.nightly]
    is_quick = case.name == "LSTMCell" and dtype == torch.float32
    return pytest.param(case, dtype, id=f"{case}, {dtype}", marks=[] if is_quick else marks)


ALL_MASKS = pytest.mark.parametrize("masks", [Masks(), MASKS], ids=["whole", "masked"])


@pytest.mark.parametrize(
    ("case", "dtype"), [marked(case, dtype) for case in SMOOTH for dtype in DTYPES]
)
@ALL_MASKS
def test_equals_the_cpu(case: Case, dtype: torch.dtype, masks: Masks) -> None:
    check_against_the_cpu(case, dtype, masks, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["compiled", "emulated"])
@pytest.mark.parametrize(
    "name",
    [
        "late reset, LayerNorm",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("LSTMCell", "ForumCell")),
    ],
)
@ALL_MASKS
def test_fresh_memory_is_written_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
    deterministic: Callable[[bool], None],
    runs: str,
    name: str,
    masks: Masks,
) -> None:
    """Numbers of fresh memory, which is full of NaN here, get nowhere."""
    if runs == "emulated":
        emulate(monkeypatch)
    case = BY_NAME[name]
    cell = case.cell(torch.bfloat16)
    expected = judged(case, cell, "cpu", masks, chunk_size=2)
    deterministic(True)
    found = judged(case, cell, "cpu", masks, chunk_size=2)
    for mine, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMOOTH, ids=str)
@ALL_MASKS
def test_equals_the_cpu_on_a_gpu(case: Case, dtype: torch.dtype, masks: Masks) -> None:
    check_against_the_cpu(case, dtype, masks, "cuda")


class Scaled(torch.nn.Module):
    """It has a number that stays on the CPU, and one that gets a gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(3, 3, device="cuda")
        self.scale, self.shift = torch.tensor(0.7), torch.tensor(0.1, requires_grad=True)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.gate(h) * self.scale + x + self.shift)


@pytest.mark.cuda
def test_numbers_on_the_cpu() -> None:
    cell, x = Scaled(), torch.randn(4, 2, 3, device="cuda")
    h = torch.zeros(2, 3, device="cuda")
    found = []
    for compile in ("require", "require", "never"):
        output = fusedrnn.Recurrent(cell, compile=compile)(x, h)[0]
        found.append([output, *torch.autograd.grad(output.sum(), [cell.shift, cell.gate.weight])])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


# Which programs run where.


def test_a_program_runs_only_where_its_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _library.operators
    cell, x = torch.nn.RNNCell(3, 3), torch.zeros(2, 1, 3)
    numbers = []
    add = program_operators.add_program

    def adding(*args: Any, **named: Any) -> int:
        numbers.append(add(*args, **named))
        return numbers[-1]

    monkeypatch.setattr(program_operators, "add_program", adding)
    fusedrnn.Recurrent(cell, compile="require")(x)
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        fusedrnn.Recurrent(cell, compile="require")(x)
        of_gpu = _library.operators
    for run, number in ((known, numbers[1]), (of_gpu, numbers[0])):
        nothing = {"sequences": [x], "last": [], "kept": [], "saved": []}
        with pytest.raises(RuntimeError, match=r"fusedrnn: there is no program \d+ for these"):
            run.program_forward(number, [], [], [], [], [], [], **nothing)


@pytest.mark.parametrize("runs", ["compiled", pytest.param("emulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("right", "wrong"), [("math::tanh(", "math::sigmoid("), ("din[0] = ", "din[0] = 1.5f * ")]
)
def test_a_library_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, runs: str, right: str, wrong: str
) -> None:
    """Such as one of a compiler with a bug: values, or gradients alone."""
    if runs == "emulated":
        emulate(monkeypatch)
    have_own_programs(monkeypatch)
    build = pipeline.build

    def build_wrong(text: str, **named: Any) -> Any:
        assert right in text
        return build(text.replace(right, wrong), **named)

    monkeypatch.setattr(pipeline, "build", build_wrong)
    rnn = fusedrnn.Recurrent(torch.nn.RNNCell(3, 3), compile="require")
    with pytest.raises(
        RuntimeError, match="the compiled library computes other results than the step"
    ):
        rnn(torch.zeros(2, 1, 3))
