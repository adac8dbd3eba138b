"""The weights and buffers of a step whose steps are taken in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._locks import CallerLock
from .._step.held_modules import Held
from .._step.replicas import Replicas, parameters_of

_locks: WeakKeyDictionary[nn.Module, CallerLock] = WeakKeyDictionary()

_locks_lock = threading.Lock()


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=False):
        if getattr(module, "training", flag) != flag:  # a frozen one of torch.jit has none
            module.training = flag


class Weights(nn.Module):
    """What a step holds: parameters with gradient, and the buffers that it changes."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.used, self.held = Replicas.if_any(held.modules), held
        self._apart = {id(parameter) for parameter in held.parameters}
        self._known_slots: dict[str, list[str]] = {}

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()

    def trained(self) -> dict[str, Tensor]:
        """By name; a parameter with several names has the first one here."""
        with self.locked():  # else it may be what another thread has put there for a while
            named = [*self.used.named_parameters("used")]
        return {name: p for name, p in named if p.requires_grad}

    def buffer_versions(self) -> dict[str, tuple[int, int]]:
        """What differs once a buffer has been written or replaced."""
        return {
            name: (id(buffer), -1 if buffer.is_inference() else buffer._version)
            for name, buffer in self.used.named_buffers("used")
        }

    def changed(self, before: dict[str, tuple[int, int]], values: dict[str, Tensor]) -> list[str]:
        """Buffers of modules of which one was written or replaced since.

        Versions alone do not tell: batch norm writes its statistics without a new one. And the mean
        of states that are zero may stay as it is for a step.

        Args:
            values: Copies of that time.
        """
        now, buffers = self.buffer_versions(), dict(self.used.named_buffers("used"))
        modules = {
            _module_of(name)
            for name, version in now.items()
            if version != before.get(name)
            or (name in values and _differ(values[name], buffers[name]))
        }
        return [name for name in now if _module_of(name) in modules]

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of these buffers now."""
        buffers = dict(self.used.named_buffers("used"))
        return {name: buffers[name].detach().clone() for name in names}

    def tensors(self) -> list[Tensor]:
        """Whose values backward exchanges in the modules.

        Not parameters that the step may also read by themselves, nor buffers with a gradient.
        """
        tensors = [p for p in self.used.parameters() if id(p) not in self._apart]
        return tensors + [buffer for buffer in self.used.buffers() if not buffer.requires_grad]

    def write(self, buffers: dict[str, Tensor]) -> None:
        """Gives buffers these values."""
        now = dict(self.used.named_buffers("used"))
        for name, value in buffers.items():
            now[name].copy_(value)

    def frozen(self) -> dict[str, Tensor]:
        """Parameters without gradient, and buffers, by name."""
        with self.locked():
            named = dict(self.used.named_parameters("used"))
            buffers = dict(self.used.named_buffers("used"))
        return {name: p for name, p in named.items() if not p.requires_grad} | buffers

    def moved(self, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those that are no longer in their places, as after torch.func.functional_call."""
        now = self.frozen()
        return {name: old.detach() for name, old in frozen.items() if now.get(name) is not old}

    def _slots(self) -> dict[str, list[str]]:
        """For the name of each parameter and buffer all places that hold it, each once.

        torch.func.functional_call finds a module that is reachable by two ways twice, and would put
        back at the end what it has put there itself.
        """
        if not self._known_slots:
            places: dict[int, list[str]] = {}
            for prefix, module in self.named_modules():
                for name, tensor in (*parameters_of(module).items(), *module._buffers.items()):
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append(f"{prefix}.{name}")
            named = [*self.used.named_parameters("used"), *self.used.named_buffers("used")]
            self._known_slots = {name: places[id(tensor)] for name, tensor in named}
        return self._known_slots

    def call_with(self, values: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        """``function()`` while parameters and buffers of these names have other values."""
        if not values:
            return function()
        with self.locked():
            slots = self._slots()
            in_slots = {slot: value for n, value in values.items() for slot in slots.get(n, [n])}
            return torch.func.functional_call(self, in_slots, (function,), tie_weights=False)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within, no other thread exchanges values of these modules."""
        with ExitStack() as stack:
            for module in self.used:
                with _locks_lock:
                    lock = _locks.setdefault(module, CallerLock())
                stack.enter_context(lock)
            yield

    def training_flags(self) -> list[bool]:
        return [getattr(module, "training", False) for module in self.used.modules()]

    @contextmanager
    def with_training_flags(self, flags: Sequence[bool]) -> Iterator[None]:
        """Within, modules are in training or not as at another time."""
        modules = list(self.used.modules())
        now = [getattr(module, "training", False) for module in modules]
        try:
            _set_training(modules, flags)
            yield
        finally:
            _set_training(modules, now)


_MOST_STATISTICS = 2**20
"""Numbers of a buffer that is looked at: larger ones hold data, which is written with a version."""


def _differ(a: Tensor, b: Tensor) -> bool:
    try:
        return a.numel() <= _MOST_STATISTICS and not torch.equal(a, b)
    except (RuntimeError, TypeError, AttributeError):  # sparse ones and the like are not compared
        return False


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
