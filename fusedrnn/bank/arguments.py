"""The arguments of a bank: what they must be, and what is said if they are not."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device as DeviceLike

from .optimizer import SHARED
from .task import Task

Key = int | str
"""The name of a task."""


def named_modules(
    modules: Any, tasks: int | Sequence[str] | None, shared: str | None
) -> tuple[Iterator[tuple[Key, nn.Module]], bool]:
    """The modules with the names of their tasks, and whether these are those of a list.

    Modules of a generator, and copies, are made when the iterator comes to them.
    """
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList | nn.ModuleDict):
        names = _names_of_copies(tasks, shared)
        made = ((name, copy.deepcopy(modules)) for name in names)
        return _checked(made), isinstance(tasks, int)
    if tasks is not None or shared is not None:
        name = "tasks" if tasks is not None else "shared"
        raise TypeError(
            f"fusedrnn: {name} is for a single module, of which a bank makes copies; got a "
            f"{type(modules).__name__} of modules"
        )
    if isinstance(modules, Mapping | nn.ModuleDict):
        found: dict[Any, Any] = dict(modules.items())
        check_modules(found)
        return _checked(found.items()), False
    if not isinstance(modules, Iterable):
        raise TypeError(
            f"fusedrnn: modules must be a module, a list or a dict, got {type(modules).__name__}"
        )
    if isinstance(modules, Sequence | nn.ModuleList):
        check_modules(dict(enumerate(modules)))
    return _checked(enumerate(modules)), True


def _names_of_copies(tasks: Any, shared: str | None) -> list[Key]:
    if tasks is None:
        raise TypeError(
            "fusedrnn: a bank of a single module needs tasks: how many copies, or their names"
        )
    if isinstance(tasks, str | bool) or (isinstance(tasks, int) and tasks < 1):
        raise ValueError(
            f"fusedrnn: tasks must be a number above 0, or a list of names, got {tasks!r}"
        )
    names: list[Key] = list(range(tasks) if isinstance(tasks, int) else tasks)
    if shared is not None and SHARED in map(str, names):
        raise ValueError(f'fusedrnn: with shared="add" no task can have the name {SHARED!r}')
    return names


def _checked(named: Iterable[tuple[Key, nn.Module]]) -> Iterator[tuple[Key, nn.Module]]:
    names: set[str] = set()
    owners: dict[int, str] = {}
    for key, module in named:
        check_key(key)
        if str(key) in names:
            raise ValueError(
                "fusedrnn: names of tasks must differ as text, as they do in a state dict; got "
                f"{key!r} twice"
            )
        names.add(str(key))
        _check_module(key, module, owners)
        yield key, module
    if not names:
        raise ValueError("fusedrnn: a bank needs at least one task, got none")


def zeroed(named: Iterable[tuple[Key, nn.Module]]) -> Iterator[tuple[Key, nn.Module]]:
    """The modules with all parameters 0."""
    for key, module in named:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        yield key, module


def in_parts(named: Iterable[tuple[Key, nn.Module]], nbytes: int) -> Iterator[dict[Key, Task]]:
    """The tasks of modules, so many at a time that they take about ``nbytes``."""
    part: dict[Key, Task] = {}
    taken = 0
    for key, module in named:
        part[key] = Task(key, module)
        taken += part[key].nbytes
        if taken >= nbytes:
            yield part
            part, taken = {}, 0
    if part:
        yield part


def check_key(key: Any) -> None:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(f"fusedrnn: the name of a task is an int or a str, got {key!r}")
    if key == "" or "." in str(key):
        raise ValueError(
            f"fusedrnn: the name of a task has no dot, and is not empty, since state dicts have it "
            f"before a dot; got {key!r}"
        )


def check_modules(made: Mapping[Any, Any], known: Iterable[nn.Module] = ()) -> None:
    """Tasks are modules that have no tensor in common, also with those of a bank."""
    owners = {id(t): "another task" for module in known for t in _tensors_of(module)}
    for key, module in made.items():
        _check_module(key, module, owners)


def _check_module(key: Any, module: Any, owners: dict[int, str]) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fusedrnn: a task must be an nn.Module, got {type(module).__name__} for {key!r}"
        )
    tensors = {id(tensor) for tensor in _tensors_of(module)}
    for number in tensors & owners.keys():
        raise ValueError(
            f"fusedrnn: task {key!r} shares a tensor with {owners[number]}: what all tasks have "
            "in common belongs outside of the bank, or is shared='add'"
        )
    owners |= dict.fromkeys(tensors, f"task {key!r}")


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def check_like_shared(task: Task, shared: nn.Module) -> None:
    ours = [(p.shape, p.dtype) for p in task.module.parameters()]
    theirs = [(p.shape, p.dtype) for p in shared.parameters()]
    if ours != theirs:
        raise ValueError(
            f"fusedrnn: {task.name} must have the shapes and dtypes of shared, {theirs}, got {ours}"
        )


def check_inputs(values: Iterable[Any], device: torch.device) -> None:
    for value in values:
        if isinstance(value, tuple | list):
            check_inputs(value, device)
            continue
        is_input = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
        if is_input and value.device != device:
            raise ValueError(
                f"fusedrnn: the bank computes on {device}, got an input on {value.device}: "
                "move the input, or the bank by to()"
            )


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"fusedrnn: {name} must be one of {choices}, got {value!r}")


def name_of(key: Any) -> Any:
    """The int that an index of another type stands for."""
    if isinstance(key, Tensor) and not key.is_cpu:
        raise TypeError(
            f"fusedrnn: a task is an int or a str, got a tensor on {key.device}: keep tasks on the "
            "host, since Python has to know which module to call"
        )
    try:
        return operator.index(key)
    except TypeError:
        raise TypeError(f"fusedrnn: a task is an int or a str, got {key!r}") from None


def device_of(device: DeviceLike) -> torch.device:
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if found is None else found
    made = torch.device(device)
    if made.type == "meta":
        raise ValueError("fusedrnn: a WeightBank cannot compute on the meta device")
    if made.type != "cpu" and made.index is None:
        made = torch.device(made.type, torch.accelerator.current_device_index())
    return made
