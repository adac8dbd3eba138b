"""Steps on the device, whose hooks and optimizers do what these may do: as with nn.ModuleList."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank.bank_modules import INPUT, KINDS
from bank.emulated_device import emulated
from torch import nn

from fusedrnn import WeightBank


def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


def replace(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad = parameter.grad / 2


def discard(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.zero_grad()


def set_to_zero(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def fail(optimizer: Any, args: Any, kwargs: Any) -> None:
    raise FloatingPointError


class Trial:
    """A bank and a list, with an optimizer each."""

    def __init__(self, make: Callable[[Any], Any] | None = None) -> None:
        models = [KINDS["mlp"]() for _ in range(3)]
        self.modules = nn.ModuleList(copy.deepcopy(models))
        self.bank = emulated(WeightBank(models, device="cpu", step_on="device"))
        make = make or (lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        self.models = self.bank, self.modules
        self.optimizers = [make(model) for model in self.models]

    def backward(self, t: int) -> None:
        x = torch.randn(5, INPUT)
        self.bank(t, x).square().sum().backward()
        self.modules[t](x).square().sum().backward()

    def assert_equal(self) -> None:
        named = zip(self.bank.named_parameters(), self.modules.parameters(), strict=True)
        for (name, ours), theirs in named:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
        x = torch.randn(5, INPUT)
        with torch.no_grad():
            for t in range(3):
                assert torch.equal(self.bank(t, x), self.modules[t](x))


@pytest.mark.parametrize("hook", [clip, replace, discard, set_to_zero])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_hooks_change_gradients(hook: Any, is_before: bool) -> None:
    trial = Trial()
    for optimizer in trial.optimizers:
        if is_before:
            optimizer.register_step_pre_hook(hook)
        else:
            optimizer.register_step_post_hook(hook)
    for t in (0, 0, 1, 0):
        trial.backward(t)
        for optimizer in trial.optimizers:
            optimizer.step()
        trial.assert_equal()


@pytest.mark.parametrize("discards", [discard, set_to_zero])
def test_gradients_that_are_discarded_after_a_failure(discards: Any) -> None:
    trial = Trial()
    trial.backward(0)
    for optimizer in trial.optimizers:
        handle = optimizer.register_step_post_hook(fail)
        with pytest.raises(FloatingPointError):
            optimizer.step()
        handle.remove()
        discards(optimizer, None, None)
    trial.backward(0)
    trial.assert_equal()


def test_weights_that_the_host_changes_during_a_step() -> None:
    """A teacher in the same task follows the weights that are trained."""
    trial = Trial(lambda model: torch.optim.SGD(model[1][0].parameters(), 0.1))
    for model, optimizer in zip(trial.models, trial.optimizers, strict=True):

        def follow(optimizer: Any, args: Any, kwargs: Any, model: Any = model) -> None:
            with torch.no_grad():
                for parameter in model[1][2].parameters():
                    parameter.mul_(0.5)

        optimizer.register_step_post_hook(follow)
    for _ in range(3):
        trial.backward(1)
        for optimizer in trial.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        trial.bank.zero_grad()
        trial.modules.zero_grad()
        trial.assert_equal()


def test_a_step_in_a_hook_of_another() -> None:
    trial = Trial(lambda model: torch.optim.SGD(model[1][0].parameters(), 0.1, momentum=0.9))
    for model, optimizer in zip(trial.models, trial.optimizers, strict=True):
        other = torch.optim.SGD(model[1][2].parameters(), 0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda o, a, k, other=other: other.step())
    for t in (1, 1, 0, 1):
        trial.backward(t)
        for optimizer in trial.optimizers:
            optimizer.step()
        trial.assert_equal()


def test_an_optimizer_of_a_weight_that_is_exchanged() -> None:
    """It is known as one of the bank's, although it has stepped before it was."""
    trial = Trial(lambda model: torch.optim.SGD([nn.Parameter(torch.ones(4, INPUT))], 0.1))
    for model, optimizer in zip(trial.models, trial.optimizers, strict=True):
        weight = optimizer.param_groups[0]["params"][0]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad = None
        model[0][0].weight = weight
    for _ in range(2):
        trial.backward(0)
        for optimizer in trial.optimizers:
            optimizer.step()
        trial.assert_equal()
    trial.backward(0)
    with trial.bank.active(0), pytest.raises(RuntimeError, match="leave the with block"):
        trial.optimizers[0].step()
