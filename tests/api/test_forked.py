"""A child that is forked from a process that has used several threads runs layers and cells.

The pool of threads is not forked along: a loop that shared its work would wait for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, torch, fusedrnn

cell, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.set_num_threads(2)
layer = getattr(fusedrnn, cell)(96, 128, dtype=dtype)
input = torch.randn(40, 48, 96, dtype=dtype)
# Each is copied: columns are not contiguous, and lengths leave padding.
strided = torch.randn(96, 48, 40, dtype=dtype).permute(2, 1, 0)
lengths = torch.arange(48) % 40 + 1


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
