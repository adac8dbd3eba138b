"""The first step of a sequence, at which forward finds out what backward needs to take it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .._step.generators import drawn_from
from .._step.torch_draws import WAY_OUT, OtherDraws
from .._step.trees import Leaves
from .._step.watch import ClosedOver
from .loop_run import Mark, Run, as_leaf


def take_first(
    run: Run, inputs: Leaves, state: Leaves, x: Leaves, constants: Leaves, for_backward: bool
) -> tuple[Leaves, Leaves, Mark]:
    """Takes the step, and notes in ``run`` what it reads, draws and changes.

    Returns:
        The new state, the output, and what was so before it.

    Raises:
        RuntimeError: Backward may follow, but could not give the gradients of what the step keeps.
    """
    weights = run.weights

    def take() -> tuple[Leaves, Leaves]:
        run.closed_over = {}
        found = ClosedOver([*weights.tensors(), *inputs, *state, *x, *constants])
        # With a graph: then what the step keeps shows whether it has a gradient.
        with torch.set_grad_enabled(for_backward), run.watched(closed_over=found):
            given = [tuple(map(_of_a_graph, leaves)) for leaves in (state, x, constants)]
            found.add_known(given)
            new, y = run.take(run.call.time(0), *given)
        run.closed_over |= found.with_gradient
        detached: dict[int, Tensor] = {id(leaf): leaf.detach() for leaf in (*new, *y)}
        return tuple(detached[id(leaf)] for leaf in new), tuple(detached[id(leaf)] for leaf in y)

    in_python = for_backward or run.graphs is not None
    result, mark = _after_seed(run, take, in_python)
    run.changed_buffers = weights.changed(mark.versions, mark.buffers)
    run.changed_variables = run.python.changed(mark.variables)
    if for_backward:
        _check_kept(run, mark)
        run.refused_variables = run.python.with_tensors(
            mark.variables, run.changed_variables, needs_gradient=True
        )
        run.befores[0].buffers = {name: mark.buffers[name] for name in run.changed_buffers}
        run.draws_in_python = drawn_from(mark.random.others, run.random_states().others) is not None
        if run.draws_in_python:
            run.befores[0].random = mark.random
        run.frozen, run.training = weights.frozen(), weights.training_flags()
    if run.graphs is not None and (run.change(mark) or run.has_drawn(mark)):
        run.graphs = None
    return *result, mark


def take_first_in_graph(
    run: Run, inputs: Leaves, state: Leaves, x: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """The new state and the output, for a graph of all steps, in which nothing can be missed."""

    def take() -> tuple[Leaves, Leaves]:
        run.closed_over = {}
        return take_looking(run, run.call.time(0), inputs, state, x, constants)

    return _after_seed(run, take, in_python=False)[0]


def take_looking(
    run: Run, time: int, inputs: Leaves, state: Leaves, x: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """One step, at which ``run`` notes the tensors with gradient that nobody has passed to it."""
    found = ClosedOver([*run.weights.tensors(), *inputs, *state, *x, *constants])
    with run.watched(closed_over=found):
        result = run.take(time, state, x, constants)
    run.closed_over |= found.with_gradient
    return result


def _after_seed(
    run: Run, take: Callable[[], tuple[Leaves, Leaves]], in_python: bool
) -> tuple[tuple[Leaves, Leaves], Mark]:
    """``take()``, the first step, before which the seed is drawn if the step needs one.

    Args:
        in_python: Whether anybody is to know what it has drawn in Python.

    Returns:
        What it returns, and what was so before it.

    Raises:
        RuntimeError: A generator was given, and the step draws from others.
    """
    mark, has_seed, seed = run.mark(in_python), run.noise.seed.is_drawn, run.noise.seed
    draws = OtherDraws()
    is_captured = not mark.random.torch  # and generators do not tell whether somebody draws
    try:
        with draws if is_captured and seed.misses(run.call.device) else nullcontext():
            result = take()
    except BaseException:
        if seed.misses(run.call.device):  # then torch's own generator is as it was after the call
            run.set_random_states(mark.random._replace(others=()))
        raise
    if draws.found:
        raise RuntimeError(
            f"fusedrnn: {draws.found} does not draw from generator= while a CUDA graph is "
            f"captured; {WAY_OUT}"
        )
    if not has_seed and seed.is_drawn:
        mark, has_drawn = _with_seed_before(run, mark)
        if has_drawn:
            _put_back(run, mark)
            result = take()
    if run.missed(mark.random.torch):
        result, mark = _from_given_generator(run, take, result, mark)
    # With a generator, what later steps alone draw must not come from torch's.
    run.draws = run.draws or bool(run.noise.draws) or seed.misses(run.call.device)
    run.is_known = True
    return result, mark


def _put_back(run: Run, mark: Mark) -> None:
    """All that the first step may have changed, but for states of torch's generators."""
    run.set_random_states(mark.random._replace(torch=()))
    run.weights.write(mark.buffers)
    run.python.put_back(mark.variables, run.python.changed(mark.variables))
    run.noise.forget()


def _from_given_generator(
    run: Run,
    take: Callable[[], tuple[Leaves, Leaves]],
    result: tuple[Leaves, Leaves],
    mark: Mark,
) -> tuple[tuple[Leaves, Leaves], Mark]:
    """Has the step, if it was the step that has drawn, draw from the generator of the call.

    To that one torch's own generator is lent until the end of the call, and the first step is taken
    again.

    Args:
        result: Of the first step.
        mark: From before it.
    """
    seed, after, draws = run.noise.seed, run.random_states(), OtherDraws()
    _put_back(run, mark)
    with draws:
        take()
    if not draws.found:  # another thread has drawn
        run.set_random_states(after)
        return result, mark
    _put_back(run, mark)
    run.set_random_states(mark.random)
    seed.lend()
    lent = mark._replace(random=run.random_states())
    result = take()
    missed = run.missed(lent.random.torch)
    if missed:
        seed.give_back(has_drawn=False)
        _put_back(run, mark)
        run.set_random_states(mark.random)
        raise RuntimeError(
            f"fusedrnn: {draws.found} draws on {missed[0]} from torch's default generator, not "
            f"from generator=; {WAY_OUT}"
        )
    if run.befores:
        run.befores[0].random = lent.random
    return result, lent


def _of_a_graph(leaf: Tensor) -> Tensor:
    """The same values as another operator gives them: with gradient, if that is enabled."""
    return as_leaf(leaf).clone() if torch.is_grad_enabled() else leaf.detach()


def _check_kept(run: Run, mark: Mark) -> None:
    """Refuses what the step has kept of its results, or written, for later steps."""
    versions = run.weights.buffer_versions()
    for name, buffer in run.weights.used.named_buffers():
        is_written = versions[f"used.{name}"] != mark.versions.get(f"used.{name}")
        if buffer.grad_fn is not None and is_written:
            raise RuntimeError(
                "fusedrnn: the step writes a tensor with gradient into the buffer "
                f"{name.partition('.')[2]}, and gradients do not flow through buffers from step to "
                "step; make it a part of the state, or detach it"
            )
    run.check_written(mark)


def _with_seed_before(run: Run, mark: Mark) -> tuple[Mark, bool]:
    """Puts the seed, which the step has drawn, before all that torch's generators give the step.

    When the step is taken again nobody draws the seed.

    Args:
        mark: From before the step.

    Returns:
        What was so before the step, but after the seed; and whether the step must be taken once
        more, since it draws from torch's generators as well.
    """
    if not run.noise.seed.is_from_torch or not mark.random.torch:
        return mark, False
    after = run.random_states(in_python=False)
    run.set_random_states(mark.random._replace(others=()))
    run.noise.seed.draw_again()
    drawn = run.random_states(in_python=False).torch
    mark = mark._replace(random=mark.random._replace(torch=drawn))
    if run.befores:
        run.befores[0].random = mark.random
    return mark, not mark.random.is_same(after)
