"""Why a step is not compiled: each a sentence without a full stop, which users read."""

from __future__ import annotations


class CannotCompile(Exception):
    """Why the graph of a step has no program."""


class StepRaises(CannotCompile):
    """The step itself raises, maybe for the numbers that it was tried with."""


class CannotTrace(Exception):
    """Why torch.compile gives no graph of a step."""


class ChangesPython(CannotTrace):
    """The step changes something in Python. It may do so once, as where it makes what it lacks."""


CHANGING = (
    "Python numbers or objects that it reads keep changing between calls, and each change needs "
    "another compilation; make them buffers or inputs"
)
