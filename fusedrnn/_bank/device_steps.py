"""Steps of optimizers on the device.

With ``step_on="device"`` the weights, gradients and states of tasks in use go to the device for the
time of the step, which there takes none of the host's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .bank_device import Device
from .block_layout import Place, aligned
from .engines import Event
from .task import Task


class DeviceStep:
    """One step, between the hooks before and after it."""

    def __init__(self, device: Device, optimizer: Optimizer, tasks: Iterable[Task]) -> None:
        """
        Args:
            tasks: Those that it may step.
        """
        self._moved: list[_TaskStep] = []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for task in tasks:
            task.check()
            stepped = [
                i for i, t in enumerate(task.tensors) if t.grad is not None and id(t) in groups
            ]
            if stepped:
                of = [groups[id(task.tensors[i])] for i in stepped]
                step = _TaskStep(device, task, stepped, optimizer.state, of)
                self._moved.append(step)

    def go_home(self) -> None:
        for step in self._moved:
            step.go_home()


class _TaskStep:
    """The tensors of one task, on the device for a step."""

    def __init__(
        self,
        device: Device,
        task: Task,
        stepped: list[int],
        state: Any,
        groups: list[dict[str, Any]],
    ) -> None:
        """
        Args:
            stepped: Indices of the task's tensors that take the step.
            state: That of the optimizer.
            groups: Its group of each of these tensors.
        """
        self._device, self._task, self._state = device, task, state
        assert device.engine is not None
        self._engine = device.engine
        self._parameters = [task.tensors[i] for i in stepped]
        self._grads = [_grad_of(p) for p in self._parameters]
        self._homes = [p.data for p in self._parameters]
        self._places = _places_side_by_side(task, stepped)
        self._sources: list[Tensor] = []
        """Of copies that may be under way."""
        self._stepped = [task.places[i] for i in stepped]
        parameters = sum(place.is_parameter for place in task.places)
        self._others = [i for i in range(parameters) if i not in stepped]
        self._before = self._version_of_others()
        weights = self._bring_weights(self._stepped)
        grads = self._bring_grads()
        self._there = [(grad, grad._version) for grad in grads]
        of_each = [state.get(p, {}) for p in self._parameters]
        for name in sorted({name for own in of_each for name in own}):
            values = [own.get(name) for own in of_each]
            if all(_is_like(v, p) for v, p in zip(values, self._parameters, strict=True)):
                for own, value in zip(of_each, self._bring(values), strict=True):
                    own[name] = value
            else:
                for own, value, group in zip(of_each, values, groups, strict=True):
                    if isinstance(value, Tensor) and (value.ndim or _counts_there(group)):
                        own[name] = value.to(device.device)
        for parameter, weight, grad in zip(self._parameters, weights, grads, strict=True):
            _set_data_and_grad(parameter, weight, grad)

    def _bring_weights(self, places: list[Place]) -> list[Tensor]:
        task, device = self._task, self._device
        assert device.slots is not None
        end = task.layout.parameter_end
        self._weights = _empty_block(end, device.device)
        slot = device.slots.find(task, device.key(task))
        self._slot = None if slot is None or slot.is_sum or slot.running else slot
        if self._slot is not None:
            self._slot.use(self._engine)
            self._weights.copy_(self._slot.memory[:end])
        else:
            self._copy(self._weights, task.bytes()[:end])
        return [place.view(self._weights) for place in places]

    def _bring_grads(self) -> list[Tensor]:
        if all(grad.layout == torch.strided for grad in self._grads):
            return self._bring(self._grads)
        return [grad.to(self._device.device) for grad in self._grads]  # sparse ones have no block

    def _bring(self, values: list[Any]) -> list[Tensor]:
        """Tensors on the device, by one copy."""
        nbytes = self._nbytes()
        source = _block_of(values, self._places, nbytes)
        if source is None:
            source = self._device.home.pool.take(nbytes)[:nbytes]
            for place, value in zip(self._places, values, strict=True):
                place.view(source).copy_(value.detach())
        there = _empty_block(nbytes, self._device.device)
        self._copy(there, source)
        return [place.view(there) for place in self._places]

    def _copy(self, there: Tensor, source: Tensor) -> None:
        self._sources.append(source)
        after = [self._engine.mark(self._engine.stream())]  # memory that torch may have used before
        self._engine.wait(self._engine.bring(there, source, after))

    def _send(self, values: list[Tensor]) -> tuple[list[Tensor], Event]:
        """Tensors on the host, by one copy, and when they are there."""
        nbytes = self._nbytes()
        there = _block_of(values, self._places, nbytes)
        if there is None:
            there = _empty_block(nbytes, self._device.device)
            for place, value in zip(self._places, values, strict=True):
                place.view(there).copy_(value)
        pool = self._device.home.pool
        block = pool.take(nbytes)[:nbytes]
        self._sources.append(there)
        event = self._engine.send(block, there)
        pool.fills(block, event)
        return [place.view(block) for place in self._places], event

    def _version_of_others(self) -> Any:
        """Of the weights that take no step."""
        version = self._task.version()
        return version.flat, [version.tensors[i] for i in self._others]

    def _grad_now(
        self, parameter: Tensor, home: Tensor, there: tuple[Tensor, int]
    ) -> Tensor | None:
        """The gradient on the host, with what the step or its hooks have done to it."""
        now = parameter.grad
        if now is None:
            return None
        if now is there[0] and now._version == there[1]:
            return home
        if now.layout != torch.strided or now.layout != home.layout:
            return now.to("cpu")
        home.copy_(now)
        return home

    def _nbytes(self) -> int:
        return self._places[-1].offset + self._places[-1].span

    def go_home(self) -> None:
        """After the step."""
        task, device = self._task, self._device
        end = task.layout.parameter_end
        grads = [
            self._grad_now(*of)
            for of in zip(self._parameters, self._grads, self._there, strict=True)
        ]
        home, there = task.bytes()[:end], self._weights
        parts = [slice(0, end)]
        if self._others:  # which the host may have changed meanwhile
            parts = [slice(place.offset, place.offset + place.span) for place in self._stepped]
        events = [self._engine.send(home[part], there[part]) for part in parts]
        of_each = [self._state.get(p, {}) for p in self._parameters]
        for name in sorted({name for own in of_each for name in own}):
            values = [own.get(name) for own in of_each]
            if all(_is_like(v, p) for v, p in zip(values, self._parameters, strict=True)):
                back, event = self._send(values)
                events.append(event)
                for own, value in zip(of_each, back, strict=True):
                    own[name] = value
            else:
                for own, value in zip(of_each, values, strict=True):
                    if isinstance(value, Tensor):
                        own[name] = value.to("cpu")
        for event in events:
            self._engine.host_wait(event)
        for parameter, data, grad in zip(self._parameters, self._homes, grads, strict=True):
            _set_data_and_grad(parameter, data, grad)
        is_whole = self._before == self._version_of_others()
        torch.autograd.graph.increment_version(self._parameters)
        slot = self._slot
        if slot is not None and slot.task is task and is_whole and not slot.is_held():
            for event in slot.take_marks(self._engine):  # of other streams, too
                self._engine.wait(event)
            slot.memory[:end].copy_(self._weights)
            slot.use(self._engine)
            slot.settle(self._engine)
            slot.arrives(self._engine.mark(self._engine.stream()))
            slot.key, slot.checked = device.key(task), None


def _set_data_and_grad(parameter: Tensor, data: Tensor, grad: Tensor | None) -> None:
    parameter.grad = None  # torch refuses one on another device
    parameter.data = data
    parameter.grad = grad


def _empty_block(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_like(value: Any, parameter: Tensor) -> bool:
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape
    return is_like and value.dtype == parameter.dtype and value.layout == torch.strided


def _counts_there(group: dict[str, Any]) -> bool:
    """Whether an optimizer keeps its count of steps where the weights are."""
    return bool(group.get("fused") or group.get("capturable"))


def _places_side_by_side(task: Task, stepped: list[int]) -> list[Place]:
    places, end = [], 0
    for i in stepped:
        like = torch.empty_like(task.tensors[i], device="meta")
        places.append(task.places[i]._replace(offset=end, stride=like.stride()))
        end = aligned(end + places[-1].span)
    return places


def _block_of(values: list[Any], places: list[Place], nbytes: int) -> Tensor | None:
    """The memory that has tensors at these places already."""
    storage = values[0].untyped_storage()
    begin = values[0].data_ptr() - places[0].offset - storage.data_ptr()
    if not 0 <= begin <= storage.nbytes() - nbytes:
        return None
    for value, place in zip(values, places, strict=True):
        is_there = value.data_ptr() == storage.data_ptr() + begin + place.offset
        if not is_there or value.stride() != place.stride:
            return None
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, begin, (nbytes,), (1,))
