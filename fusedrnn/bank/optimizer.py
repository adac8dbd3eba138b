"""One optimizer for each task of a bank.

torch's optimizers look at all their parameters in each step, also at those without a gradient: with
1,024 tasks of 8 tensors that takes many times the step of the task in use. Here a task has an
optimizer of its own, which is made when the task has its first gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from .module import WeightBank

SHARED = "shared"
"""The name of the group with what all tasks add."""


class TaskOptimizer(Optimizer):
    """An optimizer of all weights of a bank that takes the steps of tasks in use alone.

    It has a group for each task, with its name under "task", so a task can have a learning rate of
    its own, and torch's schedulers set those of all. A task's state is made when it first has a
    gradient. Make one by ``bank.optimizer(torch.optim.AdamW, lr=1e-3)``.
    """

    steps_by_others = True

    def __init__(
        self, bank: WeightBank, cls: Callable[..., Optimizer], options: dict[str, Any]
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise TypeError(f"fusedrnn: optimizer takes a class of torch.optim, got {cls!r}")
        self._bank, self._cls, self._options = bank, cls, options
        self._made: dict[Any, Optimizer] = {}
        self._generation = bank._generation
        self._all: list[tuple[int, Tensor]] | None = None
        probe = cls([nn.Parameter(torch.empty(1))], **options)
        super().__init__(self._groups(), probe.defaults)

    def _groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self._bank._shared is not None:
            found.append({"params": [*self._bank._shared.parameters()], "task": SHARED})
        for task in self._bank._tasks.values():
            found.append({"params": [*task.module.parameters()], "task": task.key})
        return found

    def step(self, closure: Any = None) -> Any:
        """Takes a step of each task that has a gradient.

        Args:
            closure: Called once, before all of them; returns a loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_tasks()
        used = dict.fromkeys([i for i, p in self._all_parameters() if p.grad is not None])
        for i in used:
            self._of(self.param_groups[i]).step()
        return loss

    def _all_parameters(self) -> list[tuple[int, Tensor]]:
        """Each with the index of its group, in a list, which is the fastest to go through."""
        if self._all is None:
            groups = enumerate(self.param_groups)
            self._all = [(i, parameter) for i, group in groups for parameter in group["params"]]
        return self._all

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all tasks to None, or to zeros."""
        self._follow_tasks()
        for parameter in [p for _, p in self._all_parameters() if p.grad is not None]:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes groups and state from ``state_dict()`` of another one."""
        super().load_state_dict(state_dict)
        self._made.clear()
        self._all = None

    def _of(self, group: dict[str, Any]) -> Optimizer:
        """The optimizer of one group, which shares the group and the state."""
        made = self._made.get(group["task"])
        if made is None:
            made = self._cls([{"params": list(group["params"])}], **self._options)
            made.is_of_a_task = True  # type: ignore[attr-defined]
            for parameter, state in made.state.items():
                self.state.setdefault(parameter, state)
            for name, value in made.param_groups[0].items():
                group.setdefault(name, value)
            self._made[group["task"]] = made
        made.param_groups, made.state = [group], self.state
        return made

    def _follow_tasks(self) -> None:
        """Tasks may have been added or deleted."""
        if self._generation == self._bank._generation:
            return
        self._generation, self._all = self._bank._generation, None
        now = {group["task"]: group for group in self._groups()}
        known = {group["task"] for group in self.param_groups}
        for group in [group for group in self.param_groups if group["task"] not in now]:
            self.param_groups.remove(group)
            self._made.pop(group["task"], None)
            for parameter in group["params"]:
                self.state.pop(parameter, None)
        for key, group in now.items():
            if key not in known:
                self.add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_bank", "_cls", "_options")
        return super().__getstate__() | {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made, self._generation, self._all = {}, -1, None

    def __repr__(self) -> str:
        lr = self.defaults.get("lr")
        return f"TaskOptimizer({self._cls.__name__}, lr={lr}, tasks={len(self._bank)})"
