"""Small calls of every kind, for compute-sanitizer to watch: ``python -m bench.sanitize``."""

from __future__ import annotations

import itertools

import torch
from torch.utils import _pytree as pytree

from docs.examples.published_cells import CASES, Case
from fusedrnn import GRU, LSTM, Recurrent, StochasticGRU, set_chunk_replay, tuning

from .any_cell_steps import Size, start_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# T, B, I, H, Z: odd widths with replayed chunks and a shorter one; and the smallest sizes.
SHAPES = ((17, 3, 5, 9, 3), (1, 1, 1, 1, 1))
# Widths of whole packets, so that persistent kernels exchange through the gradient.
IN_PLACE = (17, 3, 8, 16, 8)
CHUNK_SIZE = 3
NOISE = ("drawn", "given", "none")
# Compiled cells, with products, sums of rows, draws and vectors between them.
PROGRAMS = ("ForumCell", "LateResetGRU", "DreamerV3")
PROGRAM_DTYPES = (torch.float32, torch.bfloat16)
PROGRAM_SIZE = Size(17, 3, 8)


def call(shape: tuple[int, ...], dtype: torch.dtype, recompute: bool, noise: str) -> None:
    """Runs forward and backward with all gradients."""
    seq_len, batch, input_size, hidden_size, latent_size = shape
    rnn = StochasticGRU(
        input_size, hidden_size, latent_size, recompute=recompute, chunk_size=CHUNK_SIZE
    ).to("cuda", dtype)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(dtype).requires_grad_()

    inputs = [random(seq_len, batch, input_size), random(1, batch, hidden_size)]
    eps = random(1, seq_len, batch, latent_size) if noise == "given" else None
    output, h_n = rnn(*inputs, eps=eps, sample=noise != "none")
    (output.sum() + h_n.sum()).backward()
    given = [*inputs, *rnn.parameters(), *([] if eps is None else [eps])]
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in given)


def call_masked(cls: type[GRU | LSTM], dtype: torch.dtype, recompute: bool) -> None:
    """Runs two layers and directions with lengths, resets, dropout and zoneout."""
    seq_len, batch, input_size, hidden_size, _ = SHAPES[0]
    rnn = cls(
        input_size,
        hidden_size,
        num_layers=2,
        bidirectional=True,
        dropout=0.3,
        zoneout=0.2,
        recompute=recompute,
        chunk_size=CHUNK_SIZE,
    ).to("cuda", dtype)
    input = torch.randn(seq_len, batch, input_size, device="cuda").to(dtype).requires_grad_()
    reset = torch.rand(seq_len, batch, device="cuda") < 0.2
    for lengths in (None, [seq_len, 4, 9]):
        rnn(input, reset=reset, lengths=lengths)[0].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (input, *rnn.parameters()))


def call_program(case: Case, dtype: torch.dtype, recompute: bool) -> None:
    """Runs a compiled cell with lengths and resets."""
    seq_len, batch, width = PROGRAM_SIZE.seq_len, PROGRAM_SIZE.batch, PROGRAM_SIZE.width
    cell = case.cell(width, batch, dtype, "cuda")
    rnn = Recurrent(cell, compile="require", recompute=recompute, chunk_size=CHUNK_SIZE)
    inputs = case.inputs(seq_len, batch, width, dtype, "cuda")
    state = pytree.tree_map(lambda leaf: leaf.to(dtype), start_of(cell, PROGRAM_SIZE, "cuda"))
    reset = torch.rand(seq_len, batch, device="cuda") < 0.2
    output, _ = rnn(inputs, state, [seq_len, 4, 9], reset)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    assert all(weight.grad.isfinite().all() for weight in cell.parameters())


def main() -> None:
    """Runs all combinations."""
    torch.manual_seed(0)
    set_chunk_replay(True)
    calls = list(itertools.product(SHAPES, DTYPES, (True, False), NOISE))
    for arguments in calls:
        call(*arguments)
    masked_calls = list(itertools.product((GRU, LSTM), DTYPES, (True, False)))
    for masked in masked_calls:
        call_masked(*masked)
    programs = [case for case in CASES if case.name in PROGRAMS]
    program_calls = list(itertools.product(programs, PROGRAM_DTYPES, (True, False)))
    for program in program_calls:
        call_program(*program)
    packet_calls = list(itertools.product((torch.bfloat16,), (True, False), NOISE))
    for overlap in (False, True):
        tuning.switches.overlap_chunks = overlap
        for arguments in packet_calls:
            call(IN_PLACE, *arguments)
    torch.cuda.synchronize()
    count = len(calls) + len(masked_calls) + len(program_calls) + 2 * len(packet_calls)
    print(f"{count} calls", flush=True)


if __name__ == "__main__":
    main()
