"""Checks of torch.func.vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func
from torch.utils import _pytree as pytree

from .higher_order import Forward
from .rows import group
from .subjects import Subject
from .trial import DEEP, Trial, expect, loss, must_raise, same

row = group("func")
COPIES = 3


def _stacked(call: Callable[..., Any], *batched: Any) -> Any:
    """What vmap should give: one call after another."""
    each = [call(*arguments) for arguments in zip(*batched, strict=True)]
    if isinstance(each[0], Tensor):
        return torch.stack(each)
    if isinstance(each[0], dict):
        return {name: torch.stack([of[name] for of in each]) for name in each[0]}
    return tuple(torch.stack(of) for of in zip(*each, strict=True))


def _inputs(trial: Trial) -> Tensor:
    return torch.randn(COPIES, *trial.x.shape, dtype=trial.dtype)


def _outputs(trial: Trial) -> list[Callable[[Tensor], Tensor]]:
    """The output of the input, by the module and by the loop."""
    return [
        lambda x, f=f: f(trial.detached, x, *trial.states)[0]
        for f in (trial.functional, trial.truth)
    ]


def _mapped(trial: Trial, build: Callable[[Forward], Callable[..., Any]], *batched: Tensor) -> Any:
    """Compares vmap of the module with calls of the loop; ``build`` makes the function to map."""
    ours, truth = build(trial.functional), build(trial.truth)
    same(func.vmap(ours)(*batched), _stacked(truth, *batched))
    return ours


@row("vmap over the input")
def vmap_input(s: Subject) -> None:
    """vmap over a further dimension of the input."""
    trial = Trial(s)
    _mapped(trial, lambda f: lambda x: f(trial.detached, x, *trial.states), _inputs(trial))


@row("vmap over input and states")
def vmap_states(s: Subject) -> None:
    """vmap over input and states, of two layers in two directions."""
    trial = Trial(s, **DEEP)
    states = [torch.randn(COPIES, *state.shape, dtype=state.dtype) for state in trial.states]
    _mapped(trial, lambda f: lambda *t: f(trial.detached, *t), _inputs(trial), *states)


@row("vmap, in_dims and out_dims")
def vmap_dims(s: Subject) -> None:
    """vmap over another than the first dimension, in chunks, its result along another one too."""
    trial = Trial(s)
    ours, truth = _outputs(trial)
    x = _inputs(trial)
    result = func.vmap(ours, in_dims=2, out_dims=1, chunk_size=2)(x.movedim(0, 2))
    same(result.movedim(1, 0), _stacked(truth, x))


@row("nested vmap")
def vmap_twice(s: Subject) -> None:
    """vmap of vmap."""
    trial = Trial(s)
    ours, truth = _outputs(trial)
    x = torch.stack([_inputs(trial), _inputs(trial)])
    same(func.vmap(func.vmap(ours))(x), _stacked(lambda one: _stacked(truth, one), x))


def _ensemble(trial: Trial) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    modules = [copy.deepcopy(trial.module) for _ in range(COPIES)]
    for module in modules:
        for weight in module.parameters():
            torch.nn.init.uniform_(weight, -0.5, 0.5)
    stacked, _ = func.stack_module_state(modules)
    each = [{n: w.detach() for n, w in module.named_parameters()} for module in modules]
    return {name: w.detach() for name, w in stacked.items()}, each


@row("ensembles")
def ensemble(s: Subject) -> None:
    """vmap over the weights of several modules, by stack_module_state, on one input."""
    trial = Trial(s)
    stacked, each = _ensemble(trial)
    call = lambda weights: trial.functional(weights, trial.x, *trial.states)  # noqa: E731
    truth = lambda weights: trial.truth(weights, trial.x, *trial.states)  # noqa: E731
    same(func.vmap(call)(stacked), _stacked(truth, each))


@row("training an ensemble")
def ensemble_training(s: Subject) -> None:
    """Autograd through vmap over weights and input: the gradient of every module's weights."""
    trial = Trial(s)
    stacked, each = _ensemble(trial)
    x = _inputs(trial)
    leaves = {name: w.requires_grad_() for name, w in stacked.items()}
    outputs = func.vmap(lambda w, x: trial.functional(w, x, *trial.states))(leaves, x)
    found = torch.autograd.grad(loss(outputs), list(leaves.values()))

    def truth(weights: dict[str, Tensor], x: Tensor) -> Any:
        own = {name: w.clone().requires_grad_() for name, w in weights.items()}
        return torch.autograd.grad(loss(trial.truth(own, x, *trial.states)), list(own.values()))

    same(found, _stacked(truth, each, x), what="gradient")


def _per_sample(s: Subject, *, noise: str = "eps", **arguments: Any) -> None:
    trial = Trial(s, batch=1, noise=noise)
    samples = _inputs(trial)

    def ours(weights: Any, x: Tensor) -> Tensor:
        return loss(trial.functional(weights, x, *trial.states, **arguments))

    def truth(x: Tensor) -> Any:
        weights = {name: w.requires_grad_() for name, w in trial.detached.items()}
        result = loss(trial.truth(weights, x, *trial.states, **arguments))
        return torch.autograd.grad(result, list(weights.values()))

    found = func.vmap(func.grad(ours), in_dims=(None, 0))(trial.detached, samples)
    same(tuple(found.values()), _stacked(truth, samples), what="gradient")


@row("per-sample gradients")
def per_sample(s: Subject) -> None:
    """vmap of grad: the gradient of the weights for each sample."""
    _per_sample(s)


@row("per-sample gradients with lengths")
def per_sample_lengths(s: Subject) -> None:
    """The same with lengths=."""
    s.needs("lengths")
    _per_sample(s, lengths=[3])


@row("per-sample gradients with reset")
def per_sample_reset(s: Subject) -> None:
    """The same with reset=."""
    s.needs("lengths")
    _per_sample(s, reset=torch.tensor([[False], [True], [False], [True], [False]]))


@row("vmap over reset")
def vmap_reset(s: Subject) -> None:
    """vmap over input and reset= together."""
    s.needs("lengths")
    trial, reset = Trial(s), torch.rand(COPIES, 5, 3) < 0.3
    _mapped(
        trial,
        lambda f: lambda x, reset: f(trial.detached, x, *trial.states, reset=reset),
        _inputs(trial),
        reset,
    )


@row("vmap over lengths")
def vmap_lengths(s: Subject) -> None:
    """vmap over input and lengths= together; wrong ones are refused."""
    s.needs("lengths")
    trial, lengths = Trial(s), torch.tensor([[5, 3, 1], [2, 1, 4], [4, 5, 5]])
    ours = _mapped(
        trial,
        lambda f: lambda x, lengths: f(trial.detached, x, *trial.states, lengths=lengths),
        _inputs(trial),
        lengths,
    )
    if s.is_ours:
        must_raise(lambda: func.vmap(ours)(_inputs(trial), lengths - 1), "[1, 5], got 0")


@row("vmap over eps")
def vmap_eps(s: Subject) -> None:
    """vmap over the noise of one input, and the gradient by the noise."""
    s.needs("noise")
    trial = Trial(s)
    eps = torch.randn(COPIES, *trial.given["eps"].shape, dtype=trial.dtype)

    def of(f: Forward) -> Callable[..., Any]:
        return lambda eps: f(trial.detached, trial.x, *trial.states, eps=eps)

    _mapped(trial, of, eps)
    _mapped(trial, lambda f: func.grad(lambda eps: loss(of(f)(eps))), eps)


@row("vmap of jvp")
def vmap_jvp(s: Subject) -> None:
    """vmap of func.jvp over tangents, against vmap's absence."""
    trial = Trial(s, seq_len=3, batch=2)

    def of(f: Forward) -> Callable[..., Any]:
        output = lambda x: f(trial.detached, x, *trial.states)[0]  # noqa: E731
        return lambda tangent: func.jvp(output, (trial.x,), (tangent,))[1]

    _mapped(trial, of, _inputs(trial))


@row("vmap over no examples")
def vmap_none(s: Subject) -> None:
    """vmap over nothing, and vmap of func.grad over nothing, have the shapes of one example."""
    for options in ({}, *([{"return_sequence": False}] if s.is_ours else [])):
        trial = Trial(s, **options)
        one = lambda w, x, t=trial: t.functional(w, x, *t.states)  # noqa: E731
        result = lambda w, x, f=one: f(w, x)[0].sin().sum()  # noqa: E731
        for call in (one, func.grad(result)):
            found = func.vmap(call, (None, 0))(trial.detached, trial.x[None][:0])
            shapes = pytree.tree_map(lambda t: t[None][:0], call(trial.detached, trial.x))
            same(found, shapes, 0.0)


def _drawn(s: Subject, randomness: str) -> tuple[Trial, Tensor, Tensor]:
    s.needs("noise")
    trial = Trial(s, noise="drawn")
    x = trial.x.expand(COPIES, *trial.x.shape)
    torch.manual_seed(5)
    found = func.vmap(
        lambda x: trial.functional(trial.detached, x, *trial.states)[0], randomness=randomness
    )(x)
    torch.manual_seed(5)
    return trial, found, trial.call(trial.x, *trial.states)[0]


@row('vmap of drawn noise, "same"')
def noise_same(s: Subject) -> None:
    """With randomness="same" every copy has the noise that a call without vmap has."""
    _, found, alone = _drawn(s, "same")
    same(found, torch.stack([alone] * COPIES))


@row('vmap of drawn noise, "different"')
def noise_different(s: Subject) -> None:
    """With randomness="different" equal inputs have other noise in every copy and row."""
    _, found, alone = _drawn(s, "different")
    expect(found.shape == (COPIES, *alone.shape), "the result has another shape")
    first = found[:, 0].reshape(-1, found.shape[-1])  # of copies and rows; the inputs differ by row
    for i in range(COPIES):
        for k in range(i):
            expect(not torch.allclose(found[i], found[k]), "two copies have the same noise")
    expect(first.isfinite().all(), "a result is not finite")


@row('vmap of drawn noise, "error"')
def noise_error(s: Subject) -> None:
    """With randomness="error" a call that draws noise is refused."""
    s.needs("noise")
    must_raise(lambda: _drawn(s, "error"), "random")


@row("gradients of drawn noise under vmap")
def noise_gradients(s: Subject) -> None:
    """vmap of grad with randomness="different" agrees with the difference of two losses."""
    s.needs("noise")
    trial = Trial(s, noise="drawn")
    x = trial.x.expand(COPIES, *trial.x.shape)
    direction = torch.randn_like(trial.x)

    def one(x: Tensor) -> Tensor:
        return loss(trial.functional(trial.detached, x, *trial.states))

    def mapped(call: Callable[..., Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return func.vmap(call, randomness="different")(x)

    grads = mapped(func.grad(one), x)
    step = 1e-5
    up, down = (mapped(one, x + sign * step * direction) for sign in (1, -1))
    same((grads * direction).sum((1, 2, 3)), (up - down) / (2 * step), 1e-6, "gradient")
