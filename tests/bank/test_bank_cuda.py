"""Banks on a GPU: pinned memory, streams, bytes, graphs."""

from __future__ import annotations

import copy
import gc
import mmap
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bank.bank_modules import HIDDEN, INPUT, KINDS, Rnn
from bank.cuda_faults import FAULTS
from torch import Tensor, nn

import fusedrnn
from fusedrnn import WeightBank
from fusedrnn._bank.engines import Cuda, Streams
from fusedrnn._bank.host_memory import allocate, pin

pytestmark = pytest.mark.cuda

CYCLES = 10**6  # of a delay, about half a millisecond


def pair(kind: str, tasks: int = 3, **options: Any) -> tuple[WeightBank, nn.ModuleList]:
    modules = [KINDS[kind]() for _ in range(tasks)]
    return WeightBank(copy.deepcopy(modules), device="cuda", **options), nn.ModuleList(
        modules
    ).cuda()


def inputs() -> Tensor:
    return torch.randn(5, 2, INPUT, device="cuda")


def assert_near(ours: Any, theirs: Any) -> None:
    """Results of other kernels may be rounded otherwise, and wrong ones are far from right."""
    assert (ours is None) == (theirs is None)
    if ours is not None:
        torch.testing.assert_close(ours, theirs.to(ours.device), rtol=1e-3, atol=1e-4)


def assert_same_state(bank: WeightBank, modules: nn.ModuleList) -> None:
    for ours, theirs in zip(bank.state_dict().values(), modules.state_dict().values(), strict=True):
        assert_near(ours, theirs)


def train(bank: WeightBank, modules: nn.ModuleList, t: int) -> None:
    """One step of both, which must be the same."""
    x = inputs()
    bank(t, x).square().mean().backward()
    modules[t](x).square().mean().backward()
    for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)
    for model in (bank, modules):
        torch.optim.SGD(model.parameters(), lr=0.125).step()
        model.zero_grad()


# --- pinned memory --------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_pinned_exactly() -> None:
    WeightBank(nn.Linear(8, 8), 2, device="cuda")(0, torch.zeros(1, 8, device="cuda"))
    module = nn.Linear(1030, 2000)  # just above a power of two
    before, pinned = resident_bytes(), torch.cuda.host_memory_stats()
    bank = WeightBank(module, 16, device="cuda")
    assert resident_bytes() - before < 1.1 * bank.plan().host_weight_bytes + (8 << 20)
    assert all(p.is_pinned() for p in bank.parameters())
    bank(3, torch.ones(2, 1030, device="cuda")).sum().backward()
    assert all(p.grad.is_pinned() for p in bank[3].parameters())
    now = torch.cuda.host_memory_stats()  # of torch's own pinned memory
    name = "allocated_bytes.current"
    assert now.get(name, 0) == pinned.get(name, 0)


def test_copies_do_not_keep_the_host_waiting() -> None:
    bank, modules = pair("mlp")
    train(bank, modules, 0)
    engine = bank._device.engine
    with torch.cuda.stream(engine._incoming):
        torch.cuda._sleep(200 * CYCLES)
    bank.prefetch(1)
    slot = next(slot for slot in bank._device.slots.slots if slot.task is bank._get(1))
    assert not slot._arrival.query()
    train(bank, modules, 1)


def test_memory_that_goes() -> None:
    bank, modules = pair("gru")
    train(bank, modules, 0)
    bank.prefetch(1)
    del bank
    gc.collect()
    memory = allocate(1 << 20)  # perhaps where the other was
    assert pin(memory, Cuda(torch.device("cuda", 0))) and memory.is_pinned()


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "register", lambda *_: "it was told to fail")
    with pytest.warns(RuntimeWarning, match="could not be pinned") as caught:
        bank, modules = pair("lstm", 4)
        for t in (0, 1, 2, 3, 0):
            bank.prefetch((t + 1) % 4)
            train(bank, modules, t)
    assert sum("could not be pinned" in str(warning.message) for warning in caught) == 1
    assert not next(bank.parameters()).is_pinned()


def test_a_registration_that_fails_leaves_no_error_behind() -> None:
    runtime = Cuda(torch.device("cuda", 0))
    memory = allocate(1 << 20)
    assert runtime.register(memory.data_ptr(), memory.nbytes) == ""
    assert runtime.register(memory.data_ptr(), memory.nbytes) != ""  # once more
    assert torch.ones(3, device="cuda").sum().item() == 3
    runtime.unregister(memory.data_ptr())


# --- streams --------------------------------------------------------------------------------------


class Delayed(Cuda):
    """Puts a delay before copies of one direction."""

    def __init__(self, where: str, cycles: int) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.where, self.cycles = where, cycles

    def copy(self, to: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        if self.where == ("in" if to.is_cuda else "out"):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self.cycles)
        super().copy(to, source, stream)


def schedule(kind: str, seed: int, where: str, cycles: int = CYCLES) -> None:
    """Random calls, passes and steps, delayed before the copy in, its use, or the copy out."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    bank, modules = pair(kind, choose.choice([2, 4]), slots=choose.choice([1, 2, 3]))
    bank._use_engine(Streams(Delayed(where, cycles)))
    for memory in bank._memories:
        bank._device.engine.pin(memory)
    tasks = range(len(bank))
    for _ in range(20):
        action = choose.choice(["train", "train", "two", "evaluate", "prefetch"])
        t, u = choose.choice(tasks), choose.choice(tasks)
        if where == "use":
            torch.cuda._sleep(cycles)
        if action == "train":
            train(bank, modules, t)
        elif action == "prefetch":
            bank.prefetch(t)
        elif action == "evaluate":
            x = inputs()
            with torch.no_grad():
                results = [(bank(v, x), modules[v](x)) for v in (t, u, t)]
            for ours, theirs in results:
                assert_near(ours, theirs)
        else:
            x = inputs()
            for model in (bank.__call__, lambda v, y: modules[v](y)):
                loss = model(t, x).tanh().sum() + model(u, x).tanh().sum()
                if where == "use":
                    torch.cuda._sleep(cycles)
                loss.backward()
            for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
                assert_near(ours.grad, theirs.grad)
            bank.zero_grad()
            modules.zero_grad()
        assert_same_state(bank, modules)


@pytest.mark.parametrize("where", ["in", "use", "out"])
@pytest.mark.parametrize("kind", ["mlp", "tied", "batch_norm", "lstm"])
def test_delays_change_nothing(kind: str, where: str) -> None:
    for seed in range(9):
        schedule(kind, seed, where)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("in", "a slot is used before its weights are there"),
        ("use", "a copy in waits for nothing"),
        ("use", "a copy out does not wait for the gradient"),
        ("out", "the host does not wait for the gradient"),
    ],
)
def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, where: str, fault: str) -> None:
    FAULTS[fault][1](monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(10):
            schedule("mlp", seed, where, 50 * CYCLES)
    torch.cuda.synchronize()


@pytest.mark.parametrize("backward_too", [False, True])
def test_a_side_stream(backward_too: bool) -> None:
    bank, modules = pair("gru", 4)
    side = torch.cuda.Stream()
    for t in (0, 1, 0, 2, 3, 1):
        bank.prefetch(t)
        x = inputs()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            loss = bank(t, x).square().mean()
            if backward_too:
                loss.backward()
        if not backward_too:
            torch.cuda.current_stream().wait_stream(side)
            loss.backward()
        modules[t](x).square().mean().backward()
        for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)
        side.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    models = [KINDS["lstm"]() for _ in range(3)]
    banks = [WeightBank(copy.deepcopy(models), device=f"cuda:{i}") for i in range(2)]
    x = torch.randn(5, 2, INPUT)
    for t in (0, 1, 2, 0):
        for i, bank in enumerate(banks):
            bank(t, x.to(f"cuda:{i}")).square().mean().backward()
        for ours, theirs in zip(*(bank.parameters() for bank in banks), strict=True):
            assert_near(ours.grad, theirs.grad)
    banks[0].to("cuda:1")
    assert_near(banks[0](1, x.to("cuda:1")), banks[1](1, x.to("cuda:1")))


# --- bytes ----------------------------------------------------------------------------------------


def peak_bytes(call: Any, tasks: list[int]) -> int:
    """Of the device, by steps of these tasks after a few others."""
    x = torch.randn(64, 512, device="cuda")
    for t in tasks[:2]:
        call(t, x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for t in tasks:
        call(t, x).sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_bytes_are_those_of_the_plan() -> None:
    module = nn.Linear(512, 1024)
    weights = sum(p.nbytes for p in module.parameters())
    nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda")).sum().backward()  # cuBLAS's own memory
    gc.collect()
    start = torch.cuda.memory_allocated()
    alone = copy.deepcopy(module).cuda()
    # With the gradients that it makes, and without those that it keeps.
    own = peak_bytes(lambda t, x: alone(x), [0, 1]) - start - 2 * weights
    peaks = []
    for tasks in (4, 64):
        gc.collect()
        start = torch.cuda.memory_allocated()
        bank = WeightBank(module, tasks, device="cuda")
        peaks.append(peak_bytes(bank, [0, 1, 2, 3]) - start)
        plan = bank.plan()
        planned = plan.device_weight_bytes + plan.device_gradient_bytes
        assert planned <= peaks[-1] <= planned + own + (64 << 10)
        del bank
    assert peaks[0] == peaks[1]


def test_nothing_grows() -> None:
    bank, modules = pair("lstm", 5)
    for t in (0, 1, 2, 3, 4, 0):
        train(bank, modules, t)

    def taken() -> tuple[int, int]:
        gc.collect()
        return torch.cuda.memory_allocated(), bank._device.home.pool.nbytes()

    before, x = taken(), inputs()
    for i in range(1000):
        bank(i % 5, x).sum().backward()
        bank.zero_grad()
    assert taken() == before


# --- modules, graphs, steps -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, fusedrnn.LSTM, fusedrnn.GRU])
def test_recurrent_layers(make: Any) -> None:
    modules = [Rnn(make(INPUT, HIDDEN)) for _ in range(4)]
    bank = WeightBank(copy.deepcopy(modules), device="cuda")
    theirs = nn.ModuleList(modules).cuda()
    with warnings.catch_warnings():
        if make in (fusedrnn.LSTM, fusedrnn.GRU):  # torch's own want weights in cuDNN's order
            warnings.filterwarnings("error", ".*(RNN module|fusedrnn).*")
        for t in (0, 1, 2, 3, 2, 0):
            train(bank, theirs, t)
            assert_same_state(bank, theirs)
    slots = bank._device.slots
    assert slots.extra == 0 and not any(slot.is_held() for slot in slots.slots)


def test_a_graph_that_is_replayed_for_other_tasks() -> None:
    bank, modules = pair("mlp", 5)
    x = inputs()
    with torch.no_grad():
        with bank.active(0, slot=0) as module:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                module(x)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = module(x)
        for t in (3, 1, 4, 4, 0, 2):
            x.copy_(inputs())
            with bank.active(t, slot=0):
                graph.replay()
            assert_near(y, modules[t](x))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_on_the_device_are_those_on_the_host(fused: bool) -> None:
    models = [KINDS["lstm"]() for _ in range(3)]
    banks = [
        WeightBank(copy.deepcopy(models), device="cuda", step_on=on) for on in ("host", "device")
    ]
    optimizers = [torch.optim.AdamW(bank.parameters(), lr=0.01, fused=fused) for bank in banks]
    for t in (0, 1, 0, 2, 0, 1):
        x = inputs()
        for bank, optimizer in zip(banks, optimizers, strict=True):
            bank(t, x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*(bank.parameters() for bank in banks), strict=True):
            assert ours.device.type == "cpu" and theirs.device.type == "cpu"
            assert_near(ours, theirs)
