"""Makes calls of every kind by a library, see ``emulator.SANITIZED``: one of so many, or all for 1.

Arguments: the library, and that number.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from cases import ALL_OPTIONS, Case
from last_states_cases import Stacked, in_parts
from layouts import shifted

import fusedrnn
from fusedrnn import _cells as cells
from fusedrnn import _helpers, _library
from fusedrnn import _tuning as tuning

DTYPES = [torch.float32, torch.bfloat16]  # other dtypes run their code
# Replayed chunks and a short one; groups of four numbers that are whole, broken, and the least.
SHAPES = [
    Case(seq_len=18, batch=2, input_size=4, hidden_size=8, latent_size=4, chunk_size=4),
    Case(seq_len=17, chunk_size=4),
    Case(seq_len=5, batch=1, input_size=1, hidden_size=1, latent_size=1, chunk_size=1),
]


def call(case: Case) -> None:
    """Runs a case with tensors at aligned addresses, and at others."""
    aligned = case.tensors()
    names = ("input", "hx", "cx", "eps", "grad_output", "grad_h_n", "grad_c_n")
    given = {name: getattr(aligned, name) for name in names}
    moved: dict[str, Any] = {name: shifted(t) for name, t in given.items() if t is not None}
    moved["weights"] = [shifted(w) for w in aligned.weights]
    for arguments in (aligned, replace(aligned, **moved)):
        for tensor in arguments.differentiable():
            tensor.requires_grad_()
        arguments.results(fusedrnn, **case.options)


def stacked() -> Iterator[Stacked]:
    """Cases of the last states alone."""
    for mask in ("", "lengths reset", "packed reset"):
        for cell, dtype in itertools.product(cells.CELLS, DTYPES):
            case = Stacked(cell=cell, mask=mask, chunk_size=3, num_layers=3, dtype=dtype)
            yield from (case, replace(case, num_layers=1, reverse=True, noise="eps"))


def main() -> None:
    """Runs all combinations, and some with a second stream during persistent kernels."""
    library, every = sys.argv[1], int(sys.argv[2])
    torch.ops.load_library(library)
    _library.operators = operators = torch.ops.fusedrnn_emulated
    tuning._matters = lambda input: True
    fusedrnn.set_chunk_replay(True)
    cases = [
        replace(shape, dtype=dtype, **options)
        for shape in SHAPES
        for options in ALL_OPTIONS
        for dtype in DTYPES
    ]
    for case in cases[::every]:
        call(case)
    for stack in [*stacked()][::every]:
        in_parts(stack, stack.tensors(), tuning=_helpers.TUNING["replay"])
    launches, replays, *_ = operators.counts()
    tuning.switches.overlap_chunks = True
    for order in (0, 1):
        operators.control(False, "", multiprocessors=132, streams_order=order)
        for cell, dtype in [*itertools.product(("gru", "lstm", "stochastic_gru"), DTYPES)][::every]:
            call(replace(SHAPES[0], cell=cell, dtype=dtype))
    print(f"{launches} launches, {replays} replays, {operators.counts()[4]} second streams")


if __name__ == "__main__":
    main()
