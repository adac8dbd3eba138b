"""Steps through torch.compile, which all cells of a class share, and what was refused of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from .._front.class_contents import Contents, users_classes
from .._front.traced_step import TracedStep
from .._step.sequence_call import SequenceCall
from .user_step import UserStep, code_of, name_of, wrapper_of


class RefusedStep:
    """Why torch.compile does not take a step, and for how many calls nobody asks again."""

    def __init__(self, reason: str, calls: int) -> None:
        self.reason, self.calls, self._left = reason, calls, calls

    def is_still(self) -> bool:
        self._left -= 1
        return self._left >= 0


Refusals = dict[Any, RefusedStep]
"""By kinds of calls."""


def looks_of(user: UserStep, call: SequenceCall) -> Any:
    """Calls of which torch.compile may say the same."""
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in (*call.inputs, *call.state)]
    return tuple(kinds), tuple([module.training for module in user.modules()])


class SharedSteps:
    """Steps through torch.compile, which all cells of a class share, or all functions of a code."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, dict[str, TracedStep]] = (
            weakref.WeakKeyDictionary()
        )
        self._contents: weakref.WeakKeyDictionary[TracedStep, Contents] = (
            weakref.WeakKeyDictionary()
        )
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._refusals: weakref.WeakKeyDictionary[Any, Refusals] = weakref.WeakKeyDictionary()

    def is_news(self, user: UserStep) -> bool:
        """Whether nobody has been warned of a cell, or of functions of one code."""
        owner = user.step if isinstance(user.step, nn.Module) else code_of(user.step)
        if owner in self._warned:
            return False
        self._warned.add(owner)
        return True

    def refusals(self, user: UserStep) -> Refusals:
        """Of all functions of one code; cells have their own."""
        if isinstance(user.step, nn.Module):
            return {}
        return self._refusals.setdefault(code_of(user.step), {})

    def of(self, user: UserStep, modules: Iterable[nn.Module]) -> TracedStep:
        steps = self._of.setdefault(code_of(user.step), {})
        found = steps.get(user.wrapper)
        if found is None or not self.is_right(found, modules):
            found = steps[user.wrapper] = TracedStep(wrapper_of(user), name_of(user.step))
            self.is_right(found, modules)
        return found

    def is_right(self, step: TracedStep, modules: Iterable[nn.Module]) -> bool:
        """Whether classes of modules are as they were when a step was traced first."""

        classes = users_classes(modules)
        known = self._contents.get(step)
        if known is None:
            known = self._contents[step] = Contents()
        return known.are_as_before(classes)


steps_of_process = SharedSteps()
