"""The engine for CUDA, over the streams of the fake GPU, which does its work as late as it may.

Random schedules have the bits of nn.ModuleList, and without any one of its waits a bank is wrong.
"""

from __future__ import annotations

import gc
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bank.schedules
import pytest
import torch
from bank.bank_modules import KINDS
from bank.cuda_faults import FAULTS
from bank.cuda_scenarios import SCENARIOS, assert_same_gradients, inputs, mlp, pair
from bank.fake_runtime import FakeRuntime

import fusedrnn._bank.bank_device
from fusedrnn._bank.block_layout import aligned
from fusedrnn._bank.engines import Streams

pytestmark = pytest.mark.slow

ORDERS = [0, 1, 2, 3]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeRuntime]]:
    """Gives banks that are made from now on a new fake GPU."""

    def begin(order: int, **options: Any) -> FakeRuntime:
        runtime = FakeRuntime(order, **options)
        made = lambda *_: Streams(runtime)  # noqa: E731
        monkeypatch.setattr(fusedrnn._bank.bank_device, "engine_of", made)
        monkeypatch.setattr(bank.schedules, "EmulatedDevice", made)
        monkeypatch.setattr(bank.schedules, "Watch", lambda bank: runtime.watching())
        return runtime

    return begin


# A cell that is compiled has no mode that looks at its operations.
WATCHED = [kind for kind in KINDS if kind != "recurrent"]


@pytest.mark.ci_has_every(5)
@pytest.mark.parametrize("step_on", ["host", "device"])
@pytest.mark.parametrize("kind", WATCHED)
def test_equal_bits(use: Callable[..., FakeRuntime], kind: str, step_on: str) -> None:
    for seed in range(8):
        runtime = use(ORDERS[seed % 4] + seed // 4)
        try:
            bank.schedules.Schedule(kind, seed, is_mixed=seed == 5, step_on=step_on).run()
            assert runtime.notes() == ""
        except Exception as error:
            error.add_note(f"{kind}, seed {seed}, {runtime.notes()}")
            raise


# --- waits ----------------------------------------------------------------------------------------


def run(use: Callable[..., FakeRuntime], scenario: str, order: int, folder: Path) -> None:
    torch.manual_seed(order)
    runtime = use(order)
    with runtime.watching():
        SCENARIOS[scenario](runtime, folder)
    gc.collect()
    assert runtime.notes() == ""


@pytest.mark.parametrize(
    "orders", [range(4), pytest.param(range(4, 12), marks=pytest.mark.nightly)], ids=str
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_wait_is_missing(
    use: Callable[..., FakeRuntime], tmp_path: Path, scenario: str, orders: Sequence[int]
) -> None:
    for order in orders:
        run(use, scenario, order, tmp_path)


@pytest.mark.ci_has_every(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_noticed(
    use: Callable[..., FakeRuntime],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: str,
) -> None:
    scenario, change = FAULTS[fault]
    change(monkeypatch)
    with pytest.raises(AssertionError):
        for order in range(30):
            run(use, scenario, order, tmp_path)


# --- pinned memory --------------------------------------------------------------------------------


def test_memory_is_registered_exactly_and_once(use: Callable[..., FakeRuntime]) -> None:
    runtime = use(2)
    bank, _ = pair(3)
    (block,) = runtime.registered.items()
    assert block == (bank._memories[0].data_ptr(), bank._memories[0].nbytes)
    assert block[0] % mmap.PAGESIZE == 0 and block[1] == 3 * aligned(bank.plan().task_bytes)
    assert all(runtime.is_registered(p) for p in bank.parameters())
    with runtime.watching():
        for t in (0, 1, 2, 0):
            bank(t, inputs()).sum().backward()
    assert all(runtime.is_registered(p.grad) for p in bank.parameters())
    bank.to("cpu")  # once more
    bank.add(3, mlp())
    # The weights; three gradients that are there, and one that was added to another, whose memory
    # goes with the device that the bank had; the new task.
    grads = [p.grad for p in bank.parameters() if p.grad is not None]
    (gradient,) = {grad.untyped_storage().nbytes() for grad in grads}
    sizes = [block[1], gradient, gradient, gradient, gradient, aligned(bank.plan().task_bytes)]
    assert [size for what, _, size in runtime.log if what == "register"] == sizes
    assert [size for what, _, size in runtime.log if what == "unregister"] == [gradient]
    assert len(runtime.registered) == 5 and bank._device.home.pool._blocks == []
    with runtime.watching():
        bank.prefetch(1)  # which is under way
    del bank, grads
    gc.collect()
    assert runtime.registered == {} and runtime.notes() == ""


def test_memory_of_gradients_that_somebody_keeps(use: Callable[..., FakeRuntime]) -> None:
    runtime = use(2)
    bank, _ = pair(2)
    with runtime.watching():
        bank(0, inputs()).sum().backward()
    kept = next(bank.parameters()).grad
    assert kept is not None
    del bank
    gc.collect()
    assert len(runtime.registered) == 1 and runtime.is_registered(kept)
    del kept
    gc.collect()
    assert runtime.registered == {} and runtime.notes() == ""


@pytest.mark.parametrize("step_on", ["host", "device"])
def test_memory_goes_at_once(use: Callable[..., FakeRuntime], step_on: str) -> None:
    """When nobody has it, and not when Python's collector comes, which does not see a GPU's."""
    runtime = use(0)
    gc.collect()
    gc.disable()
    try:
        bank, _ = pair(3, step_on=step_on)
        optimizer = bank.optimizer(torch.optim.Adam)
        with runtime.watching():
            for t in (0, 1, 2, 0):
                bank(t, inputs()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        bank.to("cpu")
        # The weights are left, and where the step is on the device two states of each task.
        assert runtime.memories == set()
        assert len(runtime.registered) == (1 if step_on == "host" else 1 + 2 * 3)
        with runtime.watching():
            bank(1, inputs()).sum().backward()
        del bank, optimizer
        assert runtime.memories == set() and runtime.registered == {}
    finally:
        gc.enable()
    assert runtime.notes() == ""


def test_a_child_process_leaves_registered_memory_alone(use: Callable[..., FakeRuntime]) -> None:
    runtime = use(0)
    bank, _ = pair(2)
    with runtime.watching(), torch.no_grad():
        bank(0, inputs())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del bank
            gc.collect()
            status = len(runtime.log) - 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    del bank
    gc.collect()
    assert [what for what, *_ in runtime.log] == ["register", "unregister"]


def test_memory_that_is_made_in_a_child_process(use: Callable[..., FakeRuntime]) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            runtime = use(0)
            bank, _ = pair(2)
            del bank
            gc.collect()
            status = int([what for what, *_ in runtime.log] != ["register", "unregister"])
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_memory_that_cannot_be_registered(
    use: Callable[..., FakeRuntime], tmp_path: Path, scenario: str
) -> None:
    for order in range(4):
        runtime = use(order, refuses=True)
        with warnings.catch_warnings(record=True) as caught, runtime.watching():
            warnings.simplefilter("always")
            SCENARIOS[scenario](runtime, tmp_path)
        assert runtime.notes() == "" and runtime.log == []
        assert all("could not be pinned (out of memory)" in str(w.message) for w in caught)


def test_one_warning_for_memory_that_cannot_be_registered(use: Callable[..., FakeRuntime]) -> None:
    runtime = use(0, refuses=True)
    with pytest.warns(RuntimeWarning, match="the host will wait for each copy") as caught:
        bank, modules = pair(3)
        with runtime.watching():
            for t in range(3):
                x = inputs()
                bank(t, x).sum().backward()
                modules[t](x).sum().backward()
    assert len(caught) == 1
    assert_same_gradients(bank, modules)
