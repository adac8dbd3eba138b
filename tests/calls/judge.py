"""Errors of a call against float64, compared with those of torch and of the loop.

Those of hostile scales are compared in parts: for each row of the batch, each unit, and each row of
a weight; others as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .changes import ALIKE
from .trial import Tensors, Trial

# Orders of summation of the loop, in addition to the usual one; and before a verdict.
ORDERS, MORE_ORDERS = 5, 60
TWICE = 2.0
# Roundings that are always allowed, in units of eps. (In float64, the truth has some too.)
ROUNDINGS = {torch.float64: 64, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
CHAOS = 0.1  # relative error of a state that counts as lost


@dataclass(frozen=True)
class Finding:
    """The worst row of a result."""

    result: str
    row: str
    error: float  # relative, where the truth is not 0
    excess: float  # the error over its bound
    wrong: str  # the reason, or empty
    rows: int
    unjudged: int  # of these rows, where torch or the loop is wrong itself

    @property
    def is_wrong(self) -> bool:
        return bool(self.wrong)

    def __str__(self) -> str:
        return (
            f"{self.result}, {self.row}: error {self.error:.2g}, "
            f"{self.excess:.2g} of what it may be; {self.wrong or 'right'}"
        )


def views(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of a result as rows that are judged one by one."""
    if "weights" in name:
        # A single number of a bias may be right or wrong by luck.
        yield "row of the weight", tensor if tensor.dim() == 2 else tensor[None]
    else:
        yield "row of the batch", tensor.movedim(-2, 0).flatten(1)
        yield "unit", tensor.movedim(-1, 0).flatten(1)


def judge(trial: Trial, ours: Tensors) -> list[Finding]:
    """A finding for each result and view of it: the row whose error is furthest beyond its bound.

    The other implementations' errors vary by luck, so more orders are tried before a verdict.
    """
    truth, of = trial.truth, _by_rows if trial.call.change else _by_results
    shapes, exact = ({n: tuple(t.shape) for n, t in every.items()} for every in (ours, truth))
    if shapes != exact:
        what = f"shapes are {shapes} in place of {exact}"
        return [Finding("all", "all", math.inf, math.inf, what, 0, 0)]
    for orders in (ORDERS, MORE_ORDERS):
        findings = of(trial, ours, orders)
        if not any(finding.is_wrong for finding in findings):
            break
    return findings


def _by_results(trial: Trial, ours: Tensors, orders: int) -> list[Finding]:
    """Each result as a whole, by norms."""

    def errors(results: Tensors) -> dict[str, float]:
        found = {}
        for name, exact in trial.truth.items():
            error, size = (results[name] - exact).norm(), exact.norm()
            found[name] = float(error / size if size > 0 else error)
        return {name: math.inf if math.isnan(error) else error for name, error in found.items()}

    dtype = trial.call.dtype
    allowed = dict.fromkeys(ours, trial.call.exact)
    if dtype != torch.float64:
        worst = dict.fromkeys(ours, 0.0)
        for other in trial.others(orders):
            worst = {name: max(worst[name], error) for name, error in errors(other).items()}
        finite = [error for error in worst.values() if error < math.inf]
        usual = (sum(error**2 for error in finite) / max(len(finite), 1)) ** 0.5
        few = ROUNDINGS[dtype] * torch.finfo(dtype).eps
        # A result of few numbers may be right by luck; all results of a call are not.
        allowed = {name: TWICE * max(error, usual) + few for name, error in worst.items()}
    findings = []
    for name, error in errors(ours).items():
        unjudged = allowed[name] == math.inf
        excess = 0.0 if unjudged else error / allowed[name]
        why = "" if error <= allowed[name] else "too large"
        findings.append(Finding(name, "all", error, excess, why, 1, int(unjudged)))
    return findings


def _by_rows(trial: Trial, ours: Tensors, orders: int) -> list[Finding]:
    truth, others = trial.truth, trial.others(orders)
    chaotic = _chaotic_rows(truth, others)
    findings = []
    for name in truth:
        every = [views(name, results[name]) for results in (truth, ours, *others)]
        for (row, exact), (_, found), *rest in zip(*every, strict=True):
            tensors = (exact, found, torch.stack([tensor for _, tensor in rest]))
            unjudged = torch.zeros(len(exact), dtype=torch.bool)
            if name.startswith("grad"):
                unjudged |= chaotic if "batch" in row else chaotic.any()
            findings.append(_judge_rows(trial, name, row, *tensors, unjudged))
    return findings


def _chaotic_rows(truth: Tensors, others: list[Tensors]) -> Tensor:
    """Rows of the batch whose states another implementation has lost, bool (B,).

    With large weights errors grow from step to step, until a gate that was open is shut. The
    gradient then belongs to another function.
    """
    exact = truth["h_n"].movedim(-2, 0).flatten(1)
    chaotic = torch.zeros(len(exact), dtype=torch.bool)
    for other in others:
        error = (other["h_n"].movedim(-2, 0).flatten(1) - exact).nan_to_num(0, 0, 0)
        chaotic |= error.norm(dim=-1) > CHAOS * exact.nan_to_num(0, 0, 0).norm(dim=-1)
    return chaotic


def _judge_rows(
    trial: Trial,
    name: str,
    row: str,
    truth: Tensor,
    ours: Tensor,
    others: Tensor,
    unjudged: Tensor,
) -> Finding:
    call, dtype = trial.call, trial.call.dtype
    # Below the smallest normal number of the type of the computation, a result may be 0.
    tiny = 1e-300 if dtype == torch.float64 else 1e-37
    is_number = truth.isfinite()
    # If another implementation overflows in a row, ours may too, by its order of a sum.
    overflows = (is_number & ~others.isfinite()).any(0).any(-1)
    lost = (is_number & ~ours.isfinite()).any(-1) & ~overflows
    # A NaN must show, unless another implementation has a number, or zoneout keeps the state.
    hidden = (truth.isnan() & ours.isfinite() & ~others.isfinite().any(0)).any(-1)
    if "zoneout" in call.options:
        hidden = torch.zeros_like(hidden)

    def error(results: Tensor) -> Tensor:
        counts = is_number & ours.isfinite() & results.isfinite()
        return torch.where(counts, results - truth, 0.0).norm(dim=-1)

    size = torch.where(is_number, truth, 0.0).norm(dim=-1)
    usual, theirs = size, torch.stack([error(results) for results in others]).amax(0)
    if call.change in ALIKE:
        theirs = theirs.amax().expand_as(theirs)
    if call.change in ALIKE or "weight" in row:  # a sum over the batch whose terms cancel
        usual = size.clamp(min=float(size.square().mean().sqrt()))
    # The truth about float64 has errors of the same size.
    allowed = (2 * TWICE if dtype == torch.float64 else TWICE) * theirs
    allowed += ROUNDINGS[dtype] * torch.finfo(dtype).eps * usual + tiny * truth.shape[-1] ** 0.5
    found = error(ours)
    unjudged = unjudged | overflows
    beyond = (found > allowed) & ~unjudged
    excess = torch.where(lost | hidden, math.inf, torch.where(unjudged, 0.0, found / allowed))
    worst = int(excess.argmax())
    why = "NaN or inf" if lost[worst] else "hides a NaN" if hidden[worst] else "too large"
    return Finding(
        name,
        f"{row} {worst}",
        float(found[worst] / size[worst]) if size[worst] > 0 else float(found[worst]),
        float(excess[worst]),
        why if (lost | hidden | beyond)[worst] else "",
        len(truth),
        int(unjudged.sum()),
    )
