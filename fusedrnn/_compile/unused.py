"""Programs for calls in which some results have no gradient.

torch takes no derivative of a result that nobody has used. A stage multiplies the derivatives of
all its results by their gradients, and where a derivative is infinite, as that of the square root
of 0, infinity times 0 is NaN. So if the way to an unused result has an operation whose derivative
may be infinite, the call takes a program in which that result is stopped. It is built when such a
backward comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .codes import packets
from .expressions import Expression
from .lower import Lowered
from .plan import below
from .trace import Traced, stop

aten = torch.ops.aten

_BOUNDED = packets(
    """
    add sub rsub mul neg sigmoid tanh relu abs where gt lt ge le eq ne minimum maximum clamp
    clamp_min clamp_max sign sgn square sin cos logical_not logical_and logical_or logical_xor
    bitwise_not bitwise_and bitwise_or bitwise_xor erf floor ceil round trunc frac isnan isinf
    elu selu celu silu hardtanh relu6 hardsigmoid hardswish gelu softplus softshrink hardshrink
    threshold sinc smooth_l1_loss huber_loss mse_loss clone detach _to_copy
    """
)
"""Operations whose derivative is finite where their operands are."""


def lowered_without(
    traced: Traced, outputs: Sequence[bool], last: Sequence[bool]
) -> Lowered | None:
    """Expressions of a step in which results without gradient are stopped; None if none has to be.

    Args:
        outputs, last: Whether each output, and each state after the last step, has a gradient.
    """
    lowered = Lowered(traced)
    live = _live(lowered, outputs, last)
    is_any = False
    for pieces in (*lowered.outputs, *lowered.new_carries):
        for i, piece in enumerate(pieces):
            if any(map(_is_unbounded, _needed([piece], live))):
                pieces[i] = lowered.expressions.operation(
                    stop.default, piece, width=piece.width, is_mask=piece.is_mask
                )
                is_any = True
    return lowered if is_any else None


def _live(lowered: Lowered, outputs: Sequence[bool], last: Sequence[bool]) -> set[int]:
    """The expressions that get a gradient in some step: of used results, and of states that these
    depend on."""
    results = [
        *(y for y, is_used in zip(lowered.outputs, outputs, strict=True) if is_used),
        *(y for y, is_used in zip(lowered.new_carries, last, strict=True) if is_used),
    ]
    live: set[int] = set()
    while results:
        found = _needed([e for pieces in results for e in pieces], live)
        live |= set(map(id, found))
        read = {e.at[0] for e in found if e.kind == "carry"}
        results = [lowered.new_carries[j] for j in read]
    return live


def _needed(roots: Iterable[Expression], known: set[int]) -> list[Expression]:
    """Expressions that these are made of, themselves included, without the known ones."""
    found: dict[int, Expression] = {}
    left = list(roots)
    while left:
        e = left.pop()
        if id(e) not in found and id(e) not in known:
            found[id(e)] = e
            if e.packet is not stop:
                left += below(e)
    return list(found.values())


def _is_unbounded(e: Expression) -> bool:
    if e.kind != "op" or e.packet is stop or e.packet in _BOUNDED:
        return False
    if e.packet is aten.div:
        divisor = e.args[1]
        return isinstance(divisor, Expression) and divisor.kind != "constant"
    return True
