"""Steps whose programs would be wrong where the trial with random numbers does not look.

Longer than 350 lines, because it is one list of what is refused.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import random
import re
import secrets
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random, choice
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compiler.interpreted import interpreted
from numpy.random import default_rng
from torch import Tensor, nn

import fusedrnn
from fusedrnn._compiler.trial import Trial
from fusedrnn._front import traced_step
from fusedrnn._front.torch_refusals import reason_of

H = 5
ZEROS = torch.zeros(2, H, dtype=torch.float64)


class Cell(nn.Module):
    """A GRU and what is made of its state."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gru, self.function = nn.GRUCell(H, H), function

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(x[:, :H].to(h.dtype), h)
        return self.function(h, x), h


LARGEST = {
    "parts": lambda h, x: torch.cat([h.tanh(), h.square()], -1).amax(-1),
    "equal": lambda h, x: torch.where(h == h.detach().amax(-1, keepdim=True).detach(), h, 0.0),
    "not less": lambda h, x: h * (h >= h.max(-1, keepdim=True).values),
    "moved": lambda h, x: (h + 1 >= (h.detach().amax(-1, keepdim=True) + 1).detach()).to(h.dtype),
}


def refused(cell: nn.Module, x: Any, h: Tensor) -> str:
    with interpreted(), pytest.raises(RuntimeError, match="cannot be compiled") as error:
        fusedrnn.Recurrent(cell, compile="require")(x, h)
    return str(error.value)


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparisons_to_the_largest_of_some_numbers(name: str, dtype: torch.dtype) -> None:
    """Backward makes sums of products again, maybe with another rounding."""
    x, h = torch.randn(3, 2, H, dtype=dtype), torch.zeros(2, H, dtype=dtype)
    reason = refused(Cell(LARGEST[name]).to(dtype), x, h)
    assert "compares a maximum" in reason or "between equal maxima" in reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h, x: h[:, :, None].expand(-1, -1, 70).cumprod(-1).sum(-1), "is of 70 numbers"),
        (lambda h, x: torch.linalg.vector_norm(h, -2.0, -1), "aten.linalg_vector_norm"),
    ],
)
def test_operations_that_are_compiled_in_part(
    function: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    assert reason in refused(Cell(function), torch.randn(3, 2, H), torch.zeros(2, H))


class Doubled(torch.autograd.Function):
    """The identity, with another derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Rounded(torch.autograd.Function):
    """Without a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.round()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


def test_operations_that_raise() -> None:
    """In some calls alone, as with the wrong shapes."""
    reason = refused_first(Cell(lambda h, x: torch.cat([h, h], -1) + x[:, :3]))
    assert "it raises RuntimeError: The size of tensor a (10) must match" in reason
    assert "FakeTensor" not in reason


def refused_first(cell: nn.Module) -> str:
    """torch.compile's reason, though the step itself raises."""
    reasons = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="must match"):
        patch.setattr(
            traced_step, "reason_of", lambda e: reasons.append(reason_of(e)) or reasons[-1]
        )
        fusedrnn.Recurrent(cell)(torch.randn(3, 2, H), torch.zeros(2, H))
    return reasons[0]


def test_what_torch_compile_fails_at() -> None:
    """With an AssertionError that it does not turn into one of its own errors."""
    reason = refused(
        Cell(lambda h, x: Rounded.apply(h) * x), torch.randn(3, 2, H), torch.zeros(2, H)
    )
    assert "torch.compile cannot trace this step" in reason
    assert reason.endswith(")") and "(test_refusals.py:" in reason


def test_what_torch_compile_calls_a_fault_of_its_own() -> None:
    class Keeping(Cell):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            self.kept = Kept(h.detach())
            return super().forward(x, h)

    reason = refused(Keeping(lambda h, x: h + x), torch.randn(3, 2, H), torch.zeros(2, H))
    assert reason.endswith("cannot trace this step: it keeps a tensor in an object that it makes")


@dataclass(frozen=True)
class Kept:
    tensor: Tensor


@pytest.mark.parametrize("of", ["a tensor", "a node", "a function"])
def test_hooks_and_functions_that_trials_may_not_reach(of: str) -> None:
    """Such as a hook that clips rare gradients."""

    def function(h: Tensor, x: Tensor) -> Tensor:
        if h.requires_grad and of == "a tensor":
            h.register_hook(lambda gradient: gradient.clamp(-100, 100))
        elif h.grad_fn is not None:
            if of == "a function":
                return Doubled.apply(h)  # type: ignore[no-any-return]
            h.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-100, 100),))
        return h

    reason = refused(Cell(function), torch.randn(3, 2, H), torch.zeros(2, H))
    assert "a hook" in reason or "grad_fn" in reason


class Graph(nn.Module):
    """Nodes, whose features weights mix, and which buffers mix or choose."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(H, H), function
        self.register_buffer("zeros", torch.zeros(4, 4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + self.function(self, h)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda self, h: self.zeros @ h, "by weights from the left"),
        (lambda self, h: torch.einsum("nm,bmf->bnf", self.zeros, h), "by weights from the left"),
        (lambda self, h: h * self.mask.nonzero().shape[0], "size of aten.nonzero's result"),
        (
            lambda self, h: h * h[:, self.mask].sum((1, 2), keepdim=True),
            "size of aten.index's result",
        ),
    ],
)
def test_what_buffers_hide_at_the_first_call(
    function: Callable[[Any, Tensor], Tensor], reason: str
) -> None:
    """Zeros hide what is multiplied by them, and a mask says how long its choice is."""
    assert reason in refused(Graph(function), torch.randn(3, 2, 4, H), torch.zeros(2, 4, H))


def test_buffers_of_zeros_are_tried_with_other_numbers() -> None:
    trial = Trial(
        (torch.zeros(H), torch.ones(H)),
        [False, False],
        (),
        (),
        lambda _: ((), ()),
        dtype=torch.float32,
    )
    zeros, ones = trial.constants
    assert (zeros > 0).all() and (ones > 0.5).all()


@pytest.mark.parametrize("file", ["step.py", "<stdin>", "<ipython-input-3-1f0c>", "<string>"])
def test_steps_that_ask_whether_gradients_are_wanted(file: str) -> None:
    """Wherever they were written."""
    text = "lambda h, x: h if torch.is_grad_enabled() else h.round()"
    function = eval(compile(text, file, "eval"), {"torch": torch})
    before = torch.is_grad_enabled
    reason = refused(Cell(function), torch.randn(3, 2, H), torch.zeros(2, H))
    assert "depends on whether gradients are enabled" in reason
    assert torch.is_grad_enabled is before


def test_steps_that_draw_by_other_functions() -> None:
    """What they draw is not a function of the seed and the step."""
    for draw in (lambda h, x: h[:, torch.randperm(H)], lambda h, x: torch.poisson(h.abs() + 9)):
        reason = refused(Cell(draw), torch.randn(3, 2, H), torch.zeros(2, H))
        assert re.search(r"the step draws by aten\.\w+ from torch's own generator$", reason), reason


def test_branches_by_torch_cond() -> None:
    def function(h: Tensor, x: Tensor) -> Tensor:
        return torch.cond(h.sum() > 9, lambda y: y * 2, lambda y: y.sin(), (h,))

    reason = refused(Cell(function), torch.randn(3, 2, H), torch.zeros(2, H))
    assert re.search(r"torch.cond is not supported \(test_refusals.py:\d+\)", reason), reason


def test_buffers_with_a_gradient() -> None:
    class Buffered(Cell):
        def __init__(self) -> None:
            super().__init__(lambda h, x: h * self.scale)
            self.register_buffer("scale", torch.ones(H).requires_grad_())

    cell, x, h = Buffered().double(), torch.randn(3, 2, H).double(), ZEROS
    found = []
    for compile in ("require", "never"):
        with interpreted():
            y, _ = fusedrnn.Recurrent(cell, compile=compile)(x, h)
            found += torch.autograd.grad(y.square().sum(), cell.scale)
    torch.testing.assert_close(*found)


class Products(nn.Module):
    """Has what the sums of steps are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(H, H), nn.Linear(H, H)


def clamped(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Steps whose state is a part of a sum, and that compare the two behind a product of it."""

    class Clamped(Products):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            made = self.ih(x) + self.hh(h)
            h = made.clamp(-0.5, 0.5)
            gate = torch.sigmoid(self.hh(h))
            return gate * function(h, made, gate), h

    return Clamped


EQUAL = {
    "equal": lambda h, made, gate: (h == made).to(h.dtype),
    "absolute": lambda h, made, gate: (h - made).abs(),
    "stopped": lambda h, made, gate: nn.functional.relu(made - h.detach()),
    "loss": lambda h, made, gate: nn.functional.l1_loss(h, made.detach(), reduction="none"),
    "largest": lambda h, made, gate: torch.maximum(h, made),
    "clamped": lambda h, made, gate: torch.clamp(h, max=made),
    "norm": lambda h, made, gate: ((h - made) * gate).norm(dim=-1, keepdim=True),
    "root": lambda h, made, gate: torch.sqrt(((h - made) * gate).square().sum(-1) + 1e-12)[:, None],
    "quotient": lambda h, made, gate: h / (h - made + 1e-9),
    "sign": lambda h, made, gate: torch.sign(2 * h - 2 * made),
    "ratio": lambda h, made, gate: (h / made.detach() - 1).abs(),
    "ratio of logarithms": lambda h, made, gate: torch.exp(h - made.detach()).clamp(0.8, 1.0),
    "scaled": lambda h, made, gate: torch.floor(h / made),
}
APART = {
    "difference": lambda h, made, gate: h - made,
    "mean": lambda h, made, gate: h - made.mean(-1, keepdim=True),
    "norm of a layer": lambda h, made, gate: nn.functional.layer_norm(h + made, [H]),
    "choice": lambda h, made, gate: torch.where(made > 0.1, h, made),
    "absolute": lambda h, made, gate: h.abs() + made.abs(),
    "quotient": lambda h, made, gate: torch.tanh(h / (made.abs() + 1)),
    "softmax": lambda h, made, gate: nn.functional.softmax(h, -1) * torch.log_softmax(made, -1),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_by_its_making(name: str) -> None:
    """The state is kept, and the sum is made again, with another rounding."""
    reason = refused(clamped(EQUAL[name])().double(), torch.randn(3, 2, H).double(), ZEROS)
    assert "which backward recomputes with another rounding" in reason


@pytest.mark.parametrize("name", APART)
def test_what_is_not_compared_to_what_it_is_made_of(name: str) -> None:
    cell, x = clamped(APART[name])().double(), torch.randn(30, 2, H, dtype=torch.float64)
    found = []
    for compile in ("require", "never"):
        with interpreted():
            y, _ = fusedrnn.Recurrent(cell, compile=compile)(x, ZEROS)
            found.append([y, *torch.autograd.grad(y.square().sum(), [*cell.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_states_that_are_equal_by_their_making() -> None:
    """One is in the output, and the other is kept before each chunk alone."""

    class Two(Products):
        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
            h, made = state
            y = torch.where(h == made, h * x, made)
            made = self.ih(x) + self.hh(h)
            return y, (made.clamp(-0.5, 0.5), made)

    with interpreted(), pytest.raises(RuntimeError, match="with another rounding"):
        rnn = fusedrnn.Recurrent(Two().double(), compile="require")
        rnn(torch.randn(3, 2, H).double(), (ZEROS, ZEROS + 1))


def test_values_that_16_bits_round() -> None:
    """An operand of a product is rounded to its dtype, and what it is made of is not."""

    class Rounded(Products):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            made = self.ih(x) + self.hh(h)
            new = made.clamp(-10, 10)
            gate = torch.sigmoid(self.hh(new))
            return ((new - made) * gate).norm(dim=-1, keepdim=True), 0.5 * new

    cell, x, h = Rounded().to(torch.bfloat16), torch.randn(3, 2, H).bfloat16(), ZEROS.bfloat16()
    assert "with another rounding" in refused(cell, x, h)


def test_softmax_and_choices_are_compiled() -> None:
    def function(h: Tensor, x: Tensor) -> Tensor:
        probabilities = torch.softmax(h, -1)
        chosen = nn.functional.one_hot(h.argmax(-1), H).to(h.dtype)
        return probabilities + chosen + torch.logsumexp(h, -1, keepdim=True) + h.max(-1)[0][:, None]

    x, h = torch.randn(3, 2, H), torch.zeros(2, H)
    with interpreted():
        fusedrnn.Recurrent(Cell(function), compile="require")(x, h)


@pytest.mark.parametrize(
    ("wide", "narrow"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_inputs_that_would_be_rounded(wide: torch.dtype, narrow: torch.dtype) -> None:
    x, h = torch.randn(3, 2, H, dtype=wide), torch.zeros(2, H, dtype=narrow)
    cell = Cell(lambda h, x: (x - 300.5 > 0).to(h.dtype)).to(narrow)
    assert f"an input is {wide}, but the state is {narrow}" in refused(cell, x, h)


class Step(nn.Module):
    """A GRU, and an output of all that a step gets and of a table."""

    def __init__(self, function: Callable[[Any, Tensor, nn.Embedding], Any]) -> None:
        super().__init__()
        self.gru, self.table, self.function = nn.GRUCell(H, H), nn.Embedding(5, H), function

    def forward(self, x: Any, h: Tensor) -> Any:
        return self.function(x, h, self.table), self.gru(h, h)


def numbers(*shape: int) -> Tensor:
    return torch.ones(3, 2, *shape, dtype=torch.int64)


Function = Callable[[Any, Tensor, nn.Embedding], Any]
NAMED: dict[str, tuple[Function, Any, str]] = {
    "integers": (
        lambda x, h, table: x + h,
        numbers(1),
        r"input is torch\.int64 and used in arithmetic, by aten\.add",
    ),
    "some integers": (
        lambda x, h, table: (x["n"] > 0) * h,
        {"x": torch.randn(3, 2, H), "n": numbers(1)},
        r"input\['n'\] is torch\.int64 and used in arithmetic, by aten\.gt",
    ),
    "a cast": (lambda x, h, table: x.to(h.dtype) @ table.weight, numbers(5), r"aten\._to_copy"),
    "an output": (lambda x, h, table: h > 0, numbers(), r"an output of the step is torch\.bool"),
    "of several outputs": (
        lambda x, h, table: (h, h > 0),
        numbers(),
        "output 1 of the step is torch",
    ),
    "mixed rows": (lambda x, h, table: h.flip(0), numbers(), "an output of the step mixes"),
    "a part of an input": (
        lambda x, h, table: table(x[:, 0]),
        numbers(2),
        r"aten\.embedding looks up only a part of input",
    ),
    "checks of values": (
        lambda x, h, table: torch.distributions.Normal(h, 1.0, validate_args=True).rsample(),
        numbers(),
        r"torch\.distributions validates its arguments there",
    ),
    "an unknown operation": (lambda x, h, table: h.cummax(-1)[0], numbers(), r"aten\.cummax"),
    "a decision": (lambda x, h, table: h if h.sum() > 0 else 2 * h, numbers(), ""),
    "a factor": (
        lambda x, h, table: torch.addmm(h, h, table.weight.t() @ table.weight, beta=2),
        numbers(),
        r"aten\.addmm is called with beta or alpha",
    ),
    "a sum": (
        lambda x, h, table: torch.addmm(h, h, table.weight.t() @ table.weight),
        numbers(),
        r"aten\.addmm adds an activation to a product",
    ),
    "parts": (
        lambda x, h, table: torch.cat([h > 0, h.flip(1) > 1], -1).any(-1, keepdim=True) * h,
        numbers(),
        r"aten\.any reduces columns that different operations",
    ),
    "many values": (
        lambda x, h, table: sum(x[:, i : i + 1].tanh() * h[:, i % H, None] for i in range(40)),
        torch.randn(3, 2, 40),
        r"aten\.\w+ is computed elementwise from more than 32 inputs",
    ),
}


if torch.__version__ >= "2.13":  # before, torch has no effects of operations
    NAMED["a decomposition that may fail"] = (
        lambda x, h, table: torch.linalg.cholesky(table.weight.t() @ table.weight).sum() * h,
        numbers(),
        r"aten\._linalg_check_errors waits for values",
    )


@pytest.mark.parametrize("name", NAMED)
def test_reasons_name_what_the_user_knows(name: str) -> None:
    """The operation, or the input or output, and the line; nothing that only a graph has."""
    function, x, text = NAMED[name]
    reason = refused(Step(function), x, torch.zeros(2, H))
    assert re.search(rf"{text}.* \(test_refusals\.py:\d+\)$", reason), reason
    assert not re.search(r"arg\d|_\d", reason)


WAYS_OUT: dict[str, tuple[Function, str]] = {
    "a decision": (lambda x, h, table: h if h.sum() > 0 else 2 * h, "choose by torch.where"),
    "a list": (lambda x, h, table: (x.append(h), h)[1], "as an output"),
    "rows of its own": (
        lambda x, h, table: h + table.rows,
        "make a tensor with a row for each sequence a part of the state",
    ),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_what_to_do_is_said(name: str) -> None:
    """By explain, and below the error."""
    function, words = WAYS_OUT[name]
    x, kept = torch.randn(3, 2, H), list[Tensor]()
    table: Any = SimpleNamespace(rows=torch.randn(2, H))

    def step(h: Tensor, x: Tensor) -> Tensor:
        return function(kept, torch.tanh(x + h), table)

    rnn = fusedrnn.Recurrent(Cell(step))
    with interpreted():
        explanation = rnn.explain(x, torch.zeros(2, H))
        assert words in "".join(explanation.faster), explanation
        rnn.compile_cell = "require"
        with pytest.raises(RuntimeError, match="cannot be compiled") as error:
            rnn(x, torch.zeros(2, H))
    assert words in "".join(traceback.format_exception(error.value))


@pytest.mark.filterwarnings("ignore:fusedrnn")  # a single row is no longer compiled
@pytest.mark.parametrize("rows", [1, 7])
def test_steps_that_decide_by_the_number_of_rows(rows: int) -> None:
    """Each batch has what the step does with it; a program for a single row is that of others."""
    cell = Cell(lambda h, x: 2 * h if len(h) == rows else h).double()
    ours, theirs = (fusedrnn.Recurrent(cell, compile=how) for how in ("auto", "never"))
    for batch in (2, rows, 3, rows, 64):
        x, h = torch.randn(3, batch, H).double(), torch.zeros(batch, H).double()
        with interpreted():
            torch.testing.assert_close(ours(x, h)[0], theirs(x, h)[0])
    if rows == 1:
        x, h = torch.randn(3, 1, H).double(), torch.zeros(1, H).double()
        assert "with a batch of 1 the step computes something" in refused(cell, x, h)


TABLE = torch.ones(H)
OF_ONE_ROW = {
    "a tensor": (lambda cell, h: h * TABLE, "with a batch of 1 the step reads different tensors"),
    "an attribute": (lambda cell, h: cell.counted() * h, "the step changes cell.calls (test_refu"),
    "a hook": (lambda cell, h: (h.register_hook(torch.sign), h)[1], "computes something different"),
}


@pytest.mark.parametrize("name", OF_ONE_ROW)
def test_what_a_step_does_with_the_rows_of_the_call_alone(name: str) -> None:
    special, words = OF_ONE_ROW[name]

    class Special(Cell):
        calls = 0

        def counted(self) -> float:
            self.calls += 1
            return 2.0

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            y, h = super().forward(x, h)
            return special(self, y) if len(x) == 1 and y.requires_grad else y, h

    cell = Special(lambda h, x: h + 1)
    reason = refused(cell, torch.randn(3, 1, H), torch.zeros(1, H, requires_grad=True))
    assert words in reason


# --- what is given to Python another time each time ----------------------------------------------

OWN = random.Random(0)
RANDOM: Any = np.random.default_rng(0)


def forever() -> Iterator[int]:
    while True:
        yield 1


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        return function(*given) if time.monotonic() > 0 else 0

    return call


class Counted:
    """An iterator whose state shows."""

    def __next__(self) -> int:
        return 1


DRAWS = (
    "the step draws random numbers in Python, which a compiled step would draw once for all steps"
)
Number = Callable[[Any], Any]
CHANCE: dict[str, tuple[Number, Any, str]] = {
    "random": (lambda o: random.random(), None, "it calls Random.random"),
    "a normal number": (lambda o: random.gauss(0, 1), None, "it calls Random.gauss"),
    "an integer": (lambda o: random.randint(1, 99), None, DRAWS),
    "a rare choice": (lambda o: 1 + (random.uniform(0, 1) < 1e-9), None, ""),
    "NumPy": (lambda o: np.random.rand(), None, "or of a NumPy number"),
    "NumPy's shuffle": (lambda o: np.random.permutation(3)[0], None, "RandomState.permutation"),
    "NumPy's array": (lambda o: torch.from_numpy(np.random.rand(3, 1)).mean(), None, DRAWS),
    "a function": (lambda o: choice([1, 2]), None, "it calls Random.choice"),
    "a variable": (lambda o: OWN.random(), None, DRAWS),
    "NumPy's in a variable": (lambda o: RANDOM.random(), None, "it calls Generator.random"),
    "an attribute": (lambda o: o.random(), random.Random(0), DRAWS),
    "in a list": (lambda o: o[0].random(), [random.Random(0)], DRAWS),
    "the system's": (lambda o: o.random(), random.SystemRandom(), "SystemRandom.random"),
    "an old one": (lambda o: o.rand(), np.random.RandomState(0), "it calls RandomState.rand"),
    "a method": (lambda o: o(), np.random.default_rng(0).random, "it calls a cython_function"),
    "made in the step": (lambda o: random.Random().random(), None, DRAWS),
    "NumPy's in the step": (lambda o: np.random.default_rng().random(), None, "default_rng"),
    "a class": (lambda o: Random().random(), None, DRAWS),
    "NumPy's function": (lambda o: default_rng().random(), None, "it calls default_rng"),
    "a count": (next, itertools.count(1), "the step changes cell.held"),
    "a method of a count": (lambda o: o(), itertools.count(1).__next__, "changes cell.held"),
    "NumPy's bits in the step": (
        lambda o: np.random.Generator(np.random.PCG64()).random(),
        None,
        "it calls ",
    ),
    "a list's iterator": (next, iter([1.0] * 1000), "next() on list_iterator"),
    "Python's own iterator": (next, forever(), "next() on generator"),
    "a clock": (lambda o: 1 + 0 * time.time(), None, "it calls time.time"),
    "an imported clock": (lambda o: perf_counter(), None, "it calls time.perf_counter"),
    "a clock inside": (lambda o: (lambda: time.monotonic_ns())(), None, "time.monotonic_ns"),
    "a decorator's clock": (timed(lambda o: 1.0), None, "it calls time.monotonic"),
    "a date": (lambda o: datetime.datetime.now().year, None, "it calls type.now"),
    "bytes": (lambda o: os.urandom(1)[0], None, "it calls posix.urandom"),
    "secrets": (lambda o: secrets.randbelow(3), None, "it calls Random._randbelow"),
    "a name": (lambda o: uuid.uuid4().int % 3, None, "it calls posix.urandom"),
}


class Reads(nn.Module):
    """A cell that multiplies by a number, and says how often it was taken."""

    def __init__(self, read: Number, held: Any) -> None:
        super().__init__()
        self.gru, self.read, self.held = nn.GRUCell(H, H), read, held

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.gru(x, h) * float(self.read(self.held))


@pytest.mark.parametrize("name", CHANCE)
def test_what_is_another_value_each_time(name: str) -> None:
    """A program would have the first one for ever."""
    read, held, reason = CHANCE[name]
    cell, x, h = Reads(read, held), torch.randn(3, 2, H), torch.zeros(2, H)
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    said = refused(cell, x, h)
    assert reason in said and said.endswith(")") and "(test_refusals.py:" in said
    # What was tried has taken no number from the user.
    assert random.getstate() == states[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])
    torch.testing.assert_close(torch.get_rng_state(), states[2])


HARMLESS: dict[str, tuple[Number, Any]] = {
    "its module": (lambda o: random is not None and np.float64(2.0), None),
    "another function of a module": (lambda o: len(os.fspath(os.sep)), None),
    "a date that is given": (lambda o: o.year - 2000, datetime.datetime(2001, 1, 1)),
    "containers": (lambda o: o[0][1] + o[1]["a"], ([1, 2], {"a": range(3)[1]})),
    "an iterator in Python": (next, Counted()),
    "a generator of torch": (lambda o: 2.0, torch.Generator()),
    "a logger": (lambda o: 2.0, logging.getLogger("test")),
    "a lock": (lambda o: 2.0, threading.Lock()),
    "a thread": (lambda o: 2.0, threading.Thread(target=print)),
    "a file": (lambda o: 2.0, sys.__stderr__),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_another_value_each_time(name: str) -> None:
    with interpreted():
        rnn = fusedrnn.Recurrent(Reads(*HARMLESS[name]), compile="require")
        rnn(torch.randn(3, 2, H), torch.zeros(2, H))


@pytest.mark.parametrize("draw", ["randint", "randperm"])
def test_what_torch_draws_in_trials_is_put_back(draw: str) -> None:
    """Of functions whose numbers are not the package's."""
    function = {"randint": lambda: torch.randint(9, (2, 1)), "randperm": lambda: torch.randperm(9)}
    cell = Cell(lambda h, x: h * function[draw]()[:1].max())
    state = torch.get_rng_state()
    refused(cell, torch.randn(3, 2, H, generator=torch.Generator()), torch.zeros(2, H))
    torch.testing.assert_close(torch.get_rng_state(), state)


# --- what torch has scripted, and what is no plain array -----------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + h)


def with_part(part: Any) -> nn.Module:
    cell = Cell(lambda h, x: cell.part(h, h))
    cell.part = part
    return cell


class Scripted(torch.jit.ScriptModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    @torch.jit.script_method
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + h)


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "a class": Scripted,
    "a module": lambda: torch.jit.script(Plain()),
    "a traced module": lambda: torch.jit.trace(Plain(), (torch.zeros(2, H), torch.zeros(2, H))),
    "a frozen module": lambda: torch.jit.freeze(torch.jit.script(Plain()).eval()),
    "a part": lambda: with_part(torch.jit.script(Plain())),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_modules(name: str) -> None:
    cell, x, h = SCRIPTED[name](), torch.randn(3, 2, H), torch.zeros(2, H)
    assert "a scripted module cannot be traced: pass the module before" in refused(cell, x, h)


def decides(x: Tensor) -> Tensor:
    if x.shape[0] == 7:
        return x * 2
    return torch.tanh(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_attribute", [False, True])
def test_scripted_functions(is_attribute: bool) -> None:
    """torch.compile takes the function of Python that was scripted, with all of its branches."""
    scripted: Any = torch.jit.script(decides)
    cell = Cell(lambda h, x: scripted(h) if not is_attribute else cell.scripted(h)).double()
    cell.scripted = scripted
    rnn = fusedrnn.Recurrent(cell, compile="auto" if is_attribute else "require")
    for batch in (2, 7):
        x, h = torch.randn(3, batch, H).double(), torch.zeros(batch, H).double()
        with interpreted():
            ours = rnn(x, h)[0]
        torch.testing.assert_close(ours, fusedrnn.Recurrent(cell, compile="never")(x, h)[0])


class Sub(Tensor):
    """A class of tensors that adds nothing."""


EYE = torch.eye(H)
Use = Callable[[Tensor, Tensor], Tensor]
UNUSUAL: dict[str, tuple[Callable[[], Tensor], Use, str]] = {
    "COO": (EYE.to_sparse, lambda t, h: (t @ h.T).T, "sparse"),
    "CSR": (EYE.to_sparse_csr, lambda t, h: (t @ h.T).T, "sparse"),
    "CSC": (EYE.to_sparse_csc, lambda t, h: (t @ h.T).T, "sparse"),
    "quantized": (
        lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8),
        lambda t, h: h @ t.dequantize(),
        "quantized",
    ),
    "a subclass": (lambda: EYE.as_subclass(Sub), lambda t, h: h @ t, "a Sub"),
}


@pytest.mark.filterwarnings("ignore:Sparse|.*quantize:UserWarning")
@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_that_are_no_plain_arrays(name: str, kind: str) -> None:
    make, function, what = UNUSUAL[name]
    cell, tensor = Cell(lambda h, x: function(cell.held, h)), make()
    if kind == "buffer":
        cell.register_buffer("held", tensor)
    elif kind == "parameter":
        cell.held = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    else:
        cell.held = tensor
    x, h = torch.randn(3, 2, H), torch.zeros(2, H)
    said = refused(cell, x, h)
    assert f" {what}" in said
    if kind != "attribute":
        assert "held is " in said


def test_a_result_of_nothing() -> None:
    """torch.compile's graph does not know that it has the rows of the batch."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            made = torch.full((x.shape[0], H), 0.5, dtype=torch.float64)
            return made, made.clone()

    reason = refused(Nothing(), torch.randn(5, 3, H).double(), torch.zeros(3, H).double())
    assert "has the same batch size whatever" in reason
