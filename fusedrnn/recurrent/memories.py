"""What earlier calls of scan have found out about a step.

A step that is a method or a module, or that is defined once, has a memory of its own. One that is
defined anew in each call, as inside of a module's forward, shares that of functions which were
like it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .calls import Known, Memory
from .closures import Likeness, likeness
from .runs import Run
from .torch_compile import TorchCompiledStep
from .trees import Leaves

_MOST = 32
"""Steps that a module remembers after their functions are gone, and that are remembered without a
module."""
_OFTEN = 3
"""Functions of one code for which torch.compile compiles the step before there is a warning."""


def memory_of(step: Callable[..., Any]) -> Memory:
    """Kept by the function or by a module that it holds, so that it keeps nothing alive."""
    owner = getattr(step, "__self__", step)
    function = getattr(step, "__func__", step)
    name = f"_fusedrnn_{getattr(step, '__name__', 'forward')}"
    try:
        found: Memory | None = vars(owner).get(name)
        if found is None or not found.is_of(function):  # functools.wraps copies attributes
            # What a method computes depends on its object, whose key a function does not have.
            is_method = function is not step
            found = vars(owner)[name] = Memory(function) if is_method else _new_memory(function)
        return found
    except (TypeError, AttributeError):  # it has no attributes of its own
        return Memory()


def _new_memory(step: Any) -> Memory:
    like = likeness(step) if isinstance(step, FunctionType | partial) else None
    return Memory(step) if like is None else _OfFunction(step, _steps_of(like.module).alike(like))


class _Steps:
    """The steps that were run lately."""

    _lock = threading.Lock()

    def __init__(self, module: nn.Module | None = None) -> None:
        """``module``: which the steps hold; copies of it start without."""
        self._module = None if module is None else weakref.ref(module)
        self._found: dict[Any, _Alike] = {}
        self._times: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return _Steps, ()

    def is_of(self, module: nn.Module) -> bool:
        return self._module is not None and self._module() is module

    def alike(self, like: Likeness) -> _Alike:
        with self._lock:
            found = self._found.pop(like.key, None)
            if found is None or not found.are_like(like):
                found = _Alike(self, like)
            self._found[like.key] = found
            if len(self._found) > _MOST:
                del self._found[next(iter(self._found))]
        return found

    def count_torch_compiled(self, step: Any) -> None:
        """Warns once of a code that torch.compile compiles for one function after the other."""
        while isinstance(step, partial):
            step = step.func
        code = getattr(step, "__code__", None)
        if code is None:
            return
        self._times[code] = self._times.get(code, 0) + 1
        if self._times[code] == _OFTEN:
            warnings.warn(
                f"fusedrnn: the step {step.__qualname__} was compiled {_OFTEN} times by "
                "torch.compile, because it was defined anew with other values, or with tensors and "
                "objects of its own. Define it once, outside of the call, or let it get its "
                "tensors by params=",
                stacklevel=2,
            )


_without_module = _Steps()


def _steps_of(module: nn.Module | None) -> _Steps:
    if module is None:
        return _without_module
    found = vars(module).get("_fusedrnn_steps")
    if found is None or not found.is_of(module):  # replicas of DataParallel share attributes
        found = vars(module)["_fusedrnn_steps"] = _Steps(module)
    return found


class _Alike:
    """Functions that are the same step."""

    def __init__(self, steps: _Steps, like: Likeness) -> None:
        self.steps, self.like = steps, like
        self.memory = Memory()
        self.refusals: dict[Any, str] = {}
        """Why torch.compile cannot compile such a step."""
        self.torch_compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        """Functions that a step by torch.compile may hold."""
        self.is_counted = False

    def are_like(self, like: Likeness) -> bool:
        """Whether they still are: objects may be gone, and variables assigned anew."""
        now = [likeness(function) for function in self.torch_compiled]
        return self.like.is_alive() and all(one and one.key == like.key for one in now)


class _OfFunction(Memory):
    """The memory of one function, most of which is that of all functions like it.

    A step by torch.compile holds its function and all that this one holds. So it is shared only
    where that is modules, the first of which keeps it, and plain values.
    """

    def __init__(self, step: Any, alike: _Alike) -> None:
        super().__init__(step)
        self._step, self._alike = weakref.ref(step), alike
        self.is_counted = False

    def of(self, run: Run, inputs: Leaves, state: Leaves, constants: Leaves) -> Known:
        return self._alike.memory.of(run, inputs, state, constants)

    def _is_still_like(self) -> bool:
        """Whether variables around the function, which may change, are those of the others."""
        like = likeness(self._step())
        return like is not None and like.key == self._alike.like.key and self._alike.are_like(like)

    def torch_compiled(
        self, run: Run, inputs: Leaves, state: Leaves, constants: Leaves
    ) -> TorchCompiledStep | str:
        given, step, alike = (inputs, state, constants), self._step(), self._alike
        counted: _OfFunction | _Alike = self
        if alike.like.is_whole and self._is_still_like():
            counted = alike
            alike.torch_compiled.add(step)
            found = alike.memory.torch_compiled(run, *given)
        else:
            key = (run.signature, run.autocast, *(one.dtype for leaves in given for one in leaves))
            if key in alike.refusals:
                return alike.refusals[key]
            found = super().torch_compiled(run, *given)
            if isinstance(found, str):
                alike.refusals[key] = found
        if not counted.is_counted and not isinstance(found, str):
            counted.is_counted = True
            alike.steps.count_torch_compiled(step)
        return found
