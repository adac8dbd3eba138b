"""Checks of autocast, of gradient scaling and of modules in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode

from .rows import group, table
from .subjects import Subject
from .trial import DEEP, TOLERANCES, Trial, expect, loss, must_raise, same

row = group("amp")
SHORT = (torch.bfloat16, torch.float16)


def _autocast(dtype: torch.dtype, **options: Any) -> Any:
    return torch.autocast("cpu", dtype=dtype, **options)


def _autocasted(
    trial: Trial, dtype: torch.dtype, inner: Callable[..., Any] | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """The module, or what runs it, under autocast, with results in float32."""

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        with _autocast(dtype):
            outputs = (inner or trial.call)(x, *states)
        return tuple(o.float() for o in outputs)

    return call


def _trains(trial: Trial, dtype: torch.dtype) -> None:
    trial.trains(_autocasted(trial, dtype), tolerance=TOLERANCES[dtype])
    for name, weight in trial.weights.items():
        dtype_of = None if weight.grad is None else weight.grad.dtype
        expect(dtype_of == weight.dtype, f"the gradient of {name} is {dtype_of}")


table(
    row,
    lambda s, dtype: _trains(Trial(s, dtype=torch.float32, **DEEP), dtype),
    (
        "autocast, bfloat16",
        "A training step under autocast in bfloat16, within its rounding; gradients in float32.",
        {"dtype": torch.bfloat16},
    ),
    ("autocast, float16", "The same in float16.", {"dtype": torch.float16}),
)


@row("dtypes under autocast")
def autocast_dtypes(s: Subject) -> None:
    """Output and last states are in the dtype of autocast; integers are refused as without."""
    trial = Trial(s, dtype=torch.float32)
    for dtype in SHORT:
        with _autocast(dtype):
            found = {str(o.dtype) for o in trial.call(trial.x, *trial.states)}
            must_raise(lambda: trial.call(trial.x.long(), *trial.states))
        expect(found == {str(dtype)}, f"results are in {', '.join(sorted(found))}")


@row("autocast without gradients")
def autocast_inference(s: Subject) -> None:
    """Under autocast and no_grad or inference_mode the values are those of training."""
    trial = Trial(s, dtype=torch.float32)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, _autocast(torch.bfloat16):
            outputs = trial.call(trial.x, *trial.states)
        same(outputs, trial.truth(trial.detached, trial.x, *trial.states), 5e-2, "output")


@row("nested autocast")
def autocast_nested(s: Subject) -> None:
    """A region without autocast inside one with it computes in float32."""
    trial = Trial(s, dtype=torch.float32)
    with _autocast(torch.bfloat16):
        trial.call(trial.x, *trial.states)
        with _autocast(torch.bfloat16, enabled=False):
            inner = trial.call(trial.x, *trial.states)
    expect(inner[0].dtype == torch.float32, f"the inner region computes in {inner[0].dtype}")
    trial.same_values(inner)


@row("float64 under autocast")
def autocast_float64(s: Subject) -> None:
    """Autocast leaves a module in float64 alone."""
    trial = Trial(s)
    with _autocast(torch.bfloat16):
        outputs = trial.call(trial.x, *trial.states)
    expect(outputs[0].dtype == torch.float64, f"the output is {outputs[0].dtype}")
    trial.same_values(outputs)


@row("mixed dtypes under autocast")
def autocast_mixed(s: Subject) -> None:
    """A bfloat16 input, as a layer below leaves it, with float32 states and weights."""
    trial = Trial(s, dtype=torch.float32)
    trial.x = trial.x.bfloat16().float()
    with _autocast(torch.bfloat16):
        outputs = trial.call(trial.x.bfloat16(), *trial.states)
    loss(tuple(o.float() for o in outputs)).backward()
    expected, grads = trial.expected()
    same(outputs, expected, 5e-2, "output")
    for name, weight in trial.weights.items():
        same(weight.grad, grads[name], 5e-2, "gradient")


class _Casts(TorchDispatchMode):
    """Counts conversions of tensors of the shapes of the weights."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += 1
        return f(*args, **(kwargs or {}))


@row("autocast casts weights once")
def autocast_cache(s: Subject) -> None:
    """Five calls in one region of autocast convert each weight once, and train right."""
    trial = Trial(s, dtype=torch.float32, seq_len=2)
    count = len(trial.weights)
    with _autocast(torch.bfloat16), _Casts({w.shape for w in trial.weights.values()}) as casts:
        calls = [trial.call(trial.x, *trial.states) for _ in range(5)]
    # One product of torch may take its bias in float32.
    expect(casts.count <= count, f"{casts.count} casts of {count} weights in 5 calls")
    for outputs in calls:
        loss(tuple(o.float() for o in outputs)).backward()
    _, grads = trial.expected()
    for name, weight in trial.weights.items():
        same(weight.grad, 5 * grads[name], 5e-2, "gradient")


@row("autocast after an optimizer step")
def autocast_stepped(s: Subject) -> None:
    """The next region of autocast sees weights that an optimizer has changed."""
    trial = Trial(s, dtype=torch.float32)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.5)
    for _ in range(2):
        _trains(trial, torch.bfloat16)
        optimizer.step()
    _trains(trial, torch.bfloat16)


@row("checkpoint under autocast")
def autocast_checkpoint(s: Subject) -> None:
    """A checkpoint inside of autocast, with reentrant backward and without."""
    for reentrant in (True, False):
        trial = Trial(s, dtype=torch.float32)
        run = functools.partial(checkpoints.checkpoint, trial.call, use_reentrant=reentrant)
        trial.trains(_autocasted(trial, torch.bfloat16, run), tolerance=5e-2)


@row("GradScaler")
def grad_scaler(s: Subject) -> None:
    """Training in float16 with GradScaler: steps are taken, and one with an overflow is skipped."""
    trial = Trial(s, dtype=torch.float32)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    _, grads = trial.expected()
    before = trial.detached
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        outputs = _autocasted(trial, torch.float16)(trial.x, *trial.states)
        scaler.scale(loss(outputs) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    changed = {name: (before[name] - w.detach()) / 0.1 for name, w in trial.weights.items()}
    for name, change in changed.items():
        same(change, grads[name], 2e-2, "the step")
    expect(scaler.get_scale() < 2.0**8, "the overflow did not lower the scale")


@row("modules in 16 bits")
def short_modules(s: Subject) -> None:
    """A module converted to bfloat16 and to float16 trains within the rounding of its dtype."""
    for dtype in SHORT:
        trial = Trial(s, dtype=dtype, num_layers=2)
        trial.trains()
        for weight in trial.weights.values():
            expect(weight.grad is None or weight.grad.dtype == dtype, "a gradient's dtype differs")


@row("a module converted and back")
def round_trip(s: Subject) -> None:
    """A module converted to 16 bits and back by its methods trains right with rounded weights."""
    trial = Trial(s, dtype=torch.float32, num_layers=2)
    trial.module.bfloat16().float()
    trial.trains()
    trial = Trial(s, num_layers=2)
    trial.module.half().double()
    trial.trains()
