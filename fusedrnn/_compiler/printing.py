"""A step's expressions become what runs as a program. Records spare processes all of this."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .build import kind_of
from .compiled_step import Made, Printed
from .derive import Derived, derive
from .emit import source
from .lower import Lowered
from .program import Out
from .step_plan import Plan
from .weights_of_plan import outside_of


def printed(
    lowered: Lowered, dtype: torch.dtype, device: torch.device
) -> tuple[Printed, Callable[[], Made]]:
    """What runs a step on a device, and what it was made by."""
    plan = Plan(lowered)
    made = Made(plan, [derive(stage) for stage in plan.stages])
    outputs = [output for stage in plan.program.stages for output in stage.outputs]
    has_choices = any(one.has_choices() for one in made.derived) or any(
        output.kind in (Out.MAX, Out.ARG_MAX) for output in outputs
    )
    text = source(plan, made.derived, dtype, kind_of(device))
    outputs_at, outside = plan.output_sequences, outside_of(plan)
    lowered.traced.forget_weights()
    return Printed(plan.program, outputs_at, outside, text, has_choices), lambda: made


def made_again(lowered: Lowered, derived: list[Derived], printed: Printed) -> Made:
    """What a program was made by, from known derivatives.

    Raises:
        ValueError: It was made by something else.
    """
    plan = Plan(lowered)
    if plan.program != printed.form or len(derived) != len(plan.stages):
        raise ValueError("the graph of a record is not that of its program")
    lowered.traced.forget_weights()
    return Made(plan, derived)
