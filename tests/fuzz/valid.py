"""Compares outputs and gradients of right calls with a plain loop in float64."""

from __future__ import annotations

import contextlib
import math
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
from fusedrnn import call as fused_call

from . import Outcome
from .memory import any_memory
from .trial import Drawn, Trial
from .watch import Watch

EXACT = 1e-11  # relative error in float64, where the truth has errors too
ORDERS, MORE_ORDERS = 4, 60  # orders of summation of the loop, the usual one first


@contextlib.contextmanager
def recorded_draws() -> Iterator[Drawn]:
    """Records what a call draws at random, as long as the context lasts."""
    operators, drop, drawn = _library.operators, fused_call._drop_if_recurrent, Drawn()

    def recorded(name: str) -> Callable[..., Any]:
        operator = getattr(operators, name)

        def call(*arguments: Any, **named: Any) -> Any:
            drawn.seed, drawn.mask_seed = named.get("seed"), named.get("mask_seed")
            return operator(*arguments, **named)

        return call

    def dropped(name: str, weight: Tensor, p: float) -> Tensor:
        before, ones = torch.get_rng_state(), torch.ones_like(weight)
        scales = drop(name, ones, p)
        drawn.kept_weights.append(None if scales is ones else scales != 0)
        torch.set_rng_state(before)
        return drop(name, weight, p)

    instead = SimpleNamespace(
        **{name: recorded(name) for name in ("forward", "step", "last_states")},
        backward=operators.backward,
        last_states_backward=operators.last_states_backward,
    )
    with (
        mock.patch.object(_library, "operators", instead),
        mock.patch.object(fused_call, "_drop_if_recurrent", dropped),
    ):
        yield drawn


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
        with recorded_draws() as drawn, torch.autocast("cpu", enabled=call.autocast):
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
        truth = gradients(trial.loop(copies, drawn, is_exact=True), copies, cotangents)
        if {k: v.shape for k, v in ours.items()} != {k: v.shape for k, v in truth.items()}:
            shapes = {k: (tuple(ours[k].shape), tuple(v.shape)) for k, v in truth.items()}
            return [*found, ("other shapes", str(shapes))]
        return [*found, *too_far(trial, ours, truth, cotangents, drawn)]


def relative(error: Tensor, truth: Tensor) -> float:
    """The relative error by norms; inf where the error is not a number."""
    size = truth.norm()
    found = float(error.norm() / size if size > 0 else error.norm())
    return math.inf if math.isnan(found) else found


def too_far(
    trial: Trial,
    ours: dict[str, Tensor],
    truth: dict[str, Tensor],
    cotangents: list[Tensor | None],
    drawn: Drawn,
) -> list[tuple[str, str]]:
    """Results whose errors are larger than docs/reliability.md allows."""
    errors = {name: relative(ours[name] - exact, exact) for name, exact in truth.items()}
    allowed = dict.fromkeys(truth, EXACT)
    dtype, leaves = trial.call.dtype, trial.leaves
    if dtype != torch.float64:
        few = ROUNDINGS[dtype] * torch.finfo(dtype).eps
        worst = dict.fromkeys(truth, 0.0)
        # Errors that grow over many steps vary by luck, so more orders are tried before a verdict.
        for orders in (range(ORDERS), range(ORDERS, MORE_ORDERS)):
            for seed in orders:
                order = torch.Generator().manual_seed(seed) if seed > 0 else None
                copies = trial.copies(dtype)
                other = gradients(trial.loop(copies, drawn, order), copies, cotangents)
                for name, exact in truth.items():
                    # Under autocast a gradient is rounded to the leaf's dtype, where it may vanish.
                    leaf = leaves.get(name.removeprefix("gradient of "))
                    found = other[name] if leaf is None else other[name].to(leaf.dtype).double()
                    worst[name] = max(worst[name], relative(found - exact, exact))
            finite = [error for error in worst.values() if error < math.inf]
            usual = (sum(error**2 for error in finite) / max(len(finite), 1)) ** 0.5
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
