"""What wrong cells and wrong calls get: an error that names the tensor and the step.

Longer than 350 lines, because it is one list of mistakes.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recurrent.loops import Mixed, Unseen, generator
from torch import Tensor, nn
from torch.nn import functional as F

import fusedrnn

pytestmark = pytest.mark.usefixtures("steps_in_python")

T, B, H = 6, 3, 4
X = torch.randn(T, B, H)
START = torch.zeros(B, H)


class Cell(nn.Module):
    """Any function as a cell, with a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.eye(H))

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.function(x, state, self.weight)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x, h, w: h.add_(x @ w), RuntimeError, "at time 0 changes state in place"),
        (lambda x, h, w: x.add_(h @ w), RuntimeError, "at time 0 changes a view in place"),
        (
            lambda x, h, w: [h @ w],
            ValueError,
            r"must return its state, of the structure tensor, or",
        ),
        (lambda x, h, w: (h, h, h), ValueError, r"got \(tensor, tensor, tensor\)"),
        (
            lambda x, h, w: (x @ w)[:, :2],
            ValueError,
            r"return state of the kind it receives.*\(3, 2\)",
        ),
        (
            lambda x, h, w: (x @ w).double(),
            ValueError,
            "state of the kind it receives.*torch.float64",
        ),
        (lambda x, h, w: (x @ w).to("meta"), ValueError, "state of the kind it receives.*on meta"),
        (
            lambda x, h, w: (h.sum(), x @ w),
            ValueError,
            r"output must have the batch size, 3,.*\(\)",
        ),
        (
            lambda x, h, w: ({"a": h[:1]}, x @ w),
            ValueError,
            r"output\['a'\] must have the batch size, 3,",
        ),
        (lambda x, h, w: ((h, 2), x @ w), TypeError, r"result\[0\]\[1\] must be a tensor, got int"),
        (lambda x, h, w: None, ValueError, "must return its state"),
    ],
)
def test_results(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        fusedrnn.Recurrent(Cell(function))(X.clone(), START.clone())
    assert "time 0" in notes_of(raised.value)


def test_a_state_in_another_form() -> None:
    """A list of two tensors is taken as output and state, and the error says so."""
    cell = Cell(lambda x, state, w: [x @ w, state[1]])
    message = r"structure it receives, \(tensor, tensor\), got \[tensor, tensor\].*\(output, st"
    with pytest.raises(ValueError, match=message):
        fusedrnn.Recurrent(cell)(X, (START, START))


def notes_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_an_error_of_a_later_step() -> None:
    """Its own error, with the step added."""

    class Odd(Exception):
        pass

    def fails(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        if x[0, 0] > 5:
            raise Odd("a word")
        return x @ w

    x = X.clone()
    x[4, 0, 0] = 6
    with pytest.raises(Odd, match="a word") as raised:
        fusedrnn.Recurrent(Cell(fails))(x, START)
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["fusedrnn: in the step at time 4"]
    else:
        assert "at time 4" in str(raised.value)


def test_outputs_that_change() -> None:
    def changes(x: Tensor, h: Tensor, w: Tensor) -> Any:
        return (h[:, :2] if x[0, 0] > 5 else h), x @ w

    x = X.clone()
    x[3, 0, 0] = 6
    with pytest.raises(ValueError, match=r"return output with the same.*got \(\(3, 2\)"):
        fusedrnn.Recurrent(Cell(changes))(x, START)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"recompute": False}])
def test_outputs_that_a_later_step_writes(options: dict[str, Any]) -> None:
    """Whose steps a chunk would have copied with the numbers of its last one."""
    count, writes = torch.zeros(1), True

    def step(x: Tensor, h: Tensor, w: Tensor) -> Any:
        if writes:
            count.add_(1)
        return count.expand(B, 1), x @ w

    rnn = fusedrnn.Recurrent(Cell(step), **options)
    with pytest.raises(RuntimeError, match="in place an output that the step at time 0 has ret"):
        rnn(X, START)
    with pytest.raises(RuntimeError, match="at time 0 of layer 1 has returned"):
        fusedrnn.Recurrent([Cell(lambda x, h, w: x @ w), Cell(step)], **options)(X, [START] * 2)
    count.zero_()
    last, _ = fusedrnn.Recurrent(Cell(step), return_sequence=False, **options)(X, START)
    assert last.unique().tolist() == [T]
    writes = False
    output, _ = rnn(X, START)
    count.add_(1)
    assert output.unique().tolist() == [T]
    (output.sum() + rnn(X, START)[1].sum()).backward()


def test_a_step_that_does_not_repeat() -> None:
    counts = itertools.count()
    cell = Cell(lambda x, h, w: x @ w + next(counts))
    output, _ = fusedrnn.Recurrent(cell)(X, START)
    with pytest.raises(RuntimeError, match=r"not deterministic.* a different state\."):
        output.sum().backward()


def test_a_closed_over_tensor_that_was_exchanged() -> None:
    """The gradient of the tensor that forward read, or an error; never that of another one."""
    first = torch.randn(H, requires_grad=True)
    gradients = []
    for is_exchanged in (False, True):
        held = [first]
        cell = Cell(lambda x, h, w: torch.tanh(x @ w + held[0]))  # noqa: B023
        output, _ = fusedrnn.Recurrent(cell)(X, START)
        if is_exchanged:
            held[0] = torch.randn(H, requires_grad=True)
        gradients += torch.autograd.grad(output.sum(), first)
    torch.testing.assert_close(*gradients)
    unseen = Unseen(first)
    cell = Cell(lambda x, h, w: torch.tanh(x @ w + unseen.value))
    output, _ = fusedrnn.Recurrent(cell)(X, START)
    unseen.value = torch.randn(H, requires_grad=True)
    with pytest.raises(RuntimeError, match="fusedrnn: "):
        output.sum().backward()


def test_a_generator_inside_of_a_step() -> None:
    own = generator()
    for function in (
        lambda x, h, w: x @ w + torch.randn(x.shape, generator=own),
        lambda x, h, w: x @ w + torch.randint(5, x.shape, generator=own),
    ):
        with pytest.raises(ValueError, match="must not draw from a generator of its own"):
            fusedrnn.Recurrent(Cell(function))(X, START)


R, CELL = fusedrnn.Recurrent, nn.GRUCell(H, H)
GRU = R(CELL)
BOTH = R([CELL, nn.GRUCell(H, H)], bidirectional=True)
OTHER = R(Cell(lambda x, h, w: x @ w))
MIXED = R(Mixed())
SCAN = partial(fusedrnn.scan, lambda h, x, p=None: (h, h))
FLAGS = torch.zeros(T, B, dtype=torch.bool)


def reset_to(value: Any) -> Any:
    return GRU(X, reset=FLAGS, reset_to=value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: OTHER(X), ValueError, r"pass state, or give Cell a method initial_state"),
        (lambda: GRU("text"), TypeError, "input must be a tensor, got str"),
        (lambda: GRU({"a": X, "b": 3}), TypeError, r"input\['b'\] must be a tensor, got int"),
        (lambda: GRU(()), ValueError, "input must have at least one tensor"),
        (lambda: GRU(X[0, 0]), ValueError, r"input must have steps and batch.*\(4,\)"),
        (lambda: GRU(X[:0]), RuntimeError, "at least one step"),
        (lambda: GRU((X, X[:, :2])), RuntimeError, r"input\[1\] must have the first two dim"),
        (lambda: GRU((X, X.to("meta"))), RuntimeError, r"input\[1\] must be on cpu"),
        (
            lambda: GRU(X, START[:2]),
            RuntimeError,
            r"the batch size, 3.*\(2, 4\); fusedrnn.scan takes",
        ),
        (lambda: GRU(X, START.to("meta")), RuntimeError, "state must be on cpu"),
        (lambda: GRU(X.to("meta")), RuntimeError, "input must have values, got.*meta"),
        (lambda: GRU(X.to_sparse()), RuntimeError, "input must be a dense tensor, got.*sparse"),
        (lambda: GRU(X, START.to_sparse()), RuntimeError, "state must be a dense tensor"),
        (lambda: GRU(X, 3), TypeError, "state must be a tensor, got int"),
        (lambda: GRU(X, ()), ValueError, "state must have at least one tensor"),
        (
            lambda: BOTH(X, START),
            ValueError,
            "state must be a tuple with one state for each of the 2 cells",
        ),
        (lambda: BOTH(X, (START,)), ValueError, "each of the 2 cells, got tuple of 1"),
        (
            lambda: BOTH(X, (START, START[:1])),
            RuntimeError,
            r"state\[1\] must have the batch size, 3,",
        ),
        (lambda: GRU(X, lengths=[1, 2]), RuntimeError, r"lengths must have shape \(3,\)"),
        (lambda: GRU(X, lengths=[1, 2, 7]), ValueError, r"lengths must be in \[1, 6\], got 7"),
        (lambda: GRU(X[:, 0], lengths=[3]), ValueError, "without a batch"),
        (lambda: GRU(X, reset=FLAGS[:2]), RuntimeError, r"reset must have shape \(6, 3\)"),
        (lambda: GRU(X, lengths=torch.ones(3)), ValueError, "sequence of integers, got torch.fl"),
        (lambda: GRU(X, reset=FLAGS.float()), ValueError, r"got torch.float32; use reset.bool\(\)"),
        (lambda: GRU(X, reset=FLAGS[..., None]), RuntimeError, r"; use reset.squeeze\(-1\)"),
        (lambda: GRU(X, reset=FLAGS.t()), RuntimeError, r"order of batch_first: use reset.t\(\)"),
        (lambda: GRU(X, reset_to=START), ValueError, "reset_to must be given together"),
        (lambda: reset_to(START[:2]), RuntimeError, r"got \(2, 4\)"),
        (lambda: reset_to((START,)), ValueError, "structure of the state"),
        (lambda: reset_to({"h": START}), ValueError, "got 'h'"),
        (
            lambda: reset_to(START.double()),
            RuntimeError,
            r"be torch.float32 as .* got torch.float64",
        ),
        (lambda: reset_to(START.to_sparse()), RuntimeError, "reset_to must be a dense tensor"),
        (
            lambda: reset_to(START.to("meta")),
            RuntimeError,
            "reset_to must be on cpu as the state is",
        ),
        (
            lambda: MIXED({"x": X[..., :3], "scale": X[..., 0]}, reset=FLAGS, reset_to={}),
            ValueError,
            "reset_to must have at least one tensor",
        ),
        (lambda: GRU(X, generator=3), TypeError, "generator must be a torch.Generator"),
        (lambda: R(3), TypeError, "cell must be a torch.nn.Module or a list"),
        (lambda: R(nn.GRU(3, 3)), TypeError, "must compute one step, got GRU, which runs over"),
        (lambda: R([]), ValueError, "at least one cell, got 0"),
        (lambda: R(CELL, True), ValueError, "two cells per layer"),
        (lambda: R(CELL, 1), TypeError, "bidirectional must be a"),
        (lambda: R(CELL, chunk_size=0), ValueError, "positive"),
        (lambda: R(CELL, chunk_size=1, workspace_bytes=1), ValueError, "exclude each other"),
        (lambda: R(CELL, workspace_bytes=10)(X), RuntimeError, "workspace_bytes must be at least"),
        (lambda: fusedrnn.scan(3, START, X), TypeError, "step must be callable, got int"),
        (lambda: fusedrnn.scan(lambda h, x: h, START, X), ValueError, "got Tensor"),
        (lambda: fusedrnn.scan(lambda h, x: (h,), START, X), ValueError, "tuple of length 1"),
        (lambda: fusedrnn.scan(lambda h, x: (h, x), (), X), ValueError, "state must have at"),
        (lambda: SCAN(START, ()), ValueError, "at least one tensor unless length is given"),
        (lambda: SCAN(START), ValueError, "inputs must have.*unless length is given"),
        (
            lambda: SCAN(START, X, length=5),
            ValueError,
            "length must be 6, the number of .* inputs, got 5",
        ),
        (lambda: SCAN(START, length=True), TypeError, "length must be an int, got bool"),
        (lambda: SCAN(START, length=2.0), TypeError, "length must be an int, got float"),
        (lambda: SCAN(START, length=0), ValueError, "length must be a positive integer, got 0"),
        (lambda: SCAN(START, X, generator=3), TypeError, "generator must be a torch.Generator"),
        (lambda: SCAN(START, X, generator="a"), TypeError, "torch.Generator, got str"),
        (lambda: SCAN(START, X.to("meta")), RuntimeError, "inputs must be on cpu as state is"),
        (
            lambda: SCAN({"h": START, "c": START.to("meta")}, X),
            RuntimeError,
            r"state\['c'\] must be on cpu as state\['h'\] is, got meta",
        ),
        (lambda: SCAN(START, X, [X.to("meta")]), RuntimeError, r"params\[0\] must be on cpu"),
        (lambda: SCAN(START.to("meta"), X), RuntimeError, "state must have values"),
        (lambda: SCAN(START, X.to_sparse()), RuntimeError, "inputs must be a dense tensor"),
        (lambda: SCAN(START, (X, X[:2])), ValueError, r"inputs\[1\] must have seq_len as"),
        (lambda: SCAN(START, X[:0]), ValueError, "at least 1"),
    ],
)
def test_calls(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        call()
    assert re.match("fusedrnn: ", str(raised.value))


@dataclasses.dataclass
class Pair:
    h: Tensor


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            lambda h: torch.distributions.Normal(h, 1.0),
            "got Normal; return the distribution's parameters",
        ),
        (lambda h: {"a": Pair(h)}, r"\['a'\] must be a tensor, got Pair;.*register_dataclass"),
    ],
)
def test_outputs_that_are_no_trees(output: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fusedrnn.scan(lambda h, x: (h + x, output(h)), START, X)


# Draws that torch refuses are refused where fusedrnn gives the numbers, too.


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: torch.multinomial(torch.ones(B, H), 0), "at least 1 and at most 4, got 0"),
        (lambda: torch.ones(H).multinomial(H + 1), "at least 1 and at most 4, got 5"),
        (lambda: torch.multinomial(torch.ones(B, H), -1, True), "any number, got -1"),
        (lambda: torch.multinomial(torch.ones(B, H).long(), 1), "floats, got torch.int64"),
        (lambda: torch.multinomial(torch.ones(B, H, 2), 1), r"1 or 2 dim.*\(3, 4, 2\)"),
        (lambda: torch.multinomial(torch.ones(()), 1), r"1 or 2 dimensions, got shape \(\)"),
        (lambda: torch.bernoulli(torch.ones(B, H).long()), "floats, got torch.int64"),
        (lambda: torch.ones(B, H).bool().bernoulli(), "floats, got torch.bool"),
        (lambda: torch.empty(B, H).bernoulli_(torch.ones(B, H).int()), "floats, got torch.int32"),
        (lambda: torch.multinomial(-torch.ones(B, H), 1), "expects"),
        (lambda: torch.multinomial(torch.ones(B, H) * torch.nan, 1), "expects"),
        (lambda: torch.multinomial(torch.zeros(B, H), 1), "expects"),
        (lambda: torch.bernoulli(torch.ones(B, H) * 3), "expects"),
        (lambda: torch.empty(3).bernoulli_(-0.5), "expects"),
        (lambda: torch.normal(torch.ones(B, H), -torch.ones(B, H)), "expects"),
        (lambda: torch.normal(torch.ones(B, H), -1.0), "expects"),
        (lambda: torch.ones(B, H).normal_(0, -1), "expects"),
        (lambda: torch.ones(B, H).exponential_(-1), "expects"),
        (lambda: torch.ones(B, H).uniform_(2, 1), "expects"),
        (lambda: F.dropout(torch.ones(B, H), 1.5), "from 0 to 1, got 1.5"),
        (lambda: torch.dropout(torch.ones(B, H), -0.5, True), "from 0 to 1, got -0.5"),
    ],
)
def test_draws_that_torch_refuses(draw: Callable[[], Tensor], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        draw()
    with pytest.raises((RuntimeError, ValueError), match=f"^fusedrnn: .*{message}"):
        fusedrnn.scan(lambda h, x: (h + x, draw()), START, X)


def test_probabilities_of_other_types() -> None:
    """A number may fill tensors of any dtype, as in torch."""
    _, ones = fusedrnn.scan(
        lambda h, x: (h, torch.bernoulli(torch.zeros(B, H).long(), 1.0)), START, X
    )
    assert ones.dtype == torch.int64
    assert ones.all()
