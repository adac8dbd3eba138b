"""Sizes at which persistent kernels are claimed to be fast; tests compare values there.

On a GPU they are the claimed sizes, and ragged sizes near these, over fewer steps. The emulation
has small sizes whose warps hold as many blocks of weights, and whose groups have several tiles if
the claimed ones do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case, variants

import fusedrnn

CELLS = variants(proj_size=5)
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
TILE_ROWS, BLOCK_UNITS = 8, 16


@dataclass(frozen=True)
class SpeedSize:
    """A case for persistent kernels in both passes, of float32 through TF32."""

    cell: int
    """Which of CELLS."""
    case: Case
    depth: int
    """Blocks of weights of each warp: 1, 2 or 4, each with a kernel of its own."""
    tiles: int
    """Of rows, that a group of blocks goes through in each step: at least so many."""
    multiprocessors: int = 132
    """Of the GPU: fewer make groups with more tiles."""

    def __str__(self) -> str:
        return f"{self.case},depth={self.depth},tiles={self.tiles}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """The dtype, depth and number of tiles; the emulation tests one size of each kind."""
        return self.cell, self.case.dtype is FLOAT, self.depth, self.tiles > 1

    def small(self) -> SpeedSize:
        """A smaller case of the same kind for the emulation, with two chunks."""
        columns = 128 if self.case.dtype is FLOAT else 256  # the columns of depth 1
        width = {1: 40, 2: columns + 8, 4: 2 * columns + 8}[self.depth]
        width -= 3 if self.case.hidden_size % 8 else 0
        case = sized(self.case, 11 if self.tiles > 1 else 5, width)
        case = replace(case, seq_len=3, chunk_size=2, input_size=5)
        tiles = -(-case.batch // TILE_ROWS)
        multiprocessors = blocks_of(case) if tiles > 1 else 132
        return SpeedSize(self.cell, case, self.depth, tiles, multiprocessors)


def blocks_of(case: Case) -> int:
    """The number of blocks of a group; each block has 16 units."""
    return -(-case.hidden_size // BLOCK_UNITS)


def sized(case: Case, batch: int, width: int) -> Case:
    """A case whose other sizes follow from the width; ragged ones differ between projections."""
    return replace(
        case,
        batch=batch,
        hidden_size=width,
        latent_size=width // 2 + 3 if width % 8 else width,
        proj_size=width // 2 if case.proj_size else 0,
        input_size=19 if width % 8 else width,
    )


@contextmanager
def tf32_allowed() -> Iterator[None]:
    """Allows TF32 for products of float32, as by default."""
    before = torch.backends.cudnn.rnn.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.rnn.fp32_precision = before


def planned(size: SpeedSize, gpu: str) -> tuple[fusedrnn.Plan, int, int]:
    """A plan, and its kernel's depth and tiles."""
    case = size.case
    options = {"cell": case.cell, "hidden_size": case.hidden_size, "input_size": case.input_size}
    options |= {"chunk_size": case.chunk_size, "backend": "persistent"}
    options |= {"latent_size": case.latent_size} if case.cell == "stochastic_gru" else {}
    options |= {"proj_size": case.proj_size} if case.proj_size else {}
    shape = (case.seq_len, case.batch, case.input_size)
    with tf32_allowed():
        plan = fusedrnn.plan(options, shape, case.dtype, gpu, sample=case.noise != "none")
    gates = {"gru": 3, "lstm": 4, "stochastic_gru": 5}[case.cell]
    gates += (case.proj_size > 0) - (case.noise == "none")
    groups = plan.forward.grid // blocks_of(case)
    tiles = -(-case.batch // TILE_ROWS)
    return plan, plan.forward.weight_registers // (8 * gates), -(-tiles // groups)


# dtype, batch, width, depth, tiles: the targets of docs/gpu-evidence.md, and ragged sizes. The
# emulation takes the first size of each kind.
SIZES = [
    (BF16, 16, 256, 1, 1),
    (BF16, 64, 256, 1, 1),
    (BF16, 13, 250, 1, 1),
    (HALF, 131, 250, 1, 2),
    (BF16, 131, 250, 1, 2),
    (HALF, 13, 509, 2, 1),
    (BF16, 13, 500, 2, 1),
    (BF16, 64, 512, 2, 2),
    (HALF, 61, 500, 2, 2),
    (BF16, 61, 509, 2, 2),
    (HALF, 16, 768, 4, 1),
    (BF16, 16, 768, 4, 1),
    (BF16, 5, 1001, 4, 1),
    (BF16, 131, 1001, 4, 8),
    (HALF, 61, 1001, 4, 4),
    (BF16, 32, 1024, 4, 2),
    (BF16, 128, 1024, 4, 8),
    # in float32 the same depth takes half the width
    (FLOAT, 16, 128, 1, 1),
    (FLOAT, 261, 125, 1, 2),
    (FLOAT, 13, 250, 2, 1),
    (FLOAT, 16, 256, 2, 1),
    (FLOAT, 64, 256, 2, 1),
    (FLOAT, 128, 256, 2, 2),
    (FLOAT, 5, 509, 4, 1),
    (FLOAT, 64, 512, 4, 2),
    (FLOAT, 61, 500, 4, 2),
]
LONG = Case(seq_len=21, chunk_size=5)  # enough chunks for some to be replayed
SPEED_SIZES = [
    SpeedSize(i, sized(replace(LONG, dtype=dtype, **cell), batch, width), depth, tiles)
    for dtype, batch, width, depth, tiles in SIZES
    for i, cell in enumerate(CELLS)
]
_first_of = {size.kind: size for size in reversed(SPEED_SIZES)}
SMALL_SIZES = [size.small() for size in SPEED_SIZES if size is _first_of[size.kind]]
