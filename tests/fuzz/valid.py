"""Compares outputs and gradients of usual calls with a plain loop in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from calls.draw import usual
from calls.judge import judge
from calls.trial import Trial
from cases import Case

from . import Outcome
from .watch import Watch

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def run(seed: int, note: Callable[[str], None]) -> Outcome:
    """Runs a case."""
    trial = Trial(call := usual(random.Random(seed)), seed)
    outcome = Outcome("right", str(call))
    note(outcome.call)
    torch.set_num_threads(call.threads)
    try:
        with MODES[call.mode]():
            watch = Watch([*trial.leaves.values(), trial.lengths, trial.reset, trial.batch_sizes])
            outputs = trial.outputs()
            before = Watch(trial.along)
            ours = trial.results(outputs, trial.leaves)
            changed = watch.changes(may_draw=True) + before.changes(may_draw=True)
            wrong = [str(finding) for finding in judge(trial, ours) if finding.is_wrong]
    finally:
        torch.set_num_threads(1)
    outcome.findings = [("changed state", change) for change in changed]
    outcome.findings += [("too far off", text) for text in wrong]
    return outcome


def good_call() -> list[bytes]:
    """The bits of a fixed call."""
    case = Case("lstm", bidirectional=True, lengths=True, dtype=torch.float32)
    return [bytes(tensor.detach().numpy()) for tensor in case.results().values()]
