"""What a bank consists of, for the files that ``WeightBank`` is made of.

They come before ``WeightBank``, which imports them, so they see of a bank what is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from .bank_device import Device
from .device_steps import DeviceStep
from .ranks import Ranks
from .task import SHARED, Task


class BankState(nn.Module):
    """The parts of a bank, which ``WeightBank`` makes."""

    _tasks: Mapping[str, Task]
    """By name, in the order of the bank's modules."""
    _device: Device
    """Another one after ``to()``."""
    _ranks: Ranks
    _adds: bool
    """Whether calls add the weights of ``bank.shared``."""
    _step_on: Literal["host", "device"]
    _stepping: dict[Optimizer, DeviceStep]
    """Steps on the device that have begun."""
    _generation: int
    """Counts changes of the tasks."""

    @property
    def _shared(self) -> nn.Module | None:
        return self._modules.get(SHARED) if self._adds else None

    def _is_direct(self) -> bool:
        """Whether a call is nothing but that of the module."""
        return self._device.engine is None and not self._ranks.are_several()

    def _count_change(self) -> None:
        self._generation += 1

    def _end_steps(self) -> None:
        """Brings home what steps on the device have left there that have failed."""
        while self._stepping:
            self._stepping.popitem()[1].go_home()

    def _refresh_all(self) -> None:
        for task in self._tasks.values():
            task.refresh()
        self._device.refresh_shared()
