"""One optimizer for each task of a bank.

torch's optimizers look at all their parameters in each step, also at those without a gradient: with
1,024 tasks of 8 tensors that takes many times the step of the task in use. Here a task has an
optimizer of its own, which is made when the task has its first gradient.
"""

from __future__ import annotations

import copy
import inspect
import operator
import reprlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .bank_state import BankState
from .file_tasks import FileTasks
from .task import SHARED


class TaskOptimizer(Optimizer):
    """An optimizer of all weights of a bank that takes the steps of tasks in use alone.

    It has a group for each task, with its name under "task", so a task can have a learning rate of
    its own, and torch's schedulers set those of all. A task's state is made when it first has a
    gradient. Make one by ``bank.optimizer(torch.optim.AdamW, lr=1e-3)``.
    """

    steps_by_others = True

    def __init__(
        self, bank: BankState, cls: Callable[..., Optimizer], options: dict[str, Any]
    ) -> None:
        _check_class(cls)
        if isinstance(bank._tasks, FileTasks):
            raise RuntimeError("fusedrnn: a bank of a file is read-only: it has no optimizer")
        self._bank, self._cls, self._options = bank, cls, options
        self._generation = bank._generation
        # torch looks at all groups before it adds one, so it gets none here.
        super().__init__([{"params": []}], self._defaults())
        self._made: dict[Any, Optimizer] = {}
        self.param_groups = []
        self._generation = -1
        self._follow_tasks()

    def _defaults(self) -> dict[str, Any]:
        """Those of the class, which may refuse parameters or options: once for tasks of a kind."""
        kinds = {}
        for _, parameters in self._tasks():
            kind = tuple([(p.shape, p.dtype, p.device, p.requires_grad) for p in parameters])
            kinds[kind] = parameters
        probe = None
        for parameters in filter(None, kinds.values()):
            # In place of the parameters, which some constructors change.
            like = [nn.Parameter(torch.empty_like(p), p.requires_grad) for p in parameters]
            probe = self._cls(like, **self._options)
        if probe is None:
            raise ValueError("fusedrnn: the bank has no parameters: add tasks before optimizer()")
        return probe.defaults

    # --- groups -----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One for each task that the bank has now."""
        self._follow_tasks()
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._all: list[tuple[int, Tensor]] | None = None

    def _tasks(self) -> Iterator[tuple[Any, list[Tensor]]]:
        """Names and parameters, in the order of ``bank.parameters()``."""
        if self._bank._shared is not None:
            yield SHARED, [*self._bank._shared.parameters()]
        for task in self._bank._tasks.values():
            if task.swaps:  # within a call the module has tensors of the device
                places = zip(task.places, task.tensors, strict=True)
                yield task.key, [tensor for place, tensor in places if place.is_parameter]
            else:
                yield task.key, [*task.module.parameters()]

    def _follow_tasks(self) -> None:
        """Tasks may have been added, deleted, or replaced, which their names do not tell."""
        generation = self._bank._generation
        if self._generation == generation:
            return
        known = {group["task"]: group for group in self._groups}
        groups, kept = [], set()
        for name, parameters in self._tasks():
            group = known.get(name)
            if group is None or not _are_same(group["params"], parameters):
                group = {"params": parameters, "task": name, **_copied(self.defaults)}
            else:
                kept.add(name)
            groups.append(group)
        owned = _task_of_parameters(groups)
        for parameter in [p for p in self.state if isinstance(p, Tensor) and id(p) not in owned]:
            del self.state[parameter]
        self._made = {name: made for name, made in self._made.items() if name in kept}
        self.param_groups = groups
        self._generation = generation

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups are the tasks of the bank.

        Raises:
            ValueError: Always.
        """
        if not hasattr(self, "_made"):  # torch's constructor
            super().add_param_group(param_group)
            return
        raise ValueError(
            "fusedrnn: the groups of this optimizer are the tasks of its bank: add a task by "
            "bank.add(), and use another optimizer for other parameters"
        )

    # --- steps ------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:
        """Takes a step of each task that has a gradient.

        Args:
            closure: Called once, before all of them; returns a loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = dict.fromkeys([i for i, p in self._all_parameters() if p.grad is not None])
        for i in used:
            self._of(self._groups[i]).step()
        return loss

    def _all_parameters(self) -> list[tuple[int, Tensor]]:
        """Each with the index of its group, in a list, which is the fastest to go through."""
        self._follow_tasks()
        if self._all is None:
            groups = enumerate(self._groups)
            self._all = [(i, parameter) for i, group in groups for parameter in group["params"]]
        return self._all

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all tasks to None, or to zeros."""
        for parameter in [p for _, p in self._all_parameters() if p.grad is not None]:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def _of(self, group: dict[str, Any]) -> Optimizer:
        """The optimizer of one group, which shares the group and the state."""
        made = self._made.get(group["task"])
        if made is None:
            made = self._cls([{"params": list(group["params"])}], **self._options)
            made.of_task = weakref.ref(self), group["task"]  # type: ignore[attr-defined]
            for parameter, state in made.state.items():
                self.state.setdefault(parameter, state)
            for name, value in made.param_groups[0].items():
                group.setdefault(name, value)
            self._made[group["task"]] = made
        made.param_groups, made.state = [group], self.state
        return made

    # --- saving and loading -----------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes groups and state: each task those of its name, in any order.

        Args:
            state_dict: Of another one, or of ``cls(bank.parameters())``, as that of a list.

        Raises:
            ValueError: It has other tasks, or another number of parameters.
        """
        super().load_state_dict({**state_dict, "param_groups": self._by_task(state_dict)})

    def _by_task(self, state_dict: Any) -> list[dict[str, Any]]:
        """The groups of a state dict, in the order of this one's."""
        groups, found = self.param_groups, state_dict.get("param_groups", [])
        if found and all("task" in group for group in found):
            named = {str(group["task"]): group for group in found}
            ours = {str(group["task"]) for group in groups}
            if named.keys() != ours or len(found) != len(named):
                raise ValueError(
                    "fusedrnn: the state dict must have a group for each task of the bank: "
                    f"it lacks {reprlib.repr(sorted(ours - named.keys()))}, and has groups of "
                    f"unknown tasks, {reprlib.repr(sorted(named.keys() - ours))}"
                )
            for group in groups:
                count = len(named[str(group["task"])]["params"])
                if count != len(group["params"]):
                    raise ValueError(
                        f"fusedrnn: task {group['task']!r} has {len(group['params'])} parameters, "
                        f"and the state dict has {count} of this task"
                    )
            return [{**named[str(group["task"])], "task": group["task"]} for group in groups]
        total = sum(len(group["params"]) for group in groups)
        if len(found) != 1 or len(found[0]["params"]) != total:
            counts = reprlib.repr([len(group["params"]) for group in found])
            raise ValueError(
                "fusedrnn: the state dict must have a group for each task, with its name under "
                f'"task", or one group of all {total} parameters, as {self._cls.__name__}'
                f"(bank.parameters()) has: it has groups of {counts} parameters"
            )
        ids = iter(found[0]["params"])
        options = {k: v for k, v in found[0].items() if k not in ("params", "param_names")}
        return [
            {
                **_copied(options),
                "task": group["task"],
                "params": [next(ids) for _ in group["params"]],
            }
            for group in groups
        ]

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_bank", "_cls", "_options")
        return super().__getstate__() | {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._made, self.param_groups = {}, state["param_groups"]
        super().__setstate__({k: v for k, v in state.items() if k != "param_groups"})
        self._generation = -1

    def __repr__(self) -> str:
        lr = self.defaults.get("lr")
        return f"TaskOptimizer({self._cls.__name__}, lr={lr}, tasks={len(self._bank._tasks)})"


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        what = f"an object of type {type(cls).__name__}"  # its text may be that of all parameters
        if isinstance(cls, str | type):
            what = f"the class {cls.__name__}" if isinstance(cls, type) else reprlib.repr(cls)
        raise TypeError(
            "fusedrnn: optimizer takes the class, and its options as keywords: "
            f"bank.optimizer(AdamW, lr=1e-3); got {what}"
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = cls.__name__
        raise TypeError(
            f"fusedrnn: a step of {name} computes the loss of all tasks several times, so it "
            f"cannot be taken for each task on its own: use {name}(bank.parameters())"
        )


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """Options for one group: schedulers change a tensor in place, once for each group."""
    return {k: copy.deepcopy(v) if isinstance(v, Tensor) else v for k, v in options.items()}


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _task_of_parameters(groups: list[dict[str, Any]]) -> dict[int, Any]:
    """The task of each parameter, by its id."""
    tasks: dict[int, Any] = {}
    for group in groups:
        for parameter in group["params"]:
            other = tasks.setdefault(id(parameter), group["task"])
            if other != group["task"]:
                raise ValueError(
                    f"fusedrnn: tasks {other!r} and {group['task']!r} have a parameter in common, "
                    "so it would take a step with each of them: keep it outside of the bank, or "
                    'use shared="add"'
                )
    return tasks
