"""A sequence as one function of autograd."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._step.gradients import Gradients, gradients_of
from .._step.sequence_call import LoopValues, SequenceCall, like_rows
from .._step.trees import Leaves
from .._tracers import is_alone, never_in_graphs
from .._warnings import warn
from .first_step import take_first_in_graph
from .loop_backward import Backward
from .loop_forward import Result, forward
from .loop_run import Run


def run_sequence(
    run: Run, inputs: Leaves, state: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """All steps, from a state on.

    Returns:
        Outputs, (seq_len, ...) each, or the last ones alone if the run says so; and the last state.
    """
    weights = run.weights.trained()
    if not is_alone():
        warn_of_loop("torch.func, forward-mode derivatives and tracing")
        run.draws = True
        with run.watched():
            return plain_loop(run, LoopValues(inputs, state, constants, weights, {}), {})
    for_backward = torch.is_grad_enabled()
    result = forward(run, inputs, state, constants, for_backward)
    if torch._C._len_torch_function_stack():  # the step of an outer call, which may replace them
        run.closed_over = {n: leaf.view_as(leaf) for n, leaf in run.closed_over.items()}
    values = LoopValues(inputs, state, constants, weights, run.closed_over)
    tensors, form = pytree.tree_flatten(values)
    if for_backward and run.refused_variables:
        needed = [tensor for tensor in tensors if tensor.requires_grad]
        before = run.befores[0].variables
        run.python.refuse_gradients(before, run.refused_variables, needed)
    if not (for_backward and any(tensor.requires_grad for tensor in tensors)):
        return result.outputs, result.state
    made = _Sequence.apply(run, form, result, *tensors)
    return made[: len(result.outputs)], made[len(result.outputs) :]


def plain_loop(run: Run, values: LoopValues, buffers: dict[str, Tensor]) -> tuple[Leaves, Leaves]:
    """The steps under autograd as it is, which keeps the intermediates of all of them."""

    def take_steps() -> tuple[Leaves, Leaves]:
        state, outputs = values.state, dict[int, Leaves]()
        # Not chunk by chunk: a trace of slices would leave out the steps of a longer sequence.
        steps = [leaf.unbind(0) for leaf in values.inputs]
        for chunk in run.chunks():
            run.enter(chunk)
            for time in chunk.times:
                x = tuple(leaf[time] for leaf in steps)
                state, outputs[time] = run.take(time, state, x, values.constants)
        return outputs_of(run.call, outputs), state

    return run.weights.call_with(buffers, take_steps)


def run_with_graph(
    run: Run, inputs: Leaves, state: Leaves, constants: Leaves
) -> tuple[Leaves, Leaves]:
    """All steps under autograd, whose graph is kept, so that backward takes none again.

    They draw the random numbers that steps of :func:`run_sequence` draw, and return the same.
    """
    outputs: dict[int, Leaves] = {}
    for chunk in run.chunks():
        run.enter(chunk)
        steps = list(zip(chunk.times, chunk.steps(chunk.of(inputs)), strict=True))
        if chunk.start == 0:
            time, x = steps.pop(0)
            state, outputs[time] = take_first_in_graph(run, inputs, state, x, constants)
        with run.watched():
            for time, x in steps:
                state, outputs[time] = run.take(time, state, x, constants)
    # A step may return what it gets, and the same tensor twice: users may write to results.
    made = tuple(leaf.clone() for leaf in state)
    found = outputs_of(run.call, outputs)
    return found if run.call.returns_sequence else tuple(leaf.clone() for leaf in found), made


def outputs_of(call: SequenceCall, outputs: dict[int, Leaves]) -> Leaves:
    """Those of all steps, (seq_len, ...) each, or the last ones alone if the call says so.

    Args:
        outputs: Of each step, by its time.
    """
    times = [outputs[time] for time in range(call.seq_len)]
    if call.returns_sequence:
        return tuple(torch.stack(leaf) for leaf in zip(*times, strict=True))
    if call.last is None:
        return times[call.time(call.seq_len - 1)]
    last = times[0]
    for y, flags in zip(times[1:], call.last[1:], strict=True):
        both = zip(y, last, strict=True)
        last = tuple(torch.where(like_rows(flags, new), new, old) for new, old in both)
    return last


class _Sequence(torch.autograd.Function):
    """Marks results that there are already: forward had to run to know what the steps read."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, form: pytree.TreeSpec, result: Result, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """``form``: of the :class:`LoopValues` whose leaves are ``tensors``."""
        made = (*result.outputs, *result.state)
        starts = (leaf for start in result.starts for leaf in start)
        ctx.run, ctx.form = run, form
        ctx.counts = (len(tensors), len(result.outputs))
        ctx.save_for_backward(*tensors, *starts)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t in made if not t.is_floating_point() and not t.is_complex())
        )
        return made

    @staticmethod
    @never_in_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_tensors, of_outputs = ctx.counts
        saved = ctx.saved_tensors
        tensors, starts = saved[:of_tensors], saved[of_tensors:]
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            warn_of_loop("Derivatives of gradients")
            return None, None, None, *with_graph(ctx.run, ctx.form, tensors, needs, gradients)
        detached = [tensor.detach() for tensor in tensors]
        values: LoopValues = pytree.tree_unflatten(detached, ctx.form)
        size = max(len(values.state), 1)
        found = Backward(
            ctx.run,
            values,
            starts=[starts[i : i + size] for i in range(0, len(starts), size)],
            needs=needs,
            output_gradients=list(gradients[:of_outputs]),
            state_gradients=list(gradients[of_outputs:]),
        ).gradients()
        return None, None, None, *found


def with_graph(
    run: Run,
    form: pytree.TreeSpec,
    tensors: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    gradients: tuple[Tensor | None, ...],
) -> Gradients:
    """Gradients that have gradients: by the plain loop."""
    # Aliases, so that hooks of the tensors themselves see only what comes out of here.
    with torch.enable_grad():
        aliases = [
            tensor.view_as(tensor) if need else tensor
            for tensor, need in zip(tensors, needs, strict=True)
        ]
    values: LoopValues = pytree.tree_unflatten(aliases, form)
    run = copy.copy(run)
    weights = run.weights
    with weights.locked(), weights.with_training_flags(run.training), torch.enable_grad():
        moved = weights.moved(run.frozen)
        with run.again(0, whole=True) as buffers, run.watched(values.closed_over):
            outputs, state = plain_loop(run, values, values.weights | moved | buffers)
    needed = [alias if need else alias.detach() for alias, need in zip(aliases, needs, strict=True)]
    return gradients_of([*outputs, *state], gradients, needed, create_graph=torch.is_grad_enabled())


def is_batched(gradient: Tensor | None) -> bool:
    """By torch.func.vmap, or by torch.autograd.grad with is_grads_batched=True."""
    return gradient is not None and "Batched" in str(torch._C._dispatch_keys(gradient))


def warn_of_loop(what: str) -> None:
    warn(
        f"fusedrnn: {what} run as a plain loop over the steps, which saves the intermediates of "
        "every step"
    )
