"""Programs of cells over the fake of CUDA: csrc/ops/ops_cuda.cpp as it is, with its streams.

Stages are those of the emulation; the fake GPU runs them when their stream comes to them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import LIBRARY, fake_operators
from recurrent.registry import BY_NAME, Case
from runtime.gpu_programs import library_of, take
from runtime.plain import Masks
from test_published_cells import B, T, error, gradients, leaves_of, seeded
from torch import Tensor
from torch.utils import _pytree as pytree

import fusedrnn

pytestmark = pytest.mark.slow  # compiles all of csrc/cuda

QUEUED = """
namespace {
struct Launch {
  int64_t stage, backward;
  fusedrnn::program::StageArgs args;
  int64_t rows;
};
}  // namespace
extern "C" {
__attribute__((visibility("default"))) int64_t (*fake_enqueue)(void*, void (*)(void*), void*);
__attribute__((visibility("default"))) int64_t fusedrnn_stage_launch(
    int64_t stage, int64_t backward, const fusedrnn::program::StageArgs* args, int64_t rows,
    void* stream) {
  const auto run = [](void* data) {
    const auto& now = *static_cast<Launch*>(data);
    launch_at_once(now.stage, now.backward, &now.args, now.rows, nullptr);
  };
  // Never deleted: a graph may run it again.
  return fake_enqueue(stream, run, new Launch{stage, backward, *args, rows});
}
}
"""


def queued_library_of(text: str) -> Path:
    """A library whose launches go to the fake GPU."""
    assert text.count("fusedrnn_stage_launch") == 1
    path = library_of(text.replace("fusedrnn_stage_launch", "launch_at_once") + QUEUED)
    enqueue = ctypes.cast(ctypes.CDLL(str(LIBRARY.make())).fake_enqueue, ctypes.c_void_p)
    ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "fake_enqueue").value = enqueue.value
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its operators; it must not have found a fault."""
    operators = fake_operators()
    operators.control()
    operators.take_notes()
    yield operators
    assert operators.take_notes() == ""
    assert operators.last_error() == 0
    operators.control()


class LengthsOnHost:
    """The operators of a fake GPU, on which all tensors are while a test uses its memory."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)
        return functools.partial(self._call, operator) if name.startswith("program") else operator

    def _call(self, operator: Any, *args: Any) -> Any:
        *others, lengths, reset = args
        self._operators.use_gpu_memory(False)
        lengths = None if lengths is None else lengths.clone()
        self._operators.use_gpu_memory(True)
        return operator(*others, lengths, reset)


def results(rnn: Any, given: Any, masks: Masks) -> tuple[list[Tensor], list[Tensor]]:
    x, state = given
    reset = None if masks.reset is None else masks.reset.clone()  # in the memory of the device
    made = rnn(x, state, masks.lengths, reset, generator=seeded())
    values = [t for t in pytree.tree_leaves(made) if t.is_floating_point()]
    return values, gradients(values, leaves_of(x, state, rnn))


def drawn(case: Case, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """A cell, its input and its state, the same each time."""
    torch.manual_seed(1)
    cell = case.cell(dtype)
    return cell, case.inputs(T, B, dtype), case.state(cell, B)


SOME = ["LSTMCell", "ForumCell", "late reset, LayerNorm", "sLSTM"]
RESET = torch.rand(T, B, generator=torch.Generator().manual_seed(3)) < 0.4
MASKS = {"whole": Masks(), "masked": Masks([3, 5, 1], RESET)}


def calls() -> Iterator[Any]:
    """All combinations; CI has four of them, and the quick tests one."""
    for i, name in enumerate(SOME):
        for order, dtype, kind in itertools.product(
            [0, 1, 2], [torch.float64, torch.bfloat16], MASKS
        ):
            in_turn = (i % 3, [torch.float64, torch.bfloat16][i % 2], "masked")
            marks = [pytest.mark.slow if (order, dtype, kind) == in_turn else pytest.mark.nightly]
            if i == 0 and (order, dtype, kind) == in_turn:
                marks = []
            yield pytest.param(name, order, dtype, MASKS[kind], marks=marks)


@pytest.mark.parametrize(("name", "order", "dtype", "masks"), list(calls()))
def test_values(gpu: Any, name: str, order: int, dtype: torch.dtype, masks: Masks) -> None:
    case = BY_NAME[name]
    cell, *given = drawn(case, dtype)
    theirs = results(fusedrnn.Recurrent(cell, compile="require", chunk_size=2), given, masks)
    gpu.use_gpu_memory(True)
    try:
        cell, *given = drawn(case, dtype)
        with pytest.MonkeyPatch.context() as patch:
            take(patch, LengthsOnHost(gpu), LIBRARY.make(), queued_library_of)
            gpu.control(order=order, own_stream=True)
            ours = results(fusedrnn.Recurrent(cell, compile="require", chunk_size=2), given, masks)
            assert gpu.counts()[0] > 0
    finally:
        gpu.use_gpu_memory(False)
    for mine, other in zip(ours, theirs, strict=True):
        assert error(mine, other) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["LSTMCell", "late reset, LayerNorm"])
def test_a_call_in_a_cuda_graph(gpu: Any, name: str) -> None:
    """It is repeated with another input in the same memory."""
    case = BY_NAME[name]
    gpu.use_gpu_memory(True)
    try:
        cell, x, state = drawn(case, torch.float64)
        others = torch.randn_like(x)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            take(patch, LengthsOnHost(gpu), LIBRARY.make(), queued_library_of)
            gpu.control(order=2)
            rnn = fusedrnn.Recurrent(cell, compile="require", chunk_size=2)
            rnn(x, state)
            gpu.begin_recording()
            output, _ = rnn(x, state)
            gpu.end_recording()
            x.copy_(others)
            gpu.replay()
            expected, _ = rnn(others, state)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
    finally:
        gpu.use_gpu_memory(False)
