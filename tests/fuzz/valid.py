"""Compares outputs and gradients of right calls with a plain loop in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cases import Case
from hostile.judge import ROUNDINGS, TWICE
from torch import Tensor

import fusedrnn
from fusedrnn import _library

from . import Outcome
from .memory import any_memory
from .trial import Trial
from .watch import Watch

EXACT = 1e-11  # relative error in float64, where the truth has errors too
ORDERS, MORE_ORDERS = 4, 60  # orders of summation of the loop, the usual one first


@contextlib.contextmanager
def recorded_seeds() -> Iterator[dict[str, Tensor | None]]:
    """Records the seeds that the operators get, as long as the context lasts."""
    operators, seeds = _library.operators, {}

    def recorded(name: str) -> Callable[..., Any]:
        operator = getattr(operators, name)

        def call(*arguments: Any, **named: Any) -> Any:
            seeds.update({name: named.get(name) for name in ("seed", "mask_seed")})
            return operator(*arguments, **named)

        return call

    instead = SimpleNamespace(
        forward=recorded("forward"), step=recorded("step"), backward=operators.backward
    )
    with mock.patch.object(_library, "operators", instead):
        yield seeds


def gradients(
    outputs: tuple[Tensor, ...], leaves: dict[str, Tensor], cotangents: list[Tensor | None]
) -> dict[str, Tensor]:
    """Results and gradients by name."""
    found = {f"result {i}": output for i, output in enumerate(outputs)}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None]
    if wanted and used and torch.is_grad_enabled():
        of, along = zip(*used, strict=True)
        along = [c.to(o.dtype) for o, c in used]
        grads = torch.autograd.grad(of, list(wanted.values()), along, materialize_grads=True)
        found |= {f"gradient of {n}": g for n, g in zip(wanted, grads, strict=True)}
    return {name: tensor.detach().double() for name, tensor in found.items()}


def run(seed: int, note: Callable[[str], None]) -> Outcome:
    """Runs a case."""
    trial = Trial(seed)
    outcome = Outcome("right", str(trial.call))
    note(outcome.call)
    torch.set_num_threads(trial.call.threads)
    try:
        outcome.findings = judge(trial)
    finally:
        torch.set_num_threads(1)
    return outcome


def judge(trial: Trial) -> list[tuple[str, str]]:
    """Returns what is wrong with a call's results."""
    call, leaves = trial.call, trial.leaves
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[call.mode]():
        watch = Watch([*leaves.values(), trial.lengths, trial.reset, trial.batch_sizes])
        with recorded_seeds() as seeds, torch.autocast("cpu", enabled=call.autocast):
            outputs = trial.ours()
        noise = torch.Generator().manual_seed(trial.seed)
        cotangents: list[Tensor | None] = []
        for output in outputs:
            values = torch.randn(output.shape, generator=noise, dtype=torch.float64)
            memory = any_memory(values.to(output.dtype), trial.rng)
            cotangents.append(memory if trial.rng.random() < 0.8 else None)
        before = Watch(cotangents)
        ours = gradients(outputs, leaves, cotangents)
        changed = watch.changes(may_draw=True) + before.changes(may_draw=True)
        found = [("changed state", change) for change in changed]
        copies = trial.copies(torch.float64)
        is_plain = not any(name in call.options for name in ("dropout", "zoneout"))
        truth = gradients(trial.loop(copies, seeds, by_oracle=not is_plain), copies, cotangents)
        if {k: v.shape for k, v in ours.items()} != {k: v.shape for k, v in truth.items()}:
            shapes = {k: (tuple(ours[k].shape), tuple(v.shape)) for k, v in truth.items()}
            return [*found, ("other shapes", str(shapes))]
        if call.options.get("weight_dropout") and call.options.get("training", True):
            wrong = [name for name, tensor in ours.items() if not tensor.isfinite().all()]
            return [*found, *(("not finite", name) for name in wrong)]
        return [*found, *too_far(trial, ours, truth, cotangents, seeds)]


def relative(error: Tensor, truth: Tensor) -> float:
    """The relative error by norms."""
    size = truth.norm()
    return float(error.norm() / size if size > 0 else error.norm())


def too_far(
    trial: Trial,
    ours: dict[str, Tensor],
    truth: dict[str, Tensor],
    cotangents: list[Tensor | None],
    seeds: dict[str, Tensor | None],
) -> list[tuple[str, str]]:
    """Results whose errors are larger than docs/reliability.md allows."""
    errors = {name: relative(ours[name] - exact, exact) for name, exact in truth.items()}
    allowed = dict.fromkeys(truth, EXACT)
    dtype = trial.call.dtype
    if dtype != torch.float64:
        few = ROUNDINGS[dtype] * torch.finfo(dtype).eps
        worst = dict.fromkeys(truth, 0.0)
        # Errors that grow over many steps vary by luck, so more orders are tried before a verdict.
        for orders in (range(ORDERS), range(ORDERS, MORE_ORDERS)):
            for seed in orders:
                order = torch.Generator().manual_seed(seed) if seed > 0 else None
                copies = trial.copies(dtype)
                other = gradients(trial.loop(copies, seeds, order), copies, cotangents)
                for name, exact in truth.items():
                    worst[name] = max(worst[name], relative(other[name] - exact, exact))
            usual = (sum(error**2 for error in worst.values()) / len(worst)) ** 0.5
            # A result of few numbers may be right by luck; all results of a call are not.
            allowed = {name: TWICE * max(error, usual) + few for name, error in worst.items()}
            if all(errors[name] <= allowed[name] for name in truth):
                break
    return [
        ("too far off", f"{name}: {errors[name]:.2g}, allowed {allowed[name]:.2g}")
        for name in truth
        if not errors[name] <= allowed[name]
    ]


def good_call() -> list[bytes]:
    """The bits of a fixed call."""
    case = Case("lstm", bidirectional=True, lengths=True, dtype=torch.float32)
    results = case.tensors().to(torch.float32).results(fusedrnn, **case.options)
    return [bytes(tensor.detach().numpy()) for tensor in results.values()]
