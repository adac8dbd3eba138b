"""A sequence by a program, as one function of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compiler.compiled_step import CompiledStep
from .._front.step_graph import Given
from .._step.gradients import Gradients, gradients_of
from .._step.noise import Seed
from .._step.trees import Leaves
from .._tracers import never_in_graphs
from .find_program import without_unused
from .plain_loop import loop_of_graph, warn_of_loop
from .program_backward import backward
from .program_call import ProgramCall, ProgramValues, forward
from .sequence_slices import is_batched


def run_program(call: ProgramCall, seed: Seed, tensors: Sequence[Tensor]) -> tuple[Leaves, Leaves]:
    """Outputs and the last state of a sequence.

    Args:
        tensors: In the order of :class:`ProgramValues`.
    """
    count = len(call.program.output_shapes)
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
        made = _ProgramFunction.apply(call, seed, *tensors)
    else:
        results = forward(call, seed, tensors, for_backward=False)
        made = (*results.outputs, *results.last)
    return made[:count], made[count:]


class _ProgramFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ProgramCall, seed: Seed, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = forward(call, seed, tensors, for_backward=True)
        ctx.call, ctx.seed, ctx.count = call, seed, len(tensors)
        ctx.save_for_backward(*tensors, *results.for_backward)
        ctx.set_materialize_grads(False)
        return (*results.outputs, *results.last)

    @staticmethod
    @never_in_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: ProgramCall = ctx.call
        seed: Seed = ctx.seed
        saved = ctx.saved_tensors
        tensors, rest = saved[: ctx.count], saved[ctx.count :]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            warn_of_loop("Derivatives of gradients")
            return None, None, *_by_loop(call, seed, tensors, needs, gradients)
        if any([gradient is None for gradient in gradients]):
            program = _program_without_unused(call, tensors, needs, gradients)
            if program is None:
                warn_of_loop("Gradients of only some results")
                return None, None, *_by_loop(call, seed, tensors, needs, gradients)
            call = call.with_program(program)
        return None, None, *backward(call, seed, tensors, rest, needs, gradients)


def _by_loop(
    call: ProgramCall,
    seed: Seed,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> Gradients:
    """Gradients that may have gradients: of the steps' graph, under autograd."""

    # Aliases, so that hooks of the tensors themselves see only what comes out of here.
    with torch.enable_grad():
        aliases = [
            tensor.view_as(tensor) if need else tensor.detach()
            for tensor, need in zip(tensors, needs, strict=True)
        ]
        values = ProgramValues.of(call, aliases)
        sequence = call.sequence.with_values(
            tuple(values.inputs), tuple(values.state), tuple(values.reset_to), seed
        )
        given = Given(tuple(values.constants), call.numbers)
        assert call.graph is not None
        outputs, last = loop_of_graph(call.graph, given, sequence)
    create_graph = torch.is_grad_enabled()
    return gradients_of([*outputs, *last], gradients, aliases, create_graph=create_graph)


def _program_without_unused(
    call: ProgramCall,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> CompiledStep | None:
    """One that takes no derivatives of results without gradients."""
    used = tuple(gradient is not None for gradient in gradients)
    trained = ProgramValues.of(call, needs).constants
    inputs, state, _, constants = (
        tuple([tensor.detach() for tensor in part]) for part in ProgramValues.of(call, tensors)
    )
    return without_unused(call.program, used, constants, trained, inputs, state)
