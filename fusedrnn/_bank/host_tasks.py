"""Tasks whose weights are in host memory."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .bank_arguments import check_kind, check_like_shared, in_parts, shared_tensor_error, tensors_in
from .bank_state import BankState
from .block_layout import aligned
from .engines import Engine
from .host_memory import allocate
from .task import Task, TaskKey

_PART_BYTES = 64 << 20
"""Modules are taken in parts of so much, so that a generator of them needs little memory twice."""


class HostTasks(Mapping[str, Task]):
    """The tasks of a bank by name, in the order of its modules.

    The bank's modules say which they are: one that was replaced or removed there, as ``setattr``
    and conversions of whole models do, is followed when its task is looked up.
    """

    def __init__(self, bank: BankState) -> None:
        self._bank = weakref.ref(bank)
        self._modules = bank._modules
        self._tasks: dict[str, Task] = {}
        self._owners: dict[int, Task] = {}
        """By the address of each of their tensors."""
        self._most: int | None = None
        self._ordered: tuple[list[nn.Module | None], list[Task]] = [], []
        """The bank's modules when tasks were sorted last, and these tasks."""

    # --- as a dictionary --------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Task:
        task = self._tasks[name]
        module = self._modules.get(name)
        if module is task.module:
            return task
        if module is None:
            self.remove(name)
        else:
            self.add(task.key, module)
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        for name in [name for name in self._tasks if self._modules.get(name) is None]:
            self.remove(name)
        yield from [name for name in self._modules if name in self._tasks]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys_of_tasks(self) -> list[TaskKey]:
        return [self._tasks[name].key for name in self]

    def nbytes_of_largest(self) -> int:
        if self._most is None:
            self._most = max((task.nbytes for task in self.values()), default=0)
        return self._most

    def in_one_order(self) -> list[Task]:
        """Sorted by name, which all ranks do alike; the same list while the tasks are the same."""
        known, tasks = self._ordered
        now = [*self._modules.values()]
        if len(known) != len(now) or not all(map(operator.is_, known, now)):
            tasks = sorted(self.values(), key=lambda task: str(task.key))
            self._ordered = [*self._modules.values()], tasks
        return tasks

    def dtypes(self) -> set[torch.dtype]:
        return {t.dtype for task in self.values() for t in tensors_in(task.module)}

    def memories(self) -> list[Tensor]:
        """The blocks that have tasks."""
        return list({id(task.block): task.block for task in self._tasks.values()}.values())

    def use_engine(self, engine: Engine | None) -> None:
        """Weights go to the device of this engine."""
        if engine is not None:
            for memory in self.memories():
                engine.pin(memory)

    # --- changes ----------------------------------------------------------------------------------

    def take(self, tasks: Iterable[Task]) -> None:
        """Moves modules into blocks of host memory. They take the places of former tasks."""
        for some in in_parts(tasks, _PART_BYTES):
            self._take(some)

    def _take(self, tasks: Sequence[Task]) -> None:
        memory = allocate(sum(aligned(task.nbytes) for task in tasks))
        begin = 0
        for task in tasks:
            end, name = begin + aligned(task.nbytes), str(task.key)
            task.place(memory[begin:end])
            task.block = memory
            begin = end
            if name in self._tasks:
                self._forget(self._tasks[name])
            self._tasks[name], self._modules[name] = task, task.module
            self._owners |= dict.fromkeys(_addresses(task), task)
        self._most, self._ordered = None, ([], [])
        bank = self._known()
        if bank._device.engine is not None:
            bank._device.engine.pin(memory)
        bank._count_change()

    def add(self, key: TaskKey, module: nn.Module) -> None:
        """Takes one module, if it can be a task."""
        check_kind(module, key)
        task = Task(key, module)
        shared = self._known()._shared
        common = set() if shared is None else {id(tensor) for tensor in tensors_in(shared)}
        for tensor in tensors_in(module):
            owner = self._owners.get(tensor.data_ptr()) if tensor.numel() else None
            is_there = owner is not None and self._modules.get(str(owner.key)) is owner.module
            if owner is not None and is_there and owner.key != key:
                raise shared_tensor_error(task.name, owner.name)
            if id(tensor) in common:
                raise shared_tensor_error(task.name, "bank.shared")
        if shared is not None:
            check_like_shared(task, shared)
        self.take([task])

    def remove(self, name: str) -> None:
        self._forget(self._tasks.pop(name))
        self._modules.pop(name, None)
        self._most, self._ordered = None, ([], [])
        self._known()._count_change()

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Does as ``nn.Module._apply``; tensors that are elsewhere afterwards get new blocks."""
        tasks = list(self.values())

        def converted() -> Iterator[Task]:
            for task in tasks:
                task.module._apply(fn)
                if not task.is_in_place():
                    yield Task(task.key, task.module)

        try:
            self.take(converted())
        except BaseException:
            # As of a list, those before the error are converted.
            moved = [task for task in self.values() if not task.is_in_place()]
            self.take(Task(task.key, task.module) for task in moved)
            raise

    def _forget(self, task: Task) -> None:
        device = self._known()._device
        if device.slots is not None:
            with device.lock:
                device.slots.forget(task)
        for address in _addresses(task):
            self._owners.pop(address, None)

    def _known(self) -> BankState:
        bank = self._bank()
        assert bank is not None
        return bank


def _addresses(task: Task) -> list[int]:
    return [task.memory.data_ptr() + place.offset for place in task.places if place.span]
