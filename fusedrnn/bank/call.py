"""One call of a task."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from .._graphs import never_in_graphs
from .device import Device
from .files import FileTask
from .saved import saving
from .task import Task, versions_of

if TYPE_CHECKING:
    from .module import WeightBank


class Call:
    """The time in which a task's module has its weights on the device."""

    def __init__(self, bank: WeightBank, task: Task, index: int | None) -> None:
        self._bank, self._task, self._index = bank, task, index
        self._slot: Any = None
        self._entered: list[AbstractContextManager[Any]] = []

    @never_in_graphs
    def __enter__(self) -> nn.Module:
        bank, task, device = self._bank, self._task, self._bank._device
        self._device = device
        bank._check_place()
        if bank._is_direct():
            return task.module
        self._enter(task.lock)
        try:
            self._begin(device, task)
        except BaseException:
            self._leave(None, None, None)
            raise
        return task.module

    def _begin(self, device: Device, task: Task) -> None:
        if device.slots is None:
            task.check()
            self._tensors = device.tensors(task, None)
        else:
            with device.lock:
                slot = device.resident(task, index=self._index)
                self._tensors = device.tensors(task, slot)
                slot.running += 1
                self._slot = slot
            buffers = [
                t for t, p in zip(self._tensors, task.places, strict=True) if not p.is_parameter
            ]
            self._before = versions_of(buffers)
        self._enter(task.swapped(self._tensors))
        if self._slot is not None:
            self._enter(saving(device, task, self._slot))

    @never_in_graphs
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(kind, error, traceback)

    def _enter(self, manager: AbstractContextManager[Any]) -> None:
        manager.__enter__()
        self._entered.append(manager)

    def _leave(self, *about: Any) -> None:
        device, task, slot = self._device, self._task, self._slot
        while len(self._entered) > 1:
            self._entered.pop().__exit__(*about)
        if slot is not None:
            with device.lock:
                slot.running -= 1
                if not isinstance(task, FileTask):
                    device.bring_buffers_home(task, slot, self._tensors, self._before)
                if not slot.running:
                    slot.settle(device.engine)
                # The work of the call is on its way. What the host does next, such as loading other
                # weights, must not be read by the copy that this work waits for.
                slot.land(device.engine)
        while self._entered:
            self._entered.pop().__exit__(*about)
