"""Checks of second derivatives, forward mode and batched gradients by torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.nn.utils.rnn import pack_padded_sequence

from .rows import group, table
from .subjects import Subject, flat, hx_of
from .trial import DEEP, Trial, Weights, loss, same

row = group("autograd")
Forward = Callable[..., tuple[Tensor, ...]]


def both(trial: Trial, transform: Callable[[Forward, Weights], Any], *, what: str = "") -> None:
    """Compares a transform of the module as a function of its weights with that of the loop."""
    found = []
    for function in (trial.functional, trial.truth):
        weights = {n: w.requires_grad_() for n, w in trial.detached.items()}
        found.append(transform(function, weights))
    same(found[0], found[1], 1e-8, what)


def small(s: Subject, **options: Any) -> Trial:
    """A trial whose Jacobians and Hessians take little time."""
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
    trial = small(s, num_layers=2)

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
    """The second derivative by states, noise and input, of two layers in two directions."""
    trial = Trial(s, seq_len=9, batch=2, **DEEP)  # of several parts

    def twice(function: Forward, weights: Weights) -> Any:
        given = {name: eps.clone().requires_grad_() for name, eps in trial.given.items()}
        leaves = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
        result, leaves = loss(function(weights, *leaves, **given)), [*leaves, *given.values()]
        grads = torch.autograd.grad(result, leaves, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        return torch.autograd.grad(total, [*leaves, *weights.values()])

    both(trial, twice)


@row("second order with lengths and reset")
def second_order_masked(s: Subject) -> None:
    """The second derivative by input and weights, with lengths= and reset=."""
    s.needs("lengths")
    trial = small(s)
    reset = torch.tensor([[False, True], [True, False], [False, False]])

    def twice(function: Forward, weights: Weights) -> Any:
        x = trial.x.clone().requires_grad_()
        result = loss(function(weights, x, *trial.states, lengths=[3, 2], reset=reset))
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *weights.values()])

    both(trial, twice)


@row("third order")
def third_order(s: Subject) -> None:
    """The third derivative by input, states and weights."""
    trial = small(s)

    def thrice(function: Forward, weights: Weights) -> Any:
        leaves = [t.clone().requires_grad_() for t in (trial.x, *trial.states)]
        value = loss(function(weights, *leaves))
        leaves += weights.values()
        for _ in range(2):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(g.square().sum() for g in grads)  # type: ignore[assignment]
        return torch.autograd.grad(value, leaves)

    both(trial, thrice)


def _gradgradcheck(trial: Trial, call: Callable[[Tensor], Any]) -> None:
    def seeded(x: Tensor) -> Any:
        torch.manual_seed(5)  # the same masks each time
        return call(x)

    torch.autograd.gradgradcheck(seeded, trial.x.clone().requires_grad_(), fast_mode=True)


@row("second order with options")
def second_order_options(s: Subject) -> None:
    """gradgradcheck with dropout, with zoneout, and of the last states alone."""
    last: dict[str, Any] = {"return_sequence": False}
    dropped = [{"dropout": 0.5, "num_layers": 2}] if s.kind != "recurrent" else []
    zoned = [{"zoneout": 0.2}] if s.is_built_in else []
    of_ours = [last, last | DEEP] if s.is_ours else []
    for options in (*dropped, *zoned, *of_ours):
        seq_len = 20 if "return_sequence" in options else 5
        trial = Trial(s, seq_len=seq_len, batch=2, noise="drawn", **options)
        _gradgradcheck(trial, lambda x, t=trial: t.call(x, *t.states))


@row("second order of a PackedSequence")
def second_order_packed(s: Subject) -> None:
    """gradgradcheck of rows of several lengths, packed."""
    s.needs("packed")
    trial = Trial(s, noise="mean")

    def call(x: Tensor) -> Any:
        given = pack_padded_sequence(x, [5, 3, 1])
        output, *last = flat(trial.module(given, hx_of(trial.states), **trial.given))
        return output.data, *last

    _gradgradcheck(trial, call)


def _checkable(trial: Trial) -> tuple[Callable[..., Any], list[Tensor]]:
    names = list(trial.weights)
    n = 1 + len(trial.states)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return trial.functional(dict(zip(names, tensors[n:], strict=True)), *tensors[:n])

    leaves = [trial.x, *trial.states, *trial.detached.values()]
    return function, [t.clone().requires_grad_() for t in leaves]


def _checked(s: Subject, check: Callable[..., Any], **options: Any) -> None:
    function, leaves = _checkable(small(s))
    check(function, leaves, fast_mode=True, **options)


table(
    row,
    _checked,
    (
        "gradcheck",
        "torch.autograd.gradcheck over input, states and all weights.",
        {"check": torch.autograd.gradcheck},
    ),
    (
        "gradgradcheck",
        "torch.autograd.gradgradcheck over the same.",
        {"check": torch.autograd.gradgradcheck},
    ),
    (
        "gradcheck, forward mode and batched gradients",
        "torch.autograd.gradcheck with check_forward_ad=True and check_batched_grad=True.",
        {"check": torch.autograd.gradcheck, "check_forward_ad": True, "check_batched_grad": True},
    ),
)


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


def _jacobian(s: Subject, **options: Any) -> None:
    trial = small(s)
    of = [_of_input(trial, f, trial.weights) for f in (trial.functional, trial.truth)]
    truth = functional.jacobian(of[1], trial.x)
    same(functional.jacobian(of[0], trial.x, **options), truth)


_VECTORIZED = {"vectorize": True}
table(
    row,
    _jacobian,
    ("functional.jacobian", "functional.jacobian of the output by the input.", {}),
    ("functional.jacobian, vectorize", "The same with vectorize=True.", _VECTORIZED),
    (
        "functional.jacobian, forward mode",
        'The same with vectorize=True and strategy="forward-mode".',
        _VECTORIZED | {"strategy": "forward-mode"},
    ),
)


@row("functional.hessian")
def hessian(s: Subject) -> None:
    """torch.autograd.functional.hessian of a loss by the input."""
    trial = small(s)

    def of(function: Forward, weights: Weights) -> Any:
        one = _of_input(trial, function, weights)
        return functional.hessian(lambda x: loss((one(x),)), trial.x)

    both(trial, of)


@row("functional.hvp, vhp, jvp, vjp")
def products(s: Subject) -> None:
    """The products of torch.autograd.functional with the Jacobian and the Hessian."""
    trial = small(s)
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
