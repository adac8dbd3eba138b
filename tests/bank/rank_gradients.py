"""What ranks do in tests with gradients: hooks, accumulation, and what is done to ``.grad``."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from bank.bank_modules import INPUT
from bank.rank_behaviour import bank_of, close, gradient, loss, mean
from bank.rank_processes import Here
from bank.rank_training import batch
from torch import Tensor, nn


def hooks(here: Here) -> None:
    """They see what this rank has, as under DistributedDataParallel, which averages what is left.

    Whether they are there before the call or come after it, and before or behind the other rank's.
    """
    bank = bank_of(here)
    seen: list[Any] = []

    def register(t: int) -> list[Any]:
        weight: Any = bank[t].weight
        return [
            weight.register_hook(lambda grad: seen.append((t, grad.clone()))),
            weight.register_hook(lambda grad: 2 * grad),
            weight.register_post_accumulate_grad_hook(
                lambda weight: seen.append((t, weight.grad.clone()))
            ),
        ]

    for is_late, tasks in itertools.product((False, True), ((0, 0), (0, 1), (0, 0, 1))):
        seen.clear()
        bank.zero_grad()
        own = tasks[here.rank :: 2]
        handles = [] if is_late else [register(0), register(1)]
        total: Any = sum(loss(bank, t, here) for t in own)
        handles = [register(0), register(1)] if is_late else handles
        total.backward()
        assert sorted(t for t, _ in seen) == [t for t in own for _ in range(2)]
        for t in {*tasks}:
            whole: Any = bank[t].weight
            shares = [gradient(whole, rank) * (t in tasks[rank::2]) for rank in range(2)]
            close(whole.grad, shares[0] + shares[1])
            if t in own:
                first, second = (grad for u, grad in seen if u == t)
                close(first, shares[here.rank])
                close(second, 2 * shares[here.rank])
        for handle in itertools.chain(*handles):
            handle.remove()
    # Between two calls; and where autograd.grad, or backward of one weight, asks for it.
    bank.zero_grad()
    weight: Any = bank[0].weight
    one = loss(bank, 0, here)
    handle = weight.register_hook(lambda grad: 2 * grad)
    (one + loss(bank, 0, here)).backward()
    close(weight.grad, 4 * mean(weight))
    close(torch.autograd.grad(loss(bank, 0, here), weight)[0], 2 * gradient(weight, here.rank))
    bank.zero_grad()
    loss(bank, 0, here).backward(inputs=[weight])
    close(weight.grad, 2 * mean(weight))
    handle.remove()


def functions_that_return_gradients(here: Here) -> None:
    """autograd.grad is of this rank alone, and sends nothing: here the other does nothing."""
    bank = bank_of(here)
    weight: Any = bank[0].weight
    if here.rank == 0:
        x = batch(0).requires_grad_()
        found = torch.autograd.grad(bank(0, x).square().mean(), [weight, x])
        close(found[0], gradient(weight, 0))
        bank(0, x).square().mean().backward(inputs=[x])
    assert weight.grad is None and bank._ranks.exchanges == 0
    loss(bank, 0, here).backward()
    close(weight.grad, mean(weight))
    # A penalty on the gradient of the input.
    bank.zero_grad()
    x = batch(here.rank).requires_grad_()
    (slope,) = torch.autograd.grad(bank(0, x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    assert bank._ranks.exchanges == 2
    assert torch.equal(*here.everywhere(weight.grad))
    # First derivatives that have a history are averaged as any.
    bank.zero_grad()
    loss(bank, 0, here).backward(create_graph=True)
    close(weight.grad, mean(weight))


def discarded_gradients(here: Here) -> None:
    """zero_grad() after passes within no_sync() discards what these have added up."""
    bank = bank_of(here)
    weight: Any = bank[0].weight
    for is_none in (True, False):
        bank.zero_grad()
        with bank.no_sync():
            loss(bank, 0, here, 1).backward()
            close(weight.grad, gradient(weight, here.rank, 1))
        bank.zero_grad(set_to_none=is_none)
        loss(bank, 0, here, 2).backward()
        close(weight.grad, mean(weight, 2))
        # What comes after is added.
        with bank.no_sync():
            loss(bank, 0, here, 3).backward()
            loss(bank, 0, here, 4).backward()
        loss(bank, 1, here).backward()
        expected = mean(weight, 2) + mean(weight, 3) + mean(weight, 4)
        close(weight.grad, expected)
        with bank.no_sync():
            loss(bank, 0, here, 5).backward()
        bank.zero_grad(set_to_none=is_none)
        bank.sync_gradients()
        assert weight.grad is None or not weight.grad.any()
    # Those of all tasks but one.
    bank.zero_grad()
    with bank.no_sync():
        (loss(bank, 0, here) + loss(bank, 1, here)).backward()
    weight.grad = None
    bank.sync_gradients()
    assert weight.grad is None
    close(bank[1].weight.grad, mean(bank[1].weight))  # type: ignore[arg-type]


def changed_gradients(here: Here) -> None:
    """What is in .grad when ranks exchange is averaged, whatever has been done to it."""
    bank = bank_of(here)
    weight: Any = bank[0].weight
    with bank.no_sync():
        loss(bank, 0, here, 1).backward()
        bank.sync_gradients()  # which does nothing here, as the passes of others
    close(weight.grad, gradient(weight, here.rank, 1))
    weight.grad = weight.grad * 0.5
    loss(bank, 0, here, 2).backward()
    close(weight.grad, mean(weight, 1) / 2 + mean(weight, 2))
    # Zeros that stay are none; what comes to them is one.
    bank.zero_grad(set_to_none=False)
    with bank.no_sync():
        loss(bank, 0, here, 3).backward()
    nn.utils.clip_grad_norm_(bank.parameters(), 1e3)
    loss(bank, 1, here, 4).backward()
    close(weight.grad, mean(weight, 3))
    # Weights that were replaced, or converted, while something waits.
    bank.zero_grad()
    with bank.no_sync():
        loss(bank, 0, here, 5).backward()
    bank.load_state_dict(copy.deepcopy(bank.state_dict()), assign=True)
    weight = bank[0].weight
    loss(bank, 0, here, 6).backward()
    close(weight.grad, mean(weight, 6))
    bank.zero_grad()
    with bank.no_sync():
        loss(bank, 0, here, 7).backward()
    expected = mean(weight, 7).double()
    bank.double()
    bank.sync_gradients()
    close(weight.grad, expected)


def gradients_by_other_ways(here: Here) -> None:
    """A penalty on the weights themselves, and calls of the module on the host, count, too."""
    bank = bank_of(here, tasks=3)

    def penalty(weight: Tensor) -> Tensor:
        return 0.1 * weight.square().sum()

    for are_equal, average in ((False, "world"), (True, "users"), (False, "users")):
        own = 0 if are_equal else here.rank
        bank = bank_of(here, tasks=3, average=average)
        weight: Any = bank[0].weight
        bank.zero_grad()
        (loss(bank, own, here) + penalty(weight)).backward()
        shares = [gradient(weight, rank) * (are_equal or rank == 0) for rank in range(2)]
        users = 1 if average == "users" and not are_equal else 2
        close(weight.grad, (shares[0] + shares[1]) / users + 0.2 * weight)
        assert torch.equal(*here.everywhere(weight.grad))
    # Without a call of the bank, and in a pass that fails.
    bank.zero_grad()
    penalty(bank[here.rank].weight).backward()  # type: ignore[arg-type]
    bank.sync_gradients()
    for t in range(2):
        of_one: Any = bank[t].weight
        close(of_one.grad, 0.2 * of_one * (1 if bank._ranks.average == "users" else 0.5))
    # What is 0 is there, too: an optimizer then decays the weights on all ranks.
    bank.zero_grad()
    if here.rank == 0:
        with bank.no_sync():
            (0 * loss(bank, 0, here)).backward()
    loss(bank, 1, here).backward()
    assert [p is None for p in here.everywhere(bank[0].weight.grad)] == [False, False]
    # A change of what all have is no use of the task.
    bank = bank_of(here, average="users")
    loss(bank, 0, here).backward()
    before = bank[0].weight.grad.clone()  # type: ignore[union-attr, operator]
    nn.utils.clip_grad_norm_(bank.parameters(), 1e-3)
    clipped = bank[0].weight.grad.clone()  # type: ignore[union-attr, operator]
    loss(bank, here.rank, here).backward()
    assert not torch.equal(before, clipped)
    own: Any = bank[0].weight
    close(own.grad, clipped + gradient(own, 0))
    # Zeros of zero_grad() are not sent again and again.
    bank.zero_grad(set_to_none=False)
    before = bank._ranks.exchanged_bytes
    bank.sync_gradients()
    assert bank._ranks.exchanged_bytes == before


def hooks_of_unused_weights(here: Here) -> None:
    """They are not called, on this rank or another."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.three = nn.Linear(INPUT, 2), nn.Linear(INPUT, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.two if x.shape[1] == 2 else self.three)(x)

    bank = here.bank([Branches()])
    if here.rank == 0:
        for parameter in bank.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1, 1))
    bank(0, batch(here.rank)).square().mean().backward()
    for parameter in bank.parameters():
        assert torch.equal(*here.everywhere(parameter.grad))


def frozen_between_calls(here: Here) -> None:
    """In one pass, and between passes that add up: each call trains what it trained then."""
    bank = here.bank([nn.Linear(INPUT, 2) for _ in range(2)])
    single = copy.deepcopy(bank[0])
    frozen: Any = bank[0].bias, bank[0].weight
    alike: Any = single.bias, single.weight
    first, second = [], []
    for i in range(2):
        for some in (frozen, alike):
            some[i].requires_grad_(False)
            some[1 - i].requires_grad_(True)
        first.append(loss(bank, 0, here, i))
        second += [single(batch(rank, i)).square().mean() / 2 for rank in range(2)]
    sum(first).backward()  # type: ignore[union-attr]
    sum(second).backward()  # type: ignore[union-attr]
    for i in range(2):
        for some in (frozen, alike):
            some[i].requires_grad_(True)
    for ours, theirs in zip(frozen, alike, strict=True):
        close(ours.grad, theirs.grad)
    bank.zero_grad()
    weight, bias = frozen[1], frozen[0]
    if here.rank == 1:  # and the other rank has none of it
        with bank.no_sync():
            loss(bank, 0, here).backward()
        expected = bias.grad / 2
    bias.requires_grad_(False)
    bank.sync_gradients()
    everywhere = here.everywhere(bias.grad)
    assert torch.equal(*everywhere) and torch.equal(*here.everywhere(weight.grad))
    if here.rank == 1:
        close(bias.grad, expected)
