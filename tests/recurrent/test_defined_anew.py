"""Steps that are defined anew in each call, as inside of a module's forward."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from loops import F64, check_same, counted, double, scan_loop
from recorders import Repeated
from torch import Tensor, nn

import fusedrnn
from fusedrnn.recurrent import calls
from fusedrnn.recurrent.memories import memory_of
from fusedrnn.recurrent.probe import Obstacle

T, B, H = 12, 3, 4


class Model(nn.Module):
    """The common form: the step reads the module by its ``self``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=F64)
        self.options = options

    def forward(
        self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None, run: Any = None
    ) -> Any:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(h) * scale + x)
            return h, h if bias is None else h + bias

        if run is not None:
            return run(step, x.new_zeros(B, H), x)
        return fusedrnn.scan(step, x.new_zeros(B, H), x, **self.options)

    def check(self, scale: float = 1.0) -> None:
        x = double(T, B, H)
        leaves = [x, *self.parameters()]
        check_same(lambda: self(x, scale), lambda: self(x, scale, run=scan_loop), leaves)


@pytest.mark.slow
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each plain value that the step reads, and for each module."""
    counter = counted(monkeypatch)
    model, graphs = Model(torch_compile=True), []
    for scale in (1.0, 1.0, 0.5, 1.0, 0.5):
        model.check(scale)
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[1] < graphs[2] == graphs[3] == graphs[4]
    for other in (Model(torch_compile=True), copy.deepcopy(model)):
        before = counter.frame_count
        other.check()
        assert counter.frame_count > before
    pickle.loads(pickle.dumps(model)).check()


def test_variables_that_are_assigned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled step reads those of the function that it was made of."""
    counted(monkeypatch)
    x, start, factors = torch.randn(T, B), torch.zeros(B), []

    def run(factor: list[float]) -> Tensor:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = h * factor[0] + x
            return h, h

        factors.append((factor, step))
        return fusedrnn.scan(step, start, x, torch_compile=True)[0]

    first = run([0.0])
    factors[0][0][0] = 1.0  # of the first function alone
    assert torch.equal(run([0.0]), first)
    assert torch.equal(first, x[-1])
    with pytest.warns(UserWarning, match="compiled 3 times"):
        torch.testing.assert_close(run([1.0]), x.sum(0))


def test_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are others each time; a compiled step would keep the first ones."""
    counter = counted(monkeypatch)
    model, x = Model(torch_compile=True), torch.randn(T, B, H, dtype=F64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            before, bias = counter.frame_count, torch.randn(H, dtype=F64)
            torch.testing.assert_close(model(x, bias=bias), model(x, bias=bias, run=scan_loop))
            assert counter.frame_count > before
    messages = [str(one.message) for one in caught if "compiled 3 times" in str(one.message)]
    assert len(messages) == 1
    assert "Model.forward.<locals>.step" in messages[0]
    assert "params=" in messages[0]


def test_trials_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the values of the tensors are; other kinds of tensors are tried anew."""
    trials = []

    def trial(*arguments: Any) -> Obstacle:
        trials.append(arguments)
        return Obstacle("")

    monkeypatch.setattr(calls, "obstacle_to_parallel", trial)
    model, x = Model(mode="parallel"), torch.randn(T, B, H, dtype=F64)

    def counts(*biases: Tensor) -> list[int]:
        return [model(x, bias=bias) and len(trials) for bias in biases]

    biases = [torch.randn(H, dtype=F64) for _ in range(3)]
    assert counts(*biases) == [1, 1, 1]
    assert counts(biases[0][:1], biases[1].requires_grad_(), biases[2]) == [2, 3, 3]


def test_graphs_are_recorded_from_the_second_call_on(recorder: type[Repeated]) -> None:
    model = Model(cuda_graphs=True, chunk_size=3)
    model(torch.randn(T, B, H, dtype=F64))[1].sum().backward()
    assert recorder.count == 0
    model.check()
    assert recorder.count > 0


def weighted(weight: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h * weight + x, h


def test_what_is_like_what() -> None:
    def step_with(*held: Any, default: Any = None) -> Any:
        def step(h: Tensor, x: Tensor, default: Any = default) -> Any:
            return h, held

        return step

    def shared(step: Any) -> Any:
        return vars(memory_of(step)).get("_alike")

    gru, inner = nn.GRUCell(1, 1), step_with(1)
    for held in ((), (1, 2.5, "text"), (gru,), (gru, [1, {"a": None}]), (torch.float32, F64)):
        assert shared(step_with(*held)) is shared(step_with(*held)) is not None
        assert shared(step_with(default=held)) is shared(step_with(default=held))
    assert shared(step_with(inner)) is shared(step_with(step_with(1)))
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), (gru, nn.GRUCell(1, 1)), ([1], (1,))):
        assert shared(step_with(one)) is not shared(step_with(other))
    assert shared(step_with(step_with(1))) is not shared(step_with(step_with(2)))
    scale = torch.ones(H)
    assert shared(partial(weighted, scale)) is shared(partial(weighted, 2 * scale))
    assert shared(partial(weighted, scale)) is not shared(partial(weighted, scale.double()))
    assert shared(step_with(slice(1))) is None  # nothing refers to it weakly
    once = step_with(1)
    assert memory_of(once) is memory_of(once)


@pytest.mark.slow
def test_nothing_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    model = Model(torch_compile=True)
    model.check()
    bias = torch.randn(H, dtype=F64)
    model(torch.randn(T, B, H, dtype=F64), bias=bias)
    left = [weakref.ref(bias), weakref.ref(model.linear.weight), weakref.ref(model)]
    del bias
    gc.collect()
    assert left[0]() is None
    del model
    gc.collect()
    assert [reference() for reference in left] == [None, None, None]


def test_a_bounded_number_is_remembered() -> None:
    model, x = Model(), torch.randn(2, B, H, dtype=F64)
    for scale in range(100):
        model(x, float(scale))
    assert len(vars(model)["_fusedrnn_steps"]._found) < 50
