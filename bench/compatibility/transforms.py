"""Checks of torch.func and of its tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func
from torch.autograd import functional
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .higher_order import Forward, both, small
from .rows import group, table
from .subjects import Subject
from .trial import DEEP, Trial, Weights, loss, same

row = group("func")


def _losses(trial: Trial) -> list[Callable[..., Tensor]]:
    """The loss as a function of weights and input, by the module and by the loop."""

    def of(function: Forward) -> Callable[..., Tensor]:
        return lambda weights, x: loss(function(weights, x, *trial.states))

    return [of(trial.functional), of(trial.truth)]


def _outputs(trial: Trial) -> list[Callable[..., Tensor]]:
    """The output as a function of the input and of a weight, by the module and by the loop."""
    weights = trial.detached
    name = list(weights)[1]

    def of(function: Forward) -> Callable[..., Tensor]:
        def output(x: Tensor, weight: Tensor = weights[name]) -> Tensor:
            return function(weights | {name: weight}, x, *trial.states)[0]

        return output

    return [of(trial.functional), of(trial.truth)]


def _of_two(trial: Trial) -> tuple[Tensor, Tensor]:
    """The input and the weight."""
    return trial.x, list(trial.detached.values())[1]


@row("grad")
def grad(s: Subject) -> None:
    """func.grad by weights and input, against autograd through the loop."""
    trial = Trial(s, **DEEP)
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
    trial = small(s, **DEEP)
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
    trial = small(s)
    ours, truth = _outputs(trial)
    output, push = func.linearize(ours, trial.x)
    for _ in range(2):
        tangent = torch.randn_like(trial.x)
        same((output, push(tangent)), functional.jvp(truth, trial.x, tangent))


def _jacobian(s: Subject, transform: Callable[..., Any], **options: Any) -> None:
    trial = small(s, bidirectional=True)
    ours, truth = _outputs(trial)
    both = _of_two(trial)
    same(transform(ours, (0, 1), **options)(*both), functional.jacobian(truth, both))


def _hessian(s: Subject, transform: Callable[..., Any]) -> None:
    trial = small(s, bidirectional=True)
    ours, truth = (lambda *t, f=f: loss((f(*t),)) for f in _outputs(trial))
    both = _of_two(trial)
    same(transform(ours)(*both), functional.hessian(truth, both), 1e-8)


_REVERSE, _FORWARD = {"transform": func.jacrev}, {"transform": func.jacfwd}
_OF = "of the output by the input and a weight, in two directions."
table(
    row,
    _jacobian,
    ("jacrev", f"func.jacrev {_OF}", _REVERSE),
    (
        "jacrev, chunk_size=1",
        "The same one row at a time, without vmap.",
        _REVERSE | {"chunk_size": 1},
    ),
    ("jacfwd", f"func.jacfwd {_OF}", _FORWARD),
)
table(
    row,
    _hessian,
    (
        "hessian",
        "func.hessian of a loss by the input and a weight: forward over reverse.",
        {"transform": lambda f: func.hessian(f, (0, 1))},
    ),
    (
        "jacrev of jacrev",
        "The Hessian by func.jacrev over func.jacrev.",
        {"transform": lambda f: func.jacrev(func.jacrev(f, (0, 1)), (0, 1))},
    ),
)


@row("grad of grad")
def grad_of_grad(s: Subject) -> None:
    """func.grad of the norm of func.grad, by the weights."""
    trial = Trial(s, bidirectional=True)

    def twice(f: Forward, weights: Weights) -> Any:
        one = lambda w, x: loss(f(w, x, *trial.states))  # noqa: E731
        inner = lambda w: func.grad(one, argnums=1)(w, trial.x).square().sum()  # noqa: E731
        return func.grad(inner)({n: w.detach() for n, w in weights.items()})

    both(trial, twice)


@row("jvp of grad")
def jvp_of_grad(s: Subject) -> None:
    """A Hessian-vector product as func.jvp of func.grad: forward over reverse."""
    trial = small(s)
    vector = torch.randn_like(trial.x)
    ours, truth = (lambda x, f=f: loss((f(x),)) for f in _outputs(trial))
    _, product = func.jvp(func.grad(ours), (trial.x,), (vector,))
    same(product, functional.hvp(truth, trial.x, vector)[1], 1e-8)


@row("levels of forward mode")
def forward_of_forward(s: Subject) -> None:
    """func.jvp in func.jvp up to the third order, func.grad at each place, jacfwd of jacfwd."""
    trial = small(s)
    vector = torch.randn_like(trial.x)

    def along(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: func.jvp(f, (x,), (vector,))[1]

    def product(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: (func.grad(f)(x) * vector).sum()

    ours, truth = (lambda x, f=f: loss((f(x),)) for f in _outputs(trial))
    for transforms in (
        (along, along),
        (along, along, product),
        (along, product, along),
        (product, along, along),
        (along, along, along),
        (func.jacfwd, func.jacfwd),
    ):
        found = []
        for transformed in (ours, truth):
            for transform in reversed(transforms):
                transformed = transform(transformed)
            found.append(transformed(trial.x))
        same(found[0], found[1], 1e-8)


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
    """func.functionalize of a call, and of func.grad of it, in two directions."""
    trial = Trial(s, bidirectional=True)
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
