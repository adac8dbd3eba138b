"""Checks of torch.func and of its tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func
from torch.autograd import functional
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .higher_order import Forward, both
from .rows import group
from .subjects import Subject
from .trial import Trial, Weights, loss, same

row = group("func")


def _small(s: Subject, **options: Any) -> Trial:
    return Trial(s, seq_len=3, batch=2, **options)


def _losses(trial: Trial) -> list[Callable[..., Tensor]]:
    """The loss as a function of weights and input, by the module and by the loop."""

    def of(function: Forward) -> Callable[..., Tensor]:
        return lambda weights, x: loss(function(weights, x, *trial.states))

    return [of(trial.functional), of(trial.truth)]


def _outputs(trial: Trial) -> list[Callable[[Tensor], Tensor]]:
    """The output as a function of the input, by the module and by the loop."""

    weights = trial.detached

    def of(function: Forward) -> Callable[[Tensor], Tensor]:
        return lambda x: function(weights, x, *trial.states)[0]

    return [of(trial.functional), of(trial.truth)]


@row("grad")
def grad(s: Subject) -> None:
    """func.grad by weights and input, against autograd through the loop."""
    trial = Trial(s, num_layers=2)
    ours = func.grad(_losses(trial)[0], argnums=(0, 1))(trial.detached, trial.x)
    _, grads = trial.expected()
    same(ours, ({name: grads[name] for name in trial.weights}, grads["x"]), what="gradient")


@row("grad_and_value, has_aux")
def grad_and_value(s: Subject) -> None:
    """func.grad_and_value with has_aux=True returns gradient, loss and outputs."""
    trial = Trial(s)

    def one(x: Tensor) -> Any:
        outputs = trial.functional(trial.detached, x, *trial.states)
        return loss(outputs), outputs

    ours, (value, outputs) = func.grad_and_value(one, has_aux=True)(trial.x)
    expected, grads = trial.expected()
    same((ours, value, outputs), (grads["x"], loss(expected), expected))


@row("vjp")
def vjp(s: Subject) -> None:
    """func.vjp of all results by weights, input and states."""
    trial = Trial(s)
    found = []
    for function in (trial.functional, trial.truth):
        outputs, pull = func.vjp(function, trial.detached, trial.x, *trial.states)
        found.append((outputs, pull(tuple(torch.ones_like(o) for o in outputs))))
    same(found[0], found[1])


@row("jvp")
def jvp(s: Subject) -> None:
    """func.jvp by input and states, against two reverse passes through the loop."""
    trial = Trial(s)
    primals = (trial.x, *trial.states)
    tangents = tuple(torch.randn_like(p) for p in primals)
    of = [lambda *t, f=f: f(trial.detached, *t) for f in (trial.functional, trial.truth)]
    same(func.jvp(of[0], primals, tangents), functional.jvp(of[1], primals, tangents))


@row("jvp by weights")
def jvp_weights(s: Subject) -> None:
    """func.jvp by the weights, of two layers in two directions."""
    trial = _small(s, num_layers=2, bidirectional=True)
    weights = trial.detached
    tangents = {name: torch.randn_like(w) for name, w in weights.items()}

    def call(weights: Weights) -> tuple[Tensor, ...]:
        return trial.functional(weights, trial.x, *trial.states)

    def truth(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(weights, tensors, strict=True))
        return trial.truth(named, trial.x, *trial.states)

    ours = func.jvp(call, (weights,), (tangents,))
    same(ours, functional.jvp(truth, tuple(weights.values()), tuple(tangents.values())))


@row("linearize")
def linearize(s: Subject) -> None:
    """func.linearize at the input, applied to two tangents."""
    trial = _small(s)
    ours, truth = _outputs(trial)
    output, push = func.linearize(ours, trial.x)
    for _ in range(2):
        tangent = torch.randn_like(trial.x)
        same((output, push(tangent)), functional.jvp(truth, trial.x, tangent))


def _jacobian(s: Subject, transform: Callable[..., Any], **options: Any) -> None:
    trial = _small(s)
    ours, truth = _outputs(trial)
    same(transform(ours, **options)(trial.x), functional.jacobian(truth, trial.x))


@row("jacrev")
def jacrev(s: Subject) -> None:
    """func.jacrev of the output by the input."""
    _jacobian(s, func.jacrev)


@row("jacrev, chunk_size=1")
def jacrev_chunked(s: Subject) -> None:
    """The same one row at a time, without vmap."""
    _jacobian(s, func.jacrev, chunk_size=1)


@row("jacfwd")
def jacfwd(s: Subject) -> None:
    """func.jacfwd of the output by the input."""
    _jacobian(s, func.jacfwd)


@row("hessian")
def hessian(s: Subject) -> None:
    """func.hessian of a loss by the input: forward over reverse."""
    trial = _small(s)
    ours, truth = (lambda x, f=f: loss((f(x),)) for f in _outputs(trial))
    same(func.hessian(ours)(trial.x), functional.hessian(truth, trial.x), 1e-8)


@row("jacrev of jacrev")
def reverse_twice(s: Subject) -> None:
    """The Hessian by func.jacrev over func.jacrev."""
    trial = _small(s)
    ours, truth = (lambda x, f=f: loss((f(x),)) for f in _outputs(trial))
    same(func.jacrev(func.jacrev(ours))(trial.x), functional.hessian(truth, trial.x), 1e-8)


@row("grad of grad")
def grad_of_grad(s: Subject) -> None:
    """func.grad of the norm of func.grad, by the weights."""
    trial = Trial(s)

    def twice(f: Forward, weights: Weights) -> Any:
        one = lambda w, x: loss(f(w, x, *trial.states))  # noqa: E731
        inner = lambda w: func.grad(one, argnums=1)(w, trial.x).square().sum()  # noqa: E731
        return func.grad(inner)({n: w.detach() for n, w in weights.items()})

    both(trial, twice)


@row("jvp of grad")
def jvp_of_grad(s: Subject) -> None:
    """A Hessian-vector product as func.jvp of func.grad: forward over reverse."""
    trial = _small(s)
    vector = torch.randn_like(trial.x)
    ours, truth = (lambda x, f=f: loss((f(x),)) for f in _outputs(trial))
    _, product = func.jvp(func.grad(ours), (trial.x,), (vector,))
    same(product, functional.hvp(truth, trial.x, vector)[1], 1e-8)


@row("functional_call")
def functional_call(s: Subject) -> None:
    """functional_call with other weights, and autograd by these."""
    trial = Trial(s, num_layers=2)

    def grads(function: Forward, weights: Weights) -> Any:
        other = {name: w * 0.5 for name, w in weights.items()}
        outputs = function(other, trial.x, *trial.states)
        return outputs, torch.autograd.grad(loss(outputs), list(weights.values()))

    both(trial, grads)


def _closed(trial: Trial) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """All results, and the gradients, as functions of nothing but their arguments."""

    def outputs(weights: Weights, given: dict[str, Tensor], *tensors: Tensor) -> Any:
        return trial.functional(weights, *tensors, **given)

    def grads(weights: Weights, given: dict[str, Tensor], *tensors: Tensor) -> Any:
        return func.grad(lambda w, x: loss(outputs(w, given, x, *tensors[1:])), argnums=(0, 1))(
            weights, tensors[0]
        )

    return outputs, grads, (trial.detached, trial.given, trial.x, *trial.states)


def _check_closed(trial: Trial, outputs: Any, grads: Any) -> None:
    trial.same_values(outputs)
    _, expected = trial.expected()
    same(grads, ({name: expected[name] for name in trial.weights}, expected["x"]), what="gradient")


@row("functionalize")
def functionalize(s: Subject) -> None:
    """func.functionalize of a call, and of func.grad of it."""
    trial = Trial(s)
    outputs, grads, arguments = _closed(trial)
    _check_closed(trial, *(func.functionalize(f)(*arguments) for f in (outputs, grads)))


def _traced(s: Subject, mode: str) -> None:
    trial = Trial(s)
    outputs, grads, arguments = _closed(trial)
    others = pytree.tree_map(torch.randn_like, arguments)
    found = [make_fx(f, tracing_mode=mode)(*others)(*arguments) for f in (outputs, grads)]
    _check_closed(trial, *found)


@row("make_fx")
def make_fx_real(s: Subject) -> None:
    """make_fx of a call, and of func.grad of it; the graph is run with other values."""
    _traced(s, "real")


@row("make_fx, symbolic")
def make_fx_symbolic(s: Subject) -> None:
    """The same with symbolic shapes."""
    _traced(s, "symbolic")
