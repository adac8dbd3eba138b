"""The chunk and its reason; memory that does not grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recurrent.loops import By, Mixed, Noisy, check_same, scan_loop, twice
from runtime.plain import loop as plain_loop
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.parametrizations import weight_norm

import fusedrnn
from bench.clock import measure_memory
from fusedrnn._step.generators import drawn_from, global_generators, states_of

pytestmark = pytest.mark.usefixtures("steps_in_python")


def test_what_is_printed() -> None:
    rnn = fusedrnn.Recurrent(nn.GRUCell(8, 16))
    found = rnn.explain(torch.randn(100, 4, 8))
    assert str(found).splitlines() == [
        "steps in Python, because FUSEDRNN_COMPILE is 0",
        "chunks of 10 steps: sqrt(100), which balances saved states and workspace",
        f"  a plain loop keeps, per step         {found.step_bytes:>16,} bytes",
        "  kept until backward, per step                      26 bytes",
        f"  workspace of backward                {10 * found.step_bytes:>16,} bytes",
        "faster: fusedrnn.GRU computes the same",
    ]
    assert found.step_bytes >= 4 * 4 * 16 * 4  # r, u, n and what is added to n


def hooked(cell: nn.Module) -> nn.Module:
    cell.register_forward_pre_hook(lambda cell, given: None)
    return cell


@pytest.mark.parametrize(
    ("cell", "advice"),
    [
        (nn.RNNCell(3, 4), "torch.nn.RNN computes the same"),
        (nn.LSTMCell(3, 4), "fusedrnn.LSTM computes the same"),
        (fusedrnn.GRUCell(3, 4), "fusedrnn.GRU computes the same"),
        (fusedrnn.LSTMCell(3, 4), "fusedrnn.LSTM computes the same"),
        (fusedrnn.StochasticGRUCell(3, 4), "fusedrnn.StochasticGRU computes the same"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_be_faster(cell: nn.Module, advice: str) -> None:
    (found,) = fusedrnn.Recurrent(cell).explain(torch.randn(7, 2, 3)).faster
    assert found.startswith(advice)


@pytest.mark.parametrize("change", [lambda cell: weight_norm(cell, "weight_hh"), hooked])
def test_other_cells_have_no_faster_layer(change: Any) -> None:
    cell = change(nn.GRUCell(3, 4))
    assert fusedrnn.Recurrent(cell).explain(torch.randn(7, 2, 3)).faster == ()


def test_layers() -> None:
    """Numbers are of all cells."""
    cells = [nn.GRUCell(4, 4), nn.GRUCell(4, 8)]
    both = fusedrnn.Recurrent(cells).explain(torch.randn(16, 3, 4))
    alone = fusedrnn.Recurrent(cells[1]).explain(torch.randn(16, 3, 4))
    assert both.step_bytes == alone.step_bytes
    assert both.kept_bytes_per_step == 3 * (4 + 8) * 4 * 4 // 16


def test_it_leaves_no_trace() -> None:
    """Buffers, gradients, and generators of torch, Python and NumPy are as before."""

    def step(c: Any, x: Tensor, h: Tensor) -> Tensor:
        x = x * random.random() + np.random.rand() + c.held.random()
        return torch.tanh(c.norm(x) + h + torch.randint(3, h.shape) + torch.rand(h.shape))

    held = random.Random(0)
    rnn = fusedrnn.Recurrent(By(step, norm=nn.BatchNorm1d(4), held=held))
    x, h = torch.randn(9, 3, 4), torch.zeros(3, 4)
    before = {name: value.clone() for name, value in rnn.state_dict().items()}
    state, others = torch.get_rng_state(), states_of([*global_generators(), held])
    rnn.explain(x, h)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn_from(others, states_of([*global_generators(), held])) is None
    torch.testing.assert_close(rnn.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("cell", [Noisy(), Mixed()])
def test_workspace_bytes(cell: Any) -> None:
    x: Any = torch.randn(50, 3, 4, dtype=torch.float64)
    h: Any = torch.zeros(3, 4, dtype=torch.float64)
    if isinstance(cell, Mixed):
        x, h = {"x": x[..., :3], "scale": x[..., 0]}, None
    one = fusedrnn.Recurrent(cell).explain(x, h).step_bytes
    for steps in (1, 7, 200):
        rnn = fusedrnn.Recurrent(cell, workspace_bytes=steps * one + 5)
        found = rnn.explain(x, h)
        assert found.chunk_steps == min(steps, 50)
        assert found.workspace_bytes <= steps * one + 5


def test_memory_of_a_chunk() -> None:
    """Whatever the length of the sequence, besides inputs, outputs and their gradients."""
    extra, chunk, width = [], 8, 64
    for seq_len in (4 * chunk, 16 * chunk):
        rnn = fusedrnn.Recurrent(nn.GRUCell(width, width), chunk_size=chunk)
        x = torch.randn(seq_len, 16, width, requires_grad=True)

        def train() -> None:
            rnn(x)[0].sum().backward()  # noqa: B023
            x.grad = None  # noqa: B023

        train()
        states = x.nbytes / chunk
        extra.append(measure_memory(train).peak_bytes - 2 * x.nbytes - states)
        assert extra[-1] < 2 * chunk * rnn.explain(x).step_bytes
    assert extra[1] < 1.2 * extra[0]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4, 4)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


Use = Callable[[Tensor, Tensor], Tensor]
EYE = torch.eye(4)
UNUSUAL: dict[str, tuple[Callable[[], Tensor], Use | None]] = {
    "COO": (EYE.to_sparse, lambda t, h: (t @ h.T).T),
    "CSR": (EYE.to_sparse_csr, lambda t, h: (t @ h.T).T),
    "CSC": (EYE.to_sparse_csc, lambda t, h: (t @ h.T).T),
    "BSR": (lambda: EYE.to_sparse_bsr((2, 2)), None),
    "MKLDNN": (EYE.to_mkldnn, lambda t, h: h @ t.to_dense()),
    "quantized": (
        lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8),
        lambda t, h: h @ t.dequantize(),
    ),
    "meta": (lambda: EYE.to("meta"), None),
    "fake": (fake, None),
    "nested": (lambda: nested(torch.strided), None),
    "jagged": (lambda: nested(torch.jagged), None),
    "masked": (lambda: torch.masked.masked_tensor(EYE, EYE > 0), None),
}
"""Tensors without memory of their own, or with several pieces; and how a step reads them."""


@pytest.mark.filterwarnings("ignore:Sparse|.*quantize|.*[Nn]ested|.*MaskedTensor:UserWarning")
@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_that_are_no_plain_arrays(name: str, kind: str) -> None:
    make, use = UNUSUAL[name]
    cell: Any = By(
        lambda c, x, h: torch.tanh(c.linear(x) + (h if use is None else use(c.held, h))),
        linear=nn.Linear(4, 4),
    )
    held = make()
    if kind == "buffer":
        cell.register_buffer("held", held)
    elif kind == "parameter":
        cell.held = nn.Parameter(held, requires_grad=False)
    else:
        cell.held = held
    rnn, x, h = fusedrnn.Recurrent(cell), torch.randn(9, 3, 4), torch.zeros(3, 4)
    found = rnn.explain(x, h)
    assert found.step_bytes < 9 * 3 * 4 * 4 * 4 + 1000
    leaves = [*cell.linear.parameters()]
    check_same(lambda: rnn(x, h), lambda: plain_loop(cell, x, h), leaves, 1e-5)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return twice(cell(x, h))

    check_same(lambda: fusedrnn.scan(step, h, x), lambda: scan_loop(step, h, x), leaves, 1e-5)
