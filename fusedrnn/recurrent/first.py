"""The first step of a sequence, at which forward finds out what backward needs to take it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compiled import warn
from .reads import ClosedOver
from .runs import Run
from .trees import Leaves


def take_first(
    run: Run, inputs: Leaves, state: Leaves, x: Leaves, constants: Leaves, for_backward: bool
) -> tuple[Leaves, Leaves, dict[str, Any]]:
    """Takes the step, and notes in ``run`` what it reads, draws and changes.

    Returns:
        The new state, the output, and what differs once one of the buffers has been written that
        this step has not written.
    """
    weights, compiled = run.weights, run.compiled
    run.compiled = None  # the compiler would hide what it reads
    versions, random_states = weights.buffer_versions(), run.random_states()
    buffers = weights.copies(versions)
    has_seed = run.noise.seed.is_drawn

    def take() -> tuple[Leaves, Leaves]:
        run.closed_over = {}
        found = ClosedOver([*weights.tensors(), *inputs, *state, *x, *constants])
        # With a graph: what a step computes from weights once and keeps then shows in backward.
        with torch.set_grad_enabled(for_backward), run.watched(closed_over=found):
            given = [tuple(leaf.detach() for leaf in leaves) for leaves in (state, x, constants)]
            found.add_known(given)
            new, y = run.take(run.time(0), *given)
        run.closed_over |= found.with_gradient
        detached: dict[int, Tensor] = {id(leaf): leaf.detach() for leaf in (*new, *y)}
        return tuple(detached[id(leaf)] for leaf in new), tuple(detached[id(leaf)] for leaf in y)

    result = take()
    if not has_seed and _draw_seed_before(run, random_states):
        weights.write(buffers)
        result = take()
    run.draws, run.is_known = bool(run.noise.draws), True
    run.changed_buffers = weights.changed(versions, buffers)
    weights.detach_buffers()
    if for_backward:
        run.befores[0].buffers = {name: buffers[name] for name in run.changed_buffers}
        run.frozen, run.training = weights.frozen(), weights.training_flags()
    if compiled is not None and run.closed_over:
        warn("it reads tensors of its own that need a gradient")
    else:
        run.compiled = compiled
    after = weights.buffer_versions()
    return *result, {n: v for n, v in after.items() if n not in run.changed_buffers}


def _draw_seed_before(run: Run, random_states: tuple[Tensor, ...]) -> bool:
    """Puts the seed, if the step has drawn it, before all that torch's generators give the step.

    When the step is taken again nobody draws the seed.

    Args:
        random_states: Of torch's generators before the step.

    Returns:
        Whether the step must be taken once more, since it draws from torch's generators as well.
    """
    seed = run.noise.seed
    if not seed.is_drawn or not seed.is_from_torch or not random_states:
        return False
    after = run.random_states()
    run.set_random_states(random_states)
    seed.draw_again()
    now = run.random_states()
    if run.befores:
        run.befores[0].random = now
    if all(torch.equal(a, b) for a, b in zip(now, after, strict=True)):
        return False
    run.noise.forget()
    return True
