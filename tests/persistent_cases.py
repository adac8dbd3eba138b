"""Cases for persistent kernels, in the emulation and on a GPU."""

from dataclasses import replace

import torch
from cases import MASKED, Case
from checks import with_bits
from speed_sizes import CELLS

import fusedrnn

BASE = Case(seq_len=6, batch=11, hidden_size=37, latent_size=21, dtype=torch.bfloat16)
SHAPES = [
    replace(BASE, seq_len=1, batch=1, input_size=1, hidden_size=1, latent_size=1),
    replace(BASE, seq_len=1, batch=9, chunk_size=1),
    replace(BASE, seq_len=7, chunk_size=3, **MASKED),
    replace(BASE, seq_len=4, bias=False, chunk_size=1, **MASKED),
    replace(BASE, dtype=torch.float16, chunk_size=4, **MASKED),
    replace(BASE, hidden_size=16, latent_size=33, batch=8),  # a block has 16 units
    replace(BASE, hidden_size=40, latent_size=7, batch=17, num_layers=2, lengths=True),
]
CASES = [replace(shape, **cell) for cell in CELLS for shape in SHAPES]
LONG = replace(BASE, seq_len=11, batch=3, chunk_size=3)

# In float32 through TF32, half as many columns take the same registers.
FLOAT = replace(BASE, dtype=torch.float32)
FLOAT_SHAPES = [
    replace(shape, dtype=torch.float32) for shape in SHAPES if shape.dtype == torch.bfloat16
]
FLOAT_CASES = [replace(shape, **cell) for cell in CELLS for shape in FLOAT_SHAPES]
FLOAT_CASES.append(replace(FLOAT, cell="gru", seq_len=2, batch=2, hidden_size=512))  # the limit

# Widths that fill whole packets: in 16 bits, blocks then exchange through the gradient arrays.
IN_PLACE = [
    cell
    | {"hidden_size": 40, "latent_size": 24}
    | ({"proj_size": 8} if "proj_size" in cell else {})
    for cell in CELLS
]


def inferred(case, device="cpu", **options):
    """Results without gradients."""
    with torch.no_grad():
        every = case.tensors(device).call(fusedrnn, **case.options, **options)
    return dict(zip(("output", "h_n", "c_n"), every, strict=False))


def spoil_input(arguments):
    """Puts NaN and infinity into the input, and a NaN of all bits into the state."""
    arguments.input[2, 1] = torch.nan
    arguments.input[1, 4, 2] = torch.inf
    with_bits(arguments.hx, 0, 3)


def spoil_gradient(arguments):
    """The same in the gradients of the results."""
    arguments.grad_output[1, 4, 2] = torch.inf
    with_bits(arguments.grad_h_n, 0, 3)
