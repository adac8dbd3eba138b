"""Operations at their corners: zeros, ties, limits, infinities and NaN, against autograd.

A program is compared to its step on random numbers only, which meet none of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiler.interpreted import interpreted
from fuzz.step_words import BINARY, REDUCING, ROW_WISE, UNARY
from torch import Tensor, nn

import fusedrnn

INF, NAN = float("inf"), float("nan")
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, 0.1, -0.3, 0.3, 0.8, 0.7]
NUMBERS += [0.4, 0.25, 1.5, -1.5, 20.0, -20.0, 89.0, -104.0, 1e-5, 1e5, -1e5, 1e30, INF, -INF, NAN]
PAIRS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1e5, INF, -INF, NAN]
ROWS = [[0.0] * 3, [1.0] * 3, [2.0, 2.0, 1.0], [-1.0, 0.0, 1.0], [-0.0, 0.0, 0.0], [1.0, 1.0, -5.0]]
ROWS += [[INF, 1.0, 2.0], [-INF, 0.0, 1.0], [-INF] * 3, [NAN, 1.0, 2.0], [1e5, 1e-5, 0.0]]
KINDS = {"unary": UNARY, "binary": BINARY, "row-wise": ROW_WISE, "reducing": REDUCING}
OPERATIONS = [(kind, text) for kind, block in KINDS.items() for text in block.split()]

OTHER_AT_INFINITY = {
    'F.smooth_l1_loss({a},{b},reduction="none")',
    "{}.amax(-1)",
    "{}.amin(-1)",
    "{}.aminmax(dim=-1).max",
    "{}/{}.abs().amax(-1,keepdim=True).add(0.5)",
    "{}.var(-1)",
    "{}.var(-1,unbiased=False)",
    "torch.var_mean({},-1)[0]",
    "torch.std_mean({},-1)[1]",
    "{}.cumsum(-1)",
    "{}.flip(-1).cumsum(-1).flip(-1)",
    "{}.cumprod(-1)",
}
"""Those that give NaN, or a number for NaN, in another place than torch where an argument is
infinite or NaN. docs/your-own-cell.md says so."""

REFUSED = {
    "torch.asinh({})",
    "torch.atanh(0.9*{}.tanh())",
    "torch.acosh({}.abs()+1.1)",
    "torch.erfc({})",
    "F.rrelu({},training=False)",
    "torch.special.log_ndtr({})",
    "torch.special.i0({}.tanh())",
    "torch.lgamma({}.abs()+1)",
    "torch.digamma({}.abs()+1)",
    "torch.erfinv(0.7*{}.tanh())",
    "{}.float().double()",
    "torch.heaviside({},torch.zeros((),dtype=torch.float64))",
    "torch.fmax({a},{b})",
    "torch.fmin({a},{b})",
    "torch.copysign({a},{b})",
    "{a}.float().double()+{b}",
    "torch.nextafter({a},{b})",
    "{}.sort(-1).values",
    "torch.cummax({},-1).values",
    "{}.logcumsumexp(-1)",
    "{}.median(-1).values",
}
"""Those that cannot be compiled."""


class Cell(nn.Module):
    """Operations, each with columns of its own of the two inputs, and an output."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.functions = [
            eval(f"lambda a, b: {filled(text)}", {"torch": torch, "F": F}) for text in texts
        ]
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: tuple[Tensor, Tensor], h: Tensor) -> tuple[Any, Tensor]:
        count = len(self.functions)
        columns = zip(self.functions, *(leaf.chunk(count, -1) for leaf in x), strict=True)
        return tuple(function(a, b) for function, a, b in columns), h * self.scale


def filled(text: str) -> str:
    named = text.replace("{a}", "a").replace("{b}", "b").replace("{}", "a")
    return named.replace("{w}", "3")


def corners(kind: str, dtype: torch.dtype, finite: bool) -> tuple[Tensor, Tensor]:
    """Rows of numbers that all are finite, or not: (rows, width) each."""
    rows = {"unary": [[number] for number in NUMBERS], "binary": itertools.product(PAIRS, PAIRS)}
    every = torch.tensor([[*row] for row in rows.get(kind, ROWS)], dtype=dtype)
    a = every[every.isfinite().all(-1) == finite]
    return (a[:, :1], a[:, 1:]) if kind == "binary" else (a, a.clone())


Results = list[tuple[Tensor, Tensor, Tensor]]
"""Of each operation the value, and the gradients of its arguments."""


def results(cell: Cell, run: Any, x: tuple[Tensor, Tensor]) -> Results:
    """By a call with (rows, columns) of all operations."""
    count = len(cell.functions)
    leaves = [leaf.repeat(1, count).requires_grad_() for leaf in x]
    values = run(tuple(leaves))
    wanted = [y for y in values if y.requires_grad]
    weights = [torch.ones_like(y) for y in wanted]
    found = torch.autograd.grad(wanted, leaves, weights, allow_unused=True)
    gradients = [
        (torch.zeros_like(leaf) if g is None else g).chunk(count, -1)
        for g, leaf in zip(found, leaves, strict=True)
    ]
    flat = [y.detach().reshape(len(leaves[0]), -1) for y in values]
    return list(zip(flat, *gradients, strict=True))


class Ran:
    """Operations in a program, which all their numbers share."""

    def __init__(self, texts: Sequence[str], dtype: torch.dtype) -> None:
        self.cell = Cell(texts).to(dtype)
        self.rnn = fusedrnn.Recurrent(self.cell, compile="require")

    def by_torch(self, x: tuple[Tensor, Tensor]) -> Results:
        return results(self.cell, lambda leaves: self.cell(leaves, self.start(x))[0], x)

    def by_program(self, x: tuple[Tensor, Tensor]) -> Results:
        def run(leaves: Any) -> list[Tensor]:
            made, _ = self.rnn(tuple(leaf[None] for leaf in leaves), self.start(x))
            return [y[0] for y in made]

        return results(self.cell, run, x)

    def start(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros(len(x[0]), 1, dtype=x[0].dtype)


def differences(ours: Any, theirs: Any, x: Any, tolerance: float) -> list[str]:
    """Where a value or a gradient is another one."""
    found = []
    for name, mine, right in zip(("value", "gradient of a", "of b"), ours, theirs, strict=True):
        off = (mine - right).abs() > tolerance * (1 + right.abs())
        off |= mine.isnan() != right.isnan()
        off |= (mine.isinf() | right.isinf()) & (mine != right)
        for row in off.any(-1).nonzero().flatten().tolist()[:4]:
            at = [leaf[row].tolist() for leaf in x]
            found.append(f"{name} at {at}: {mine[row].tolist()}, not {right[row].tolist()}")
    return found


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize(("kind", "text"), OPERATIONS)
def test_derivatives_at_corners(kind: str, text: str) -> None:
    """By programs that torch runs, so what is wrong here is no matter of C++."""
    run = Ran([text], torch.float64)
    if text in REFUSED:
        with pytest.raises(RuntimeError, match="cannot be compiled"):
            run.by_program(corners(kind, torch.float64, True))
        return
    for is_finite in (True, False):
        x = corners(kind, torch.float64, is_finite)
        with interpreted():
            (ours,) = run.by_program(x)
        (right,) = run.by_torch(x)
        is_other = not is_finite and text in OTHER_AT_INFINITY
        assert bool(differences(ours, right, x, 1e-9)) == is_other


def groups() -> Iterator[Any]:
    """As many operations as have a library together. CI has all of them in float32."""
    for kind in KINDS:
        texts = [text for of, text in OPERATIONS if of == kind and text not in REFUSED]
        for i in range(0, len(texts), 16):
            for dtype in (torch.float32, torch.float64):
                is_quick = kind == "reducing" and i == 0
                marks = [] if is_quick else [pytest.mark.slow]
                yield pytest.param(
                    kind,
                    texts[i : i + 16],
                    dtype,
                    id=f"{kind} {i}, {dtype}",
                    marks=marks if dtype == torch.float32 else [pytest.mark.nightly],
                )


@pytest.mark.parametrize(("kind", "texts", "dtype"), list(groups()))
def test_compiled_operations_at_corners(kind: str, texts: list[str], dtype: torch.dtype) -> None:
    """Several operations in one library."""
    run, tolerance = Ran(texts, dtype), {8: 1e-9, 4: 1e-4}[dtype.itemsize]
    for is_finite in (True, False):
        x = corners(kind, dtype, is_finite)
        wrong = {
            text: differences(mine, right, x, tolerance)
            for text, mine, right in zip(texts, run.by_program(x), run.by_torch(x), strict=True)
            if is_finite or text not in OTHER_AT_INFINITY
        }
        assert not any(wrong.values()), "\n".join(f"{t}: {w}" for t, w in wrong.items() if w)


VARIANCES = ["{}.var(-1)", "{}.var(-1,unbiased=False)"]
DEVIATIONS = ["{}.std(-1)", "{}.std(-1,correction=0)", "torch.std_mean({},-1)[0]"]
LENGTHS = ["{}.norm(dim=-1)", "F.rms_norm({},({}.shape[-1],))"]
NORMS = ["F.layer_norm({},({}.shape[-1],))", "F.group_norm({},1)"]


def scaled(width: int, scales: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Five rows of each scale."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(len(scales), 5, width, dtype=torch.float64, generator=generator) - 0.2
    return (rows * torch.tensor(scales, dtype=torch.float64)[:, None, None]).flatten(0, 1).to(dtype)


@pytest.mark.ci_has_every(4)
@pytest.mark.parametrize("width", [3, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_squares_that_overflow_or_vanish(dtype: torch.dtype, width: int) -> None:
    """In float32, torch has the deviation of any finite numbers."""
    facts = torch.finfo(dtype)
    root = facts.max**0.5
    scales = [facts.tiny**0.4, root / 30, root * 30, facts.max / 30]
    if dtype == torch.float32:
        scales += [facts.tiny * 1e6, facts.tiny**0.75]
    for texts, more in ((VARIANCES, [root]), (DEVIATIONS, [root]), (LENGTHS, [])):
        x = scaled(width, [*scales, *more], dtype)
        run = Ran(texts, dtype)
        every = zip(
            texts, run.by_program((x, x.clone())), run.by_torch((x, x.clone())), strict=True
        )
        for text, mine, right in every:
            for ours, theirs in zip(mine[:2], right[:2], strict=True):
                unit = theirs.abs().amax(-1, keepdim=True) + facts.tiny
                torch.testing.assert_close(
                    ours / unit, theirs / unit, rtol=0, atol=1e-4, equal_nan=True, msg=text
                )


@pytest.mark.parametrize("width", [3, 8, 13, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layer_norm_of_numbers_whose_squares_overflow(dtype: torch.dtype, width: int) -> None:
    """NaN in any width; torch has NaN, or where vectors leave a remainder 0."""
    run, x = Ran(NORMS, dtype), scaled(width, [torch.finfo(dtype).max ** 0.75], dtype)
    for results_of in (run.by_program, run.by_torch):
        for value, gradient, _ in results_of((x, x.clone())):
            is_zero = results_of == run.by_torch and bool((value == 0).all())
            assert is_zero or bool(value.isnan().all() and gradient.isnan().all())


@pytest.mark.parametrize("dims", [(-1, -2), (-2, -1), (2, 1), (1, 2)])
def test_sums_over_several_dimensions_in_any_order(dims: tuple[int, int]) -> None:
    """Of as many columns as cannot be put into another order."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256, dtype=torch.float64)

        def forward(self, x: Tensor, h: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            h = torch.tanh(self.linear(x) + h)
            groups = h.unflatten(-1, (16, 16))
            return (groups.mean(dims), groups.square().sum(dims, keepdim=True)), h

    cell, x, h = Sums(), torch.randn(4, 2, 256).double(), torch.zeros(2, 256).double()
    with interpreted():
        ours, _ = fusedrnn.Recurrent(cell, compile="require")(x, h)
    theirs, _ = fusedrnn.Recurrent(cell, compile="never")(x, h)
    torch.testing.assert_close(ours, theirs)
