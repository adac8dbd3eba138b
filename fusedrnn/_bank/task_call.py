"""One call of a task."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .._tracers import is_recorded, never_in_graphs
from .bank_device import Device
from .bank_state import BankState
from .call_changes import bring_changes_home, is_changed, keep_reassigned
from .call_tensors import tensors_of_call
from .file_tasks import FileTask, FileTasks
from .saved_weights import saving
from .slots import Slot, Use
from .task import Task
from .tensor_swaps import reassign_buffers, reassigned_buffers, swap_back, swap_in, write_values


class TaskCall:
    """The time in which a task's module has its weights on the device."""

    def __init__(self, bank: BankState, task: Task, index: int | None) -> None:
        self._bank, self._task, self._index = bank, task, index
        self._begun: list[_Begun | None] = []
        """More than one if it is entered again; None where a call is that of the module."""

    @never_in_graphs
    def __enter__(self) -> nn.Module:
        bank = self._bank
        _check_place(bank)
        begun = None if bank._is_direct() else _Begun(bank._device, self._task, self._index)
        if begun is not None:
            begun.begin()
        self._begun.append(begun)
        return self._task.module

    @never_in_graphs
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(kind is None)

    def _leave(self, is_fine: bool) -> None:
        begun = self._begun.pop()
        if begun is not None:
            begun.end(is_fine)


class _Begun:
    """A call that has begun."""

    def __init__(self, device: Device, task: Task, index: int | None) -> None:
        self._device, self._task, self._index = device, task, index
        self._slot: Slot | None = None
        self._use: Use | None = None
        self._tensors: list[Tensor] | None = None
        """What the module has in place of its own, once it has."""
        self._hooks: AbstractContextManager[Any] | None = None

    def begin(self) -> None:
        self._device.calls.__enter__()
        try:
            tensors = self._find()
            swap_in(self._task, tensors)
            self._tensors = tensors
            if self._slot is not None:
                hooks = saving(self._device, self._slot)
                hooks.__enter__()
                self._hooks = hooks
        except BaseException:
            self.end(False)
            raise

    def _find(self) -> list[Tensor]:
        device, task = self._device, self._task
        if device.slots is None:
            task.check()
            return tensors_of_call(device, task, None)
        with device.lock:
            slot = device.resident(task, index=self._index)
            slot.is_fixed = slot.is_fixed or self._index is not None
            tensors = tensors_of_call(device, task, slot)
            self._slot, self._use = slot, slot.begin(tensors)
        return tensors

    def end(self, is_fine: bool) -> None:
        """Leaves everything, in any case.

        Args:
            is_fine: Whether there is no error yet. What cannot be kept is another one.
        """
        try:
            if self._hooks is not None:
                self._hooks.__exit__(None, None, None)
        finally:
            try:
                self._restore()
            except RuntimeError:
                if is_fine:
                    raise
            finally:
                self._device.calls.__exit__(None, None, None)

    def _restore(self) -> None:
        values: dict[int, Tensor] = {}
        try:
            if self._tensors is not None:
                values = self._take_back(self._tensors)
        finally:
            if self._use is not None:
                with self._device.lock:
                    self._end_use(self._use, values)

    def _take_back(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """The module gets its own tensors. Returns what buffers were set to, for the slot."""
        task = self._task
        values: dict[int, Tensor] = {}
        try:
            values = reassigned_buffers(task)
            if values and task.swaps[-1] is not tensors:  # a call that goes on has set them
                write_values(task.swaps[-1], values)
                values = {}
        finally:
            swap_back(task, tensors)
        if self._slot is None:
            reassign_buffers(task, values)
        return values

    def _end_use(self, use: Use, values: dict[int, Tensor]) -> None:
        device, task, slot = self._device, self._task, self._slot
        assert slot is not None and device.engine is not None
        try:
            # The work of the call is on its way. What the host does next, such as loading other
            # weights, must not be read by the copy that this work waits for.
            slot.land(device.engine)
            keep_reassigned(task, slot, use, values)
            if not isinstance(task, FileTask):
                bring_changes_home(device, task, slot, use)
            elif is_changed(task, use):
                slot.forget()  # the next call reads the file again
        finally:
            slot.end(use)
            if not slot.running:
                slot.settle(device.engine)


def _check_place(bank: BankState) -> None:
    if is_recorded():
        raise RuntimeError(
            "fusedrnn: a WeightBank chooses the weights of a task in Python, so it cannot be "
            "traced or exported: trace or export the module of one task, bank[t]"
        )
    if getattr(bank, "_is_replica", False):
        raise RuntimeError(
            "fusedrnn: a WeightBank has one device in a process, so it does not run in the "
            "replicas of nn.DataParallel: use DistributedDataParallel"
        )
    if bank._ranks.is_known_to_ddp(lambda: _some_parameters(bank)):
        raise RuntimeError(
            "fusedrnn: this DistributedDataParallel would send the gradients of all tasks: "
            "call fusedrnn.WeightBank.exclude(model) before DistributedDataParallel(model), "
            "with the same module that DistributedDataParallel gets, not with a part of it"
        )


def _some_parameters(bank: BankState) -> list[Tensor]:
    """One of each task is enough to know whether the bank is excluded."""
    if isinstance(bank._tasks, FileTasks):
        return []
    found = (next(task.module.parameters(), None) for task in bank._tasks.values())
    return [parameter for parameter in found if parameter is not None]
