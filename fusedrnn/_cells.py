"""What Python knows of each cell. All of it comes from the table of cells in C++."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from . import _helpers as helpers
from ._tracers import constant_in_graphs


@dataclass(frozen=True)
class CellFacts:
    """A cell, as the operators have it."""

    index: int
    """Its number to the operators."""
    has_cell_state: bool
    """Whether it carries a cell state c from step to step besides h."""
    has_latent: bool
    """Whether it draws a latent, and so takes noise."""
    is_projected: bool
    """Whether h has fewer features than the cell state."""
    weights: tuple[tuple[str, str], ...]
    """Name of each weight matrix of a layer, and the field of Sizes that counts its columns."""


class Sizes(NamedTuple):
    """Numbers of features; ``output`` counts those of h."""

    input: int = 1
    hidden: int = 1
    latent: int = 1
    output: int = 1


CELLS = {name: CellFacts(**facts) for name, facts in helpers.CELLS.items()}
CELL_NAMES = tuple(CELLS)

# Name, offset in elements, and shape of each parameter.
Layout = tuple[tuple[str, int, tuple[int, ...]], ...]


def layout(cell: str, sizes: Sizes, num_layers: int, directions: int, bias: bool) -> Layout:
    """Name, offset in elements, and shape of each parameter in a module's flat buffer.

    Layers lie one after the other, and so do the directions of a layer. Layer k > 0 reads the
    output of all directions of layer k - 1.
    """
    return _constant_layout(cell, *sizes, num_layers, directions, bias)


@constant_in_graphs
def weights_per_direction(cell: str, bias: bool) -> int:
    """How many weights and biases a layer has in each direction."""
    return len(_layout(cell, Sizes(), 1, 1, bias))


@constant_in_graphs  # of plain numbers: torch confuses calls with named tuples
def _constant_layout(
    cell: str,
    input_size: int,
    hidden_size: int,
    latent_size: int,
    output_size: int,
    num_layers: int,
    directions: int,
    bias: bool,
) -> Layout:
    # int() turns sizes of any integer type into hashable ones.
    sizes = Sizes(int(input_size), int(hidden_size), int(latent_size), int(output_size))
    return _layout(cell, sizes, num_layers, directions, bias)


@functools.lru_cache(maxsize=256)
def _layout(cell: str, sizes: Sizes, num_layers: int, directions: int, bias: bool) -> Layout:
    parameters, offset, input_size = [], 0, sizes.input
    for layer in range(num_layers):
        # A loop in Python, because a million layers take long and Ctrl-C must end it.
        of_layer = helpers.layer_layout(
            cell, input_size, sizes.hidden, sizes.latent, sizes.output, bias
        )
        for suffix in ("", "_reverse")[:directions]:
            for name, shape in of_layer:
                parameters.append((f"{name}_l{layer}{suffix}", offset, shape))
                offset += math.prod(shape)
        input_size = directions * sizes.output
    return tuple(parameters)
