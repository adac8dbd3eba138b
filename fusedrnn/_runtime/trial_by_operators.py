"""What a program's library computes on a trial, by the operators that run it in calls."""

from __future__ import annotations

import torch
from torch import Tensor

from .._compiler.compiled_step import CompiledStep
from .._compiler.trial import Trial
from .._step.sequence_call import Names, SequenceCall
from .program_backward import backward
from .program_call import ProgramCall, forward
from .sequence_parts import SequencePart


def run_library(
    program: CompiledStep, trial: Trial, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of a trial's leaves, as the interpreter and the trial give them."""
    groups = trial.inputs, trial.state, trial.constants
    tensors = [
        t.detach().to(device, program.dtype if t.is_floating_point() else t.dtype)
        for group in groups
        for t in group
    ]
    needs = [t.requires_grad for group in groups for t in group]
    inputs, states = len(trial.inputs), len(trial.state)
    steps = trial.steps
    call = ProgramCall(
        SequenceCall((), (), Names([], []), steps, trial.batch, device, trial.noise.seed),
        (inputs, states, 0),
        None,
        (),
        program,
        program,
        steps - 1,  # three make a whole chunk and a shorter one
        [SequencePart(0, steps)],
        saves_sums=False,
    ).with_program(program)
    seed = trial.noise.seed
    results = forward(call, seed, tensors, for_backward=True)
    cotangents = [g.to(device, program.dtype) for g in trial.cotangents]
    found = backward(call, seed, tensors, results.for_backward, needs, cotangents)
    leaves = [
        torch.zeros_like(t) if g is None else g
        for t, g, need in zip(tensors, found, needs, strict=True)
        if need
    ]
    constants = sum(needs[: inputs + states])  # where these begin, which a trial has first
    return [*results.outputs, *results.last], [*leaves[constants:], *leaves[:constants]]
