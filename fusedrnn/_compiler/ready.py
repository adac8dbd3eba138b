"""A program gets its library, which is compared to the step or to the program before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import program_operators
from .build import CannotBuild, build, capability_of, kind_of
from .compiled_step import Program
from .trace import CannotCompile
from .verify import Trial, verify_library


def with_library(
    program: Program,
    trial: Trial | None,
    device: torch.device,
    check: Callable[[Program, Any, torch.device], None] = verify_library,
) -> Program:
    """The program with its library, which has passed a check.

    Raises:
        CannotCompile: It cannot be built here, or what the check raises.
    """
    kind = kind_of(device)
    try:
        program.library = build(program.printed.text, device=kind, capability=capability_of(device))
    except CannotBuild as error:
        raise CannotCompile(str(error)) from error
    outside = program.printed.outside
    constants = outside.numbers(program.sequence_shapes, program.state_shapes)
    program.number = program_operators.add_program(
        program.form,
        program.library.function,
        dtype=program.dtype,
        constants=constants,
        is_for_gpu=kind == "cuda",
    )
    outside.prepare(device, program.dtype)
    check(program, trial, device)
    return program
