"""Checks of second derivatives, forward mode and batched gradients by torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, functional

from .rows import group
from .subjects import Subject
from .trial import Trial, Weights, loss, same

row = group("autograd")
Forward = Callable[..., tuple[Tensor, ...]]


def both(trial: Trial, transform: Callable[[Forward, Weights], Any], *, what: str = "") -> None:
    """Compares a transform of the module as a function of its weights with that of the loop."""
    found = []
    for function in (trial.functional, trial.truth):
        weights = {n: w.requires_grad_() for n, w in trial.detached.items()}
        found.append(transform(function, weights))
    same(found[0], found[1], 1e-8, what)


def _small(s: Subject, **options: Any) -> Trial:
    return Trial(s, seq_len=3, batch=2, **options)


@row("create_graph, not used")
def create_graph_unused(s: Subject) -> None:
    """create_graph=True gives the same gradients, whether or not the graph is used."""
    Trial(s).trains(backward=lambda result: result.backward(create_graph=True))


@row("gradient penalty")
def gradient_penalty(s: Subject) -> None:
    """The gradient of the norm of the input's gradient, as WGAN-GP needs it."""
    trial = Trial(s)

    def penalty(function: Forward, weights: Weights) -> Any:
        x = trial.x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            loss(function(weights, x, *trial.states)), x, create_graph=True
        )
        return torch.autograd.grad((grad.norm() - 1) ** 2, [x, *weights.values()])

    both(trial, penalty)


@row("Hessian-vector product")
def hessian_vector(s: Subject) -> None:
    """The Hessian of the weights times a vector, by two reverse passes."""
    trial = _small(s, num_layers=2)

    def product(function: Forward, weights: Weights) -> Any:
        leaves = list(weights.values())
        result = loss(function(weights, trial.x, *trial.states))
        grads = torch.autograd.grad(result, leaves, create_graph=True)
        dot = sum((g * torch.ones_like(g)).sum() for g in grads)
        return torch.autograd.grad(dot, leaves)

    both(trial, product)


@row("MAML")
def maml(s: Subject) -> None:
    """The gradient through a step of gradient descent, as meta-learning takes it."""
    trial = Trial(s)

    def meta(function: Forward, weights: Weights) -> Any:
        inner = loss(function(weights, trial.x, *trial.states))
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        outer = loss(function(fast, trial.x * 0.5, *trial.states))
        return torch.autograd.grad(outer, list(weights.values()))

    both(trial, meta)


@row("second order, frozen weights")
def second_order_frozen(s: Subject) -> None:
    """The second derivative by the input alone, through weights that need no gradient."""
    trial = Trial(s)

    def twice(function: Forward, weights: Weights) -> Any:
        x = trial.x.clone().requires_grad_()
        frozen = {n: w.detach() for n, w in weights.items()}
        result = loss(function(frozen, x, *trial.states))
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)

    both(trial, twice)


@row("second order by the states")
def second_order_states(s: Subject) -> None:
    """The second derivative by states and input, of two layers in two directions."""
    trial = _small(s, num_layers=2, bidirectional=True)

    def twice(function: Forward, weights: Weights) -> Any:
        leaves = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
        grads = torch.autograd.grad(loss(function(weights, *leaves)), leaves, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        return torch.autograd.grad(total, [*leaves, *weights.values()])

    both(trial, twice)


@row("second order with lengths and reset")
def second_order_masked(s: Subject) -> None:
    """The second derivative by input and weights, with lengths= and reset=."""
    s.needs("lengths")
    trial = _small(s)
    reset = torch.tensor([[False, True], [True, False], [False, False]])

    def twice(function: Forward, weights: Weights) -> Any:
        x = trial.x.clone().requires_grad_()
        result = loss(function(weights, x, *trial.states, lengths=[3, 2], reset=reset))
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *weights.values()])

    both(trial, twice)


@row("third order")
def third_order(s: Subject) -> None:
    """The third derivative by the input."""
    trial = _small(s)

    def thrice(function: Forward, weights: Weights) -> Any:
        x = trial.x.clone().requires_grad_()
        value = loss(function(weights, x, *trial.states))
        for _ in range(2):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.square().sum()
        return torch.autograd.grad(value, x)

    both(trial, thrice)


def _checkable(trial: Trial) -> tuple[Callable[..., Any], list[Tensor]]:
    names = list(trial.weights)
    n = 1 + len(trial.states)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return trial.functional(dict(zip(names, tensors[n:], strict=True)), *tensors[:n])

    leaves = [trial.x, *trial.states, *trial.detached.values()]
    return function, [t.clone().requires_grad_() for t in leaves]


@row("gradgradcheck")
def gradgradcheck(s: Subject) -> None:
    """torch.autograd.gradgradcheck over input, states and all weights."""
    function, leaves = _checkable(_small(s))
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@row("gradcheck, forward mode")
def gradcheck_forward(s: Subject) -> None:
    """torch.autograd.gradcheck with check_forward_ad=True."""
    function, leaves = _checkable(_small(s))
    torch.autograd.gradcheck(function, leaves, fast_mode=True, check_forward_ad=True)


@row("gradcheck, batched gradients")
def gradcheck_batched(s: Subject) -> None:
    """torch.autograd.gradcheck with check_batched_grad=True."""
    function, leaves = _checkable(_small(s))
    torch.autograd.gradcheck(function, leaves, fast_mode=True, check_batched_grad=True)


@row("forward_ad")
def dual_numbers(s: Subject) -> None:
    """Tangents of the results for tangents of input, states and weights, by forward_ad."""
    trial = Trial(s)
    names = list(trial.weights)
    n = 1 + len(trial.states)
    primals = (trial.x, *trial.states, *trial.detached.values())
    tangents = tuple(torch.randn_like(t) for t in primals)

    def call(function: Forward, *tensors: Tensor) -> tuple[Tensor, ...]:
        return function(dict(zip(names, tensors[n:], strict=True)), *tensors[:n])

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        outputs = [forward_ad.unpack_dual(o) for o in call(trial.functional, *duals)]
    expected = functional.jvp(lambda *t: call(trial.truth, *t), primals, tangents)
    same(tuple(o.primal for o in outputs), expected[0], what="output")
    same(tuple(o.tangent for o in outputs), expected[1], what="tangent")


def _of_input(trial: Trial, function: Forward, weights: Weights) -> Callable[[Tensor], Tensor]:
    frozen = {n: w.detach() for n, w in weights.items()}
    return lambda x: function(frozen, x, *trial.states)[0]


@row("functional.jacobian")
def jacobian(s: Subject) -> None:
    """torch.autograd.functional.jacobian of the output by the input."""
    trial = _small(s)
    both(trial, lambda f, w: functional.jacobian(_of_input(trial, f, w), trial.x))


@row("functional.jacobian, vectorize")
def jacobian_vectorized(s: Subject) -> None:
    """The same with vectorize=True."""
    trial = _small(s)
    of = [_of_input(trial, f, trial.weights) for f in (trial.functional, trial.truth)]
    same(functional.jacobian(of[0], trial.x, vectorize=True), functional.jacobian(of[1], trial.x))


@row("functional.jacobian, forward mode")
def jacobian_forward(s: Subject) -> None:
    """The same with vectorize=True and strategy="forward-mode"."""
    trial = _small(s)
    of = [_of_input(trial, f, trial.weights) for f in (trial.functional, trial.truth)]
    ours = functional.jacobian(of[0], trial.x, vectorize=True, strategy="forward-mode")
    same(ours, functional.jacobian(of[1], trial.x))


@row("functional.hessian")
def hessian(s: Subject) -> None:
    """torch.autograd.functional.hessian of a loss by the input."""
    trial = _small(s)

    def of(function: Forward, weights: Weights) -> Any:
        one = _of_input(trial, function, weights)
        return functional.hessian(lambda x: loss((one(x),)), trial.x)

    both(trial, of)


@row("functional.hvp, vhp, jvp, vjp")
def products(s: Subject) -> None:
    """The products of torch.autograd.functional with the Jacobian and the Hessian."""
    trial = _small(s)
    vector = torch.randn_like(trial.x)

    def of(function: Forward, weights: Weights) -> Any:
        one = _of_input(trial, function, weights)
        scalar = lambda x: loss((one(x),))  # noqa: E731
        cotangent = torch.ones_like(one(trial.x))
        return (
            functional.vjp(one, trial.x, cotangent),
            functional.jvp(one, trial.x, vector),
            functional.hvp(scalar, trial.x, vector),
            functional.vhp(scalar, trial.x, vector),
        )

    both(trial, of)


@row("is_grads_batched")
def batched_gradients(s: Subject) -> None:
    """torch.autograd.grad of several cotangents at once, by is_grads_batched=True."""
    trial = Trial(s)
    x = trial.x.clone().requires_grad_()
    leaves = [x, *trial.weights.values()]
    output = trial.call(x, *trial.states)[0]
    cotangents = torch.randn(3, *output.shape, dtype=output.dtype)
    ours = torch.autograd.grad(output, leaves, cotangents, is_grads_batched=True)
    weights = {n: w.requires_grad_() for n, w in trial.detached.items()}
    truth = trial.truth(weights, x, *trial.states)[0]
    each = [
        torch.autograd.grad(truth, [x, *weights.values()], c, retain_graph=True) for c in cotangents
    ]
    same(ours, tuple(torch.stack(of) for of in zip(*each, strict=True)), what="gradient")
