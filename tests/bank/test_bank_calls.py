"""What a call does to its module, and which calls go together: as with nn.ModuleList."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bank.emulated_device import emulated
from torch import Tensor, nn

import fusedrnn._bank.task_call
from fusedrnn import WeightBank
from fusedrnn._bank.engines import Immediate
from fusedrnn._bank.ranks import Ranks

X = torch.randn(5, 3)


def linear() -> nn.Module:
    return nn.Linear(3, 3)


def both(make: Callable[[], nn.Module] = linear, **options: Any) -> tuple[WeightBank, Any]:
    """A bank on an emulated device, and the list that it has to equal."""
    modules = nn.ModuleList(make() for _ in range(3))
    return emulated(WeightBank(copy.deepcopy(list(modules)), device="cpu", **options)), modules


def assert_same(bank: nn.Module, modules: nn.Module) -> None:
    torch.testing.assert_close(bank.state_dict(), modules.state_dict(), rtol=0, atol=0)
    for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def module_of(forward: Callable[..., Tensor], **buffers: Tensor) -> Callable[[], nn.Module]:
    """Makes modules with two weights, ``a`` and ``b``, and these buffers."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(3, 3)) for _ in "ab")
            for name, buffer in buffers.items():
                self.register_buffer(name, buffer.clone())

    Module.forward = forward  # type: ignore[method-assign]
    return Module


# --- weights that a call changes ------------------------------------------------------------------


def clamped(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.a.clamp_(-0.1, 0.1)
    return x @ module.a @ module.b


def clamped_late(module: Any, x: Tensor) -> Tensor:
    y = (x * 1.0).requires_grad_() @ module.a @ module.b
    with torch.no_grad():
        module.a.clamp_(-0.1, 0.1)
    return y


def changed_by_autograd(module: Any, x: Tensor) -> Tensor:
    module.a.mul_(2)
    return x @ module.a


def test_weights_that_a_call_changes() -> None:
    bank, modules = both(module_of(clamped))
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (bank, modules)]
    for t in (0, 1, 1, 0):
        # The first graph is there while the second call changes one of its weights.
        ours = bank(t, X) + bank(t, X * 2)
        theirs = modules[t](X) + modules[t](X * 2)
        assert torch.equal(ours, theirs)
        for y, optimizer in zip((ours, theirs), optimizers, strict=True):
            y.square().sum().backward()
            optimizer.step()
        assert_same(bank, modules)
    copies = bank._device.slots.copies
    bank(0, X)
    assert bank._device.slots.copies == copies + 1  # since the last step
    bank(0, X)
    assert bank._device.slots.copies == copies + 1


def test_weights_that_were_saved_before_the_change() -> None:
    bank, modules = both(module_of(clamped_late))
    for y in (modules[0](X), bank(0, X)):
        with pytest.raises(RuntimeError, match=r"modified by an inplace|a of task 0 was changed"):
            y.sum().backward()
    for m in (bank, modules):  # autograd has come to some of them
        m.zero_grad()
    assert_same(bank, modules)


def test_embeddings_with_a_largest_norm() -> None:
    bank, modules = both(lambda: nn.Embedding(10, 3, max_norm=0.5), slots=1)
    rows = torch.tensor([1, 2, 3])
    optimizers = [torch.optim.SGD(m.parameters(), 0.3) for m in (bank, modules)]
    for t in (0, 0, 1, 0):
        for y, optimizer in zip((bank(t, rows), modules[t](rows)), optimizers, strict=True):
            (y * torch.arange(9.0).view(3, 3)).sum().backward()
            optimizer.step()
        assert_same(bank, modules)


def test_weights_that_are_loaded_while_they_are_on_the_device() -> None:
    bank, modules = both()
    state = linear().state_dict()
    with bank.active(0) as module:
        module.load_state_dict(state)
        ours = bank(0, X)
    modules[0].load_state_dict(state)
    assert torch.equal(ours, modules[0](X)) and torch.equal(bank(0, X), modules[0](X))
    assert_same(bank, modules)


def test_changes_that_cannot_be_kept() -> None:
    bank, modules = both(module_of(changed_by_autograd))
    for call in (modules[0], lambda x: bank(0, x)):
        with pytest.raises(RuntimeError, match=r"a leaf Variable|a of task 0 was changed in place"):
            call(X)
    assert_same(bank, modules)
    bank, modules = both()
    home = bank[0].weight
    with (
        pytest.raises(RuntimeError, match="both during a call and on the host"),
        bank.active(0) as module,
    ):
        nn.init.zeros_(module.weight)
        nn.init.ones_(home)
    with pytest.raises(RuntimeError, match="was moved or converted"), bank.active(0) as module:
        module.half()
    bank(0, X)
    shared = emulated(WeightBank(linear(), 2, shared="add", device="cpu"))
    with pytest.raises(RuntimeError, match="the sum with a shared"), shared.active(0) as module:
        nn.init.zeros_(module.weight)
    assert torch.equal(shared(0, X), shared.shared(X))


# --- buffers --------------------------------------------------------------------------------------


def state_of(module: Any, x: Tensor) -> Tensor:
    former = module.h
    module.h, module.k = (x @ module.a + module.h).detach(), module.h
    return former if former[0, 0] else module.h + module.k


def test_buffers_that_a_call_sets() -> None:
    """Also where the former one is returned, and is not to change."""
    h = torch.zeros(5, 3)
    bank, modules = both(module_of(state_of, h=h, k=h))
    results = [(bank(t, X), modules[t](X)) for t in (0, 0, 1, 0, 0, 1)]
    for ours, theirs in results:
        assert torch.equal(ours, theirs)
    assert_same(bank, modules)


def test_buffers_that_are_set_around_a_call_within_a_call() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        module.h = (x @ module.a + module.h).detach()
        return module.h

    bank, modules = both(module_of(forward, h=torch.zeros(5, 3)))
    with bank.active(0) as module:
        module.h = X
        ours = bank(0, X)
        module.h = module.h * 2
    modules[0].h = X
    assert torch.equal(ours, modules[0](X))
    modules[0].h = modules[0].h * 2
    assert_same(bank, modules)


def test_buffers_that_are_set_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As among ranks on CPUs."""
    monkeypatch.setattr(Ranks, "are_several", lambda ranks: True)
    h = torch.zeros(5, 3)
    _, modules = both(module_of(state_of, h=h, k=h))
    bank = WeightBank(copy.deepcopy(list(modules)), device="cpu")
    with torch.no_grad():
        results = [(bank(t, X), modules[t](X)) for t in (0, 0, 1, 0, 0, 1)]
    for ours, theirs in results:
        assert torch.equal(ours, theirs)
    assert_same(bank, modules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "h", m.a.sum(0)), r"a grad_fn, .*: detach\(\) it"),
        (lambda m: setattr(m, "h", torch.zeros(4)), r"was torch.float32 \(3,\), and was set to"),
        (lambda m: m.__delattr__("h"), "was deleted during a call"),
        (lambda m: setattr(m, "a", nn.Parameter(m.b * 1)), r"was replaced during a call.*bank\[0"),
        (lambda m: m.h.add_(m.a.sum(0)), "its graph cannot go to the host"),
    ],
)
def test_tensors_that_cannot_be_set(change: Callable[[Any], Any], message: str) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        change(module)
        return x

    bank, modules = both(module_of(forward, h=torch.zeros(3)))
    with pytest.raises(RuntimeError, match=message):
        bank(0, X)
    assert_same(bank, modules)
    with pytest.raises(ZeroDivisionError), bank.active(0) as module:  # this one says more
        change(module)
        _ = 1 / 0
    assert_same(bank, modules)


def test_batch_norm_in_a_module_that_does_not_train() -> None:
    bank, modules = both(lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)))
    for m in (bank, modules):
        m.eval()
        m[1][1].train()
    for _ in range(2):
        assert torch.equal(bank(1, X), modules[1](X))
    assert_same(bank, modules)


def test_versions_are_those_of_a_list() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        module.h.add_(1).mul_(2)
        return module.norm(clamped(module, x * module.mask))

    def make() -> nn.Module:
        module = module_of(forward, h=torch.zeros(3), mask=torch.ones(3))()
        module.norm = nn.BatchNorm1d(3)
        return module

    def versions(module: nn.Module) -> list[int]:
        return [tensor._version for tensor in (*module.parameters(), *module.buffers())]

    bank, modules = both(make)
    before = versions(bank[0]), versions(modules[0])
    for m, call in ((bank, bank), (modules, lambda t, x: modules[t](x))):
        penalty = (m[0].b * m[0].mask).sum()  # saves a buffer that the call may write to
        (penalty + call(0, X).square().sum()).backward()
    assert_same(bank, modules)
    changes = [
        [now - then for now, then in zip(versions(m[0]), old, strict=True)]
        for m, old in zip((bank, modules), before, strict=True)
    ]
    assert changes[0] == changes[1]
    assert torch.equal(bank(0, X), modules[0](X))


# --- several calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("tasks", [(0, 0), (0, 1)])
def test_calls_that_end_in_the_order_they_began_in(tasks: tuple[int, int], wants: bool) -> None:
    bank, modules = both(lambda: nn.LSTM(3, 3))
    own = [[*m.parameters()] for m in bank.values()], bank[0]._flat_weights

    def run(t: int) -> Iterator[Tensor]:
        with bank.active(t) as module:
            yield module(X)[0]
            yield module(X * 2)[0]

    with torch.set_grad_enabled(wants):
        found = [y for pair in zip(*(run(t) for t in tasks), strict=True) for y in pair]
        expected = [modules[t](x)[0] for x in (X, X * 2) for t in tasks]
    assert [[*m.parameters()] for m in bank.values()] == own[0]
    assert bank[0]._flat_weights is own[1] and not bank._device.slots.extra
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    if wants:
        for ys in (found, expected):
            torch.stack(ys).square().sum().backward()
        for ours, theirs in zip(bank.parameters(), modules.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_coroutines() -> None:
    bank, modules = both()
    own = bank[0].weight

    async def request(seconds: float) -> Tensor:
        with bank.active(0) as module:
            await asyncio.sleep(seconds)
            return module(X)

    async def requests() -> list[Tensor]:
        return await asyncio.gather(request(0.01), request(0.02))

    for y in asyncio.run(requests()):
        assert torch.equal(y, modules[0](X))
    assert bank[0].weight is own


def test_calls_within_calls_of_two_threads() -> None:
    bank, _ = both()
    bank._use_engine(Immediate())
    began = [threading.Event(), threading.Event()]

    def work(outer: int, inner: int) -> None:
        with bank.active(outer):
            began[outer].set()
            began[inner].wait(0.2)
            bank(inner, X)

    threads = [threading.Thread(target=work, args=of, daemon=True) for of in ((0, 1), (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_an_interrupt_at_the_end_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, modules = both()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fusedrnn._bank.task_call, "bring_changes_home", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError), bank.active(1):
            pass

        def interrupt(*arguments: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(fusedrnn._bank.task_call, "bring_changes_home", interrupt)
        bank(0, X)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(bank(0, X)), daemon=True)
    thread.start()
    thread.join(10)
    assert found and torch.equal(found[0], modules[0](X))
    assert not any(slot.running for slot in bank._device.slots.slots)
