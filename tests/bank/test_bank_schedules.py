"""Random schedules over an emulated device: a bank has the bits of nn.ModuleList.

And each safeguard seen to matter: without it a schedule fails.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bank.bank_modules import KINDS
from bank.emulated_device import EmulatedDevice
from bank.schedules import Schedule

from fusedrnn._bank import task_call
from fusedrnn._bank.bank_device import Device
from fusedrnn._bank.gradient_blocks import Home
from fusedrnn._bank.slots import Slot, Slots
from fusedrnn._bank.task import Task
from fusedrnn._bank.task_gradients import Gradient

pytestmark = pytest.mark.filterwarnings("ignore:.*slots of a WeightBank:RuntimeWarning")


def run(kind: str, seeds: range, **options: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += Schedule(kind, seed, is_mixed=seed % 4 == 3, **options).run()
        except Exception as error:
            error.add_note(f"{kind}, seed {seed}")
            raise
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits(kind: str) -> None:
    counts = run(kind, range(6))
    assert min(counts[name] for name in ("forwards", "backwards", "copies", "hits")) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits_of_many(kind: str) -> None:
    counts = run(kind, range(6, 36))
    assert min(counts[name] for name in ("raised", "reloads")) > 10
    assert counts["extra"] == 0  # slots are never held in ordinary use


@pytest.mark.parametrize("kind", ["mlp", "tied", "batch_norm", "lstm", "partly_frozen"])
def test_steps_on_the_device(kind: str) -> None:
    run(kind, range(6), step_on="device")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_the_device_of_many(kind: str) -> None:
    run(kind, range(6, 20), step_on="device")


# --- safeguards -----------------------------------------------------------------------------------


def _no_wait(self: Any, event: Any) -> None: ...


def _marks_of_first_uses(old: Callable[..., Any]) -> Callable[..., Any]:
    def take_marks(self: Slot, engine: Any) -> Any:
        self._used.clear()
        return old(self, engine)

    return take_marks


def _overwrite(old: Callable[..., Any]) -> Callable[..., Any]:
    def is_held(self: Slot) -> bool:
        self.views = None
        return False

    return is_held


def _stale(old: Callable[..., Any]) -> Callable[..., Any]:
    def find(self: Slots, task: Task, key: Any) -> Any:
        for slot in self.slots:
            if slot.task is task and slot.key is not None:
                slot.key = key
        return old(self, task, key)

    return find


def _block_without_wait(old: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Home, owner: Gradient, nbytes: int) -> Any:
        for block in self.blocks:
            block.is_sent = False
        return old(self, owner, nbytes)

    return take


def _always(result: Any) -> Callable[..., Any]:
    return lambda old: lambda *arguments, **named: result


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "compute_does_not_wait_for_the_copy": (EmulatedDevice, "wait", lambda old: _no_wait),
    "the_host_does_not_wait_for_the_gradient": (EmulatedDevice, "host_wait", lambda old: _no_wait),
    "a_copy_does_not_wait_for_compute": (Slot, "take_marks", _marks_of_first_uses),
    "versions_are_not_compared": (Device, "_check_unchanged", _always(None)),
    "old_weights_are_taken_for_new": (Slots, "find", _stale),
    "replaced_parameters_are_not_noticed": (Task, "check", _always(None)),
    "changed_buffers_stay_on_the_device": (task_call, "bring_changes_home", _always(None)),
    "outer_hooks_are_forgotten": (
        torch._C._autograd,
        "_top_saved_tensors_default_hooks",
        _always(None),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_safeguard_matters(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, change = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        for kind in ("mlp", "batch_norm", "gru"):
            run(kind, range(10))


def test_held_slots_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hooks for saved tensors autograd itself holds slots."""
    monkeypatch.setattr(task_call, "saving", lambda *arguments: nullcontext())
    monkeypatch.setattr(Slot, "is_held", _overwrite(Slot.is_held))
    with pytest.raises((AssertionError, RuntimeError)):
        run("mlp", range(10))


@pytest.mark.skipif("FUSEDRNN_SCHEDULES" not in os.environ, reason="a number of schedules")
@pytest.mark.nightly
def test_as_many_as_wanted() -> None:
    """FUSEDRNN_SCHEDULES=1000 pytest -m nightly tests/bank -k wanted."""
    for kind in KINDS:
        run(kind, range(int(os.environ["FUSEDRNN_SCHEDULES"])))
