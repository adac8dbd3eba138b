"""What a bank does before and after each step of an optimizer, of which torch tells.

A bank counts steps, by which ranks that have diverged are noticed; has those on the device begin
and end; and brings weights again that were changed in a way that torch does not count.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .bank_state import BankState
from .device_steps import DeviceStep
from .task import Task
from .task_optimizer import TaskOptimizer

_Known = weakref.WeakKeyDictionary[Optimizer, tuple[Any, bool]]
_banks: weakref.WeakKeyDictionary[BankState, _Known] = weakref.WeakKeyDictionary()
"""All banks, and of optimizers whether they have a weight of the bank: for what that was found."""


def watch(bank: BankState) -> None:
    """Has the steps of optimizers tell this bank."""
    _banks[bank] = weakref.WeakKeyDictionary()


def _has_weights(optimizer: Optimizer, bank: BankState) -> bool:
    """Whether an optimizer has a weight of the bank."""
    owner, _ = _task_of(optimizer)
    optimizer = optimizer if owner is None else owner  # known once, and not for each task
    signature = Task.exchanges_of_tensors, bank._generation, _signature(optimizer)
    known = _banks[bank].get(optimizer)
    if known is None or known[0] != signature:
        ids = {id(parameter) for parameter in bank.parameters()}
        found = any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
        known = _banks[bank][optimizer] = signature, found
    return known[1]


def _signature(optimizer: Optimizer) -> Any:
    """Of its parameters, without a look at all of them."""
    if isinstance(optimizer, TaskOptimizer):
        return optimizer._bank._generation
    lists = [group["params"] for group in optimizer.param_groups]
    return [(len(some), id(some[0]), id(some[-1])) for some in lists if some]


def _task_of(optimizer: Optimizer) -> tuple[TaskOptimizer | None, Any]:
    """The TaskOptimizer that has made an optimizer, and the name of its task."""
    owner, name = getattr(optimizer, "of_task", (lambda: None, None))
    return owner(), name


def _tasks_of(optimizer: Optimizer, bank: BankState) -> list[Task]:
    """The tasks of a bank that an optimizer may step."""
    owner, name = _task_of(optimizer)
    if owner is None or owner._bank is not bank:
        return list(bank._tasks.values())
    task = bank._tasks.get(str(name))
    return [] if task is None else [task]


_stepped_by_others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of which another one takes the steps."""


def _held_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Those that an optimizer holds, as torch's ZeroRedundancyOptimizer does."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    banks = [bank for bank in list(_banks) if _has_weights(optimizer, bank)]
    inner = _held_optimizers(optimizer)
    has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
    # The steps that others take for this one go to the device each.
    is_own = not inner and not isinstance(optimizer, TaskOptimizer)
    moved = [
        bank
        for bank in banks
        if is_own and bank._step_on == "device" and bank._device.engine is not None
    ]
    for bank in banks:
        _check_at_home(optimizer, bank, has_closure)
    if moved and has_closure:
        raise ValueError(
            'fusedrnn: a WeightBank with step_on="device" moves its weights to the device '
            "before step(), so a closure of step() cannot call the bank: compute gradients "
            'before step(), or use step_on="host"'
        )
    _stepped_by_others.update(inner)
    for bank in banks:
        bank._end_steps()  # of one that has failed, or within which this one is
    for bank in moved:
        bank._stepping[optimizer] = DeviceStep(bank._device, optimizer, _tasks_of(optimizer, bank))


def _check_at_home(optimizer: Optimizer, bank: BankState, has_closure: bool) -> None:
    """Raises where a step would not reach the weights that are in use."""
    tasks = _tasks_of(optimizer, bank)
    if getattr(optimizer, "parameters_as_bucket_view", False) and _having(tasks, _ids(optimizer)):
        raise ValueError(
            "fusedrnn: ZeroRedundancyOptimizer moves weights into buckets of its own, and a "
            "WeightBank keeps them in blocks of its own: set parameters_as_bucket_view=False"
        )
    if bank._device.engine is None:  # a CPU has no other place
        return
    in_use = [task for task in tasks if task.swaps and bank._device.calls.is_mine()]
    if in_use:
        stepped = _ids(optimizer) if has_closure else _ids(optimizer, with_grad=True)
        found = in_use if _has_shared(bank, stepped) else _having(in_use, stepped)
        if found:
            raise RuntimeError(
                f"fusedrnn: {found[0].name} is on the device, within bank.active(), where calls "
                "would still have the weights from before the step: leave the with block before "
                "step()"
            )


def _ids(optimizer: Optimizer, *, with_grad: bool = False) -> set[int]:
    """Of its parameters, or of those with a gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p) for p in parameters if not with_grad or p.grad is not None}


def _having(tasks: list[Task], ids: set[int]) -> list[Task]:
    """Those that have some of these tensors."""
    return [task for task in tasks if any(id(tensor) in ids for tensor in task.tensors)]


def _has_shared(bank: BankState, ids: set[int]) -> bool:
    """Whether some of these tensors are added to all tasks."""
    return bank._shared is not None and any(id(p) in ids for p in bank._shared.parameters())


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    inner = _held_optimizers(optimizer)
    _stepped_by_others.difference_update(inner)
    for bank in list(_banks):
        step = bank._stepping.pop(optimizer, None)
        if step is not None:
            step.go_home()
        if not _has_weights(optimizer, bank):
            continue
        if inner:
            bank._refresh_all()  # it may have written itself, as messages do, and torch counts none
        elif step is None and torch._C._len_torch_dispatch_stack():
            _refresh_stepped(optimizer, bank)
        # The optimizers of single tasks, and those within others, are steps of these.
        if optimizer not in _stepped_by_others and not hasattr(optimizer, "of_task"):
            bank._ranks.steps += 1


def _refresh_stepped(optimizer: Optimizer, bank: BankState) -> None:
    """After a step under a mode that looks at operations, where torch counts none of foreach."""
    if isinstance(optimizer, TaskOptimizer):
        return  # its optimizers of single tasks have come here
    stepped, tasks = _ids(optimizer, with_grad=True), list(bank._tasks.values())
    for task in tasks if _has_shared(bank, stepped) else _having(tasks, stepped):
        task.refresh()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
