"""The device of a bank: which weights are there, and how gradients leave it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from .._locks import CallerLock
from .backward_passes import Pass, Passes
from .engines import Engine, Immediate, engine_of
from .gradient_blocks import Home
from .slots import Slot, SlotKey, Slots, Unseen
from .task import Task, versions_of
from .task_gradients import Gradient, gradient_layout


class Device:
    """One device, with the slots and the gradients of one bank."""

    def __init__(
        self,
        device: torch.device,
        *,
        slots: int,
        shared: nn.Module | None,
        most: Callable[[], int],
        deliver: Callable[[Pass], None],
        keeps: Callable[[], bool],
        engine: Engine | None = None,
    ) -> None:
        """
        Args:
            most: Gives the bytes of the largest task.
            deliver: Takes each pass with gradients at its end.
            keeps: Whether they stay on the device until then, for an exchange.
        """
        self.device = device
        self.engine = engine_of(device) if engine is None else engine
        if self.engine is None and shared is not None:
            self.engine = Immediate()
        self.shared, self.lock = shared, threading.RLock()
        self.calls = CallerLock()
        """For the length of a call, as a module has other tensors meanwhile. One for all tasks:
        with one for each, calls within calls could wait for each other."""
        self.slots = None if self.engine is None else Slots(slots, device, self.engine)
        self.home = Home(self.engine, device)
        self.passes = Passes()
        self.reloads = 0
        self._most, self._deliver, self._keeps = most, deliver, keeps
        self.refresh_shared()

    # --- weights ----------------------------------------------------------------------------------

    def key(self, task: Task) -> SlotKey:
        """Of the numbers as they are now."""
        return SlotKey(task.version(), self._shared_key())

    def refresh_shared(self) -> None:
        """The weights that are added were changed in a way that nobody sees."""
        theta = [] if self.shared is None else self.shared.parameters()
        self._theta = [(weakref.ref(tensor), tensor.data_ptr()) for tensor in theta]
        self._theta_epoch = object()

    def _shared_key(self) -> tuple[Hashable, ...]:
        if self.shared is None:
            return ()
        theta = list(self.shared.parameters())
        known = [(tensor(), address) for tensor, address in self._theta]
        are_known = len(known) == len(theta) and all(
            a is b and address == b.data_ptr() for (a, address), b in zip(known, theta, strict=True)
        )
        # FSDP gathers weights anew into memory that had others before, and counts no change.
        epoch = self._theta_epoch if are_known else Unseen()
        versions = versions_of(theta)
        return tuple((epoch, version) if are_known else epoch for version in versions)

    def resident(
        self,
        task: Task,
        *,
        ahead: bool = False,
        index: int | None = None,
        key: SlotKey | None = None,
    ) -> Slot:
        """A slot with the task's weights of now, which the caller's stream waits for.

        Args:
            ahead: Nobody needs them yet.
            index: Of the slot that must have them.
            key: That of a call, which is still right.
        """
        assert self.slots is not None and self.engine is not None
        task.check()
        key = self.key(task) if key is None else key
        if self.shared is not None:
            for known in self.slots.slots:  # to which they have not been added yet
                if known.task is task and not known.is_sum and known.key.task == key.task:
                    known.key = key
        slot = self.slots.find(task, key)
        if slot is not None and index is not None and slot is not self._at(index):
            slot = None
        if slot is None:
            slot = self.slots.bring(task, key, max(self._most(), task.nbytes), index)
        elif _is_checked():
            self._compare(task, slot)
        if not ahead:
            slot.use(self.engine)
            if self.shared is not None and not slot.is_sum:
                self._add_shared(task, slot)
        return slot

    def forget_views(self) -> None:
        """The next calls get other tensors than those before."""
        if self.slots is not None:
            for slot in self.slots.slots:
                slot.views = None

    def _at(self, index: int) -> Slot | None:
        assert self.slots is not None
        return self.slots.slots[index] if index < len(self.slots.slots) else None

    def _add_shared(self, task: Task, slot: Slot) -> None:
        assert self.shared is not None and self.engine is not None
        theta = list(self.shared.parameters())
        with torch.no_grad(), torch.inference_mode(False):
            views = [place.view(slot.memory) for place in task.places if place.is_parameter]
            torch._foreach_add_(views, [tensor.detach() for tensor in theta])
        slot.is_sum = True
        slot.arrives(self.engine.mark(self.engine.stream()))

    def for_backward(self, task: Task, key: SlotKey, view: Callable[[Slot], Tensor]) -> Tensor:
        """A tensor in a slot with the weights that a call had.

        Args:
            view: Makes it, before anybody can overwrite the slot.

        Raises:
            RuntimeError: They have changed since.
        """
        assert self.slots is not None and self.engine is not None
        with self.lock:
            number = torch._C._current_graph_task_id()
            now = (number, key)
            for slot in self.slots.slots:
                if slot.task is task and slot.checked == now and number != -1:
                    break  # once in each pass
            else:
                task.check()
                copies = self.slots.copies
                here = self.key(task)
                if key.shared and isinstance(key.shared[0], Unseen):
                    here = here._replace(shared=key.shared)
                slot = self.resident(task, key=here)
                self.reloads += self.slots.copies - copies
                slot.checked = now
                passed = self.this_pass()
                if passed is None:
                    slot.land(self.engine)
                else:
                    passed.brought.append(slot)
            slot.use(self.engine)
            return view(slot)

    def _check_unchanged(
        self, task: Task, slot: Slot, key: SlotKey, indices: tuple[int, ...], changes: int
    ) -> None:
        """Raises if a slot has other numbers of a tensor than those that a call has saved.

        Args:
            key: Of the slot that they were in.
            indices: Of the tensor, and of others that share its memory.
            changes: Made by the call before.
        """
        now = slot.changes(indices)
        if (slot.key, now) == (key, changes):
            slot.key = key  # the same object, which is compared faster
            return
        then, here = key.task, slot.key.task
        changed = None
        for place, before, after in zip(task.places, then.tensors, here.tensors, strict=True):
            if place.is_parameter and before[0] != after[0]:  # which could not get its gradient
                changed = place.names[0], "replaced, or refresh() was called,"
        was = sum(then.tensors[i][1] for i in indices) + changes
        is_now = sum(here.tensors[i][1] for i in indices) + now
        if changed is None and was != is_now:
            changed = task.places[indices[0]].names[0], f"changed (version {was} is now {is_now})"
        elif key.shared and any(key.shared[i] != slot.key.shared[i] for i in indices):
            changed = "a weight that is added (shared)", "changed"
        elif here.flat != then.flat:
            changed = "flat_weight", "written to"
        if changed is not None:
            raise RuntimeError(
                f"fusedrnn: {changed[0]} of {task.name} was {changed[1]} between forward and "
                "backward, and backward needs the values that forward had: call backward() before "
                "step(), and before weights are loaded"
            )

    def _compare(self, task: Task, slot: Slot) -> None:
        """Raises if the numbers in a slot are not those on the host, with FUSEDRNN_CHECK=1."""
        assert self.engine is not None
        if slot.running:
            return  # a call in progress may have changed them
        slot.use(self.engine)
        theta = [] if self.shared is None else list(self.shared.parameters())
        for i, (place, tensor) in enumerate(zip(task.places, task.tensors, strict=True)):
            if place.is_parameter and slot.is_sum:
                expected = _as_bytes(tensor.detach().to(self.device) + theta[i].detach())
            else:
                expected = _as_bytes(tensor.detach()).to(self.device)
            if not torch.equal(_as_bytes(place.view(slot.memory)), expected):
                raise RuntimeError(
                    f"fusedrnn: {place.names[0]} of {task.name} has changed in a way that torch "
                    "does not count, such as a write to .data: call refresh() of the bank after it"
                )

    # --- gradients --------------------------------------------------------------------------------

    def this_pass(self) -> Pass | None:
        """The backward pass that the caller is in."""
        return self.passes.now(self._finish)

    def _finish(self, passed: Pass) -> None:
        with self.lock:
            if self.slots is not None and self.engine is not None:
                self.slots.settle()
                for slot in passed.brought:  # the host may load others next
                    slot.land(self.engine)
            passed.is_over = True
        if passed.gradients or passed.returned:  # else it has read weights alone
            self._deliver(passed)

    def take_gradients(
        self,
        task: Task,
        own: Sequence[int],
        grads: Sequence[Tensor | None],
        outer: weakref.ref[Pass] | None,
    ) -> None:
        """Keeps gradients of a task until the end of the pass.

        Args:
            outer: The pass in which the call was made, if it was one.
        """
        with self.lock:
            known = self._pass_of(outer).gradients
            key = task, tuple(own)
            gradient = known.get(key)
            if gradient is None:
                layout = gradient_layout(task, own)
                gradient = known[key] = Gradient(task, layout, self.home)
            gradient.add(grads)
            if not self._keeps():
                gradient.send()

    def returned_gradients(self, task: Task, outer: weakref.ref[Pass] | None) -> None:
        """Autograd has gradients of a task, and adds them to ``.grad`` itself."""
        with self.lock:
            self._pass_of(outer).returned.add(task)

    def _pass_of(self, outer: weakref.ref[Pass] | None) -> Pass:
        passed = None if outer is None else outer()
        if passed is None or passed.is_over:
            passed = self.this_pass()
        assert passed is not None
        return passed

    def return_gradients(
        self, task: Task, own: Sequence[int], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients on the host, at once."""
        with self.lock:
            gradient = Gradient(task, gradient_layout(task, own), self.home)
            gradient.add(grads)
            return gradient.results()


def _is_checked() -> bool:
    return os.environ.get("FUSEDRNN_CHECK", "0") not in ("", "0")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Its numbers as bytes, of any dtype and strides."""
    size = tensor.itemsize
    own = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    shape, stride = (*tensor.shape, size), (*(n * size for n in tensor.stride()), 1)
    return own.set_(tensor.untyped_storage(), tensor.storage_offset() * size, shape, stride)
