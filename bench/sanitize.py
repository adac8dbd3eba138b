"""Small calls of every kind, for compute-sanitizer to watch: ``python -m bench.sanitize``."""

from __future__ import annotations

import itertools

import torch

from fusedrnn import GRU, LSTM, StochasticGRU, set_chunk_replay, tuning

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# T, B, I, H, Z: odd widths with replayed chunks and a shorter one; and the smallest sizes.
SHAPES = ((17, 3, 5, 9, 3), (1, 1, 1, 1, 1))
# Widths of whole packets, so that persistent kernels exchange through the gradient.
IN_PLACE = (17, 3, 8, 16, 8)
CHUNK_SIZE = 3
NOISE = ("drawn", "given", "none")


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
    packet_calls = list(itertools.product((torch.bfloat16,), (True, False), NOISE))
    for overlap in (False, True):
        tuning.switches.overlap_chunks = overlap
        for arguments in packet_calls:
            call(IN_PLACE, *arguments)
    torch.cuda.synchronize()
    print(f"{len(calls) + len(masked_calls) + 2 * len(packet_calls)} calls", flush=True)


if __name__ == "__main__":
    main()
