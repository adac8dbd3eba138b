"""What banks do on streams, for tests of the waits: each raises if a number is wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import safetensors.torch as safetensors
import torch
from bank.bank_modules import Fails
from bank.fake_runtime import FakeRuntime
from torch import Tensor, nn
from torch.func import functional_call

from fusedrnn import WeightBank
from fusedrnn._bank.engines import Streams
from fusedrnn._bank.gradient_blocks import Home
from fusedrnn._bank.host_memory import allocate
from fusedrnn._bank.task import Task
from fusedrnn._bank.task_gradients import Gradient, gradient_layout

WIDTH = 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH))


def pair(tasks: int, slots: int = 2, step_on: str = "host") -> tuple[WeightBank, nn.ModuleList]:
    modules = nn.ModuleList(mlp() for _ in range(tasks))
    bank = WeightBank(copy.deepcopy(list(modules)), device="cpu", slots=slots, step_on=step_on)
    return bank, modules


def inputs() -> Tensor:
    return torch.randn(5, WIDTH)


def assert_same_gradients(bank: nn.Module, modules: nn.Module) -> None:
    for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def assert_same_weights(bank: nn.Module, modules: nn.Module) -> None:
    for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def evaluation(runtime: FakeRuntime, folder: Path) -> None:
    bank, modules = pair(6)
    x = inputs()
    with torch.no_grad():
        for _ in range(2):
            for t, _ in bank.prefetching((t, None) for t in [0, 1, 2, 3, 4, 5, 3, 4]):
                assert torch.equal(bank(t, x), modules[t](x))


def a_graph_of_many_tasks(runtime: FakeRuntime, folder: Path) -> None:
    bank, modules = pair(6)
    for _ in range(3):
        losses = []
        x = inputs()
        for models in (bank.__call__, lambda t, y: modules[t](y)):
            y = x
            for t in range(6):
                y = models(t, y)
            losses.append(y.square().sum())
        for loss in losses:
            loss.backward()
        assert_same_gradients(bank, modules)
        for model in (bank, modules):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


def a_pass_for_each_task(runtime: FakeRuntime, folder: Path) -> None:
    bank, modules = pair(4, slots=1)
    for t in [0, 1, 2, 3, 1, 1, 0]:
        x = inputs()
        bank(t, x).square().sum().backward()
        modules[t](x).square().sum().backward()
        assert_same_gradients(bank, modules)


def frozen_tasks(runtime: FakeRuntime, folder: Path) -> None:
    """No gradient follows on what backward reads."""
    for slots in (1, 2):
        bank, modules = pair(4, slots)
        bank.requires_grad_(False)
        modules.requires_grad_(False)
        for tasks in ([0], [1], [2, 3, 0], [2]):
            x, y = (ours := inputs()).clone().requires_grad_(), ours.clone().requires_grad_()
            ours, theirs = x, y
            for t in tasks:
                ours, theirs = bank(t, ours), modules[t](theirs)
            ours.sum().backward()
            theirs.sum().backward()
            assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


def a_second_stream(runtime: FakeRuntime, folder: Path) -> None:
    other = runtime.new_stream()
    for slots in (1, 2):
        bank, modules = pair(6, slots)
        x = inputs()
        with torch.no_grad():
            for t in range(6):
                bank.prefetch(t)
                # The first stream waits for the weights; the host does after its call.
                with bank.active(t), runtime.on(other):
                    assert torch.equal(bank(t, x), modules[t](x))


def shared_weights(runtime: FakeRuntime, folder: Path) -> None:
    module, x, other = mlp(), inputs(), runtime.new_stream()
    bank = WeightBank(copy.deepcopy(module), tasks=4, device="cpu", shared="add")
    for parameter in bank.parameters():
        nn.init.normal_(parameter)
    names = [name for name, _ in module.named_parameters()]
    for t in range(4):
        weights = [
            p + q for p, q in zip(bank[t].parameters(), bank.shared.parameters(), strict=True)
        ]
        with torch.no_grad():
            with bank.active(t):
                pass  # the first stream has added them
            with runtime.on(other):
                expected = functional_call(module, dict(zip(names, weights, strict=True)), x)
                assert torch.equal(bank(t, x), expected)


def a_file(runtime: FakeRuntime, folder: Path) -> None:
    modules = nn.ModuleList(mlp() for _ in range(6))
    path = folder / "tasks.safetensors"
    if path.exists():
        path.unlink()
    safetensors.save_file(modules.state_dict(), path)
    bank = WeightBank.open(path, mlp(), device="cpu", slots=2)
    modules.eval()
    x = inputs()
    with torch.no_grad():
        for t in (0, 2, 4):
            bank.prefetch(t)
            bank.prefetch(t + 1)
            for u in (t, t + 1):
                assert torch.equal(bank(u, x), modules[u](x))


def steps_on_the_device(runtime: FakeRuntime, folder: Path) -> None:
    bank, modules = pair(3, step_on="device")
    ours, theirs = (
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False) for model in (bank, modules)
    )
    other = runtime.new_stream()
    for i, t in enumerate([0, 0, 1, 0, 2, 2, 1]):
        x = inputs()
        bank(t, x).square().sum().backward()
        modules[t](x).square().sum().backward()
        bank.prefetch((t + 1) % 3)
        if i == 5:  # it comes again, for the step
            bank.prefetch((t + 2) % 3)
            bank.prefetch(t)
        with runtime.on(other if i == 3 else 0), torch.no_grad():
            y = inputs()
            assert i % 2 or torch.equal(bank(t, y), modules[t](y))
        ours.step()
        theirs.step()
        assert_same_weights(bank, modules)
        assert [p.device.type for p in bank.parameters()] == ["cpu"] * 12
        with runtime.on(other), torch.no_grad():
            assert torch.equal(bank(t, x), modules[t](x))
        ours.zero_grad()
        theirs.zero_grad()


def blocks_of_gradients(runtime: FakeRuntime, folder: Path) -> None:
    """One block, whose users are on two streams."""
    home = Home(Streams(runtime), torch.device("cpu"), blocks=1)
    other = runtime.new_stream()
    tasks = [Task(i, nn.Linear(width, width)) for i, width in enumerate((2, 5, 9))]
    for task in tasks:
        task.place(allocate(task.nbytes))
    gradients = []
    for task, stream in zip(tasks * 2, [0, other, 0, other, other, 0], strict=True):
        layout = gradient_layout(task, task.trained())
        gradient = Gradient(task, layout, home)
        values = [torch.randn_like(p) for p in layout.parameters]
        with runtime.on(stream):
            gradient.add(values)
        with runtime.on(other if stream == 0 else 0):
            gradient.add(values)
        with runtime.on(stream):
            gradient.send()
        gradients.append((gradient, values))
    for gradient, values in gradients:
        for ours, theirs in zip(gradient.results(), values, strict=True):
            assert ours is not None and torch.equal(ours, theirs + theirs)


def a_bank_that_goes(runtime: FakeRuntime, folder: Path) -> None:
    bank, _ = pair(4)
    kept = bank[0]  # and with it the memory of the host
    bank.prefetch(1)
    del bank
    gc.collect()
    assert not runtime.memories and next(kept.parameters()).all()


def fail(bank: WeightBank, task: int) -> None:
    """In backward, behind the bank, so that a gradient is under way that nobody needs."""
    try:
        bank(task, Fails.apply(inputs().requires_grad_())).square().sum().backward()
    except ValueError:
        return
    raise AssertionError


def a_pass_that_fails(runtime: FakeRuntime, folder: Path) -> None:
    bank, modules = pair(2, step_on="device")
    ours, theirs = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for model in (bank, modules)
    )
    x = inputs()
    bank(0, x).square().sum().backward()
    modules[0](x).square().sum().backward()
    for parameter in [*bank.parameters(), *modules.parameters()]:
        if parameter.grad is not None:  # which a step then gathers in memory of the pool
            parameter.grad = parameter.grad * 2
    fail(bank, 1)
    ours.step()
    theirs.step()
    assert_same_weights(bank, modules)


def blocks_that_go(runtime: FakeRuntime, folder: Path) -> None:
    """With a gradient on its way to memory that somebody keeps."""
    home = Home(Streams(runtime), torch.device("cpu"), blocks=1)
    task = Task(0, nn.Linear(WIDTH, WIDTH))
    task.place(allocate(task.nbytes))
    layout = gradient_layout(task, task.trained())
    values = [torch.ones_like(p) for p in layout.parameters]
    gradient = Gradient(task, layout, home)
    gradient.add(values)
    gradient.send()
    del home
    gradient._home = None  # type: ignore[assignment]
    gc.collect()
    assert not runtime.memories


def slots_that_go(runtime: FakeRuntime, folder: Path) -> None:
    """A task is added that they are too small for, while copies to them are under way."""
    bank, modules = pair(3)
    large = nn.Linear(WIDTH, 400)
    x, other = inputs(), runtime.new_stream()
    with torch.no_grad():
        with runtime.on(other):
            bank.prefetch(0)
        bank.prefetch(1)
        bank.add(3, copy.deepcopy(large))
        assert torch.equal(bank(3, x), large(x))
        for t in (1, 0):
            assert torch.equal(bank(t, x), modules[t](x))


SCENARIOS: dict[str, Callable[[FakeRuntime, Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        evaluation,
        a_graph_of_many_tasks,
        a_pass_for_each_task,
        frozen_tasks,
        a_second_stream,
        shared_weights,
        a_file,
        steps_on_the_device,
        blocks_of_gradients,
        a_bank_that_goes,
        slots_that_go,
        a_pass_that_fails,
        blocks_that_go,
    )
}
