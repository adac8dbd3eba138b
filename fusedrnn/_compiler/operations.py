"""Every operation that programs know, in one place; an elementwise one has a row.

What a flag claims is checked by numbers in tests/compiler/test_operation_table.py. A flag that is
not given is the cautious answer: then more steps are taken in Python, or get a library of their
own, and none becomes wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._front.flat_step import joined, kept, rounded, stop
from .columns import packets

aten = torch.ops.aten


@dataclass(frozen=True)
class Operation:
    """One elementwise operation of ATen."""

    name: str
    """With an overload, if that has claims of its own."""
    cpp: str = ""
    """The operands are {0}, {1}, ..., and as masks {m0}, {m1}, ...; A(...) makes an expression one
    number. Empty for what :mod:`.emit` prints by its options, and for what is whole."""
    whole: bool = False
    """Stays whole until its derivative is taken: torch's own derivative is right where that of its
    parts is not, at limits and where a part overflows. Its parts are in :mod:`.decompositions`."""
    mask: bool = False
    """The result is a mask."""
    costly: bool = False
    """Computed once and handed on to other stages; others are computed wherever they are read.
    What a costly operation makes is equal to something else by chance alone."""
    jumps: bool = False
    """The result jumps where an operand changes a little, so a library may choose otherwise than
    its program in the last bit. Libraries are compared more strictly without it."""
    smooth: bool = False
    """Results and derivatives change little where operands do, so backward may see a difference
    where forward had none."""
    kinks_at_numbers: bool = False
    """Jumps, kinks and poles are at a few fixed numbers of one operand, and never just where two
    operands meet."""
    pole: bool = False
    """Smooth but for a pole at 0."""
    apart: bool = False
    """Not near 0 where its operands are near each other, or where it has one that is near 1."""
    bounded: bool = False
    """The derivative is finite where operands are."""

    @property
    def meets(self) -> bool:
        """Whether it may jump, or have a kink, where two operands meet."""
        return not (self.smooth or self.pole or self.kinks_at_numbers)

    @property
    def target(self) -> Any:
        """None if this version of torch does not have it."""
        packet, _, overload = self.name.partition(".")
        found = getattr(aten, packet, None)
        return getattr(found, overload, None) if overload else found


_SELECT = "math::select({m0}, A({1}), A({2}))"
_IS_INF = "math::abs(A({0})) == number<A>(HUGE_VAL)"
_XLOGY = "math::select(A({0}) == A{{}}, A{{}}, A(A({0}) * math::log(A({1}))))"
_OF_MASKS = {
    "and": "mask_and({m0}, {m1})",
    "or": "mask_or({m0}, {m1})",
    "xor": "mask_and(mask_or({m0}, {m1}), mask_not(mask_and({m0}, {m1})))",
    "not": "mask_not({m0})",
}

OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "arithmetic": (
        Operation("add", smooth=True, bounded=True),
        Operation("sub", smooth=True, bounded=True),
        Operation("rsub", smooth=True, bounded=True),
        Operation("mul", "{0} * {1}", smooth=True, apart=True, bounded=True),
        Operation("div", costly=True, kinks_at_numbers=True, apart=True),
        Operation("neg", "-{0}", smooth=True, apart=True, bounded=True),
        Operation("abs", "math::abs(A({0}))", kinks_at_numbers=True, bounded=True),
        Operation("reciprocal", "1.0f / {0}", costly=True, pole=True, apart=True),
        Operation("square", "{0} * {0}", smooth=True, apart=True, bounded=True),
        Operation("pow", costly=True, kinks_at_numbers=True, apart=True),
        Operation("sqrt", "math::sqrt(A({0}))", costly=True, pole=True, apart=True),
        Operation("rsqrt", "math::rsqrt(A({0}))", costly=True, pole=True, apart=True),
        Operation("hypot", "math::hypot(A({0}), A({1}))", costly=True, apart=True),
        Operation("fmod", "math::fmod(A({0}), A({1}))", costly=True, jumps=True),
        Operation("remainder", whole=True, costly=True),
    ),
    "comparisons": (
        Operation("eq", "A({0}) == A({1})", mask=True, jumps=True, bounded=True),
        Operation("ne", "A({0}) != A({1})", mask=True, jumps=True, bounded=True),
        Operation("lt", "A({0}) < A({1})", mask=True, jumps=True, bounded=True),
        Operation("le", "A({0}) <= A({1})", mask=True, jumps=True, bounded=True),
        Operation("gt", "A({0}) > A({1})", mask=True, jumps=True, bounded=True),
        Operation("ge", "A({0}) >= A({1})", mask=True, jumps=True, bounded=True),
        Operation("isnan", "A({0}) != A({0})", mask=True, smooth=True, apart=True, bounded=True),
        Operation("isinf", _IS_INF, mask=True, smooth=True, apart=True, bounded=True),
    ),
    "choices": (
        Operation("where", _SELECT, smooth=True, apart=True, bounded=True),
        Operation("minimum", "math::min2(A({0}), A({1}))", bounded=True),
        Operation("maximum", "math::max2(A({0}), A({1}))", bounded=True),
        Operation("clamp", kinks_at_numbers=True, apart=True, bounded=True),
        Operation("clamp_min", kinks_at_numbers=True, apart=True, bounded=True),
        Operation("clamp_max", kinks_at_numbers=True, apart=True, bounded=True),
        Operation("clamp.Tensor", bounded=True),
        Operation("clamp_min.Tensor", bounded=True),
        Operation("clamp_max.Tensor", bounded=True),
    ),
    "flags": (
        *(
            Operation(f"{kind}_{name}", cpp, mask=True, smooth=True, apart=True, bounded=True)
            for kind in ("logical", "bitwise")
            for name, cpp in _OF_MASKS.items()
        ),
    ),
    "rounding": (
        Operation("floor", "math::floor(A({0}))", jumps=True, bounded=True),
        Operation("ceil", "math::ceil(A({0}))", jumps=True, bounded=True),
        Operation("round", "math::round(A({0}))", jumps=True, bounded=True),
        Operation("trunc", "math::trunc(A({0}))", jumps=True, bounded=True),
        Operation("frac", "{0} - math::trunc(A({0}))", jumps=True, bounded=True),
        Operation("sign", "math::sign(A({0}))", jumps=True, bounded=True),
        Operation("sgn", "math::sign(A({0}))", jumps=True, bounded=True),
    ),
    "functions": (
        Operation("exp", "math::exp(A({0}))", costly=True, smooth=True, apart=True),
        Operation("expm1", "math::expm1(A({0}))", costly=True, smooth=True, apart=True),
        Operation("exp2", "math::exp2(A({0}))", costly=True, smooth=True, apart=True),
        Operation("log", "math::log(A({0}))", costly=True, pole=True),
        Operation("log2", "math::log2(A({0}))", costly=True, pole=True),
        Operation("log10", "math::log10(A({0}))", costly=True, pole=True),
        Operation("log1p", "math::log1p(A({0}))", costly=True, kinks_at_numbers=True),
        Operation("xlogy", _XLOGY, whole=True, costly=True, kinks_at_numbers=True, apart=True),
        Operation("sin", "math::sin(A({0}))", costly=True, smooth=True, apart=True, bounded=True),
        Operation("cos", "math::cos(A({0}))", costly=True, smooth=True, apart=True, bounded=True),
        Operation("tan", whole=True, costly=True, kinks_at_numbers=True),
        Operation("asin", "math::asin(A({0}))", costly=True),
        Operation("acos", "math::acos(A({0}))", costly=True),
        Operation("atan", "math::atan(A({0}))", costly=True, smooth=True, apart=True, bounded=True),
        Operation("atan2", "math::atan2(A({0}), A({1}))", costly=True),
        Operation("sinh", "math::sinh(A({0}))", costly=True, smooth=True, apart=True),
        Operation("cosh", "math::cosh(A({0}))", costly=True, smooth=True, apart=True),
        Operation("sinc", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("erf", "math::erf(A({0}))", costly=True, smooth=True, apart=True, bounded=True),
    ),
    "activations": (
        Operation("sigmoid", costly=True, smooth=True, apart=True, bounded=True),
        Operation("tanh", costly=True, smooth=True, apart=True, bounded=True),
        Operation("relu", "math::max(A({0}), 0.0f)", kinks_at_numbers=True, bounded=True),
        Operation("leaky_relu", whole=True, costly=True, kinks_at_numbers=True),
        Operation("elu", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("celu", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("silu", whole=True, costly=True, smooth=True, apart=True, bounded=True),
        Operation("gelu", whole=True, costly=True, smooth=True, apart=True, bounded=True),
        Operation("softplus", whole=True, costly=True, smooth=True, apart=True, bounded=True),
        Operation("hardtanh", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("hardsigmoid", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("hardswish", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("softshrink", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("hardshrink", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
        Operation("threshold", whole=True, costly=True, kinks_at_numbers=True, bounded=True),
    ),
    "losses": (
        Operation("mse_loss", whole=True, costly=True, smooth=True, bounded=True),
        Operation("smooth_l1_loss", whole=True, costly=True, bounded=True),
        Operation("huber_loss", whole=True, costly=True, bounded=True),
    ),
}
"""The rows, by what docs/your-own-cell.md calls them."""

_COPY = Operation("", smooth=True, apart=True, bounded=True)
_ROWS = {row.target: row for rows in OPERATIONS.values() for row in rows if row.target is not None}
POINTWISE = frozenset(_ROWS)
_ROWS |= dict.fromkeys((aten.clone, aten.detach, aten._to_copy, kept, rounded, stop), _COPY)
_ROWS[joined] = _ROWS[aten.add]
_ROWS |= {
    # What derivatives consist of besides.
    aten.sigmoid_backward: Operation("sigmoid_backward"),
    aten.tanh_backward: Operation("tanh_backward"),
}
_UNKNOWN = Operation("")


def of(target: Any) -> Operation:
    """The row of an operation, or of all its overloads; one without claims, if there is none."""
    return _ROWS.get(target) or _ROWS.get(getattr(target, "overloadpacket", None), _UNKNOWN)


OWN = frozenset((joined, kept, rounded, stop))
"""What this package says about numbers to later passes."""
WHOLE = frozenset(target for target, row in _ROWS.items() if row.whole)
COMPARISONS = frozenset(target for target, row in _ROWS.items() if row.mask and row.jumps)

# What is not elementwise.

MOVES = packets(
    """
    view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select cat
    stack split split_with_sizes unbind flip roll clone alias lift_fresh lift_fresh_copy
    contiguous chunk unsafe_split unsafe_chunk unsafe_split_with_sizes expand_copy view_copy
    slice_copy select_copy permute_copy transpose_copy t_copy unsqueeze_copy squeeze_copy
    split_copy split_with_sizes_copy unbind_copy alias_copy repeat index index_select movedim
    narrow unfold diagonal diagonal_copy unfold_copy repeat_interleave tile
    copy slice_scatter select_scatter diagonal_scatter index_put
    """
)
"""They only move numbers."""
SHAPES = packets("expand view _unsafe_view reshape sum_to_size")
"""Of single numbers they change nothing."""
COPIES = packets("clone detach alias lift_fresh lift_fresh_copy expand view _unsafe_view")
REDUCTIONS = {
    aten.sum: "sum",
    aten.mean: "mean",
    aten.amax: "max",
    aten.amin: "min",
    aten.argmax: "argmax",
    aten.argmin: "argmin",
    aten.max: "max with place",
    aten.min: "min with place",
    aten.any: "any",
    aten.all: "all",
}
FULL = packets("full full_like scalar_tensor")
ZEROS = packets("zeros_like zeros new_zeros")
ONES = packets("ones_like ones new_ones")
EMPTY = packets("empty_permuted")
"""It is there for its shape, and full_like gives it a number."""
FILLED = FULL | ZEROS | ONES | packets("new_full arange eye")
"""Of an input they read only the shape."""
