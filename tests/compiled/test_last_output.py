"""The last output of compiled cells, made part by part: values, gradients and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import Masks, loop
from registry import BY_NAME, Case
from test_published_cells import (
    SEVERAL,
    Ready,
    check_same,
    error,
    gradients,
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
QUICK = {"LSTMCell", "forum"}
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
KINDS = ["whole", "lengths", "resets", "one row", "rows", "sequence"]


def masks_of(case: Case, cell: Any, kind: str) -> Masks:
    torch.manual_seed(1)
    if kind == "whole":
        return Masks()
    if kind == "lengths":
        return Masks(LENGTHS)
    reset = torch.rand(T, B) < 0.1
    if kind == "resets":
        return Masks(LENGTHS, reset)
    steps, rows = (T,) if kind == "sequence" else (), 1 if kind == "one row" else B
    return Masks(LENGTHS, reset, case.state(cell, rows, *steps), bool(steps))


def test_there_are_several_parts() -> None:
    cell = nn.LSTMCell(3, 4)
    rnn = fusedrnn.Recurrent(cell, compile="require", return_sequence=False)
    found = rnn.explain(torch.randn(T, B, 3))
    assert "each of 3 parts" in found.chunk_reason
    assert found.chunk_steps == 24
    assert found.kept_bytes_per_step == B * -(-2 * 8 * 4 // T)


@SOME
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop(case: Case, kind: str) -> None:
    one = ready(case, "compiled")
    cell, rnn = one.cell, one.with_options(return_sequence=False)
    masks = masks_of(case, cell, kind)
    x, state = case.inputs(T, B), case.state(cell, B)
    ours = rnn(x, state, masks.lengths, masks.reset, masks.reset_to, generator=seeded())
    expected = loop(cell, x, state, masks, returns_sequence=False)
    check_same(ours, expected, leaves_of(x, state, masks.reset_to, cell))


@pytest.mark.parametrize("chunk_size", [1, 5, pytest.param(50, marks=pytest.mark.slow)])
def test_chunks_and_strides(chunk_size: int) -> None:
    """Inputs whose batch comes first in memory."""
    case = BY_NAME["forum"]
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
    x, states = case.inputs(T, B), tuple(case.state(cell, B) for cell in one.cell)
    reset = torch.rand(T, B) < 0.1
    rnn = one.with_options(return_sequence=False)
    ours = rnn(x, states, lengths, reset, generator=seeded())
    options = {"is_bidirectional": True, "returns_sequence": False}
    expected = loop(one.cell, x, states, Masks(lengths, reset), **options)
    check_same(ours, expected, leaves_of(x, states, *one.cell))


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
@pytest.mark.parametrize("name", ["LSTMCell", pytest.param("forum", marks=pytest.mark.slow)])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Errors are at most twice those of the loop."""
    case = BY_NAME[name]
    cell, exact_cell = case.cell(dtype), case.cell()
    exact_cell.load_state_dict(cell.state_dict())
    x, state = case.inputs(T, 32, dtype), case.state(cell, 32)
    exact_given = pytree.tree_map(
        lambda t: (
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        ),
        (x, state),
    )
    rnn = fusedrnn.Recurrent(cell, compile="require", return_sequence=False)
    found = []
    for results, leaves in (
        (rnn(x, state, generator=seeded()), leaves_of(x, state, cell)),
        (loop(cell, x, state, returns_sequence=False), leaves_of(x, state, cell)),
        (
            loop(exact_cell, *exact_given, returns_sequence=False, drawn_in=dtype),
            leaves_of(exact_given, exact_cell),
        ),
    ):
        found.append((pytree.tree_leaves(results), gradients(results, leaves)))
    for mine, other, right in zip(*found, strict=True):
        assert error(mine, right) <= 2 * error(other, right) + torch.finfo(dtype).eps / 8


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
