"""Small calls of one kind of kernel, for compute-sanitizer: ``python -m bench.sanitize KIND``.

One kind per process, because the sanitizer itself may end with a process, and then says nothing
about what would have come after.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils import _pytree as pytree

from docs.examples.published_cells import CASES
from fusedrnn import GRU, LSTM, Recurrent, StochasticGRU, set_chunk_replay
from fusedrnn import _tuning as tuning

from .any_cell_steps import Size, start_of
from .parts import KINDS, PROGRAM_DTYPES, PROGRAMS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PERSISTENT_DTYPES = (torch.bfloat16, torch.float32)  # float32 by products rounded to TF32
# T, B, I, H, Z: odd widths with replayed chunks and a shorter one; the smallest sizes; and widths
# of whole packets, so that persistent kernels exchange through the gradient.
SHAPES = ((17, 3, 5, 9, 3), (1, 1, 1, 1, 1))
IN_PLACE = (17, 3, 8, 16, 8)
CHUNK_SIZE = 3
NOISE = ("drawn", "given", "none")
# Whether blocks exchange by flags, and whether there is a second stream.
WAYS = ((False, False), (True, False), (False, True))
PROGRAM_SIZE = Size(17, 3, 8)

Call = Callable[[], None]


def stochastic(
    shape: tuple[int, ...], dtype: torch.dtype, recompute: bool, noise: str, backend: str
) -> None:
    """Runs forward and backward with all gradients."""
    seq_len, batch, input_size, hidden_size, latent_size = shape
    options = {"recompute": recompute, "chunk_size": CHUNK_SIZE, "backend": backend}
    rnn = StochasticGRU(input_size, hidden_size, latent_size, **options).to("cuda", dtype)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(dtype).requires_grad_()

    inputs = [random(seq_len, batch, input_size), random(1, batch, hidden_size)]
    eps = random(1, seq_len, batch, latent_size) if noise == "given" else None
    output, h_n = rnn(*inputs, eps=eps, sample=noise != "none")
    (output.sum() + h_n.sum()).backward()
    given = [*inputs, *rnn.parameters(), *([] if eps is None else [eps])]
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in given)


def masked(
    cls: type[GRU | LSTM],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    recompute: bool,
    backend: str,
) -> None:
    """Runs two layers and directions with lengths, resets, dropout and zoneout."""
    seq_len, batch, input_size, hidden_size, _ = shape
    options = {"recompute": recompute, "chunk_size": CHUNK_SIZE, "backend": backend}
    options |= {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "zoneout": 0.2}
    rnn = cls(input_size, hidden_size, **options).to("cuda", dtype)
    input = torch.randn(seq_len, batch, input_size, device="cuda").to(dtype).requires_grad_()
    reset = torch.rand(seq_len, batch, device="cuda") < 0.2
    for lengths in (None, [seq_len, 4, 9]):
        rnn(input, reset=reset, lengths=lengths)[0].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (input, *rnn.parameters()))


def program(name: str, dtype: torch.dtype, recompute: bool) -> None:
    """Runs a compiled cell with lengths and resets."""
    case = next(case for case in CASES if case.name == name)
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


def product(by: str) -> None:
    """Reads one product in bfloat16 with operands aligned to 16 bytes, and sums of float.

    By torch it has nothing of this package in it: what initcheck reports of that is its own.
    """
    if by == "a layer":
        stochastic(IN_PLACE, torch.bfloat16, True, "none", "stepwise")
        return
    torch.backends.cuda.preferred_blas_library("cublaslt")
    a, b = torch.randn(2, 16, 16, device="cuda").to(torch.bfloat16)
    out = torch.mm(a[:3], b) if by == "torch" else torch.mm(a[:3], b, out_dtype=torch.float32)
    assert out.add(1).isfinite().all()


def exchanging(call: Call, by_flags: bool, overlap: bool) -> None:
    """Runs a call of persistent kernels with this way of exchange and number of streams."""
    tuning.switches.exchange_by_flags = by_flags
    tuning.switches.overlap_chunks = overlap
    call()


def calls_of(kind: str) -> dict[str, Call]:
    """The calls of a kind, by what is said before each of them."""
    both = (True, False)
    found: dict[str, Call] = {}

    def add(call: Callable[..., None], *arguments: Sequence[object]) -> None:
        for of_call in itertools.product(*arguments):
            found[f"{call.__name__} {', '.join(map(_name, of_call))}"] = partial(call, *of_call)

    if kind == "stepwise":
        add(stochastic, SHAPES, DTYPES, both, NOISE, ["stepwise"])
        add(masked, [GRU, LSTM], SHAPES[:1], DTYPES, both, ["stepwise"])
    elif kind == "product":
        add(product, ["torch", "torch, into float", "a layer"])
    elif kind.startswith("persistent"):
        shapes, backend = [SHAPES[0], IN_PLACE], ["persistent"]
        if kind == "persistent_stochastic_gru":
            add(stochastic, shapes, PERSISTENT_DTYPES, both, NOISE, backend)
        else:
            cls = GRU if kind == "persistent_gru" else LSTM
            add(masked, [cls], shapes, PERSISTENT_DTYPES, both, backend)
        found = {
            f"{said}, flags {by_flags}, second stream {overlap}": partial(
                exchanging, call, by_flags, overlap
            )
            for by_flags, overlap in WAYS
            for said, call in found.items()
        }
        # In these racecheck ends with an error of its own, in what cuBLASLt launches.
        late = f"{IN_PLACE}, {torch.bfloat16}"
        found = dict(sorted(found.items(), key=lambda of_call: late in of_call[0]))
    else:
        name, dtype = kind.rsplit("_", 1)
        assert name in PROGRAMS and dtype in PROGRAM_DTYPES
        add(program, [name], [getattr(torch, dtype)], both)
    return found


def _name(argument: object) -> str:
    return getattr(argument, "__name__", str(argument))


def main() -> None:
    """Runs all calls of a kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args().kind
    torch.manual_seed(0)
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    set_chunk_replay(True)
    calls = calls_of(kind)
    for said, call in calls.items():
        print(said, flush=True)  # what the sanitizer says next is about this one
        call()
        torch.cuda.synchronize()
    print(f"{len(calls)} calls", flush=True)


if __name__ == "__main__":
    main()
