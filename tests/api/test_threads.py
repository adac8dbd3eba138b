"""Layers with several threads: the same bits as with one, and after a fork, which takes the pool's
threads away: a loop that shared its work would wait for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from checks import HAS_OWN_PRODUCTS

import fusedrnn

PROGRAM = """
import os, signal, sys, torch, fusedrnn

cell, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.set_num_threads(2)
layer = getattr(fusedrnn, cell)(96, 128, dtype=dtype)
input = torch.randn(10, 48, 96, dtype=dtype)
# Each is copied: columns are not contiguous, and lengths leave padding.
strided = torch.randn(96, 48, 10, dtype=dtype).permute(2, 1, 0)
lengths = torch.arange(48) % 10 + 1


def results():
    torch.manual_seed(1)
    found = []
    for sequence, options in ((input, {}), (strided, {}), (input, {"lengths": lengths})):
        sequence = sequence.detach().requires_grad_()
        output = layer(sequence, **options)[0]
        found.append(output.detach())
        found += torch.autograd.grad(output, [sequence, *layer.parameters()], output.detach())
    return found


before = results()
child = os.fork()
if child == 0:
    signal.alarm(60)
    again = results()
    torch.set_num_threads(1)  # torch's own loops, as of equal(), would hang
    same = all(map(torch.equal, before, again))
    os._exit(0 if same else 1)
status = os.waitpid(child, 0)[1]
assert not os.WIFSIGNALED(status), "the child hung or crashed"
assert os.WEXITSTATUS(status) == 0, "the child has other numbers"
assert all(map(torch.equal, before, results()))  # the parent still has its threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cell", ["StochasticGRU", "GRU", "LSTM"])
def test_a_forked_child_runs_a_layer(cell: str, dtype: str) -> None:
    command = [sys.executable, "-c", PROGRAM, cell, dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr


# Products of few columns and rows: of 12 to 15, and of less than 12 with less than 4 rows.
SIZES = {
    "12 inputs": (fusedrnn.LSTM, {"input_size": 12, "hidden_size": 300}, 64),
    "13 projected": (fusedrnn.LSTM, {"input_size": 9, "hidden_size": 400, "proj_size": 13}, 64),
    "2 projected, B=1": (fusedrnn.LSTM, {"input_size": 9, "hidden_size": 100, "proj_size": 2}, 1),
    "5 hidden, B=3": (fusedrnn.GRU, {"input_size": 1000, "hidden_size": 5}, 3),
    "a tile for each thread": (fusedrnn.GRU, {"input_size": 96, "hidden_size": 96}, 300),
    # The input's weight is packed, in panels of 64 columns; halves of tiles would begin within one.
    "200 columns": (fusedrnn.LSTM, {"input_size": 60, "hidden_size": 50}, 80),
}


@pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="products are torch's here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bits_are_the_same_for_any_number_of_threads(size: str, dtype: torch.dtype) -> None:
    kind, sizes, batch = SIZES[size]
    layer = kind(**sizes, dtype=dtype)
    input = torch.randn(9, batch, layer.input_size, dtype=dtype, requires_grad=True)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output = layer(input)[0]
            tensors = [input, *layer.parameters()]
            found.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    finally:
        torch.set_num_threads(before)
    for results in found[1:]:
        assert all(map(torch.equal, found[0], results))
