"""A user's step: what it is called with, which modules it has, and what it is called in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from .._front import marked_step
from .._step.held_modules import held_modules
from .._step.trees import Leaves


class UserStep(NamedTuple):
    """A user's step."""

    wrapper: str
    """Which function of marked_step.py takes it."""
    step: Any
    """The cell, or the function of a scan."""
    input: Callable[[Leaves], Any]
    """The tree that the step gets."""
    state: Callable[[Leaves], Any]
    more: tuple[Any, ...] = ()
    """Further arguments of the wrapper."""

    def arguments(self, inputs: Leaves, state: Leaves) -> tuple[Any, ...]:
        return self.step, self.input(inputs), self.state(state), *self.more

    def modules(self) -> list[nn.Module]:
        """Those of a cell."""
        return list(self.step.modules()) if isinstance(self.step, nn.Module) else []

    def held(self) -> list[nn.Module]:
        """Those that are no cell, and no modules of one: in variables, lists and objects."""
        found: list[nn.Module] = held_modules(self.step).modules
        return [module for module in found if module is not self.step]


def wrapper_of(user: UserStep) -> Any:
    return getattr(marked_step, user.wrapper)


def code_of(step: Any) -> Any:
    """What steps that are traced together have in common."""
    if isinstance(step, nn.Module):
        return type(step)
    return getattr(_function_of(step), "__code__", None) or type(step)


def name_of(step: Any) -> str:
    """The same in words."""
    function = type(step) if isinstance(step, nn.Module) else _function_of(step)
    if not hasattr(function, "__qualname__"):
        function = type(step)
    return f"{function.__module__}.{function.__qualname__}"


def _function_of(step: Any) -> Any:
    function = getattr(step, "__func__", step)
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return function
