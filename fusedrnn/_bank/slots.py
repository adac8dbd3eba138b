"""Blocks of device memory, each with the weights of one task."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_layout import aligned
from .engines import Engine, Event
from .host_memory import references
from .task import Task, Version, versions_of


class SlotKey(NamedTuple):
    """What the numbers in a slot were made of."""

    task: Version
    shared: tuple[Hashable, ...]
    """Of each weight that is added: a version, or ``Unseen`` where versions do not tell."""


class Unseen:
    """In place of a version. It equals no other."""


class Use:
    """The tensors that calls in progress have of a slot."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.calls = tensors, 0
        self.versions = versions_of(tensors)
        """When the host had the same numbers."""
        self.addresses = [tensor.data_ptr() for tensor in tensors]


class Slot:
    """One block, and what is known of it."""

    def __init__(self, nbytes: int, device: torch.device, engine: Engine) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._engine, self._stream, self._process = engine, engine.stream(), os.getpid()
        self._storage = self.memory.untyped_storage()
        self.address = self._storage.data_ptr()
        self.task: Task | None = None
        self.key: Any = None
        """A SlotKey. Equal keys, equal numbers."""
        self.views: Any = None
        """Of the task's tensors, with their history, while they are current."""
        self.is_sum = False
        self.is_fixed = False
        """Whether somebody counts on its address."""
        self.running = 0
        """Calls that are in progress."""
        self.uses: list[Use] = []
        """Of these calls; those of one pass have the same tensors."""
        self.turn = 0
        self.checked: Any = None
        """The pass and the version for which backward has compared versions."""
        self._arrival: Event = None
        self._has_landed = True
        self._waited: set[Hashable] = set()
        """Streams that wait for it already."""
        self._used: set[Hashable] = {self._stream}
        """Streams that use it, since the last marks. torch gives out memory that this one may still
        be using for something else."""
        self._marks: dict[Hashable, Event] = {}
        self._typed: dict[torch.dtype, Tensor] = {}
        self._own = references(self._storage)

    def __del__(self) -> None:
        """torch gives the memory to others in the order of the stream that it gave it to."""
        if not hasattr(self, "_own") or sys.is_finalizing() or os.getpid() != self._process:
            return  # it was never made, or CUDA may be gone
        for stream in self._used - {self._stream}:
            self._marks[stream] = self._engine.mark(stream)
        self._marks.pop(self._stream, None)
        for event in self._marks.values():
            self._engine.host_wait(event)
        if self._arrival is not None and self._stream not in self._waited:
            self._engine.host_wait(self._arrival)

    def typed(self, dtype: torch.dtype) -> Tensor:
        """All of it as numbers of a dtype."""
        if dtype not in self._typed:
            with torch.inference_mode(False):
                self._typed[dtype] = self.memory.view(dtype)
            self._own += 1
        return self._typed[dtype]

    def is_held(self) -> bool:
        """Whether somebody besides the bank has a tensor here, so that it must stay as it is."""
        self.views = None
        return references(self._storage) > self._own + sum(len(use.tensors) for use in self.uses)

    def begin(self, tensors: Sequence[Tensor]) -> Use:
        """A call begins, with these tensors."""
        use = next((use for use in self.uses if use.tensors is tensors), None)
        if use is None:
            use = Use(tensors)
            self.uses.append(use)
        use.calls += 1
        self.running += 1
        return use

    def end(self, use: Use) -> None:
        """A call ends."""
        self.running -= 1
        use.calls -= 1
        if not use.calls:
            self.uses.remove(use)

    def changes(self, indices: tuple[int, ...]) -> int:
        """How often calls in progress have changed tensors, which the key does not tell."""
        of_each = [use.tensors[i]._version - use.versions[i] for use in self.uses for i in indices]
        return sum(of_each)

    def forget(self) -> None:
        """Its numbers are nobody's."""
        self.task = self.key = self.views = self.checked = None

    def use(self, engine: Engine) -> None:
        """The caller's stream waits until the numbers are there, and is noted."""
        stream = engine.stream()
        if stream not in self._waited:
            engine.wait(self._arrival)
            self._waited.add(stream)
        self._used.add(stream)

    def arrives(self, event: Event) -> None:
        """Its numbers are there when this event comes."""
        self._arrival, self._has_landed = event, False
        self._waited.clear()

    def land(self, engine: Engine) -> None:
        """The host waits until the numbers are there. From here on it may write to its own."""
        if not self._has_landed:
            engine.host_wait(self._arrival)
            self._has_landed = True

    def settle(self, engine: Engine) -> None:
        """A use has ended: from here on it may be overwritten."""
        for stream in self._used:
            self._marks[stream] = engine.mark(stream)
        self._used.clear()

    def take_marks(self, engine: Engine) -> list[Event]:
        """What a copy that overwrites it has to wait for."""
        self.settle(engine)
        marks = [*self._marks.values()]
        self._marks.clear()
        return marks


class Slots:
    """The slots of a bank. The caller holds the bank's lock."""

    def __init__(self, count: int, device: torch.device, engine: Engine) -> None:
        self.count, self.device, self.engine = count, device, engine
        self.slots: list[Slot] = []
        self.copies = self.hits = self.extra = self.nbytes_in = 0
        self._turn = 0

    def find(self, task: Task, key: Any) -> Slot | None:
        """The slot that has the weights of a task, or will."""
        for slot in self.slots:
            if slot.task is task and slot.key == key:
                self.hits += 1
                self._turn += 1
                slot.turn = self._turn
                return slot
        return None

    def bring(self, task: Task, key: Any, most: int, index: int | None) -> Slot:
        """Begins to copy a task's weights into a free slot.

        Args:
            most: Bytes of the largest task.
            index: Of the slot to take.
        """
        nbytes = max(aligned(task.nbytes), 1), max(aligned(most), 1)
        slot = self._free(*nbytes) if index is None else self._fixed(index, *nbytes)
        self._turn += 1
        slot.task, slot.key, slot.views, slot.turn = task, key, None, self._turn
        slot.checked, slot.is_sum = None, False
        after = slot.take_marks(self.engine)
        event = self.engine.bring(slot.memory[: task.nbytes], task.bytes(), after)
        task.was_read(event)
        slot.arrives(event)
        self.copies += 1
        self.nbytes_in += task.nbytes
        return slot

    def settle(self) -> None:
        """The uses of all slots have ended, but for calls that are in progress."""
        for slot in self.slots:
            if not slot.running:
                slot.settle(self.engine)

    def forget(self, task: Task) -> None:
        """A task is no longer one of the bank's."""
        for slot in self.slots:
            if slot.task is task:
                slot.forget()

    def at(self, address: int) -> Slot | None:
        """The slot that has its memory there, if a call is using it."""
        for slot in self.slots:
            if slot.address == address and slot.running:
                return slot
        return None

    def _free(self, nbytes: int, most: int) -> Slot:
        """
        Args:
            nbytes: It needs to have.
            most: Of a new one.
        """
        free = [
            i
            for i, s in enumerate(self.slots)
            if not s.running and (s.memory.nbytes >= nbytes or not s.is_fixed) and not s.is_held()
        ]
        if len(self.slots) < self.count or not free:
            # First, since there may be too little memory.
            slot = Slot(most, self.device, self.engine)
            if len(self.slots) >= self.count:
                self._warn()
            self.slots.append(slot)
            return slot
        return self._at_least(most, min(free, key=lambda i: self.slots[i].turn))

    def _fixed(self, index: int, nbytes: int, most: int) -> Slot:
        while len(self.slots) <= index:
            self.slots.append(Slot(most, self.device, self.engine))
        slot = self.slots[index]
        if slot.running or slot.is_held():
            why = "a call is using it, or a tensor of its weights is still referenced"
        elif slot.is_fixed and slot.memory.nbytes < nbytes:
            why = (
                "it is too small for a task that was added, and its memory must not move: call "
                "bank.to(bank.device), which makes new slots, and record CUDA graphs again"
            )
        else:
            del slot  # which may go
            return self._at_least(most, index)
        raise RuntimeError(f"fusedrnn: slot {index} cannot take other weights: {why}")

    def _at_least(self, most: int, index: int) -> Slot:
        """The slot at an index; a larger one if a larger task has come, unless it is fixed."""
        if self.slots[index].memory.nbytes < most and not self.slots[index].is_fixed:
            # The former memory goes first, since there may be too little for both.
            self.slots[index] = Slot(1, self.device, self.engine)
            self.slots[index] = Slot(most, self.device, self.engine)
        return self.slots[index]

    def _warn(self) -> None:
        self.extra += 1
        if self.extra == 1:
            warnings.warn(
                f"fusedrnn: all {self.count} slots of a WeightBank are in use, by calls in "
                "progress or by tensors of weights that are still referenced, or are too small and "
                "were taken by number, so the bank makes one more: it takes more memory than "
                "plan() says",
                RuntimeWarning,
                stacklevel=2,
            )
