"""Checks of torch.compile: training, inference, how often it compiles, what is inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import checkpoint as checkpoints

from .backward import train_in_windows
from .rows import group, table
from .subjects import Slow, Subject
from .trial import DEEP, Around, Trial, expect, loss, same

row = group("compile")
MOST_GRAPHS = 2
SIZES = ((5, 3), (7, 2), (4, 6), (9, 3), (3, 5))


def compiled_call(trial: Trial, **options: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The compiled module in place of the module, in one graph."""
    given: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"} | options
    module = torch.compile(trial.module, **given)
    return lambda x, *states, **named: trial.call(x, *states, module=module, **named)


def count_graphs(
    make: Callable[[Any], Callable[[Trial], object]], trials: list[Trial], most: int = MOST_GRAPHS
) -> None:
    """Runs a compiled function over several sizes, and counts what was compiled.

    Raises:
        Slow: There were more than ``most`` graphs.
    """
    counter = CompileCounterWithBackend("aot_eager")
    run = make(counter)
    for trial in trials:
        run(trial)
    # Dynamo goes around what it cannot compile, as it does around all of torch's own layers.
    expect(counter.frame_count, "nothing was compiled")
    if counter.frame_count > most:
        raise Slow(f"{counter.frame_count} graphs for {len(trials)} sizes")


def sized(trial: Trial, s: Subject, seq_len: int, batch: int, **options: Any) -> Trial:
    """A trial of another size, with the module of the first one."""
    other = Trial(s, seq_len=seq_len, batch=batch, **options)
    other.module = trial.module
    return other


def trains_at_sizes(
    s: Subject, dynamic: bool | None, sizes: tuple[tuple[int, int], ...] = SIZES, **arguments: Any
) -> None:
    """Trains a compiled module at each size. arguments: functions of the trial."""
    first = Trial(s)

    def make(counter: Any) -> Callable[[Trial], object]:
        module = torch.compile(first.module, fullgraph=True, backend=counter, dynamic=dynamic)

        def run(trial: Trial) -> None:
            named = {name: of(trial) for name, of in arguments.items()}
            trial.trains(
                lambda x, *states, **given: trial.call(x, *states, module=module, **given), **named
            )

        return run

    count_graphs(make, [sized(first, s, *size) for size in sizes])


def _trains(s: Subject, compiling: Any = None, **options: Any) -> None:
    trial = Trial(s, **options)
    trial.trains(compiled_call(trial, **(compiling or {})))


table(
    row,
    _trains,
    (
        "fullgraph training",
        "A training step compiled in one graph, by aot_eager; two layers, two directions.",
        DEEP,
    ),
    ("backend eager", 'The same by the backend "eager".', {"compiling": {"backend": "eager"}}),
    (
        "recompute=False",
        "The same with recompute=False, two layers, two directions.",
        DEEP | {"recompute": False},
    ),
    (
        "batch_first, no bias",
        "The same with batch_first=True and bias=False.",
        {"batch_first": True, "bias": False},
    ),
    ("proj_size", "The same with projected states.", {"proj_size": 2}),
)


@row("backend inductor", speed="slow")
def by_inductor(s: Subject) -> None:
    """The same by inductor."""
    _trains(s, {"backend": "inductor"}, seq_len=3)


@row("a model around it", speed="slow")
def model(s: Subject) -> None:
    """A model with layers before and after, compiled as a whole by inductor in one graph."""
    _in_a_model(s, fullgraph=True)


@row("a model around it, in several graphs")
def model_in_graphs(s: Subject) -> None:
    """The same by aot_eager without fullgraph=True: a module may stay out of graphs."""
    _in_a_model(s, backend="aot_eager")


def _in_a_model(s: Subject, **options: Any) -> None:
    trial = Trial(s, seq_len=3)
    around = Around(trial)
    compiled = torch.compile(
        lambda x, *states: tuple(o.tanh() * 2 for o in around(x.exp().log(), *states)), **options
    )

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple((o / 2).atanh() for o in compiled(x, *states))

    trial.trains(call, tolerance=1e-8)


@row("under no_grad")
def no_grad(s: Subject) -> None:
    """Compiled in one graph under no_grad, in eval mode."""
    trial = Trial(s)
    trial.module.eval()
    with torch.no_grad():
        trial.same_values(compiled_call(trial)(trial.x, *trial.states))


@row("under inference_mode")
def inference_mode(s: Subject) -> None:
    """Compiled in one graph under inference_mode."""
    trial = Trial(s)
    with torch.inference_mode():
        trial.same_values(compiled_call(trial)(trial.x, *trial.states))


@row("frozen weights")
def frozen(s: Subject) -> None:
    """Compiled with frozen weights: with a plain input, and with one that needs a gradient."""
    trial = Trial(s)
    trial.module.requires_grad_(False)
    call = compiled_call(trial)
    trial.same_values(call(trial.x, *trial.states))
    trial.trains(call)


@row("training after inference")
def both_modes(s: Subject) -> None:
    """One compiled module for inference, training and inference again."""
    trial = Trial(s)
    call = compiled_call(trial)
    for _ in range(2):
        with torch.no_grad():
            trial.same_values(call(trial.x, *trial.states))
        trial.trains(call)


@row("dynamic shapes")
def dynamic(s: Subject) -> None:
    """Training at 5 sizes of steps and batch with dynamic=True takes at most 2 graphs."""
    trains_at_sizes(s, True)


@row("automatic dynamic shapes", speed="slow")
def automatic(s: Subject) -> None:
    """The same with dynamic left to torch.compile."""
    trains_at_sizes(s, None)


@row("dynamic shapes with lengths and reset")
def dynamic_masked(s: Subject) -> None:
    """The same with lengths= as a tensor and reset=."""
    s.needs("lengths")
    trains_at_sizes(
        s,
        None,
        lengths=lambda trial: torch.arange(trial.x.shape[1]) % trial.x.shape[0] + 1,
        reset=lambda trial: torch.rand(trial.x.shape[:2]) < 0.3,
    )


@row("dynamic shapes without gradients", speed="slow")
def dynamic_inference(s: Subject) -> None:
    """Inference at 5 sizes takes at most 2 graphs."""
    first = Trial(s)

    def make(counter: Any) -> Callable[[Trial], object]:
        module = torch.compile(first.module, fullgraph=True, backend=counter)

        def run(trial: Trial) -> None:
            with torch.no_grad():
                trial.same_values(trial.call(trial.x, *trial.states, module=module))

        return run

    count_graphs(make, [sized(first, s, *size) for size in SIZES])


@row("windows")
def windows(s: Subject) -> None:
    """Truncated backpropagation in 4 windows by one compiled module, in at most 2 graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    train_in_windows(s, lambda module: torch.compile(module, fullgraph=True, backend=counter))
    expect(counter.frame_count, "nothing was compiled")
    if counter.frame_count > MOST_GRAPHS:
        raise Slow(f"{counter.frame_count} graphs for 4 windows")


@row("func.grad inside", speed="slow")
def func_inside(s: Subject) -> None:
    """A compiled function that calls func.grad of a loss."""
    trial = Trial(s)

    @torch.compile(backend="aot_eager", fullgraph=s.is_ours)
    def grads(x: Tensor) -> Tensor:
        return func.grad(lambda x: loss(trial.call(x, *trial.states)))(x)

    same(grads(trial.x), trial.expected()[1]["x"], what="gradient")


@row("autocast inside")
def autocast_inside(s: Subject) -> None:
    """Autocast inside of a compiled function, and around it."""
    for inside in (True, False):
        trial = Trial(s, dtype=torch.float32)

        def call(x: Tensor, *states: Tensor, t: Trial = trial) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return t.call(x, *states)

        inner = call if inside else trial.call
        compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)

        def run(x: Tensor, *states: Tensor, c: Any = compiled) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = c(x, *states)
            return tuple(o.float() for o in outputs)

        trial.trains(run, tolerance=5e-2)


@row("checkpoint inside")
def checkpoint_inside(s: Subject) -> None:
    """A checkpoint inside of a compiled function."""
    trial = Trial(s)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x: Tensor, *states: Tensor) -> Any:
        return checkpoints.checkpoint(trial.call, x, *states, use_reentrant=False)

    trial.trains(call)


@row("optimizer steps")
def optimizer_steps(s: Subject) -> None:
    """Three steps of training by a compiled module are those of the module itself."""
    found = []
    for compiled in (True, False):
        trial = Trial(s)
        call = compiled_call(trial) if compiled else trial.call
        optimizer = torch.optim.Adam(trial.module.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss(call(trial.x, *trial.states)).backward()
            optimizer.step()
        found.append(trial.detached)
    same(found[0], found[1])


@row("module.compile()")
def compiled_in_place(s: Subject) -> None:
    """nn.Module.compile, and the state dict of a compiled module."""
    trial = Trial(s)
    trial.module.compile(backend="aot_eager", fullgraph=True)
    trial.trains()
    expect(set(trial.module.state_dict()) == set(trial.weights), "other names of weights")


@row("float32 and bfloat16")
def dtypes(s: Subject) -> None:
    """Compiled modules in float32 and bfloat16 train within the rounding of each."""
    for dtype in (torch.float32, torch.bfloat16):
        trial = Trial(s, dtype=dtype)
        trial.trains(compiled_call(trial))


@row("compiled autograd", speed="slow")
def compiled_autograd(s: Subject) -> None:
    """Backward by compiled autograd."""
    trial = Trial(s)

    def backward(result: Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            result.backward()

    trial.trains(backward=backward)
