"""The operators of csrc/ops/program_ops.h as Python calls them.

Lists have a tensor for each part of the program. An empty tensor stands for what is not there, or
not wanted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._helpers import call_interruptibly
from .._ops import as_torch_raises
from .program import Program

CODES = {torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: -2}
"""As Programs::dtype_of in csrc/ops/programs.h has them."""

_FIRST_ON_GPU = 1 << 32
"""Programs::kFirstOnGpu: the number of the first program of the operators for GPUs."""


def add_program(
    program: Program,
    function: int,
    *,
    dtype: torch.dtype,
    constants: Sequence[int] = (),
    is_for_gpu: bool = False,
) -> int:
    """Makes a program known, and returns its number.

    Args:
        function: Address of the stages' function, which must stay loaded: fusedrnn_stage, or for a
            GPU fusedrnn_stage_launch.
        dtype: For which the stages are compiled.
        constants: How weights and vectors are made of those of a step, for :func:`call`.

    Raises:
        RuntimeError: The program could not be run.
    """
    numbers = program.numbers()
    return _checked(
        _function("add", is_for_gpu),
        (ctypes.c_int64 * len(numbers))(*numbers),
        ctypes.c_int64(len(numbers)),
        (ctypes.c_int64 * len(constants))(*constants) if constants else None,
        ctypes.c_int64(len(constants)),
        ctypes.c_void_p(function),
        ctypes.c_int64(_code(dtype)),
    )


def chunk(
    program: int,
    seq_len: int,
    batch: int,
    dtype: torch.dtype,
    chunk_size: int,
    workspace_bytes: int,
) -> tuple[int, int, int]:
    """The steps of a chunk, and the bytes of the workspaces of forward and backward.

    Args:
        chunk_size: Steps that the caller asks for, or 0.
        workspace_bytes: The most that a workspace may take, or 0 for no limit.

    Raises:
        RuntimeError: Even one step takes more than ``workspace_bytes``.
    """
    plan = (ctypes.c_int64 * 3)()
    numbers = (program, seq_len, batch, _code(dtype), chunk_size, workspace_bytes)
    function = _function("chunk", program >= _FIRST_ON_GPU)
    _checked(function, *map(ctypes.c_int64, numbers), plan)
    return plan[0], plan[1], plan[2]


def _function(what: str, is_for_gpu: bool) -> ctypes._NamedFuncPointer:
    """A function beside the operators."""
    names = {
        "add": ("fusedrnn_add_program", "fusedrnn_add_gpu_program"),
        "chunk": ("fusedrnn_program_chunk", "fusedrnn_gpu_program_chunk"),
    }
    library = _library.cuda if is_for_gpu else _library.core
    try:
        function: ctypes._NamedFuncPointer = getattr(library, names[what][is_for_gpu])
    except AttributeError:
        raise RuntimeError(
            "fusedrnn: the compiled part of fusedrnn for "
            f"{'GPUs' if is_for_gpu else 'the CPU'} has no programs: install fusedrnn again"
        ) from None
    function.restype = ctypes.c_int64
    return function


def call(*given: Any) -> list[Tensor]:
    """Some steps of a program.

    Args:
        program: Its number.
        tensors: Inputs of the step, (seq_len, batch, ...) each; its state, (batch, ...) each; its
            constants, and what is computed of them (:class:`.call_weights.CallWeights`).
        first_state: The number of inputs.
        seq_len: Steps.
        keeps: 0 without a backward, 1 for one that repeats products, 2 for one that does not.
        reset_to: What each carry becomes at a reset, (batch, ...), (1, ...) or (seq_len, batch,
            ...), or an empty tensor; or none at all.
        reset_kinds: Of each carry: 0 for zero, 1 for a state, 2 for a sequence of states, 3 for a
            carry that no reset changes; or none.
        chunk: Steps of a chunk, or 0 for as many as ``chunk()`` gives without arguments.
        reverse: Whether the steps are taken from the last to the first.
        stream: Added to the streams of the program's draws.
        first_step: Where these steps start, if they are a part of a longer sequence.
        seed: Of the program's draws, or None.
        lengths: int64 (batch) on the CPU: a row takes step t if t is less than its length. Or None.
        reset: bool (seq_len, batch), or None.

    Returns:
        Sequences, (seq_len, batch, ...) each, with zeros in rows that have ended; the carries after
        the last step of each row, (batch, ...) each; of each carry that is in no sequence its
        values before each chunk, (chunks, batch, width) in float64 or float32, if ``keeps`` is not
        0; and sums of products, (seq_len * batch, columns) each, if it is 2.
    """
    return _run(_library.operators.program_call, given)


def call_backward(*given: Any) -> list[Tensor]:
    """Gradients of ``tensors`` and of ``reset_to``: empty ones for those that are not needed.

    Those of states that rows are set to are (batch, width), in float64 or float32.

    Args: As of :func:`call`, with these in the place of ``keeps``:
        kept: What that returned without the last state.
        gradients: Of sequences and of the last state, empty ones for those that have none.
        needs: Which of ``tensors`` and of ``reset_to`` need a gradient.
        is_part: Whether gradients of constants are in float64 or float32, to be added to others.
    """
    return _run(_library.operators.program_call_backward, given)


def _run(operator: Any, given: Any) -> list[Tensor]:
    """As call_operator(), of what is never in a graph of torch.compile."""
    try:
        made: list[Tensor] = call_interruptibly(operator, *given)
        return made
    except RuntimeError as error:
        raise as_torch_raises(error, given[1]) from None


def _code(dtype: torch.dtype) -> int:
    if dtype not in CODES:
        raise TypeError(f"fusedrnn: a program must be of a floating dtype, got {dtype}")
    return CODES[dtype]


def _checked(function: ctypes._NamedFuncPointer, *arguments: object) -> int:
    """Calls a function that returns less than 0 after an error."""
    error = ctypes.create_string_buffer(1024)
    result: int = function(*arguments, error, ctypes.c_int64(len(error)))
    if result < 0:
        raise RuntimeError(error.value.decode(errors="replace"))
    return result
