"""What torch's FlopCounterMode counts for the operators: matrix products, as it does for mm.

Backward counts what it recomputes, too. A formula is told shapes alone, so that with ``lengths``
the rows count that are padding; those of a packed batch are no more than there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch.utils.flop_counter import register_flop_formula

from . import _library
from ._cells import CELL_NAMES, CELLS
from ._ops import NEEDS_FIRST_WEIGHT, NEEDS_INPUT


class _Product(NamedTuple):
    """The product of rows with a weight matrix."""

    name: str
    place: int
    """The number of the matrix among all weights."""
    flops: int
    """Of all rows; each of the products with gradients in backward takes as many."""


def _products(
    arguments: Sequence[Any], named: Mapping[str, Any], layers: int | None = None
) -> list[_Product]:
    """Of all layers, or of all directions of one.

    Args:
        arguments: What all operators get, maybe behind gradients.
        layers: How many, where the state does not tell.
    """
    cell, input, hx, _, weights = arguments[-5:]
    has_noise = named.get("eps") is not None or named.get("seed") is not None
    names = [name for name, _ in CELLS[CELL_NAMES[cell]].weights]
    names *= hx[0] if layers is None else layers
    matrices = [(place, shape) for place, shape in enumerate(weights) if len(shape) == 2]
    found = []
    for name, (place, shape) in zip(names, matrices, strict=True):
        # Without noise nothing reads the second half of what weight_hz makes, the log-variances.
        halves = 2 if name == "weight_hz" and not has_noise else 1
        found.append(_Product(name, place, 2 * prod(input[:-1]) * prod(shape) // halves))
    return found


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


def _forward(*arguments: Any, **named: Any) -> int:
    return sum(p.flops for p in _products(arguments, named))


def _step(*arguments: Any, **named: Any) -> int:
    return sum(p.flops for p in _products(arguments, named, layers=1))


def _step_backward(*arguments: Any, needs: int, **named: Any) -> int:
    products = _products(arguments, named, layers=1)
    return _of_backward(products, *_needed(needs, arguments), saved=False)


def _backward(*arguments: Any, needs: int, saved_gates: Any = None, **named: Any) -> int:
    products = _products(arguments, named)
    return _of_backward(products, *_needed(needs, arguments), saved=saved_gates is not None)


def _needed(needs: int, arguments: Sequence[Any]) -> tuple[bool, list[bool]]:
    """Whether the gradient of the input is needed, and of each weight."""
    of_weights = [bool(needs & NEEDS_FIRST_WEIGHT << i) for i in range(len(arguments[-1]))]
    return bool(needs & NEEDS_INPUT), of_weights


def _last_states_backward(*arguments: Any, needs: Sequence[bool], **named: Any) -> int:
    _, _, hx, _, weights = arguments[-5:]
    layers, products = hx[0], _products(arguments, named)
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
