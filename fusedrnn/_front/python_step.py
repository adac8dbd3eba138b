"""One step of the user's own Python beside its graph.

torch.compile does not tell what a step asks of its surroundings: whether gradients are wanted, or
whether its state has one. Such a step computes something else in one of three modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .._compile.trace import CannotCompile, FlatStep
from ..recurrent.generators import global_generators, states_of
from ..recurrent.noise import Noise
from ..recurrent.reads import Watch
from ..recurrent.trees import Leaves, differentiable
from .graph import Given, StepGraph
from .traceable import WithLines

_TRIES = 4
"""Another thread may change weights meanwhile."""
_ASKS = (
    "the step asks whether gradients are wanted, or it does something that torch.compile's graph "
    "of it does not"
)

Take = Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]
"""Input and state to the new state and the output."""


def difference(graph: StepGraph, given: Given, in_python: Take, x: Leaves, state: Leaves) -> str:
    """Says that the step does not compute what its graph does; or nothing.

    Args:
        x, state: Of which kinds are the tensors that both get.
    """
    rows = state[0].shape[0]

    def by_graph(x: Leaves, state: Leaves) -> tuple[Leaves, Leaves]:
        return graph.take(given, x, state, rows)

    with _generators_put_back(state[0].device):
        _check_changes(graph, given, x, state)
        return _difference(given, in_python, by_graph, x, state)


def _check_changes(graph: StepGraph, given: Given, x: Leaves, state: Leaves) -> None:
    """Refuses a step that changes what it reads, of which a trial would leave other numbers there.

    Raises:
        CannotCompile: It does.
    """
    rows = state[0].shape[0]

    def step(
        constants: Sequence[Tensor], x: Sequence[Tensor], state: Sequence[Tensor]
    ) -> tuple[Leaves, Leaves]:
        run = functools.partial(WithLines(graph.module).run, enable_io_processing=False)
        own = given._replace(constants=tuple(constants))
        return graph.take(own, tuple(x), tuple(state), rows, run)

    copies = [[t.detach().clone() for t in leaves] for leaves in (given.constants, x, state)]
    constants, inputs, carries = copies
    flat = FlatStep(step, constants, inputs, carries, rows, graph.names)
    try:
        flat(*flat.arguments, notes_lines=False)
    except CannotCompile:
        raise
    except Exception:  # which the trial says better
        pass


@contextmanager
def _generators_put_back(device: torch.device) -> Iterator[None]:
    """Users get the same random numbers, whether their step is tried or not."""
    before = states_of(global_generators())
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for one in before:
            one.put_back()


def _difference(given: Given, in_python: Take, by_graph: Take, x: Leaves, state: Leaves) -> str:
    for needs_grad, is_grad in ((False, True), (True, True), (False, False)):
        for _ in range(_TRIES):
            before = [c._version for c in given.constants if not c.is_inference()]
            try:
                pairs = [
                    _results(take, x, state, given, needs_grad, is_grad or take is by_graph)
                    for take in (in_python, by_graph)
                ]
            except Exception as error:
                said = str(error).split("\n")[0][:200]
                raise CannotCompile(
                    f"in a trial it raises {type(error).__name__}: {said}"
                ) from error
            if all(map(_are_close, *pairs)):
                break
            if before == [c._version for c in given.constants if not c.is_inference()]:
                return _ASKS
    return ""


def _results(
    take: Take, x: Leaves, state: Leaves, given: Given, needs_grad: bool, is_grad: bool
) -> list[Tensor]:
    """Values, and gradients of what needs one."""
    random = torch.Generator().manual_seed(0)
    rows = state[0].shape[0]

    def like(tensor: Tensor) -> Tensor:
        if not differentiable(tensor):
            return tensor.detach().clone()
        made = torch.rand(tensor.shape, generator=random).to(tensor.device, tensor.dtype)
        return made.requires_grad_(needs_grad)

    xs, states = [like(leaf) for leaf in x], [like(leaf) for leaf in state]
    noise = Noise.for_trial()
    noise.chunk(0, 1, rows)
    noise.step(0)
    with Watch(noise), torch.set_grad_enabled(is_grad):
        # No leaves, for the step may change them in place.
        new, y = take(tuple(x.clone() for x in xs), tuple(leaf.clone() for leaf in states))
    results = [*new, *y]
    # Not of weights with hooks, which are not to see this gradient.
    weights = [c for c in given.constants if c.requires_grad and not c._backward_hooks]
    leaves = [leaf for leaf in (*xs, *states, *weights) if leaf.requires_grad]
    totals = [_total(result) for result in results if result.requires_grad]
    if not leaves or not is_grad:
        return [result.detach() for result in results]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if totals:
        found = torch.autograd.grad(torch.stack(totals).sum(), leaves, allow_unused=True)
    gradients = [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)
    ]
    return [*(result.detach() for result in results), *gradients]


def _total(result: Tensor) -> Tensor:
    return result.square().sum().to(torch.float32)


_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}


def _are_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = _TOLERANCES.get(a.dtype, 0.05)
    scale = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * (1 + scale), equal_nan=True)
