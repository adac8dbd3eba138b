"""Checks of what may change between forward and backward, and what may not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .rows import group
from .subjects import Subject
from .trial import Trial, expect, loss, must_raise, same

row = group("autograd")


def _changed(
    trial: Trial, change: Callable[[], object], call: Callable[..., tuple[Tensor, ...]]
) -> None:
    x = trial.x.clone().requires_grad_()
    result = loss(call(x, *trial.states))
    with torch.no_grad():
        change()
    must_raise(result.backward, "modified")


@row("a weight changed before backward")
def changed_weight(s: Subject) -> None:
    """Writing a recurrent weight in place between forward and backward is an error."""
    for layer in (0, 1):
        trial = Trial(s, num_layers=2)
        count = len(trial.weights) // 2
        of_layer = list(trial.weights)[layer * count : (layer + 1) * count]
        for name in filter(re.compile("weight_(hh|zh|hz)").search, of_layer):
            trial = Trial(s, num_layers=2)
            _changed(trial, lambda w=trial.weights[name]: w.mul_(2), trial.call)  # type: ignore


@row("an optimizer step before backward")
def stepped(s: Subject) -> None:
    """An optimizer's step between forward and backward is an error."""
    for make in (torch.optim.SGD, torch.optim.AdamW):
        trial = Trial(s)
        loss(trial.call(trial.x)).backward()
        optimizer = make(trial.module.parameters(), lr=0.1)
        _changed(trial, optimizer.step, trial.call)


def write_flat(
    s: Subject, made: Callable[[Trial], Any] = lambda trial: trial.call, **options: Any
) -> None:
    """Writes flat_weight between forward, which is called as ``made`` has it, and backward."""
    for num_layers, first_is_frozen in ((1, False), (2, False), (2, True)):
        s.needs("built-in")
        trial = Trial(s, num_layers=num_layers, **options)
        for name, weight in trial.weights.items():
            weight.requires_grad_(not (first_is_frozen and name.endswith("_l0")))
        write = lambda module=trial.module: module.flat_weight.mul_(2)  # noqa: E731
        _changed(trial, write, made(trial))


@row("flat_weight written before backward")
def flat_written(s: Subject) -> None:
    """Writing flat_weight before backward is an error: 1 and 2 layers, the first one frozen."""
    write_flat(s)


@row("flat_weight written, last state alone")
def flat_written_last(s: Subject) -> None:
    """The same with return_sequence=False, where backward runs the layers again."""
    write_flat(s, return_sequence=False, seq_len=40)


@row("input or output changed before backward")
def changed_tensors(s: Subject) -> None:
    """Writing input, a state or the output in place is an error or makes no difference."""
    trial = Trial(s)
    _, grads = trial.expected()
    for i in range(2 + len(trial.states)):
        x, *states = (t.clone() for t in (trial.x, *trial.states))
        leaf = next(iter(trial.weights.values()))
        outputs = trial.call(x, *states)
        result = loss(tuple(o * 1 for o in outputs))
        with torch.no_grad():
            (x, *states, outputs[0])[i].mul_(2)
        try:
            (grad,) = torch.autograd.grad(result, leaf)
        except RuntimeError as error:
            expect("modified" in str(error), f"another error: {error}")
        else:
            same(grad, grads[next(iter(trial.weights))], what="gradient")


@row("a gradient changed in place")
def changed_gradient(s: Subject) -> None:
    """Writing to one weight's gradient leaves a graph valid that has saved another one."""
    trial = Trial(s)
    result = loss(trial.call(trial.x, *trial.states))
    first, second, *_ = torch.autograd.grad(result, list(trial.weights.values()))
    scale = torch.ones((), dtype=trial.dtype, requires_grad=True)
    total = (scale * first).square().sum()
    second.clamp_(-1, 1)
    total.backward()
    same(scale.grad, 2 * first.square().sum())
