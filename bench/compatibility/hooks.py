"""Checks of hooks: of modules, of tensors and of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from .rows import group
from .subjects import Subject
from .trial import Trial, expect, loss, same

row = group("autograd")


@row("forward hooks")
def forward_hooks(s: Subject) -> None:
    """A forward pre-hook replaces the input, and a forward hook the output."""
    trial = Trial(s)
    trial.module.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    trial.module.register_forward_hook(lambda module, args, results: (results[0] * 3, results[1]))
    output, *last = trial.call(trial.x / 2, *trial.states)
    trial.same_values((output / 3, *last))


@row("backward hooks")
def backward_hooks(s: Subject) -> None:
    """Full backward hooks see the gradients of output and input, and may replace the latter."""
    trial = Trial(s)
    seen: list[Any] = []
    trial.module.register_full_backward_pre_hook(lambda module, grads: seen.append(grads))

    def replace(module: Any, grad_input: Any, grad_output: Any) -> Any:
        seen.append((grad_input, grad_output))
        return (grad_input[0] * 2, *grad_input[1:])

    trial.module.register_full_backward_hook(replace)
    x = trial.x.clone().requires_grad_()
    loss(trial.call(x, *trial.states)).backward()
    expect(len(seen) == 2, f"{len(seen)} hooks ran instead of 2")
    _, grads = trial.expected()
    same(seen[1][0][0], grads["x"], what="grad_input")
    same(x.grad, 2 * grads["x"], what="gradient")
    same(next(iter(trial.weights.values())).grad, grads[next(iter(trial.weights))])


@row("tensor hooks")
def tensor_hooks(s: Subject) -> None:
    """Hooks and retain_grad of output, input and weights see, and may replace, gradients."""
    trial = Trial(s)
    _, grads = trial.expected()
    x = trial.x.clone().requires_grad_()
    x.register_hook(lambda grad: grad * 2)
    for weight in trial.weights.values():
        weight.register_hook(lambda grad: grad * 3)
    outputs = trial.call(x, *trial.states)
    outputs[0].retain_grad()
    seen: list[Tensor] = []
    outputs[1].register_hook(seen.append)
    loss(outputs).backward()
    expect(outputs[0].grad is not None and len(seen) == 1, "a hook did not run")
    same(x.grad, 2 * grads["x"], what="gradient")
    for name, weight in trial.weights.items():
        same(weight.grad, 3 * grads[name], what="gradient")


@row("hooks after accumulation")
def post_accumulate(s: Subject) -> None:
    """An optimizer's step in post-accumulate-grad hooks changes each weight by its gradient."""
    trial = Trial(s, num_layers=2)
    _, grads = trial.expected()
    before = trial.detached

    def step(weight: Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad)  # type: ignore[arg-type]
        weight.grad = None

    for weight in trial.weights.values():
        weight.register_post_accumulate_grad_hook(step)
    loss(trial.call(trial.x, *trial.states)).backward()
    same(trial.detached, {name: w - grads[name] for name, w in before.items()})


@row("hooks of several gradients")
def multi_grad(s: Subject) -> None:
    """A hook of several tensors at once gets the gradient of each."""
    trial = Trial(s)
    _, grads = trial.expected()
    seen: list[Any] = []
    register_multi_grad_hook(list(trial.weights.values()), seen.append)
    loss(trial.call(trial.x, *trial.states)).backward()
    expect(len(seen) == 1, f"the hook ran {len(seen)} times")
    same(list(seen[0]), [grads[name] for name in trial.weights], what="gradient")


@row("hooks of graph nodes")
def node_hooks(s: Subject) -> None:
    """A pre-hook of the output's node in the graph replaces the gradient that it gets."""
    trial = Trial(s)
    x = trial.x.clone().requires_grad_()
    output = trial.call(x, *trial.states)[0]
    node: Any = output.grad_fn
    expect(node is not None and node.name(), "the output has no node in the graph")
    node.register_prehook(lambda grads: tuple(None if g is None else 2 * g for g in grads))
    output.sum().backward()
    leaf = trial.x.clone().requires_grad_()
    (2 * trial.truth(trial.detached, leaf, *trial.states)[0].sum()).backward()
    same(x.grad, leaf.grad, what="gradient")
