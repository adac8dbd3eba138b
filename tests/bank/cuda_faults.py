"""Faults that a bank would have if it left a wait out, each with a scenario that notices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from fusedrnn._bank.bank_device import Device
from fusedrnn._bank.device_steps import _TaskStep
from fusedrnn._bank.engines import Streams
from fusedrnn._bank.file_tasks import Staging
from fusedrnn._bank.gradient_blocks import Block, Home
from fusedrnn._bank.host_memory import HostPool
from fusedrnn._bank.slots import Slot, Slots
from fusedrnn._bank.task import Task
from fusedrnn._bank.task_call import TaskCall
from fusedrnn._bank.task_gradients import Gradient


def _uses_without_wait(slot: Slot, engine: Any) -> None:
    slot._used.add(engine.stream())


def _uses_that_one_stream_waits_for(slot: Slot, engine: Any) -> None:
    if not slot._waited:
        engine.wait(slot._arrival)
        slot._waited.add(engine.stream())
    slot._used.add(engine.stream())


def _without_marks_after(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Uses that end in this method are forgotten."""

    def change(patch: pytest.MonkeyPatch) -> None:
        old, settle, ends = getattr(owner, name), Slot.settle, []

        def method(*arguments: Any) -> Any:
            ends.append(True)
            try:
                return old(*arguments)
            finally:
                ends.pop()

        patch.setattr(owner, name, method)
        patch.setattr(
            Slot,
            "settle",
            lambda slot, engine: (slot._used.clear if ends else partial(settle, slot, engine))(),
        )

    return change


def _marks_of_the_past(slot: Slot, engine: Any) -> list[Any]:
    if slot._arrival is None:
        slot.settle(engine)
    marks = [*slot._marks.values()]
    slot._used.clear()
    slot._marks.clear()
    return marks


def _marks_of_one_stream(slot: Slot, engine: Any) -> list[Any]:
    slot.settle(engine)
    marks = [event for stream, event in slot._marks.items() if stream == engine.stream()]
    slot._marks.clear()
    return marks


def _new_slot(old: Callable[..., None]) -> Callable[..., None]:
    def init(slot: Slot, *arguments: Any) -> None:
        old(slot, *arguments)
        slot._used.clear()

    return init


def _send_at_once(streams: Streams, to: Tensor, source: Tensor) -> Any:
    streams._runtime.copy(to, source, streams._outgoing)
    return streams._runtime.record(streams._outgoing)


def _add_without_mark(old: Callable[..., None]) -> Callable[..., None]:
    def add(device: Device, task: Task, slot: Slot) -> None:
        before = slot._arrival, {*slot._waited}
        old(device, task, slot)
        slot._arrival, slot._waited = before

    return add


def _packed_here(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """What was packed on another stream is not waited for."""

    def change(patch: pytest.MonkeyPatch) -> None:
        old = getattr(Gradient, name)

        def method(*arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(Block, "wait", lambda block: None)
                return old(*arguments)

        patch.setattr(Gradient, name, method)

    return change


def _no_wait_in(owner: Any, name: str, *waits: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Within this method the engine does not wait."""

    def change(patch: pytest.MonkeyPatch) -> None:
        old = getattr(owner, name)

        def method(*arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                for wait in waits:
                    inner.setattr(Streams, wait, WITHOUT[wait])
                return old(*arguments)

        patch.setattr(owner, name, method)

    return change


def _bring_at_once(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda streams, to, source, after: old(streams, to, source, [])


WITHOUT: dict[str, Callable[..., Any]] = {
    "wait": lambda streams, event: None,
    "host_wait": lambda streams, event: None,
    "bring": _bring_at_once(Streams.bring),
    "send": _send_at_once,
    "mark": lambda streams, stream: streams._runtime.record(streams._outgoing),
}


def _set(owner: Any, name: str, new: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, new)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a slot is used before its weights are there": (
        "evaluation",
        _set(Slot, "use", _uses_without_wait),
    ),
    "a second stream does not wait for the weights": (
        "a_second_stream",
        _set(Slot, "use", _uses_that_one_stream_waits_for),
    ),
    "a copy into new memory does not wait for its former use": (
        "evaluation",
        _set(Slot, "__init__", _new_slot(Slot.__init__)),
    ),
    "a copy in does not wait for calls": ("evaluation", _without_marks_after(TaskCall, "_leave")),
    "a copy in does not wait for backward": (
        "frozen_tasks",
        _without_marks_after(Slots, "settle"),
    ),
    "a copy in during backward does not wait for it": (
        "frozen_tasks",
        _set(Slot, "take_marks", _marks_of_the_past),
    ),
    "a copy in does not wait for other streams": (
        "a_second_stream",
        _set(Slot, "take_marks", _marks_of_one_stream),
    ),
    "a copy in waits for nothing": ("evaluation", _set(Streams, "bring", WITHOUT["bring"])),
    "a copy out does not wait for the gradient": (
        "a_pass_for_each_task",
        _set(Streams, "send", _send_at_once),
    ),
    "the host does not wait for the gradient": (
        "a_pass_for_each_task",
        _no_wait_in(Gradient, "on_host", "host_wait"),
    ),
    "a block of gradients is filled before it was sent": (
        "a_graph_of_many_tasks",
        _no_wait_in(Home, "take", "wait"),
    ),
    "a larger block takes the place of one that is being sent": (
        "blocks_of_gradients",
        _no_wait_in(Home, "take", "host_wait"),
    ),
    "a gradient is added to one that is not there yet": (
        "blocks_of_gradients",
        _packed_here("add"),
    ),
    "a gradient of another stream is sent too early": ("blocks_of_gradients", _packed_here("send")),
    "the sum with shared weights is used before it is there": (
        "shared_weights",
        _set(Device, "_add_shared", _add_without_mark(Device._add_shared)),
    ),
    "the staging buffer is filled before it was read": (
        "a_file",
        _no_wait_in(Staging, "fill", "host_wait"),
    ),
    "a step begins before a copy in its slot is there": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "_bring_weights", "wait"),
    ),
    "a step begins before its copies are there": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "_copy", "wait"),
    ),
    "a copy for a step does not wait for the former use of memory": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "_copy", "bring"),
    ),
    "the host does not wait for a step": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "go_home", "host_wait"),
    ),
    "a copy out does not wait for a step": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "go_home", "send"),
    ),
    "a step's weights overwrite a slot that another stream uses": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "go_home", "wait"),
    ),
    "a slot is used before it has a step's weights": (
        "steps_on_the_device",
        _no_wait_in(_TaskStep, "go_home", "mark"),
    ),
    "a bank gives memory back that a copy will write to": (
        "a_bank_that_goes",
        lambda patch: patch.delattr(Slot, "__del__"),
    ),
    "memory of the host is given out before a copy has filled it": (
        "a_pass_that_fails",
        _set(HostPool, "fills", lambda pool, memory, event: None),
    ),
    "a block of gradients is given back that a copy reads": (
        "blocks_that_go",
        lambda patch: patch.delattr(Block, "__del__"),
    ),
    "a slot gives memory back that others use": (
        "slots_that_go",
        lambda patch: patch.delattr(Slot, "__del__"),
    ),
}
