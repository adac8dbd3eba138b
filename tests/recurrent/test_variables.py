"""What a step changes in Python, and what it keeps there: counters, lists and tensors.

Longer than 350 lines, because its tests are of one topic and share a cell.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import MODES, check_same, generator, plain_loop
from recorders import Repeated
from torch import Tensor, nn

import fusedrnn
from fusedrnn.recurrent import graphs, locks

SEQ_LEN, BATCH, H = 11, 3, 4
F64 = torch.float64


class Cell(nn.Module):
    """A step that ``change`` makes another one."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)
        self.change = change
        self.attributes = attributes
        self.start()

    def start(self) -> None:
        for name, value in self.attributes.items():
            setattr(self, name, copy.deepcopy(value))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.change(self, h)) + x)


def truncated(cell: Any, h: Tensor) -> Tensor:
    """A count decides about gradients alone."""
    cell.count += 1
    return h.detach() if cell.count % 4 == 0 else h


def grown(cell: Any, h: Tensor) -> Tensor:
    cell.seen.append(len(cell.seen))
    return h * (1 + 0.1 * len(cell.seen))


def counted_by_key(cell: Any, h: Tensor) -> Tensor:
    cell.seen["steps"] = cell.seen.get("steps", 0) + 1
    return h * (1 + 0.1 * cell.seen["steps"])


def averaged(cell: Any, h: Tensor) -> Tensor:
    """A tensor that is no buffer."""
    cell.mean = 0.9 * cell.mean + 0.1 * h.detach().mean(0)
    return h + cell.mean


def made_late(cell: Any, h: Tensor) -> Tensor:
    """An attribute that there is not before."""
    cell.__dict__.setdefault("times", 0)
    cell.times += 1
    return h * cell.times


def now_and_then(cell: Any, h: Tensor) -> Tensor:
    """Nothing at the first step, then a list that is set anew."""
    cell.counts["steps"] += 1
    if cell.counts["steps"] % 3 == 0:
        cell.seen = [*cell.seen, cell.counts["steps"]]
    return h.detach() if len(cell.seen) == 2 else h


def nested(cell: Any, h: Tensor) -> Tensor:
    cell.seen["steps"][0]["count"] += 1
    return h.detach() if cell.seen["steps"][0]["count"] % 4 == 0 else h


class Object:
    count = 0


def in_an_object(cell: Any, h: Tensor) -> Tensor:
    cell.seen.count += 1
    return h.detach() if cell.seen.count % 4 == 0 else h


COUNTS = [0]


def around(cell: Any, h: Tensor) -> Tensor:
    """Of the Python module in which the function is."""
    COUNTS[0] += 1
    cell.seen = COUNTS[0] % 1000
    return h.detach() if COUNTS[0] % 11 == 4 else h


CHANGES = [
    (now_and_then, {"counts": {"steps": 0}, "seen": []}),
    (nested, {"seen": {"steps": [{"count": 0}]}}),
    (in_an_object, {"seen": Object()}),
    (around, {}),
    (truncated, {"count": 0}),
    (grown, {"seen": []}),
    (grown, {"seen": deque()}),
    (counted_by_key, {"seen": {}}),
    (averaged, {"mean": torch.zeros(H, dtype=F64)}),
    (made_late, {}),
]


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(SEQ_LEN, BATCH, H, dtype=F64, requires_grad=True)
    return x, torch.randn(BATCH, H, dtype=F64, requires_grad=True)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize(("change", "attributes"), CHANGES)
def test_attributes_that_change(
    change: Any, attributes: Any, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, gradients, and the attributes afterwards, in several calls."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Repeated)
    cell, (x, h) = Cell(change, **attributes), given()
    rnn = fusedrnn.Recurrent(cell, cuda_graphs=has_graphs, chunk_size=3)

    def run(f: Callable[[], Any]) -> Any:
        cell.start()
        cell.__dict__.pop("times", None)
        return f()

    for _ in range(3):
        check_same(
            lambda: run(lambda: rnn(x, h)),
            lambda: run(lambda: plain_loop(cell, x, h)),
            [x, h, *cell.parameters()],
        )
    made = []
    for f in (lambda: rnn(x, h), lambda: plain_loop(cell, x, h)):
        run(f)[0].sum().backward()
        names = [name for name in ("times", *attributes) if name in vars(cell)]
        values = {name: getattr(cell, name) for name in names}
        made.append({n: vars(v) if isinstance(v, Object) else v for n, v in values.items()})
    torch.testing.assert_close(*made)


class Shared(nn.Module):
    """One module by several ways, and a norm that is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)
        self.again, self.hidden = self.linear, [self.linear]
        self.norm = nn.BatchNorm1d(H, dtype=F64)
        self.norms = nn.Sequential(self.norm, nn.Tanh())
        self.tied = nn.Linear(H, H, dtype=F64)
        self.tied.weight = self.linear.weight

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        made = self.norm(self.linear(h)) + self.again(x) + self.tied(h)
        return self.norms(made) * self.hidden[0](x)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_modules_that_are_reached_by_several_ways(chunk_size: int) -> None:
    """Parameters stay what they are, and statistics are written once."""
    cell, (x, h) = Shared(), given()
    parameters, like = list(cell.parameters()), copy.deepcopy(cell)
    rnn = fusedrnn.Recurrent(cell, chunk_size=chunk_size)
    print(rnn.explain(x, h))
    for _ in range(2):
        check_same(lambda: rnn(x, h), lambda: plain_loop(like, x, h), [x, h])
        found = torch.autograd.grad(rnn(x, h)[0].sum(), parameters)
        exact = torch.autograd.grad(plain_loop(like, x, h)[0].sum(), [*like.parameters()])
        torch.testing.assert_close(found, exact)
    assert all(a is b for a, b in zip(parameters, cell.parameters(), strict=True))
    torch.testing.assert_close(dict(cell.named_buffers()), dict(like.named_buffers()))


@pytest.mark.parametrize("mode", MODES)
def test_another_memory_before_backward(mode: str) -> None:
    """Each call has the gradient of the memory that it has read."""
    cell, (x, h) = Cell(lambda cell, h: h + (h[:, None] * cell.memory).mean(1)), given()
    rnn = fusedrnn.Recurrent(cell, mode=mode)
    memories = [torch.randn(5, H, dtype=F64, requires_grad=True) for _ in range(2)]

    def results() -> list[Any]:
        totals = []
        for run in (rnn, lambda x, h: plain_loop(cell, x, h)):
            total: Any = 0.0
            for memory in memories:
                cell.memory = memory
                total = total + run(x, h)[0].square().sum()
            totals.append(torch.autograd.grad(total, [x, h, *memories, *cell.parameters()]))
        return totals

    torch.testing.assert_close(*results())
    assert cell.memory is memories[1]


def test_a_list_that_is_taken_away_before_backward() -> None:
    cell, (x, h) = Cell(grown, seen=[]), given()
    output, _ = fusedrnn.Recurrent(cell)(x, h)
    taken, cell.seen = cell.seen, []
    output.sum().backward()
    assert taken == [*range(SEQ_LEN)]
    assert cell.seen == []


def test_second_derivatives_of_what_a_count_decides() -> None:
    cell, (x, h) = Cell(truncated, count=0), given()
    found = []
    for f in (lambda: fusedrnn.Recurrent(cell)(x, h), lambda: plain_loop(cell, x, h)):
        cell.start()
        (first,) = torch.autograd.grad(f()[0].square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, h]))
    torch.testing.assert_close(*found)


def test_trials_leave_attributes_alone() -> None:
    cell, (x, h) = Cell(truncated, count=0), given()
    rnn = fusedrnn.Recurrent(cell, workspace_bytes=10_000)
    assert rnn.explain(x, h).mode == "replay"
    assert cell.count == 0
    rnn(x, h)
    assert cell.count == SEQ_LEN


def test_numbers_of_two_kinds_count_once() -> None:
    """The first step is taken twice, for the seed to come before what torch's generators give."""

    def both(cell: Any, h: Tensor) -> Tensor:
        cell.count += 1
        return nn.functional.dropout(nn.functional.alpha_dropout(h, 0.1, True), 0.1)

    cell, (x, h) = Cell(both, count=0), given()
    with torch.no_grad():
        fusedrnn.Recurrent(cell)(x, h)
    assert cell.count == SEQ_LEN


def test_parallel_mode_and_the_compiler_refuse() -> None:
    cell, (x, h) = Cell(truncated, count=0), given()
    with pytest.raises(ValueError, match="the attribute 'count' of Cell"):
        fusedrnn.Recurrent(cell, mode="parallel")(x, h)
    with pytest.warns(UserWarning, match="the attribute 'count' of Cell"):
        fusedrnn.Recurrent(cell, torch_compile=True)(x, h)


# What a step keeps


def in_a_sum(cell: Any, h: Tensor) -> Tensor:
    cell.kept = cell.kept + h.square().sum() + cell.linear.weight.sum()
    return h


def in_a_list(cell: Any, h: Tensor) -> Tensor:
    cell.kept.append(cell.linear(h))
    return h


def in_a_dict(cell: Any, h: Tensor) -> Tensor:
    cell.kept["last"] = [cell.linear(h)]
    return h


@pytest.mark.parametrize(
    ("change", "start", "of"),
    [
        (in_a_sum, 0.0, lambda kept: kept),
        (in_a_list, [], lambda kept: sum(t.sum() for t in kept)),
        (in_a_dict, {}, lambda kept: kept["last"][0].sum()),
    ],
)
def test_a_gradient_of_what_is_kept_is_an_error(change: Any, start: Any, of: Any) -> None:
    """The values are there to look at, though."""
    cell, (x, h) = Cell(change, kept=start), given()
    output, _ = fusedrnn.Recurrent(cell)(x, h)
    torch.autograd.grad(output.sum(), cell.linear.weight, retain_graph=True)
    kept = of(cell.kept)
    cell.start()
    plain_loop(cell, x, h)
    torch.testing.assert_close(kept, of(cell.kept), check_stride=False)
    loss, what = output.sum() + kept, "what a step keeps in the attribute 'kept' of Cell"
    with pytest.raises(RuntimeError, match=what):
        torch.autograd.grad(loss, cell.linear.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match=what):
        loss.backward()


def before_last(cell: Any, h: Tensor) -> Tensor:
    """The state of the step before, as in a skip connection."""
    kept, cell.kept = cell.kept, h
    return h if kept is None else h + 0.5 * kept


def smoothed(cell: Any, h: Tensor) -> Tensor:
    cell.kept = 0.9 * cell.kept + 0.1 * h
    return h + cell.kept


def all_states(cell: Any, h: Tensor) -> Tensor:
    cell.kept.append(h)
    return h + torch.stack(cell.kept).mean(0)


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize(
    ("change", "start"),
    [(before_last, None), (smoothed, torch.zeros(H, dtype=F64)), (all_states, [])],
)
def test_a_gradient_through_what_is_kept_is_an_error(
    change: Any, start: Any, chunk_size: int | None
) -> None:
    """It would end where a chunk begins."""
    cell, (x, h) = Cell(change, kept=start), given()
    output, _ = fusedrnn.Recurrent(cell, chunk_size=chunk_size)(x, h)
    with pytest.raises(RuntimeError, match="an earlier step has kept in the attribute 'kept'"):
        output.sum().backward()


def test_the_last_value_is_read_detached() -> None:
    """Also that of an earlier call."""

    def follows(cell: Any, h: Tensor) -> Tensor:
        kept, cell.kept = cell.kept, cell.linear(h)
        return h + 0.1 * kept.detach()

    x, h = given()
    found = []
    for make in (fusedrnn.Recurrent, lambda cell: lambda x, h: plain_loop(cell, x, h)):
        torch.manual_seed(1)
        cell = Cell(follows, kept=torch.zeros(H, dtype=F64))
        run = make(cell)
        for _ in range(2):
            found.append(torch.autograd.grad(run(x, h)[0].sum(), [x, h, *cell.parameters()]))
    torch.testing.assert_close(found[:2], found[2:])


def test_what_is_kept_detached_or_without_gradients() -> None:
    def detached(cell: Any, h: Tensor) -> Tensor:
        cell.kept.append(h.detach())
        return h

    cell, (x, h) = Cell(detached, kept=[]), given()
    rnn = fusedrnn.Recurrent(cell)
    rnn(x, h)[0].sum().backward()
    assert len(cell.kept) == SEQ_LEN
    assert not any(tensor.requires_grad for tensor in cell.kept)
    cell = Cell(in_a_list, kept=[])
    with torch.no_grad():
        fusedrnn.Recurrent(cell)(x, h)
    fusedrnn.Recurrent(cell.requires_grad_(False))(x.detach(), h.detach())
    assert len(cell.kept) == 2 * SEQ_LEN
    assert not any(tensor.requires_grad for tensor in cell.kept)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_weights_that_hooks_set_as_attributes(norm: Any) -> None:
    cell, (x, h) = Cell(lambda cell, h: h), given()
    norm(cell.linear)
    cell.eval()
    rnn = fusedrnn.Recurrent(cell)
    for _ in range(2):
        check_same(lambda: rnn(x, h), lambda: plain_loop(cell, x, h), [x, h, *cell.parameters()])


# What is an error at once


def written(cell: Any, h: Tensor) -> Tensor:
    cell.mean.add_(h.detach().mean(0))
    return h + cell.mean


def written_late(cell: Any, h: Tensor) -> Tensor:
    """As batch norm writes, which leaves the version as it is."""
    if cell.counts.append(0) or len(cell.counts) > 2:
        nn.functional.batch_norm(h.detach(), cell.mean, cell.var, training=True)
    return h


def learned(cell: Any, h: Tensor) -> Tensor:
    cell.memory = 0.9 * cell.memory + h.mean(0)
    return h + cell.memory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (written, "the tensor in the attribute 'mean' of Cell in place"),
        (written_late, "changes the buffer mean after the first step"),
        (learned, "gives the buffer memory a gradient"),
    ],
)
def test_errors(change: Any, message: str) -> None:
    cell, (x, h) = Cell(change, counts=[]), given()
    mean = torch.zeros(H, dtype=F64)
    if change is written_late:
        cell.register_buffer("mean", mean)
        cell.register_buffer("var", mean + 1)
    else:
        cell.mean = mean
    cell.register_buffer("memory", mean.clone())
    rnn = fusedrnn.Recurrent(cell)
    with pytest.raises(RuntimeError, match=message):
        rnn(x, h)
    with torch.no_grad():
        rnn(x, h)


def test_draws_within_vmap() -> None:
    """Rows have numbers of their own, which come again in backward."""

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.func.vmap(lambda row: nn.functional.dropout(row, 0.5), randomness="different")(
            torch.ones_like(h)
        )
        return torch.tanh(h * mask + x), mask + torch.randn_like(h)

    x, h = given()
    state, masks = fusedrnn.scan(step, h, x, generator=generator())
    assert not (masks == masks[:, :1]).all()
    (state.sum() + masks.sum()).backward()

    def one(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h + x, torch.func.vmap(torch.randn_like)(h)

    with pytest.raises(RuntimeError, match="random"):
        fusedrnn.scan(one, h, x)


def test_a_lock_lets_those_pass_who_work_for_its_holder() -> None:
    lock, done = locks.CallerLock(), []

    def work(caller: object | None) -> None:
        if caller is not None:  # as autograd does for its threads
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(caller))  # torch 2.11 gives it back
            torch._C._stash_obj_in_tls(locks._KEY, caller)
        with lock:
            done.append(caller)

    with lock, lock:
        caller = torch._C._get_obj_in_tls(locks._KEY)
        threads = [threading.Thread(target=work, args=(c,)) for c in (caller, None)]
        for thread in threads:
            thread.start()
        threads[0].join(30)
        assert done == [caller]
    threads[1].join(30)
    assert done[1:] == [None]


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="of a later torch")
def test_a_thread_keeps_nothing_of_a_lock() -> None:
    """At its end torch would ask for the interpreter, and abort if that is gone by then."""
    first, second = locks.CallerLock(), locks.CallerLock()
    with first:
        with second, first:
            pass
        assert torch._C._is_key_in_tls(locks._KEY)
    assert not torch._C._is_key_in_tls(locks._KEY)


@pytest.mark.parametrize("mode", MODES)
def test_a_scan_over_a_part_of_the_cell_itself(mode: str) -> None:
    def scanned(cell: Any, h: Tensor) -> Tensor:
        def step(s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            s = torch.tanh(cell.linear(s) + u)
            return s, s

        state: Tensor = fusedrnn.scan(step, h, torch.stack([h, 2 * h]), mode="replay")[0]
        return state

    cell, (x, h) = Cell(scanned), given()
    rnn = fusedrnn.Recurrent(cell, mode=mode)
    check_same(lambda: rnn(x, h), lambda: plain_loop(cell, x, h), [x, h, *cell.parameters()])


def test_a_list_that_contains_itself() -> None:
    """As nodes of a tree that know their parents; what is set in it is put back for backward."""

    def read(cell: Any, h: Tensor) -> Tensor:
        cell.seen[1] = cell.seen[1] + 1
        return h * cell.seen[0][1] * cell.seen[2]

    cell, (x, h) = Cell(read), given()
    results = []
    for run in (fusedrnn.Recurrent(cell), lambda x, h: plain_loop(cell, x, h)):
        cell.seen = [None, 1.0, torch.ones(H, dtype=F64)]
        cell.seen[0] = cell.seen
        output, state = run(x, h)
        gradients = torch.autograd.grad(output.square().sum(), [x, *cell.parameters()])
        results.append([output, state, *gradients, cell.seen[1]])
    torch.testing.assert_close(*results)


# Steps of scan


def test_variables_around_a_function() -> None:
    """A count, a list, and a tensor that is set anew, in a closure and in what it calls."""
    x, h = given()

    def results(run: Callable[..., Any]) -> list[Any]:
        count, seen, mean = 0, [], torch.zeros(H, dtype=F64)

        def factor() -> float:
            seen.append(count)
            return 1 + 0.1 * len(seen)

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal count, mean
            count += 1
            mean = 0.9 * mean + 0.1 * h.detach().mean(0)
            h = torch.tanh((h.detach() if count % 4 == 0 else h) * factor() + mean + x)
            return h, h * count

        state, ys = run(step, h, x)
        gradients = torch.autograd.grad(state.sum() + ys.square().sum(), [x, h])
        return [state, ys, *gradients, count, seen, mean]

    def loop(step: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ys = []
        for time in range(SEQ_LEN):
            h, y = step(h, x[time])
            ys.append(y)
        return h, torch.stack(ys)

    torch.testing.assert_close(results(fusedrnn.scan), results(loop))


def test_a_loss_in_a_list_around_a_function() -> None:
    x, h = given()
    losses = []

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x)
        losses.append(h.square().mean())
        return h, h

    _, ys = fusedrnn.scan(step, h, x)
    assert len(losses) == SEQ_LEN
    with pytest.raises(RuntimeError, match="the variable 'losses' has no gradient"):
        (ys.sum() + sum(losses)).backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_module_and_its_weight(mode: str) -> None:
    """The step reads both, and the weight's gradient is that of both."""
    torch.manual_seed(0)
    linear = nn.Linear(H, H, dtype=F64)
    weight = linear.weight

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(linear(h) + 0.3 * h @ weight + x)
        return h, h

    x, h = given()
    found = torch.autograd.grad(
        fusedrnn.scan(step, h, x, mode=mode)[1].square().sum(), [x, h, *linear.parameters()]
    )
    ys, state = [], h
    for time in range(SEQ_LEN):
        state, y = step(state, x[time])
        ys.append(y)
    exact = torch.autograd.grad(torch.stack(ys).square().sum(), [x, h, *linear.parameters()])
    torch.testing.assert_close(found, exact)
