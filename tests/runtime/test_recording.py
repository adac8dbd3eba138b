"""Recordings that fail, what they leave behind, and when their memory ends."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from recurrent.loops import F64, By, check_same, double, plain_loop
from runtime.recorders import Repeated
from torch import Tensor, nn

import fusedrnn
from fusedrnn._runtime import cuda_graphs
from fusedrnn._runtime.loop_backward import Backward

pytestmark = pytest.mark.usefixtures("steps_in_python")

T = TypeVar("T")
H = 4
START = torch.zeros(3, H, dtype=F64)


class Failing(Repeated):
    """Raises what is next in ``errors``."""

    errors: list[Exception | None]

    def record(self, function: Callable[[], T]) -> T:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return super().record(function)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Failing]]:
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", Failing)
    Failing.count = Failing.replays = 0
    Failing.errors = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fusedrnn")
        yield Failing


# --- recordings that fail ------------------------------------------------------------------------


def short() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")


def refused() -> Exception:
    return RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([short], ""),
        ([short, short], "raises OutOfMemoryError: CUDA"),
        ([refused], "not permitted when stream"),
    ],
)
def test_errors(errors: Any, said: str, place: str, recorder: type[Failing]) -> None:
    """The call goes on without graphs, and says why, once.

    Memory may be short once: one more recording follows, with the cached memory given back.
    """
    rnn = fusedrnn.Recurrent(nn.GRUCell(H, H, dtype=F64), cuda_graphs=True)
    x = double(16, 3, H)
    leaves = [x, *rnn.parameters()]
    rnn(x, START)[0].sum().backward()
    recorder.errors = [*([None] if place == "backward" else []), *(make() for make in errors)]
    warns = pytest.warns(UserWarning, match=f"without CUDA graphs.*{said}")
    for context in (warns if said else nullcontext(), nullcontext()):
        with context:
            check_same(lambda: rnn(x, START), lambda: plain_loop(rnn.cell, x, START), leaves)
    assert rnn.explain(x, START).is_recorded == (not said)
    assert said in rnn.explain(x, START).record_reason


@pytest.mark.parametrize("fails_alone", [True, False])
def test_errors_of_the_step(
    fails_alone: bool, recorder: type[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the step fails without graphs as well, it says so itself, and graphs stay possible."""
    is_failing = False

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        if is_failing:
            raise KeyError("a word")
        return torch.tanh(x + h)

    class Spoiling(Failing):
        def record(self, function: Callable[[], T]) -> T:
            nonlocal is_failing
            is_failing = True
            try:
                return super().record(function)
            finally:
                is_failing = fails_alone

    rnn, x, h = fusedrnn.Recurrent(By(step), cuda_graphs=True), torch.randn(16, 3, H), START.float()
    with torch.no_grad():
        rnn(x, h)
        monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", Spoiling)
        if fails_alone:
            with pytest.raises(KeyError, match="a word"):
                rnn(x, h)
        else:
            with pytest.warns(UserWarning, match="without CUDA graphs.*raises KeyError: 'a word'"):
                rnn(x, h)
        is_failing = False
        monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", recorder)
        rnn(x, h)
        assert recorder.count == fails_alone
        assert rnn.explain(x, h).is_recorded == fails_alone


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x, h: torch.tanh(x + h) + h.prod(-1, keepdim=True),
        lambda c, x, h: torch.tanh(x + h) + h.prod(),
        lambda c, x, h: torch.tanh(x + h) + (h + 1).cumprod(-1).sin(),
    ],
)
def test_gradients_that_wait(function: Any, recorder: type[Failing]) -> None:
    """They are tried as well, unless there are none."""
    rnn, x = fusedrnn.Recurrent(By(function), cuda_graphs=True), double(16, 3, H)
    reason = "backward of the step waits for the values of a tensor, in "
    assert reason in rnn.explain(x, START).record_reason
    for _ in range(2):
        rnn(x, START)[0].sum().backward()
    assert recorder.count == 0
    with torch.no_grad():
        assert rnn.explain(x, START).is_recorded


def test_gradients_that_raise() -> None:
    """That is for backward to say, if there is one."""

    def fails(grad: Tensor) -> Tensor:
        raise KeyError("a word")

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        y = torch.tanh(x + h)
        if y.requires_grad:
            y.register_hook(fails)
        return y

    rnn, x = fusedrnn.Recurrent(By(step), cuda_graphs=True), double(16, 3, H)
    assert "backward of the step raises KeyError" in rnn.explain(x, START).record_reason
    output = rnn(x, START)[0]
    with pytest.raises(KeyError, match="a word"):
        output.sum().backward()
    rnn.cell.function = lambda c, x, h: torch.tanh(x + h)
    assert rnn.explain(x, START).is_recorded


def test_a_step_in_place_is_told_so_by_name() -> None:
    rnn = fusedrnn.Recurrent(By(lambda c, x, h: h.add_(x)), cuda_graphs=True)
    with pytest.raises(RuntimeError, match="fusedrnn: the step changes state in place"):
        rnn(double(16, 3, H), START)


# --- when memory ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("has_graphs", [False, True])
def test_nothing_waits_for_the_garbage_collector(
    has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Seen(Repeated):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            alive.add(self)

    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", Seen)
    cell = nn.GRUCell(H, H, dtype=F64)
    rnn = fusedrnn.Recurrent(cell, cuda_graphs=has_graphs)
    x = double(16, 3, H)
    rnn(x, START)[0].sum().backward()
    gc.collect()
    gc.disable()
    try:
        output = rnn(x, START)[0]
        saved = weakref.ref(output.grad_fn)
        output.sum().backward()
        del output
        assert saved() is None
        assert not alive
        assert not any(type(thing) is Backward for thing in gc.get_objects())
    finally:
        gc.enable()


# --- CUDA, of which only the calls are here ------------------------------------------------------


class FakeCuda:
    """Notes what is called, and breaks off recordings as CUDA does."""

    def __init__(self) -> None:
        self.pools: set[int] = set()
        """Those that allocations go to."""
        self.made = 0
        self.is_broken = False

    @contextmanager
    def current(self, _: Any) -> Iterator[None]:
        yield

    def stream(self) -> Any:
        self.made += 1
        return SimpleNamespace(
            device=torch.device("cpu"),
            device_index=0,
            cuda_stream=self.made,
            wait_stream=lambda other: None,
        )

    def graph(self) -> Any:
        fake = self

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert pool not in fake.pools
                self.pool = pool
                fake.pools.add(pool)

            def capture_end(self) -> None:
                if fake.is_broken:
                    fake.is_broken = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                fake.pools.remove(self.pool)

        return Graph()

    def end(self, device: int, pool: int) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    default = fake.stream()
    for name, value in {
        "device": fake.current,
        "stream": fake.current,
        "current_stream": lambda: default,
        "Stream": fake.stream,
        "CUDAGraph": fake.graph,
        "graph_pool_handle": lambda: fake.stream().cuda_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: None, raising=False)
    monkeypatch.setattr(cuda_graphs, "_free_places", {})
    monkeypatch.setattr(cuda_graphs, "_failed", [])
    return fake


def made() -> cuda_graphs.CudaGraph:
    return cuda_graphs.CudaGraph(torch.device("cpu"))


@pytest.mark.parametrize("is_broken", [True, False])
def test_the_first_error_of_a_recording_is_the_reason(is_broken: bool, cuda: FakeCuda) -> None:
    """And nothing of it is left: neither its pool nor its stream are taken again."""

    def fails() -> None:
        cuda.is_broken = is_broken
        raise ValueError("operation not permitted when stream is capturing")

    for _ in range(2):
        with pytest.raises(ValueError, match="not permitted"):
            made().record(fails)
        assert not cuda.pools
        assert not any(cuda_graphs._free_places.values())
    assert len(cuda_graphs._failed) == 2 * is_broken
    assert made().record(lambda: 5) == 5


def test_an_error_of_the_end_alone(cuda: FakeCuda) -> None:
    def breaks() -> None:
        cuda.is_broken = True

    with pytest.raises(RuntimeError, match="due to a previous error"):
        made().record(breaks)
    assert not cuda.pools


def test_a_graph_has_its_place_for_itself(cuda: FakeCuda) -> None:
    first, second = made(), made()
    first.record(lambda: second.record(lambda: None))
    assert first._place is not second._place
    place = first._place
    del first
    third = made()
    third.record(lambda: None)
    assert third._place is place
    assert place is not None and place.last is third._graph
