"""Steps that are defined anew in each call, as inside of a module's forward."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from recurrent.loops import F64, check_same, double, scan_loop
from torch import Tensor, nn

import fusedrnn
from fusedrnn._recurrent.layer_call import cell_memory_of

pytestmark = pytest.mark.usefixtures("steps_in_python")

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

    def check(self, scale: float = 1.0, bias: Tensor | None = None) -> None:
        x = double(T, B, H)
        leaves = [x, *self.parameters()]
        check_same(lambda: self(x, scale, bias), lambda: self(x, scale, bias, scan_loop), leaves)


def test_other_values_and_tensors() -> None:
    model = Model()
    for scale in (1.0, 1.0, 0.5, 1.0, 0.5):
        model.check(scale)
    for bias in (torch.randn(H, dtype=F64), double(H), torch.randn(1, dtype=F64)):
        model.check(1.0, bias)
    for other in (Model(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.check()


def weighted(weight: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h * weight + x, h


def test_each_function_has_a_memory() -> None:
    def step_with(held: Any) -> Any:
        return lambda h, x: (h, held)

    once, part = step_with(1), partial(weighted, torch.ones(H))
    assert cell_memory_of(once) is cell_memory_of(once) is not cell_memory_of(step_with(1))
    assert (
        cell_memory_of(part)
        is cell_memory_of(part)
        is not cell_memory_of(partial(weighted, torch.ones(H)))
    )


def test_nothing_lives_on() -> None:
    model = Model()
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
