"""Backward passes that go through a bank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from .slots import Slot
from .task import Task
from .task_gradients import Gradient


class Pass:
    """One backward pass. Autograd keeps it until its end.

    The end comes after what others have queued for it, such as FSDP's last messages: in a pass that
    does not go through the bank these come before sync_gradients(), so ranks have one order.
    """

    def __init__(self, finish: Callable[[Pass], None], outer: Pass | None) -> None:
        """
        Args:
            outer: The pass that this one runs within, as those of reentrant checkpoints do.
        """
        self._outer = outer
        self.gradients: dict[tuple[Task, tuple[int, ...]], Gradient] = {}
        """By task, and by the indices of the tensors that the call trained."""
        self.returned: set[Task] = set()
        """Tasks with gradients that autograd itself adds to ``.grad``."""
        self.brought: list[Slot] = []
        """Slots with weights that backward has brought again."""
        self.is_over = False
        self._finish = finish
        Variable._execution_engine.queue_callback(self._ends)

    @property
    def outermost(self) -> Pass:
        return self if self._outer is None else self._outer.outermost  # no circle: it goes at once

    def _ends(self) -> None:
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._finish(self)


class Passes:
    """The passes that are under way, by autograd's number of each."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._mine = _OfThread()

    def now(self, finish: Callable[[Pass], None]) -> Pass | None:
        """The pass that the caller is in; of one within another the outermost that is known.

        Args:
            finish: Called at the end of a pass that was not known. Kept until then only, since it
                has what has this.
        """
        number = torch._C._current_graph_task_id()
        under_way = self._mine.passes
        if number == -1:
            under_way.clear()  # those that are left have failed
            return None
        found = self._known.get(number)
        if found is None:
            while under_way and ((last := under_way[-1]()) is None or last.is_over):
                under_way.pop()
            outer = under_way[-1]() if under_way else None
            found = self._known[number] = Pass(finish, outer)
            under_way.append(weakref.ref(found))
        return found.outermost


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.passes: list[weakref.ref[Pass]] = []


def executed(context: Any, count: int) -> list[bool] | None:
    """For each of the first ``count`` inputs, whether this pass adds a gradient to it.

    None if it is one of torch.autograd.grad, which returns gradients.
    """
    found = []
    for node, _ in context.next_functions[:count]:
        try:
            if node is not None and not node.name().endswith("AccumulateGrad"):
                return None  # a function of other tensors is in a parameter's place
            found.append(node is not None and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch.autograd.grad asks for it
            return None
    return found if any(found) else None
