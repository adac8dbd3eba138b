"""Whether a program computes what the step does: values and all gradients.

First its plan, by the interpreter in float64; then its library, in its own dtype and on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._front.refusals import CannotCompile
from .compiled_step import CompiledStep
from .trial import Trial

RunLibrary = Callable[
    [CompiledStep, Trial, torch.device], tuple[Sequence[Tensor], Sequence[Tensor]]
]
"""Runs a library on the tensors of a trial, as calls do: results, and gradients of the leaves. It
belongs to the room that runs programs, so whoever starts a compilation hands it in."""

_NEARBY = 1 + 1e-12
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative: a step may have numbers that depend on the dtype of its weights, such as an eps."""


def verify(
    program: CompiledStep,
    trial: Trial,
    again: Callable[[float], Trial | None] = lambda scale: None,
) -> None:
    """Compares a program to the step, at a corner where the step has finite numbers.

    Args:
        again: The same trial of the step with inputs and states times a number. At a corner it
            shows what roundings do to the step itself, if numbers cancel there.

    Raises:
        CannotCompile: They differ.
    """
    results, gradients = trial.by_interpreter(program)
    tolerance = _TOLERANCES[program.dtype]
    is_corner = trial.is_at_corner
    exact = [*trial.outputs, *trial.last]
    for ours, theirs, what in (
        (results, exact, "values"),
        (gradients, trial.gradients, "derivatives"),
    ):
        try:
            compare(ours, theirs, tolerance, what, is_corner)
        except CannotCompile:
            others = again(_NEARBY) if is_corner else None
            if others is None:
                raise
            moved = [*others.outputs, *others.last] if what == "values" else others.gradients
            noise = [10 * (a - b).abs() for a, b in zip(theirs, moved, strict=True)]
            compare(ours, theirs, tolerance, what, is_corner, noise)


_LIBRARY_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
}
"""Relative to the largest number."""
_TRIALS = 4
_OFF = {torch.bfloat16: 0.25, torch.float16: 0.25}
"""A rounding may make a choice another one, or a derivative at a kink. So steps with choices are
tried several times, and in 16 bits a share of the numbers may be off."""

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The same where a library is compared to the step itself, in the same dtype."""


def library_is_close(
    program: CompiledStep, trial: Trial, device: torch.device, run_library: RunLibrary
) -> bool:
    """Whether the library of a program that has passed every trial in another process computes what
    the step itself does, to a few roundings. In 16 bits they are too large to say so.

    Raises:
        Exception: The program is of other shapes.
    """
    of_step = [*trial.outputs, *trial.last], trial.gradients
    try:
        results = run_library(program, trial, device)
        _compare_library(program, results, device, of_step, _CLOSE[program.dtype])
    except CannotCompile:  # or a rounding has made a choice another one
        return False
    return True


def verify_library(
    program: CompiledStep, trial: Trial, device: torch.device, run_library: RunLibrary
) -> None:
    """Compares what a program's library computes, on its device and in its dtype, to the program.

    Raises:
        CannotCompile: They differ.
    """
    has_choices = program.generated.has_choices
    failure: CannotCompile | None = None
    for number in range(_TRIALS if has_choices else 1):
        try:
            rounded = trial.rounded(program.dtype, 1 - number / 8)
            exact, tolerance = rounded.by_interpreter(program), _LIBRARY_TOLERANCES[program.dtype]
            results = run_library(program, rounded, device)
            return _compare_library(program, results, device, exact, tolerance)
        except CannotCompile as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _compare_library(
    program: CompiledStep,
    found: tuple[Sequence[Tensor], Sequence[Tensor]],
    device: torch.device,
    exact: tuple[list[Tensor], list[Tensor]],
    tolerance: float,
) -> None:
    """``found``, ``exact``: results, and gradients of the leaves."""
    dtype = program.dtype
    results, gradients = found
    off = _OFF.get(dtype, 0.0) if program.generated.has_choices else 0.0
    for ours, theirs in ((results, exact[0]), (gradients, exact[1])):
        for a, b in zip(ours, theirs, strict=True):
            a, b = a.detach().cpu().to(b.dtype, copy=True).reshape(b.shape), b.detach()
            scale = _largest(b)
            if not math.isfinite(scale):
                raise CannotCompile(f"values or gradients of the step are not finite in {dtype}")
            difference, most = a.sub_(b), tolerance * (1 + scale)
            if _largest(difference) <= most:
                continue
            wrong = ~(difference.abs() <= most)
            if int(wrong.sum()) > off * wrong.numel():
                raise CannotCompile(
                    f"the compiled library computes other results than the step in {dtype} on "
                    f"{device}"
                )


def compare(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    tolerance: float,
    what: str,
    is_corner: bool = False,
    noise: Sequence[Tensor] | None = None,
) -> None:
    """
    Args:
        is_corner: What is infinite or NaN in ``theirs`` may be any number.
        noise: By how much each number may be off besides.

    Raises:
        CannotCompile: They differ.
    """
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.detach().double(), b.detach().double()
        scale = _largest(b)
        if math.isfinite(scale) and noise is None:
            difference = _largest(a - b)
        elif is_corner:
            finite = b.isfinite()
            more = torch.zeros_like(b) if noise is None else noise[i].detach().expand(b.shape)
            a, b, more = a[finite], b[finite], more[finite].nan_to_num(torch.inf)
            scale = _largest(b)
            difference = ((a - b).abs() - more).max().item() if b.numel() else 0.0
        else:
            raise CannotCompile(f"{what} of the step are not finite on random inputs")
        if not difference <= tolerance * (1 + scale):
            where = " on zeros, equal or large numbers, or in another batch" if is_corner else ""
            hint = (
                ""
                if what == "values" or is_corner
                else ": does it have a custom autograd.Function, a hook, or an in-place change "
                "that autograd does not see?"
            )
            raise CannotCompile(
                f"the compiled step has other {what} than the step itself{where}{hint}"
            )


def _largest(numbers: Tensor) -> float:
    """Of the magnitudes; NaN if one is, and 0 if there are none."""
    if not numbers.numel():
        return 0.0
    least, most = torch.aminmax(numbers)
    return max(-least.item(), most.item())
