"""What autograd does with the weights of a bank: as with those of nn.ModuleList.

Longer than 350 lines, because its tests are of one topic and share ``Both``.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bank.bank_modules import HIDDEN, INPUT, KINDS, Fails
from bank.emulated_device import emulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedrnn import WeightBank


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


class Both:
    """A bank on an emulated device, and the list that it has to equal."""

    def __init__(self, make: Callable[[], nn.Module] = mlp, tasks: int = 3, **options: Any) -> None:
        models = [make() for _ in range(tasks)]
        self.list = nn.ModuleList(copy.deepcopy(models))
        self.bank = emulated(WeightBank(models, device="cpu", **options))
        self.x = torch.randn(5, INPUT)

    def assert_equal(self, compute: Callable[[Callable[..., Tensor], Any], Sequence[Any]]) -> None:
        """``compute`` gets what calls a task, and the modules."""
        found = compute(self.bank, self.bank)
        expected = compute(lambda t, x: self.list[t](x), self.list)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def gradients(self) -> list[Any]:
        return [[p.grad for p in modules.parameters()] for modules in (self.bank, self.list)]


def test_grad_of_parameters() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        return torch.autograd.grad(call(1, both.x).sum(), list(modules[1].parameters()))

    both.assert_equal(compute)
    assert all(p.grad is None for p in both.bank.parameters())
    assert both.bank[1][0].weight.grad is None

    def of_one(call: Any, modules: Any) -> Any:
        loss = call(1, both.x).sum() + call(2, both.x).sum()
        return torch.autograd.grad(loss, [modules[2][0].weight])

    both.assert_equal(of_one)


def test_backward_to_some_inputs() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        call(1, both.x).sum().backward(inputs=[modules[1][0].weight])
        return [p.grad for p in modules[1].parameters()]

    both.assert_equal(compute)


def test_gradient_penalties() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        z = both.x.clone().requires_grad_()
        (gz,) = torch.autograd.grad(call(1, z).sum(), z, create_graph=True)
        return torch.autograd.grad(
            gz.square().sum(), list(modules[1].parameters()), allow_unused=True
        )

    both.assert_equal(compute)


def test_second_derivatives() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        weights = list(modules[1].parameters())
        first = torch.autograd.grad(call(1, both.x).square().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), weights)

    both.assert_equal(compute)

    def accumulated(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        call(0, both.x).square().sum().backward(create_graph=True)
        return [p.grad.detach() for p in modules[0].parameters()]

    both.assert_equal(accumulated)


def test_batched_gradients() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        y = call(1, both.x)
        grads = torch.eye(5).unsqueeze(-1)
        return torch.autograd.grad(y, list(modules[1].parameters()), grads, is_grads_batched=True)

    both.assert_equal(compute)


def test_hooks() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        seen: list[Tensor] = []
        weight = modules[1][0].weight
        handles = [
            weight.register_hook(lambda g: g * 2),
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
        ]
        for _ in range(2):
            call(1, both.x).sum().backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == 2
        return [*seen, *(p.grad for p in modules[1].parameters())]

    both.assert_equal(compute)


def test_a_penalty_on_the_host_beside_a_call() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        (call(1, both.x).sum() + modules[1][0].weight.square().sum()).backward()
        return [p.grad for p in modules[1].parameters()]

    both.assert_equal(compute)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        x = both.x.clone().requires_grad_()
        y = checkpoint(lambda x: call(1, x) + call(2, x), x, use_reentrant=reentrant)
        (y * call(1, x)).sum().backward()
        return [x.grad, *(p.grad for p in modules.parameters())]

    both.assert_equal(compute)
    both.assert_equal(compute)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    both = Both()

    x = both.x.clone().requires_grad_()
    with pytest.raises(ValueError, match="on purpose"):
        both.bank(0, Fails.apply(x)).sum().backward()

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        call(0, both.x).sum().backward()
        return [p.grad for p in modules.parameters()]

    both.assert_equal(compute)


def test_idle_tasks_have_no_gradient_and_one_task_one_allocation() -> None:
    both = Both()
    both.bank(2, both.x).sum().backward()
    assert all(p.grad is None for t in (0, 1) for p in both.bank[t].parameters())
    storages = {p.grad.untyped_storage().data_ptr() for p in both.bank[2].parameters()}
    assert len(storages) == 1


def test_memory_of_gradients_is_used_again() -> None:
    both = Both(tasks=20)
    for t in range(20):
        both.bank.zero_grad()
        both.bank(t, both.x).sum().backward()
    size = sum(p.nbytes for p in both.bank[0].parameters())
    assert both.bank._device.home.pool.nbytes() <= 3 * (size + 5 * 64)


def test_sparse_gradients() -> None:
    both = Both(lambda: nn.Embedding(10, 3, sparse=True))

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        for rows in ([1, 2, 2], [3, 1]):
            call(1, torch.tensor(rows)).square().sum().backward()
        return [modules[1].weight.grad.to_dense()]

    both.assert_equal(compute)


def test_other_tensors_that_are_changed_in_place_are_noticed() -> None:
    both = Both()
    x = both.x.clone().requires_grad_()
    hidden = x * 2
    y = both.bank(0, hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_call_without_backward_keeps_no_memory() -> None:
    """Outputs that a call saves do not keep themselves alive."""
    both = Both()
    x = both.x.clone().requires_grad_()
    with both.bank.active(0) as module:
        y = (module(x) * x.sum()).exp()
    kept = weakref.ref(x)
    del x, y
    assert kept() is None


def test_gradients_of_frozen_tensors() -> None:
    both = Both()
    for modules in (both.bank, both.list):
        modules[1][0].requires_grad_(False)

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        x = both.x.clone().requires_grad_()
        call(1, x).sum().backward()
        return [x.grad, *(p.grad for p in modules.parameters())]

    both.assert_equal(compute)
    for modules in (both.bank, both.list):
        modules[1].requires_grad_(False)
    both.assert_equal(compute)
    for modules in (both.bank, both.list):
        modules[1].requires_grad_(True)
    both.assert_equal(compute)


def test_nested_calls_of_one_task() -> None:
    both = Both()

    def compute(call: Any, modules: Any) -> Any:
        modules.zero_grad()
        if modules is both.bank:
            with modules.active(1) as outer:
                first = outer(both.x)
                with modules.active(1) as inner, torch.no_grad():
                    inner(both.x)
                second = outer(both.x * 2) * call(1, both.x)
            loss = (first + second).sum()
        else:
            loss = (call(1, both.x) + call(1, both.x * 2) * call(1, both.x)).sum()
        loss.backward()
        return [p.grad for p in modules.parameters()]

    both.assert_equal(compute)


def test_threads() -> None:
    both = Both(lambda: KINDS["gru"](), tasks=6, slots=3)
    x = torch.randn(5, 2, INPUT)
    expected = [module(x) for module in both.list]
    failures: list[Any] = []

    def work(first: int) -> None:
        try:
            for i in range(30):
                t = (first + i) % 6
                found = both.bank(t, x)
                torch.testing.assert_close(found, expected[t], rtol=0, atol=0)
                found.sum().backward()
        except BaseException as error:
            failures.append(error)

    # Copies of this emulation are not those of several threads.
    from fusedrnn._bank.engines import Immediate

    both.bank._use_engine(Immediate())
    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for module in both.list:
        for _ in range(20):
            module(x).sum().backward()
    ours, theirs = both.gradients()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# --- theta + theta[t] -----------------------------------------------------------------------------


@pytest.mark.parametrize("step_on", ["host", "device"])
@pytest.mark.parametrize("has_slots", [False, True])
def test_the_sum_of_two_weights(has_slots: bool, step_on: Any) -> None:
    theta = mlp()
    reference = copy.deepcopy(theta)
    deltas = [[torch.zeros_like(p, requires_grad=True) for p in theta.parameters()] for _ in "1234"]
    bank = WeightBank(theta, 4, shared="add", device="cpu", step_on=step_on)
    assert bank.shared is theta and not any(p.any() for p in bank[2].parameters())
    bank = emulated(bank) if has_slots else bank
    ours = torch.optim.AdamW(bank.parameters(), 0.05)
    theirs = torch.optim.AdamW([*reference.parameters(), *itertools.chain(*deltas)], 0.05)

    def expected(t: int, x: Tensor) -> Tensor:
        named = zip(reference.named_parameters(), deltas[t], strict=True)
        weights = {name: delta + p for (name, p), delta in named}
        return torch.func.functional_call(reference, weights, (x,))

    for _ in range(30):
        t, u = (int(torch.randint(4, ())) for _ in range(2))
        x = torch.randn(5, INPUT)
        ours.zero_grad()
        theirs.zero_grad()
        (bank(t, x).square().mean() + bank(u, x).sum()).backward()
        (expected(t, x).square().mean() + expected(u, x).sum()).backward()
        pairs = [*zip(theta.parameters(), reference.parameters(), strict=True)]
        pairs += zip(bank[t].parameters(), deltas[t], strict=True)
        for p, q in pairs:
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
        ours.step()
        theirs.step()
    for p, q in zip(theta.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert "shared.0.weight" in bank.state_dict() and "3.0.weight" in bank.state_dict()


def test_a_sum_of_which_one_is_frozen() -> None:
    theta = mlp()
    bank = emulated(WeightBank(theta, 2, shared="add", device="cpu"))
    x = torch.randn(5, INPUT)
    theta.requires_grad_(False)
    bank(0, x).sum().backward()
    assert theta[0].weight.grad is None and bank[0][0].weight.grad is not None
    theta.requires_grad_(True)
    bank[1].requires_grad_(False)
    bank(1, x).sum().backward()
    assert theta[0].weight.grad is not None and bank[1][0].weight.grad is None


@pytest.mark.parametrize("is_leaf", [False, True])
def test_functional_call_of_the_bank(is_leaf: bool) -> None:
    """Other weights for one call; the bank's own stay as they are, and backward is refused."""
    both = Both()
    before = copy.deepcopy(both.bank.state_dict())
    other = torch.randn(HIDDEN, INPUT, requires_grad=True)
    given = other if is_leaf else other * 1
    found = torch.func.functional_call(both.bank, {"0.0.weight": given}, (0, both.x))
    expected = torch.func.functional_call(both.list[0], {"0.weight": given}, (both.x,))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    both.assert_equal(lambda call, modules: [call(0, both.x)])
    for name, tensor in both.bank.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"0\.weight of task 0 was replaced"):
        found.sum().backward()
