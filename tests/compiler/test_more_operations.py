"""Operations with C++ or parts of their own, compiled in four dtypes: at corners, and their errors.

test_operations.py has others at corners. Errors are those against float64: no larger than twice
torch's in the same dtype, in values and in derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from compiler.interpreted import interpreted
from fuzz.step_words import BINARY, REDUCING, ROW_WISE, UNARY
from test_operations import OTHER_AT_INFINITY, Ran, Results, corners, differences
from torch import Tensor, nn

import fusedrnn

DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(torch.float64, marks=pytest.mark.nightly),
    pytest.param(torch.float16, marks=pytest.mark.nightly),
]
"""Of which each has libraries of its own, that take seconds to build."""
OF_ONE = """
    torch.asin({}.clamp(-1,1)) torch.acos({}.clamp(-1,1)) torch.atan({}) torch.sinh({})
    torch.cosh({}) torch.exp2({}) torch.log2({}.abs()) torch.log10({}.abs()) {}.round(decimals=1)
    {}.round(decimals=-1) F.mish({}) F.hardswish({}) F.hardsigmoid({}) F.selu({}) F.celu({},1.3)
    F.logsigmoid({}) {}.detach()//3+{} {}%0.75 {}.remainder(-3) torch.fmod({},0.75)
    torch.div({},0.125,rounding_mode="floor") torch.div({},0.125,rounding_mode="trunc")
    F.pad({},(1,2),value=0.5) F.pad({},(2,-1)) F.prelu({},torch.full((1,),0.25,dtype={}.dtype))
"""
OF_TWO = """
    torch.atan2({a},{b}) torch.hypot({a},{b}) torch.fmod({a},{b}) torch.remainder({a},{b})
    {a}.detach()//{b}.detach()+{a} torch.div({a},{b},rounding_mode="floor")
    torch.div({a},{b},rounding_mode="trunc")
"""
OF_ROWS = """
    {}.cumsum(-1) {}.cumprod(-1) {}.unflatten(-1,(1,-1)).cumsum(-1).flatten(1)
    {}-{}.amax(-1,keepdim=True)
"""
OF_FEATURES = """
    {}.amax(-1) {}.amin(-1) {}.prod(-1) {}.prod(-1,keepdim=True) {}.unflatten(-1,(1,-1)).amax((1,2))
    torch.linalg.vector_norm({},0,dim=-1) torch.linalg.vector_norm({},1,dim=-1)
    torch.linalg.vector_norm({},3,dim=-1) torch.linalg.vector_norm({},2.5,dim=-1)
    torch.linalg.vector_norm({},0.5,dim=-1) torch.linalg.vector_norm({},float("inf"),dim=-1)
    torch.linalg.vector_norm({},-float("inf"),dim=-1) torch.norm({},p=3,dim=-1)
"""
KINDS = {"unary": OF_ONE, "binary": OF_TWO, "row-wise": OF_ROWS, "reducing": OF_FEATURES}
OPERATIONS = [(kind, text) for kind, block in KINDS.items() for text in block.split()]
KNOWN = {*UNARY.split(), *BINARY.split(), *ROW_WISE.split(), *REDUCING.split()}
OTHER_AT_INFINITY_TOO = {
    "{}.unflatten(-1,(1,-1)).cumsum(-1).flatten(1)",
    "{}-{}.amax(-1,keepdim=True)",
    "{}.unflatten(-1,(1,-1)).amax((1,2))",
    "torch.linalg.vector_norm({},0.5,dim=-1)",
    'torch.linalg.vector_norm({},float("inf"),dim=-1)',
    'torch.linalg.vector_norm({},-float("inf"),dim=-1)',
}
"""As OTHER_AT_INFINITY."""
OTHERS = OTHER_AT_INFINITY | OTHER_AT_INFINITY_TOO


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, text in OPERATIONS if text not in KNOWN]
)
def test_derivatives_at_corners(kind: str, text: str) -> None:
    """By programs that torch runs, so what is wrong here is no matter of C++."""
    run = Ran([text], torch.float64)
    for is_finite in (True, False):
        x = corners(kind, torch.float64, is_finite)
        with interpreted():
            (ours,) = run.by_program(x)
        (right,) = run.by_torch(x)
        is_other = not is_finite and text in OTHERS
        assert bool(differences(ours, right, x, 1e-9)) == is_other


@functools.cache
def ran(kind: str, dtype: torch.dtype) -> tuple[Sequence[str], Ran]:
    texts = KINDS[kind].split()
    return texts, Ran(texts, dtype)


def representable(x: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows whose numbers have finite squares in a dtype, so that torch's own formulas have them."""
    most = torch.finfo(dtype).max ** 0.5 / 4
    keep = (torch.cat(x, -1).abs() < most).all(-1)
    return x[0][keep], x[1][keep]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_at_corners(kind: str, dtype: torch.dtype) -> None:
    """The same numbers as torch's, infinities and NaN at the same places."""
    texts, run = ran(kind, dtype)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
    for is_finite in (True, False):
        x = corners(kind, dtype, is_finite)
        if is_finite:
            x = representable(x, dtype)
        wrong = {
            text: differences(mine, right, x, tolerance)
            for text, mine, right in zip(texts, run.by_program(x), run.by_torch(x), strict=True)
            if is_finite or text not in OTHERS
        }
        assert not any(wrong.values()), "\n".join(f"{t}: {w}" for t, w in wrong.items() if w)


def random_numbers(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of several sizes."""
    generator, width = torch.Generator().manual_seed(0), 24 if "r" in kind[:1] else 1

    def drawn(*scales: float) -> Tensor:
        rows = [torch.randn(200, width, generator=generator) * scale for scale in scales]
        return torch.cat(rows).to(dtype)

    if width > 1:
        return drawn(1.0, 1.1), drawn(1.0, 1.1)
    return drawn(0.01, 0.5, 1.0, 3.0, 8.0), drawn(1.0, 3.0, 0.7, 1.0, 0.3)


def errors(found: Results, exact: Results, others: Results) -> list[list[float]]:
    """Of each operation: the largest of its value and of each gradient, relative to the largest
    number of its row, or to 0.1 where that is less, since derivatives cross 0 in sums that cancel.
    (Near 0, functions are in values/test_math.py.)

    Args:
        others: What torch finds, which is finite where errors are taken.
    """
    every = []
    for mine, right, theirs in zip(found, exact, others, strict=True):
        of_one = []
        for a, b, c in zip(mine, right, theirs, strict=True):
            size = b.abs().amax(-1, keepdim=True).clamp(min=0.1).expand_as(b)
            keep = b.isfinite() & c.isfinite()
            off = ((a.double() - b).abs() / size)[keep]
            of_one.append(off.max().item() if off.numel() else 0.0)
        every.append(of_one)
    return every


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors(kind: str, dtype: torch.dtype) -> None:
    texts, run = ran(kind, dtype)
    x = random_numbers(kind, dtype)
    wide = x[0].double(), x[1].double()
    exact, by_torch = Ran(texts, torch.float64).by_torch(wide), run.by_torch(x)
    ours = errors(run.by_program(x), exact, by_torch)
    theirs = errors(by_torch, exact, by_torch)
    eps, wrong = torch.finfo(dtype).eps, []
    for text, mine, right in zip(texts, ours, theirs, strict=True):
        print(f"{text}, {dtype}: {mine} for torch's {right}")
        if dtype == torch.float64:
            assert max(mine) < 1e-12
            continue
        if any(a > max(2 * b, eps) for a, b in zip(mine, right, strict=True)):
            wrong.append(f"{text}: {mine} for torch's {right}")
    assert not wrong, "\n".join(wrong)


class Rows(nn.Module):
    """Of many numbers each, of weights as well."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(1 + 0.1 * torch.randn(100).double())

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + 0.5 * h)
        return self.function(1 + 0.1 * h) * self.function(self.weight[None]), h


OF_MANY = {
    "prod": lambda x: x.prod(-1, keepdim=True),
    "prod of groups": lambda x: x.unflatten(-1, (20, 5)).prod(-1),
    "prod over groups": lambda x: x.unflatten(-1, (20, 5)).prod(-2),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum as gates of groups": lambda x: (
        x.unflatten(-1, (20, 5)) * x[:, :20].cumsum(-1)[..., None]
    ),
    "cumsum of groups": lambda x: x.unflatten(-1, (20, 5)).cumsum(-2),
    "cumprod of some": lambda x: x[:, :63].cumprod(-1),
    "cumprod over groups": lambda x: x.unflatten(-1, (20, 5)).cumprod(-2),
    "amax of groups": lambda x: x.round(decimals=1).unflatten(-1, (20, 5)).amax(-1),
    "amin": lambda x: x.clamp(max=1.0).amin(-1, keepdim=True),
    "a norm": lambda x: torch.linalg.vector_norm(x.unflatten(-1, (20, 5)), 3, -1),
    "padding": lambda x: nn.functional.pad(x.unflatten(-1, (20, 5)), (1, 2, 0, 3), value=0.5),
}


@pytest.mark.parametrize("name", OF_MANY)
def test_many_numbers(name: str) -> None:
    """By programs that torch runs: each kind of operation has several ways, by sizes."""
    cell, x = Rows(OF_MANY[name]), torch.randn(4, 3, 100).double().requires_grad_()
    h, found = torch.zeros(3, 100).double(), []
    for compile in ("require", "never"):
        with interpreted():
            y, last = fusedrnn.Recurrent(cell, compile=compile)(x, h)
            loss = y.square().sum() + last.sum()
            found.append([y, last, *torch.autograd.grad(loss, [x, cell.weight])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


RUNNING = {
    "cumsum": lambda x: x[:, :24].cumsum(-1),
    "cumsum over groups": lambda x: x.unflatten(-1, (20, 5)).cumsum(-2).flatten(1),
    "cumsum of many": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x[:, :63].cumprod(-1),
    "cumprod over groups": lambda x: x.unflatten(-1, (20, 5)).cumprod(-2).flatten(1),
    "cumsum of parts": lambda x: torch.cat([x[:, :50], 2 * x[:, 50:]], 1).cumsum(-1),
}
"""In float32 on a CPU, torch computes these in float64."""


class Running(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> tuple[list[Tensor], Tensor]:
        return [function(x) for function in RUNNING.values()], h


@functools.cache
def running() -> fusedrnn.Recurrent:
    return fusedrnn.Recurrent(Running(), compile="require")


def test_errors_of_running_sums_and_products() -> None:
    x = torch.randn(500, 100, generator=torch.Generator().manual_seed(0)) * 1.1
    seeds = [torch.randn_like(y) for y in Running()(x, x)[0]]

    def by(run: Callable[[Tensor], list[Tensor]], x: Tensor) -> list[list[Tensor]]:
        x = x.clone().requires_grad_()
        pairs = zip(run(x), seeds, strict=True)
        return [[y, torch.autograd.grad(y, x, g.to(y), retain_graph=True)[0]] for y, g in pairs]

    exact = by(lambda x: Running()(x, x)[0], x.double())
    theirs = errors(by(lambda x: Running()(x, x)[0], x), exact, exact)
    ours = errors(by(lambda x: [y[0] for y in running()(x[None], x)[0]], x), exact, exact)
    ones = torch.ones(100, 100).triu()
    scaled = torch.cat([ones[:50], 2 * ones[50:]])
    for i, by_ones in ((0, ones[:, :24]), (2, ones), (5, scaled)):  # derivatives are products
        product = [seeds[i] @ by_ones.T]
        theirs[i][1] = errors([product], [exact[i][1:]], [exact[i][1:]])[0][0]
    for name, mine, right in zip(RUNNING, ours, theirs, strict=True):
        print(f"{name}: {mine} for {right}")
        assert all(a <= 2 * b for a, b in zip(mine, right, strict=True)), name


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_running_sums_and_products_that_overflow(is_compiled: bool) -> None:
    """Also behind the eighth number, where what rounding has lost is added."""
    texts = ["{}.cumprod(-1)", "{}.unflatten(-1,(12,1)).cumsum(-2).flatten(1)"]
    infinite = torch.ones(12).index_fill(0, torch.tensor(2), float("inf"))
    x = torch.stack([torch.full((12,), 1e10), torch.full((12,), 3e38), infinite, -infinite])
    run = Ran(texts, torch.float32)
    with nullcontext() if is_compiled else interpreted():
        ours = run.by_program((x, x.clone()))
    for mine, right in zip(ours, run.by_torch((x, x.clone())), strict=True):
        torch.testing.assert_close(mine[0], right[0])


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e10, 3e36])
def test_running_sums_of_any_size(scale: float) -> None:
    x = torch.rand(4, 100).sub(0.5).mul(scale)
    for ours, right in zip(running()(x[None], x)[0][:3], Running()(x, x)[0], strict=False):
        torch.testing.assert_close(ours[0], right, rtol=1e-6, atol=scale * 1e-6)


class RunningWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(100))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weight[None]
        sums = w.unflatten(-1, (20, 5)).cumsum(-2).flatten(1) + w.cumsum(-1)
        return x * sums * w[:, :30].cumprod(-1).sum(-1, keepdim=True), h


def test_running_sums_and_products_of_weights() -> None:
    cell, x, found = RunningWeights(), torch.randn(2, 3, 100), []
    for compile in ("require", "never"):
        with interpreted():
            y, _ = fusedrnn.Recurrent(cell, compile=compile)(x, torch.zeros(3, 100))
            found.append([y, *torch.autograd.grad(y.square().sum(), cell.weight)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
