"""Errors of huge sizes, and of calls and plans near the end of int64."""

import re

import pytest
import torch
from cases import CELLS

import fusedrnn


@pytest.mark.parametrize("num_layers", [10**6, 10**8])
def test_weights_are_counted_first(num_layers):
    weights = list(fusedrnn.GRU(5, 7).parameters())
    with pytest.raises(ValueError, match=f"take {4 * num_layers} weights, got 4"):
        fusedrnn.gru(torch.randn(4, 3, 5), weights, num_layers=num_layers)


@pytest.mark.parametrize("make", [fusedrnn.GRU, fusedrnn.LSTM, fusedrnn.StochasticGRU])
def test_sizes_without_end(make):
    for sizes, error, message in (
        ((5, 7), ValueError, "num_layers must be at most 268435455, got 1000000000"),
        ((2**62, 7), RuntimeError, "sizes are too large"),
        ((5, 2**40), RuntimeError, "sizes are too large"),
        ((2**63, 7), ValueError, "input_size must be below 2^63"),
    ):
        options = {"num_layers": 10**9} if error is ValueError and sizes[0] == 5 else {}
        with pytest.raises(error, match=f"^fusedrnn: {re.escape(message)}"):
            make(*sizes, device="meta", **options)
    # Each layer is possible, but not all of them together.
    with pytest.raises(RuntimeError, match=r"^fusedrnn: no [0-9,]{26} weights of .*: too many"):
        make(5, 8 * 10**8, num_layers=5, bidirectional=True, device="meta")


HUGE = (2**31, 2**40, 2**62 - 1, 2**62, 2**63 - 1)


@pytest.mark.parametrize("device", ["cpu", "H100", "A100"])
@pytest.mark.parametrize("cell", CELLS)
def test_plans_of_sizes_near_the_end_of_int64(cell, device):
    def attempt(steps, batch, dtype=torch.bfloat16, **sizes):
        sizes = {"cell": cell, "input_size": 8, "hidden_size": 8} | sizes
        try:
            plan = fusedrnn.plan(sizes, (steps, batch, sizes["input_size"]), dtype, device)
        except (ValueError, RuntimeError) as error:
            assert str(error).startswith("fusedrnn: ")
        else:
            memory = plan.memory
            assert min(memory.training_bytes, memory.most_workspace_bytes, plan.chunk_steps) > 0
            assert memory.training_bytes < 2**62 and memory.most_workspace_bytes < 2**62

    for huge in HUGE:
        attempt(huge, 1)
        attempt(1, huge)
        attempt(huge, huge)
        attempt(4, 3, chunk_size=huge)
        attempt(4, 3, workspace_bytes=huge)
        for name in ("input_size", "hidden_size", "num_layers"):
            attempt(4, 3, **{name: huge})
            attempt(2**31, 1, torch.float64, **{name: huge})
        attempt(2**16, 2**15, hidden_size=huge, input_size=huge)
    attempt(2**32 - 1, 1, torch.float64, input_size=2**16, hidden_size=2**16)
