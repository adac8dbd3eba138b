"""``recompute=False`` of compiled cells: the same values, gradients and noise, from kept sums."""

from __future__ import annotations

import pytest
import torch
from plain import Masks, loop
from registry import BY_NAME
from test_published_cells import Ready, check_same, leaves_of, seeded

T, B = 20, 3


@pytest.mark.parametrize("returns_sequence", [True, False])
@pytest.mark.parametrize("lengths", [None, [20, 3, 11]])
@pytest.mark.parametrize("name", ["LSTMCell", "forum", "zoneout"])
def test_equals_the_loop(name: str, lengths: list[int] | None, returns_sequence: bool) -> None:
    case = BY_NAME[name]
    one = Ready(case.cell(), "require", recompute=False)
    x, state = case.inputs(T, B), case.state(one.cell, B)
    masks = Masks(lengths, torch.rand(T, B) < 0.2)
    rnn = one.with_options(return_sequence=returns_sequence, chunk_size=6)
    assert rnn.explain(x, state).is_program
    ours = rnn(x, state, lengths, masks.reset, generator=seeded())
    expected = loop(one.cell, x, state, masks, returns_sequence=returns_sequence)
    check_same(ours, expected, leaves_of(x, state, one.cell))
