"""What a step changes in Python, and what it keeps there: counters, lists and tensors.

Longer than 350 lines, because it is one list of such changes.
"""

from __future__ import annotations

import copy
from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from recurrent.loops import F64, double, loss_of, plain_loop
from torch import Tensor, nn

import fusedrnn
from fusedrnn._runtime import python_variables

pytestmark = pytest.mark.usefixtures("steps_in_python")

SEQ_LEN, BATCH, H = 11, 3, 4
Run = Callable[[Tensor, Tensor], Any]


class Object:
    count = total = 0


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Tally:
    """A class that steps name."""

    total = 0
    inner = Object()
    lists: ClassVar[dict[str, list[int]]] = {"n": []}


class Listed(list[int]):
    count = 0


@dataclass(frozen=True)
class Frozen:
    __slots__ = ("__count",)

    def add(self) -> int:
        object.__setattr__(self, "_Frozen__count", getattr(self, "_Frozen__count", 0) + 1)
        return self.count

    @property
    def count(self) -> int:
        return getattr(self, "_Frozen__count", 0)


class Ticking:
    def count_up(self) -> int:
        global counted
        counted = counted % SEQ_LEN + 1
        return counted


counted = 0
COUNTS = [0]
"""Of this Python module."""


ticks = 0


class Cell(nn.Module):
    """A step whose ``change`` does something to the cell and to h; ``start`` sets attributes anew.

    A change is a function or the text of its statements.
    """

    def __init__(self, change: Callable[[Any, Tensor], Tensor] | str, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)
        self.change = of_text(change) if isinstance(change, str) else change
        self.attributes = attributes
        self.start()

    def start(self) -> None:
        vars(self).pop("times", None)
        for name, value in self.attributes.items():
            setattr(self, name, copy.deepcopy(value))

    def values(self) -> dict[str, Any]:
        """Of the attributes now."""
        names = [name for name in ("times", *self.attributes) if name in vars(self)]
        values = {name: getattr(self, name) for name in names}
        objects = (Object, Slots, Listed, Frozen)
        others = (SimpleNamespace, Ticking, UserDict)
        return {
            name: value.count if isinstance(value, objects) else value
            for name, value in values.items()
            if not isinstance(value, others)
        }

    def tick(self) -> int:
        global ticks
        ticks = ticks % SEQ_LEN + 1  # the same again after each call
        return ticks

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.change(self, h)) + x)


def of_text(statements: str) -> Any:
    space: dict[str, Any] = {}
    lines = "\n    ".join(statements.splitlines())
    exec(f"def change(cell, h):\n    {lines}\n    return h", globals(), space)
    return space["change"]


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return double(SEQ_LEN, BATCH, H), double(BATCH, H)


def check_both(cell: Cell, found: Callable[[Run], Any], **options: Any) -> None:
    """Whatever ``found`` calls, it gets of Recurrent what it gets of the loop."""
    results = []
    for run in (fusedrnn.Recurrent(cell, **options), lambda x, h: plain_loop(cell, x, h)):
        cell.start()
        results.append(found(run))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10, check_stride=False)


class Memory(deque[int]):
    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)

    def __deepcopy__(self, memo: Any) -> Memory:
        return Memory(5)


# What a step changes


def cut(h: Tensor, count: int) -> Tensor:
    return h.detach() if count % 4 == 0 else h


TRUNCATED = "cell.count += 1; h = cut(h, cell.count)"
GROWN = "cell.seen.append(len(cell.seen)); h = h * (1 + 0.1 * len(cell.seen))"
APPENDED = "cell.seen.append(cell.seen[-1] + 1); h = cut(h, cell.seen[-1])"
BY_KEY = """cell.seen["steps"] = cell.seen.get("steps", 0) + 1
h = h * (1 + 0.1 * cell.seen["steps"])"""
IN_A_DICT = """counts = cell.seen["steps"][0]
counts["count"] += 1
h = cut(h, counts["count"])"""
NOW_AND_THEN = """cell.counts["steps"] += 1
if cell.counts["steps"] % 3 == 0:
    cell.seen = [*cell.seen, cell.counts["steps"]]
h = h.detach() if len(cell.seen) == 2 else h"""
AROUND = """COUNTS[0] += 1
cell.seen = COUNTS[0] % 1000
h = h.detach() if COUNTS[0] % SEQ_LEN == 4 else h"""
AVERAGED = "cell.mean = 0.9 * cell.mean + 0.1 * h.detach().mean(0); h = h + cell.mean"
MADE_LATE = """cell.__dict__.setdefault("times", 0)
cell.times += 1
h = h * cell.times"""
ROUND = """key = next(iter(cell.seen))
cell.seen[key] = cell.seen.pop(key)
h = cut(h, key)"""
CHANGES: dict[str, Any] = {
    "in an object in an object": (
        "cell.seen.of.count += 1; cell.times = cell.seen.of.count; h = cut(h, cell.times)",
        {"seen": SimpleNamespace(of=SimpleNamespace(count=0))},
    ),
    "of a class that the step names": (
        "Tally.total = Tally.total % SEQ_LEN + 1; h = cut(h, Tally.total)",
        {},
    ),
    "in an object that a class holds": (
        "Tally.inner.count = Tally.inner.count % SEQ_LEN + 1; h = cut(h, Tally.inner.count)",
        {},
    ),
    "in containers of a class": (
        "n = Tally.lists['n']; n.append(1); n = cell.times = len(n) % SEQ_LEN; h = cut(h, n + 1)",
        {},
    ),
    "an attribute of a list": (
        "cell.seen.count += 1; h = cut(h, cell.seen.count)",
        {"seen": Listed([1])},
    ),
    "in a private slot of a frozen object": ("h = cut(h, cell.seen.add())", {"seen": Frozen()}),
    "by a method of an object": ("h = cut(h, cell.seen.count_up())", {"seen": Ticking()}),
    "an attribute of an object of collections": (
        "cell.seen.data = {0: cell.seen[0] + 1}; cell.times = cell.seen[0]; h = cut(h, cell.times)",
        {"seen": UserDict({0: 0})},
    ),
    "the order of a dict": (
        f"{ROUND}; cell.times = [*cell.seen]",
        {"seen": {5: 0, 6: 0, 4: 0}},
    ),
    "the sign of zero": (
        "cell.seen = -cell.seen; h = cut(h, 1 if str(cell.seen)[0] == '-' else 4)",
        {"seen": 0.0},
    ),
    "a list that is set anew, but not at the first step": (
        NOW_AND_THEN,
        {"counts": {"steps": 0}, "seen": []},
    ),
    "in containers": (IN_A_DICT, {"seen": {"steps": [{"count": 0}]}}),
    "in an object": ("cell.seen.count += 1; h = cut(h, cell.seen.count)", {"seen": Object()}),
    "around the function": (AROUND, {}),
    "around a method": ("h = cut(h, cell.tick())", {}),
    "of a class": (
        "kind = type(cell.seen); kind.total = kind.total % SEQ_LEN + 1; h = cut(h, kind.total)",
        {"seen": Object()},
    ),
    "in slots": ("cell.seen.count += 1; h = cut(h, cell.seen.count)", {"seen": Slots()}),
    "in an array": ("cell.seen[0] += 1; h = cut(h, cell.seen[0])", {"seen": np.zeros(1)}),
    "in an array of one number": ("cell.seen += 1; h = cut(h, cell.seen)", {"seen": np.zeros(())}),
    "in an object that a step makes": (
        "cell.seen = cell.seen or Object(); cell.seen.count += 1; h = cut(h, cell.seen.count)",
        {"seen": None},
    ),
    "in a list that a step makes": (
        "cell.seen['n'].append(1); h = cut(h, len(cell.seen['n']))",
        {"seen": defaultdict(list)},
    ),
    "a list that gets long": (APPENDED, {"seen": [0] * 995}),
    "a long list": (APPENDED, {"seen": [0] * 2000}),
    "a long deque": (APPENDED, {"seen": deque([0] * 2000, 2000)}),
    "a deque of a class of its own": (GROWN, {"seen": Memory(5)}),
    "a count that decides about gradients alone": (TRUNCATED, {"count": 0}),
    "a list": (GROWN, {"seen": []}),
    "a deque": (GROWN, {"seen": deque()}),
    "a dict": (BY_KEY, {"seen": {}}),
    "a tensor that is no buffer": (AVERAGED, {"mean": torch.zeros(H, dtype=F64)}),
    "an attribute that there is not before": (MADE_LATE, {}),
}


@pytest.mark.parametrize(("change", "attributes"), CHANGES.values(), ids=CHANGES)
def test_attributes_that_change(change: Any, attributes: Any) -> None:
    """Results, gradients, and the attributes afterwards, in several calls."""
    cell, (x, h) = Cell(change, **attributes), given()

    def calls(run: Run) -> Any:
        for _ in range(3):
            cell.start()
            results = run(x, h)
            gradients = torch.autograd.grad(loss_of(results), [x, h, *cell.parameters()])
            yield [*results, *gradients, cell.values()]

    check_both(cell, lambda run: [*calls(run)], chunk_size=3)


def test_another_memory_before_backward() -> None:
    """Each call has the gradient of the memory that it has read."""
    cell, (x, h) = Cell(lambda cell, h: h + (h[:, None] * cell.memory).mean(1)), given()
    memories = [double(5, H) for _ in range(2)]

    def gradients(run: Run) -> Any:
        total: Any = 0.0
        for memory in memories:
            cell.memory = memory
            total = total + run(x, h)[0].square().sum()
        return torch.autograd.grad(total, [x, h, *memories, *cell.parameters()])

    check_both(cell, gradients)
    assert cell.memory is memories[1]


def test_a_list_that_is_taken_away_before_backward() -> None:
    cell, (x, h) = Cell(GROWN, seen=[]), given()
    output, _ = fusedrnn.Recurrent(cell)(x, h)
    taken, cell.seen = cell.seen, []
    output.sum().backward()
    assert taken == [*range(SEQ_LEN)]
    assert cell.seen == []


def test_second_derivatives_of_what_a_count_decides() -> None:
    cell, (x, h) = Cell(TRUNCATED, count=0), given()

    def second(run: Run) -> Any:
        (first,) = torch.autograd.grad(run(x, h)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, h])

    check_both(cell, second)


def test_trials_leave_attributes_alone() -> None:
    cell, (x, h) = Cell(TRUNCATED, count=0), given()
    rnn = fusedrnn.Recurrent(cell, workspace_bytes=10_000)
    rnn.explain(x, h)
    assert cell.count == 0
    rnn(x, h)
    assert cell.count == SEQ_LEN


def test_numbers_of_two_kinds_count_once() -> None:
    """The first step is taken twice, for the seed to come before what torch's generators give."""

    draws = "nn.functional.dropout(nn.functional.alpha_dropout(h, 0.1, True), 0.1)"
    cell, (x, h) = Cell(f"cell.count += 1; h = {draws}", count=0), given()
    with torch.no_grad():
        fusedrnn.Recurrent(cell)(x, h)
    assert cell.count == SEQ_LEN


def test_a_list_that_contains_itself() -> None:
    """As nodes of a tree that know their parents; what is set in it is put back for backward."""

    read = "cell.seen[1] = cell.seen[1] + 1; h = h * cell.seen[0][1] * cell.seen[2]"
    cell, (x, h) = Cell(read), given()

    def results(run: Run) -> Any:
        cell.seen = [None, 1.0, torch.ones(H, dtype=F64)]
        cell.seen[0] = cell.seen
        output, state = run(x, h)
        gradients = torch.autograd.grad(output.square().sum(), [x, *cell.parameters()])
        return [output, state, *gradients, cell.seen[1]]

    check_both(cell, results)


# What a step keeps


KEEP = "cell.kept.append(cell.linear(h))"


@pytest.mark.parametrize(
    ("change", "start", "of"),
    [
        (
            "cell.kept = cell.kept + h.square().sum() + cell.linear.weight.sum()",
            0.0,
            lambda kept: kept,
        ),
        (KEEP, [], lambda kept: sum(t.sum() for t in kept)),
        ("cell.kept['last'] = [cell.linear(h)]", {}, lambda kept: kept["last"][0].sum()),
    ],
)
def test_gradients_of_what_is_kept(change: Any, start: Any, of: Any) -> None:
    """A loss in an attribute or in a list is as after the loop."""
    cell, (x, h) = Cell(change, kept=start), given()

    def gradients(run: Run) -> Any:
        output, _ = run(x, h)
        loss = output.square().sum() + of(cell.kept)
        return of(cell.kept), torch.autograd.grad(loss, [x, h, *cell.parameters()])

    check_both(cell, gradients)
    check_both(cell, gradients, recompute=False)


SKIPPED = "kept, cell.kept = cell.kept, h; h = h if kept is None else h + 0.5 * kept"
SMOOTHED = "cell.kept = 0.9 * cell.kept + 0.1 * h; h = h + cell.kept"
ALL = "cell.kept.append(h); h = h + torch.stack(cell.kept).mean(0)"
INSIDE = "cell.kept['all'].append(h); h = h + torch.stack(cell.kept['all']).mean(0)"


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize(
    ("change", "start"),
    [(SKIPPED, None), (SMOOTHED, torch.zeros(H, dtype=F64)), (ALL, []), (INSIDE, {"all": []})],
)
def test_gradients_through_what_is_kept(change: Any, start: Any, chunk_size: int | None) -> None:
    """From step to step, also where a chunk begins."""
    cell, (x, h) = Cell(change, kept=start), given()

    def gradients(run: Run) -> Any:
        output, _ = run(x, h)
        return output, torch.autograd.grad(output.square().sum(), [x, h, *cell.parameters()])

    check_both(cell, gradients, chunk_size=chunk_size)


def test_the_last_value_is_read_detached() -> None:
    """Also that of an earlier call."""

    follows = "kept, cell.kept = cell.kept, cell.linear(h); h = h + 0.1 * kept.detach()"
    cell, (x, h) = Cell(follows, kept=torch.zeros(H, dtype=F64)), given()
    leaves = [x, h, *cell.parameters()]
    check_both(
        cell, lambda run: [torch.autograd.grad(run(x, h)[0].sum(), leaves) for _ in range(2)]
    )


def test_what_is_kept_detached_or_without_gradients() -> None:
    cell, (x, h) = Cell("cell.kept.append(h.detach())", kept=[]), given()
    fusedrnn.Recurrent(cell)(x, h)[0].sum().backward()
    assert len(cell.kept) == SEQ_LEN
    other = Cell(KEEP, kept=[])
    with torch.no_grad():
        fusedrnn.Recurrent(other)(x, h)
    fusedrnn.Recurrent(other.requires_grad_(False))(x.detach(), h.detach())
    assert len(other.kept) == 2 * SEQ_LEN
    assert not any(tensor.requires_grad for tensor in [*cell.kept, *other.kept])


# Buffers

WRITTEN_LATE = """cell.counts.append(0)
if len(cell.counts) > 6:
    nn.functional.batch_norm(h.detach(), cell.kept, cell.var, training=True)
h = h + cell.kept * cell.var"""  # which leaves the version as it is
LEARNED = "cell.kept = 0.9 * cell.kept + h.mean(0); h = h + cell.kept"
FILLED = "cell.kept[1] = h[0, 1] * 2; h = h + cell.kept"


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("change", [WRITTEN_LATE, LEARNED, FILLED])
def test_buffers_that_steps_write(change: str, chunk_size: int | None) -> None:
    """Late, anew, and in place with a gradient."""
    cell, (x, h) = Cell(change, counts=[]), given()

    def results(run: Run) -> Any:
        cell.register_buffer("kept", torch.ones(H, dtype=F64))
        cell.register_buffer("var", torch.ones(H, dtype=F64))
        output, _ = run(x, h)
        gradients = torch.autograd.grad(output.square().sum(), [x, h, *cell.parameters()])
        return output, gradients, dict(cell.named_buffers())

    check_both(cell, results, chunk_size=chunk_size)


WRITTEN = "cell.mean.add_(h.detach().mean(0)); h = h + cell.mean"


def test_a_tensor_that_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one may be; of a large one, or of a parameter, there is no copy."""
    cell, (x, h) = Cell(WRITTEN, mean=torch.zeros(H, dtype=F64)), given()

    def results(run: Run) -> Any:
        output, _ = run(x, h)
        return output, torch.autograd.grad(output.sum(), [x, h]), cell.mean

    check_both(cell, results)
    monkeypatch.setattr(python_variables, "MOST_NUMBERS", H - 1)
    rnn = fusedrnn.Recurrent(cell)
    with pytest.raises(RuntimeError, match="the tensor in the attribute 'mean' of Cell in place"):
        rnn(x, h)
    with torch.no_grad():
        rnn(x, h)
    cell = Cell(lambda cell, h: h + cell.mean.add_(h.detach().mean(0)))
    cell.mean = nn.Parameter(torch.zeros(H, dtype=F64), requires_grad=False)
    with pytest.raises(RuntimeError, match="in the parameter 'mean' of Cell in place"):
        fusedrnn.Recurrent(cell)(x, h)


def test_a_part_that_a_step_makes() -> None:
    def made(cell: Any, h: Tensor) -> Tensor:
        if cell.part is None:
            cell.part = nn.Linear(H, H, dtype=F64)
        return cell.part(h)

    cell, (x, h) = Cell(made), given()

    def results(run: Run) -> Any:
        cell.part = None
        torch.manual_seed(0)
        output, _ = run(x, h)
        part = cell.part
        output.sum().backward()
        assert cell.part is part
        return output, [weight.grad for weight in part.parameters()]

    check_both(cell, results)
