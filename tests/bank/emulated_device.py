"""A device for banks that is memory of the CPU, whose copies run in any order that streams allow.

Copies wait in two queues, and run when somebody waits for them or, by chance, earlier. Until then
their target holds NaN, and what they read is what the source holds when they run. ``Watch`` tells
of every operation on a slot, and a copy into memory that was used after the events it waits for
raises: that race would be silent on a GPU.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedrnn._bank.engines import Immediate

aten = torch.ops.aten
# These look at no numbers.
VIEWS = {
    aten.set_.source_Storage_storage_offset,
    aten.view.default,
    aten.view.dtype,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.detach.default,
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unbind.int,
    aten.select.int,
    aten.split.Tensor,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten._unsafe_view.default,
    aten.expand.default,
}


class Copy:
    """A copy that may be still to come. It does not keep the memory that it writes to."""

    def __init__(self, to: Tensor, source: Tensor) -> None:
        whole = to._base if to._base is not None else to
        self._to, self._begin, self._size = weakref.ref(whole), to.storage_offset(), len(to)
        self._source: Tensor | None = source
        self._keeps = to if whole is to else None
        self.is_done = False

    def run(self) -> None:
        whole = self._to()
        if whole is not None:
            whole[self._begin : self._begin + self._size].copy_(self._source)
        self._source, self._keeps, self.is_done = None, None, True


class EmulatedDevice:
    """An engine for a bank."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = 0
        self.queues: dict[str, list[Copy]] = {"in": [], "out": []}
        self.last_use: dict[int, int] = {}
        self.over: dict[int, int] = {}
        self.is_copying = False

    def stream(self) -> int:
        return 0

    def mark(self, stream: Any) -> int:
        self.clock += 1
        return self.clock

    def touched(self, address: int) -> None:
        self.clock += 1
        self.last_use[address] = self.clock

    def bring(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        address = to.untyped_storage().data_ptr()
        # Copies to the device are in order, so what an earlier one has waited for is over.
        self.over[address] = max([self.over.get(address, 0), *after])
        is_over = self.last_use.get(address, 0) <= self.over[address]
        assert is_over, "race: a copy may overwrite memory that is being read"
        return self._queue("in", to, source)

    def send(self, to: Tensor, source: Tensor) -> Any:
        return self._queue("out", to, source)

    def _queue(self, name: str, to: Tensor, source: Tensor) -> Any:
        self.is_copying = True
        to.fill_(0xFF)  # NaN in every floating-point type
        self.is_copying = False
        copy = Copy(to, source)
        self.queues[name].append(copy)
        self._by_chance()
        return name, copy

    def _run(self, name: str) -> None:
        self.is_copying = True
        copy = self.queues[name].pop(0)
        copy.run()
        self.is_copying = False

    def _by_chance(self) -> None:
        for name in self.random.sample(["in", "out"], 2):
            while self.queues[name] and self.random.random() < 0.3:
                self._run(name)

    def wait(self, event: Any) -> None:
        if not isinstance(event, tuple):
            return  # a mark of what the CPU has done already
        name, copy = event
        self._by_chance()
        while not copy.is_done:
            self._run(name)

    def host_wait(self, event: Any) -> None:
        self.wait(event)

    def pin(self, memory: Tensor) -> None: ...


class Recorder(Immediate):
    """An engine that tells which copies to the device the host has waited for."""

    def __init__(self) -> None:
        self.brought: list[object] = []
        self.waited: list[object] = []

    def bring(self, to: Tensor, source: Tensor, after: Sequence[Any]) -> Any:
        super().bring(to, source, after)
        self.brought.append(object())
        return self.brought[-1]

    def host_wait(self, event: Any) -> None:
        self.waited.append(event)


class Watch(TorchDispatchMode):
    """Tells the emulated device of a bank of every operation on its slots."""

    def __init__(self, bank: Any) -> None:
        super().__init__()
        self.bank = bank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        device = self.bank._device
        if not device.engine.is_copying and func not in VIEWS:
            addresses = {slot.address for slot in device.slots.slots}
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    address = tensor.untyped_storage().data_ptr()
                    if address in addresses:
                        device.engine.touched(address)
        return found


def emulated(bank: Any, seed: int = 0) -> Any:
    """Gives a bank an emulated device."""
    bank._use_engine(EmulatedDevice(seed))
    return bank
