"""The last output of compiled cells, made part by part: values, gradients and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent.registry import BY_NAME, Case
from runtime.plain import Masks, loop
from test_published_cells import (
    SEVERAL,
    STATES,
    Ready,
    check_call,
    check_layers,
    check_same,
    errors,
    leaves_of,
    ready,
    seeded,
)
from torch import nn
from torch.utils import _pytree as pytree

import fusedrnn

T, B = 70, 8
"""Of three parts, the last of which is shorter."""
LENGTHS = [70, 3, 64, 65, 20, 33, 1, 69]
QUICK = {"LSTMCell", "ForumCell"}
NIGHTLY = {"sLSTM", "DreamerV2", "PlaNet"}
SOME = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=[]
            if case.name in QUICK
            else [pytest.mark.nightly if case.name in NIGHTLY else pytest.mark.slow],
        )
        for case in SEVERAL
    ],
)
KINDS = ["whole", "lengths", "zero", *STATES]


def test_there_are_several_parts() -> None:
    cell = nn.LSTMCell(3, 4)
    rnn = fusedrnn.Recurrent(cell, compile="require", return_sequence=False)
    found = rnn.explain(torch.randn(T, B, 3))
    assert "one of 3 parts" in found.chunk_reason
    assert found.chunk_steps == 24
    assert found.kept_bytes_per_step == B * -(-2 * 8 * 4 // T)


@SOME
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop(case: Case, kind: str) -> None:
    torch.manual_seed(1)
    masks = Masks(None if kind == "whole" else LENGTHS)
    if kind not in ("whole", "lengths"):
        cell = ready(case, "compiled").cell
        masks = case.masks(cell, kind, torch.rand(T, B) < 0.1, LENGTHS)
    check_call(case, "compiled", masks, (T, B), return_sequence=False)


@pytest.mark.parametrize("chunk_size", [1, 5, pytest.param(50, marks=pytest.mark.slow)])
def test_chunks_and_strides(chunk_size: int) -> None:
    """Inputs whose batch comes first in memory."""
    case = BY_NAME["ForumCell"]
    one = ready(case, "compiled")
    x, state = case.inputs(T, B), case.state(one.cell, B)
    turned = pytree.tree_map(lambda leaf: leaf.transpose(0, 1).contiguous(), x)
    rnn = one.with_options(return_sequence=False, batch_first=True, chunk_size=chunk_size)
    ours = rnn(turned, state, LENGTHS, generator=seeded())
    expected = loop(one.cell, x, state, Masks(LENGTHS), returns_sequence=False)
    check_same(ours, expected, leaves_of(state, one.cell))


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("name", ["zoneout", pytest.param("LSTMCell", marks=pytest.mark.slow)])
def test_both_directions(name: str, lengths: list[int] | None) -> None:
    case = BY_NAME[name]
    one = Ready([case.cell(), case.cell()], "require", bidirectional=True)
    masks = Masks(lengths, torch.rand(T, B) < 0.1)
    check_layers(case, one, masks, (T, B), is_bidirectional=True, returns_sequence=False)


@pytest.mark.parametrize(
    ("given", "wanted"), [(0, "input"), (1, "state"), (0, "weights"), (1, "weights")]
)
def test_some_gradients(given: int, wanted: str) -> None:
    """Of the output or the last state alone, to some leaves alone; without a gradient to others."""
    case = BY_NAME["LSTMCell"]
    cell, x = case.cell(), case.inputs(T, B)
    state = case.state(cell, B)
    groups = {"input": leaves_of(x), "state": leaves_of(state), "weights": leaves_of(cell)}
    for name, leaves in groups.items():
        for leaf in leaves:
            leaf.requires_grad_(name == wanted)
    rnn = fusedrnn.Recurrent(cell, compile="require", return_sequence=False)
    ours, expected = rnn(x, state)[given], loop(cell, x, state, returns_sequence=False)[given]
    check_same(ours, expected, groups[wanted])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["LSTMCell", pytest.param("ForumCell", marks=pytest.mark.slow)])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Errors are at most twice those of the loop."""
    found = errors(BY_NAME[name], dtype, "compiled", (T, 32), returns_sequence=False)
    for mine, other in zip(*found, strict=True):
        assert mine <= 2 * other + torch.finfo(dtype).eps / 8


def test_memory_grows_with_the_root() -> None:
    from bench.clock import measure_memory

    cell = nn.LSTMCell(8, 32)
    rnn = fusedrnn.Recurrent(cell, compile="require", return_sequence=False)
    peaks = []
    for seq_len in (400, 6400):
        x = torch.randn(seq_len, 8, 8)
        state = torch.zeros(8, 32), torch.zeros(8, 32)

        def step(x: Any = x, state: Any = state) -> None:
            rnn(x, state)[0].sum().backward()
            rnn.zero_grad()

        step()
        peaks.append(measure_memory(step).peak_bytes)
    assert peaks[1] < 4.5 * peaks[0]
