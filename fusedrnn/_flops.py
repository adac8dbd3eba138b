"""What torch's FlopCounterMode counts for the operators: matrix products, as it does for mm.

Backward counts what it recomputes, too. A formula is told shapes alone, so that with ``lengths``
the rows count that are padding; those of a packed batch are no more than there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from torch.utils.flop_counter import register_flop_formula

from . import _library
from ._ops import NEEDS_FIRST_WEIGHT, NEEDS_INPUT
from .cells import CELL_NAMES, CELLS

Shape = Sequence[int]


class _Product(NamedTuple):
    """The product of rows with a weight matrix."""

    name: str
    place: int
    """The number of the matrix among all weights."""
    flops: int
    """Of all rows; each of the products with gradients in backward takes as many."""


def _products(
    cell: int, rows: int, weights: Sequence[Shape], layers: int, has_noise: bool
) -> Iterator[_Product]:
    """Of all layers, or of all directions of one."""
    names = [name for name, _ in CELLS[CELL_NAMES[cell]].weights] * layers
    matrices = [(place, shape) for place, shape in enumerate(weights) if len(shape) == 2]
    for name, (place, shape) in zip(names, matrices, strict=True):
        # Without noise nothing reads the second half of what weight_hz makes, the log-variances.
        halves = 2 if name == "weight_hz" and not has_noise else 1
        yield _Product(name, place, 2 * rows * prod(shape) // halves)


def _of_backward(
    products: Sequence[_Product], needs_input: bool, needs_weights: Sequence[bool], saved: bool
) -> int:
    flops = 0
    for product in products:
        is_recomputed = not saved and product.name != "weight_hr"  # what that makes is the output
        is_of_input = product.name == "weight_ih"
        times = is_recomputed + needs_weights[product.place] + (needs_input or not is_of_input)
        flops += times * product.flops
    return flops


def _rows(input: Shape) -> int:
    return prod(input[:-1])


def _forward(
    cell: int,
    input: Shape,
    hx: Shape,
    cx: Shape | None,
    weights: Sequence[Shape],
    *,
    eps: Shape | None = None,
    seed: Shape | None = None,
    **_: Any,
) -> int:
    has_noise = eps is not None or seed is not None
    return sum(p.flops for p in _products(cell, _rows(input), weights, hx[0], has_noise))


def _step(
    cell: int,
    input: Shape,
    hx: Shape | None,
    cx: Shape | None,
    weights: Sequence[Shape],
    *,
    eps: Shape | None = None,
    seed: Shape | None = None,
    **_: Any,
) -> int:
    has_noise = eps is not None or seed is not None
    return sum(p.flops for p in _products(cell, _rows(input), weights, 1, has_noise))


def _step_backward(
    grad_h: Shape | None,
    grad_c: Shape | None,
    cell: int,
    input: Shape,
    hx: Shape | None,
    cx: Shape | None,
    weights: Sequence[Shape],
    *,
    needs: int,
    eps: Shape | None = None,
    seed: Shape | None = None,
    **_: Any,
) -> int:
    has_noise = eps is not None or seed is not None
    products = [*_products(cell, _rows(input), weights, 1, has_noise)]
    needs_weights = [bool(needs & NEEDS_FIRST_WEIGHT << i) for i in range(len(weights))]
    return _of_backward(products, bool(needs & NEEDS_INPUT), needs_weights, saved=False)


def _backward(
    grad_output: Shape | None,
    grad_h_n: Shape | None,
    grad_c_n: Shape | None,
    cell: int,
    input: Shape,
    hx: Shape,
    cx: Shape | None,
    weights: Sequence[Shape],
    *,
    needs: int,
    eps: Shape | None = None,
    seed: Shape | None = None,
    saved_gates: Shape | None = None,
    **_: Any,
) -> int:
    has_noise = eps is not None or seed is not None
    products = [*_products(cell, _rows(input), weights, hx[0], has_noise)]
    needs_weights = [bool(needs & NEEDS_FIRST_WEIGHT << i) for i in range(len(weights))]
    return _of_backward(products, bool(needs & NEEDS_INPUT), needs_weights, saved_gates is not None)


def _last_states_backward(
    grad_h_n: Shape | None,
    grad_c_n: Shape | None,
    cell: int,
    input: Shape,
    hx: Shape,
    cx: Shape | None,
    weights: Sequence[Shape],
    *,
    needs: Sequence[bool],
    eps: Shape | None = None,
    seed: Shape | None = None,
    **_: Any,
) -> int:
    has_noise, layers = eps is not None or seed is not None, hx[0]
    products = [*_products(cell, _rows(input), weights, layers, has_noise)]
    flops = sum(p.flops for p in products)  # forward runs again
    of_each, (needs_input, *others), needs_weights = len(weights) // layers, needs[:4], needs[4:]
    lowest = 0
    if not needs_input and not any(others):
        lowest = [*needs_weights, True].index(True) // of_each
    for layer in range(lowest, layers):
        of_layer = [p for p in products if p.place // of_each == layer]
        reads_gradients = needs_input if layer == 0 else layer > lowest
        flops += _of_backward(of_layer, reads_gradients, needs_weights, saved=False)
    return flops


register_flop_formula(_library.operators.forward)(_forward)
register_flop_formula(_library.operators.last_states)(_forward)
register_flop_formula(_library.operators.step)(_step)
register_flop_formula(_library.operators.step_backward)(_step_backward)
register_flop_formula(_library.operators.backward)(_backward)
register_flop_formula(_library.operators.last_states_backward)(_last_states_backward)
