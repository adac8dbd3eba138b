"""What other threads see of a cell while calls compile, run and explain; first calls at once."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedrnn
from fusedrnn._recurrent import compiled_calls, layer_call, running_call
from fusedrnn._recurrent.shared_steps import SharedSteps
from fusedrnn._runtime import find_program

T, B, H = 5, 3, 6


@pytest.fixture(autouse=True)
def _threads_change_often(folder: Path) -> Iterator[None]:
    """And nothing is compiled before."""
    find_program._known.clear()
    compiled_calls.steps_of_process = SharedSteps()
    torch._dynamo.reset()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class Cell(nn.Module):
    """With a buffer, dropout and a part that is shared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.norm, self.drop = nn.GRUCell(H, H), nn.LayerNorm(H), nn.Dropout(0.2)
        self.register_buffer("scale", torch.full((H,), 1.5))
        self.double()

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.norm(self.gru(self.drop(x), h)) * self.scale


def sequence() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(T, B, H, dtype=torch.float64)


STATE = torch.zeros(B, H, dtype=torch.float64)
Look = Callable[[], str]
"""Says what is wrong, or nothing."""


def acting(cell: nn.Module) -> Look:
    x, still = sequence()[0], copy.deepcopy(cell).eval()
    with torch.no_grad():
        mean = still(x, STATE)

    def look() -> str:
        with torch.no_grad():  # without the cell's own draws, which differ
            made = cell.norm(cell.gru(x, STATE)) * cell.scale  # type: ignore[operator]
        return "" if torch.equal(made, mean) else "another result"

    return look


def acting_with_gradients(cell: nn.Module) -> Look:
    x, gru = sequence()[0], cell.gru
    assert isinstance(gru, nn.Module)

    def gradients() -> list[Tensor]:
        weights = list(gru.parameters())
        return list(torch.autograd.grad(gru(x, STATE).square().sum(), weights))

    exact = gradients()

    def look() -> str:
        return "" if all(map(torch.equal, gradients(), exact)) else "another gradient"

    return look


def saving(cell: nn.Module) -> Look:
    exact = {name: tensor.clone() for name, tensor in cell.state_dict().items()}

    def look() -> str:
        now = cell.state_dict()
        if list(now) != list(exact):
            return "other names"
        return "".join(name for name in now if not torch.equal(now[name], exact[name]))

    return look


def listing(cell: nn.Module) -> Look:
    exact = dict(cell.named_parameters()) | dict(cell.named_buffers())
    mode = [module.training for module in cell.modules()]
    versions = {name: tensor._version for name, tensor in exact.items()}

    def look() -> str:
        found = dict(cell.named_parameters()) | dict(cell.named_buffers())
        for name, tensor in exact.items():
            if found.get(name) is not tensor:
                return f"{name} is another object, {type(found.get(name)).__name__}"
            if tensor.grad is not None or tensor._version != versions[name]:
                return f"{name} has a gradient, or was changed"
        return "" if mode == [module.training for module in cell.modules()] else "another mode"

    return look


@contextmanager
def looked_at(cell: nn.Module, *kinds: Callable[[nn.Module], Look]) -> Iterator[None]:
    """Within, a thread for each kind looks at a cell again and again."""
    found, ended, counts = list[str](), threading.Event(), [0] * len(kinds)
    looks = [kind(cell) for kind in kinds]

    def work(i: int) -> None:
        while not ended.is_set():
            try:
                if wrong := looks[i]():
                    found.append(f"{kinds[i].__name__}: {wrong}")
            except BaseException as error:
                found.append(f"{kinds[i].__name__}: {type(error).__name__}: {error}")
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(kinds))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not found, set(found)
    assert all(counts)


def by_recurrent(cell: nn.Module, x: Tensor) -> Any:
    return fusedrnn.Recurrent(cell, compile="require")(x, STATE)


def by_scan(cell: nn.Module, x: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h.square()

    last, ys = fusedrnn.scan(step, STATE, x, compile="require")
    return ys, last


RUNS = [by_recurrent, by_scan]


@pytest.mark.ci_has_every(2)
@pytest.mark.parametrize("run", RUNS)
def test_first_uses_are_not_seen(run: Callable[..., Any]) -> None:
    """Nor what comes after them: backward, gradients of gradients, a batch of one row."""
    cell, x = Cell(), sequence().requires_grad_()
    weights = list(cell.parameters())
    with looked_at(cell, acting, acting_with_gradients, saving, listing):
        output, last = run(cell, x)
        torch.autograd.grad(output.square().sum() + last.sum(), [x, *weights])
        torch.autograd.grad(run(cell, x)[1].sum(), [x, *weights])  # without unused results
        with torch.no_grad():
            run(cell, x)
        output, _ = run(cell, x)
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), weights)


def test_explain_is_not_seen() -> None:
    cell, x = Cell(), sequence()
    rnn = fusedrnn.Recurrent(cell, compile="require")
    with looked_at(cell, acting, acting_with_gradients, saving, listing):
        assert rnn.explain(x, STATE).is_compiled
        assert rnn.explain(x, STATE).is_compiled


@pytest.mark.parametrize("run", RUNS)
def test_training_in_another_thread(run: Callable[..., Any]) -> None:
    """It gets what it gets alone, and the first use is right."""
    cell = Cell().eval()
    x, ended, steps = sequence(), threading.Event(), 0

    def train(cell: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        cell(x[0], STATE).sin().sum().backward()
        optimizer.step()

    # Not Adam, which rounds otherwise while any thread is within torch.compile.
    alone = copy.deepcopy(cell)
    own, theirs = [torch.optim.SGD(one.parameters(), 1e-6, 0.9) for one in (cell, alone)]
    errors = list[BaseException]()

    def work() -> None:
        nonlocal steps
        try:
            while not ended.is_set():
                train(cell, own)
                steps += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        made = run(cell, x)[0]
    finally:
        ended.set()
        thread.join()
    assert not errors and steps
    # In a thread, too, which has another number of threads for sums.
    thread = threading.Thread(target=lambda: [train(alone, theirs) for _ in range(steps)])
    thread.start()
    thread.join()
    for a, b in zip(cell.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(made, run(cell, x)[0], rtol=0, atol=steps * 1e-4)


def test_traces_do_not_look_at_gradients() -> None:
    """Another thread may write them at that moment, which ends the process; torch.compile alone
    does, and refuses this cell."""
    rnn, x = fusedrnn.Recurrent(Cell().eval(), compile="require"), sequence()
    weight = rnn.cell.gru.weight_ih
    weight.grad_dtype = None
    weight.grad = torch.ones_like(weight, dtype=torch.float32)
    rnn(x, STATE)[0].sum().backward()
    assert weight.grad.dtype == torch.float32


def test_calls_beside_a_first_use() -> None:
    """Those of a compiled cell stay compiled, and functions of torch.compile run."""
    rnn, x = fusedrnn.Recurrent(Cell().eval(), compile="require"), sequence()
    # Not with fullgraph=True, which torch 2.13 refuses now and then beside any other one.
    exact, plain = rnn(x, STATE)[0], torch.compile(torch.sin, backend="eager")
    exact_sin = plain(x)

    def calling(_: nn.Module) -> Look:
        def look() -> str:
            is_same = torch.equal(rnn(x, STATE)[0], exact) and torch.equal(plain(x), exact_sin)
            return "" if is_same else "another result"

        return look

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_call.StepsInPython, "take", None)
        with looked_at(rnn.cell, calling, calling):
            for other in (Other, Cell):
                made = fusedrnn.Recurrent(other().eval(), compile="require")(x, STATE)[0]
                made.sum().backward()


def test_counts_of_torch_that_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 says that a graph did not run if another thread has begun to count."""
    count = getattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is None:
        pytest.skip("this torch does not count")
    rnn, x = fusedrnn.Recurrent(Cell(), compile="require"), sequence()
    torch.manual_seed(0)
    exact = rnn(x, STATE)[0]
    counts, runs = list[int](), list[Any]()

    def of_another_thread(new: int) -> int:
        counts.append(count(new))
        return 0 if counts[-1] == 1 == counts.count(1) else counts[-1]  # as the first call ends

    def run_beside(*args: Any) -> Any:
        runs.append(run_program(*args))
        return runs[-1]

    run_program = running_call.run_program
    monkeypatch.setattr(running_call, "run_program", run_beside)
    monkeypatch.setattr(
        torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", of_another_thread
    )
    torch.manual_seed(0)
    assert torch.equal(rnn(x, STATE)[0], exact)
    assert len(runs) == 1 and counts.count(1) == 2


class Other(Cell):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(super().forward(x, h))


def test_first_calls_at_once(folder: Path) -> None:
    """Of one module, of cells of its class, and of other steps: one program for each step."""
    shared = fusedrnn.Recurrent(Cell().eval(), compile="require")
    rnns = [shared, shared, *(fusedrnn.Recurrent(Cell().eval(), compile="require"),) * 2]
    rnns += [fusedrnn.Recurrent(Other().eval(), compile="require") for _ in range(2)]
    x = sequence()
    weights = [list(rnn.parameters()) for rnn in rnns]
    barrier, found = threading.Barrier(len(rnns)), dict[int, Any]()

    def gradients(made: Any, weights: list[nn.Parameter]) -> list[Tensor]:
        loss = made[0].sin().sum() + made[1].sum()
        return [made[0].detach(), *torch.autograd.grad(loss, weights)]

    def work(i: int) -> None:
        barrier.wait()
        try:
            found[i] = gradients(rnns[i](x, STATE), weights[i])
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(rnns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    errors = [repr(one) for one in found.values() if isinstance(one, BaseException)]
    assert not errors, errors
    for i, rnn in enumerate(rnns):
        plain = fusedrnn.Recurrent(rnn.cell, compile="never")
        torch.testing.assert_close(found[i], gradients(plain(x, STATE), weights[i]))
    assert len(list(folder.glob("*.so"))) == len({id(p) for p in find_program._known.values()}) == 2
