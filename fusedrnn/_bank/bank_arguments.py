"""The arguments of a bank: what they must be, and what is said if they are not."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.types import Device as DeviceLike

from .bank_state import BankState
from .task import SHARED, Task, TaskKey


def has_numbered_tasks(modules: Any, tasks: Any) -> bool:
    """Whether tasks have numbers in place of names."""
    if _is_single(modules):
        return _count(tasks) is not None
    return not isinstance(modules, Mapping | nn.ModuleDict)


def _is_single(modules: Any) -> bool:
    is_several = isinstance(modules, nn.ModuleList | nn.ModuleDict)
    return isinstance(modules, nn.Module) and not is_several


def tasks_of(bank: BankState, modules: Any, tasks: Any, shared: str | None) -> Iterator[Task]:
    """The tasks of a bank that is made, which are not in its memory yet.

    All are checked before the first one comes; but modules of a generator, and copies, are made
    when the iterator comes to them.
    """
    if _is_single(modules):
        names = _names_of_copies(tasks)
        for name in names:
            check_free(bank, name)
        check_kind(modules, names[0])
        made = ((name, copy.deepcopy(modules)) for name in names)
        return _checked(bank, made if shared is None else with_zero_weights(made))
    if tasks is not None or shared is not None:
        name = "tasks" if tasks is not None else "shared"
        raise TypeError(
            f"fusedrnn: {name} needs a single module, which the bank copies; got a "
            f"{type(modules).__name__} of modules"
        )
    if isinstance(modules, Mapping | nn.ModuleDict):
        return iter(list(_checked(bank, modules.items())))
    if not isinstance(modules, Iterable):
        raise TypeError(
            f"fusedrnn: modules must be a module, a list or a dict, got {type(modules).__name__}"
        )
    found = _checked(bank, enumerate(modules))
    return iter(list(found)) if isinstance(modules, Sequence | nn.ModuleList) else found


def _names_of_copies(tasks: Any) -> list[TaskKey]:
    if tasks is None:
        raise TypeError(
            "fusedrnn: a bank of a single module needs tasks: how many copies, or their names"
        )
    count = _count(tasks)
    if count is not None and count > 0 and not isinstance(tasks, bool):
        return list(range(count))
    if count is not None or isinstance(tasks, str) or not isinstance(tasks, Iterable):
        raise ValueError(
            f"fusedrnn: tasks must be a number above 0, or a list of names, got {as_text(tasks)}"
        )
    names = [key_of(key) for key in tasks]
    if not names:
        raise ValueError("fusedrnn: a bank needs at least one task, got none")
    return names


def _count(tasks: Any) -> int | None:
    with suppress(TypeError):
        return index(tasks)
    return None


def _checked(bank: BankState, named: Iterable[tuple[Any, nn.Module]]) -> Iterator[Task]:
    names: set[str] = set()
    ids: dict[int, Task] = {}
    memory: dict[int, tuple[StorageWeakRef, Task]] = {}
    for given, module in named:
        key = key_of(given)
        if str(key) in names:
            raise ValueError(
                "fusedrnn: names of tasks must differ as text, as they do in a state dict; got "
                f"{key!r} twice"
            )
        names.add(str(key))
        check_free(bank, key)
        check_kind(module, key)
        task = Task(key, module)
        for tensor in tensors_in(module):
            # Memory of tasks that are in the bank already was freed, and may be another's now, if
            # nobody else has it.
            storage, other = memory.get(tensor.data_ptr(), (None, None))
            other = ids.get(id(tensor)) or (None if storage is None or storage.expired() else other)
            if other is not None and other is not task:
                raise shared_tensor_error(task.name, other.name)
            ids[id(tensor)] = task
            if tensor.numel():
                memory[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage()), task
        yield task
    if not names:
        raise ValueError("fusedrnn: a bank needs at least one task, got none")


def with_zero_weights(
    named: Iterable[tuple[TaskKey, nn.Module]],
) -> Iterator[tuple[TaskKey, nn.Module]]:
    """The modules with all parameters 0."""
    for key, module in named:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        yield key, module


def in_parts(tasks: Iterable[Task], nbytes: int) -> Iterator[list[Task]]:
    """So many tasks at a time that they take about ``nbytes``."""
    part: list[Task] = []
    taken = 0
    for task in tasks:
        part.append(task)
        taken += task.nbytes
        if taken >= nbytes:
            yield part
            part, taken = [], 0
    if part:
        yield part


def check_free(bank: BankState, key: TaskKey) -> None:
    """Whether a bank can have a task of this name."""
    name = str(key)
    if name == "" or "." in name:
        raise ValueError(
            "fusedrnn: the name of a task must not be empty or have a dot, since state dicts put "
            f"it before a dot; got {key!r}"
        )
    if name == SHARED and bank._adds:
        raise ValueError(f'fusedrnn: with shared="add" no task can have the name {SHARED!r}')
    if name in bank._modules:
        raise ValueError(f"fusedrnn: there is a task {key!r} already")
    if name in vars(bank) or (name.startswith("_") and hasattr(type(bank), name)):
        raise ValueError(
            f"fusedrnn: no task can have the name {key!r}, which is an attribute of the bank: use "
            "another name"
        )


def check_kind(module: Any, key: TaskKey) -> None:
    """Whether a module can be a task."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fusedrnn: a task must be an nn.Module, got {type(module).__name__} for {key!r}"
        )
    for inner in module.modules():
        if isinstance(inner, torch.jit.ScriptModule):
            raise TypeError(
                f"fusedrnn: task {key!r} has a {type(inner).__name__}, whose tensors are in C++ "
                "where a bank cannot replace them: pass the module that it was made from"
            )
        if isinstance(inner, BankState):
            raise TypeError(
                f"fusedrnn: task {key!r} has a WeightBank in it, and a task of a bank cannot "
                "contain a bank: make both banks submodules of the model"
            )


def shared_tensor_error(task: str, other: str) -> ValueError:
    return ValueError(
        f"fusedrnn: {task} shares a tensor with {other}: keep tensors that tasks have in common "
        "outside of the bank, or use shared='add'"
    )


def tensors_in(module: nn.Module) -> Iterator[Tensor]:
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


def key_of(key: Any) -> TaskKey:
    """The int or str that a key is, or stands for: one of NumPy or of an Enum, or a tensor."""
    if isinstance(key, str):
        return str.__str__(key)  # of an Enum its value
    is_bool = isinstance(key, bool)
    if isinstance(key, Tensor):
        is_bool = key.dtype == torch.bool
        if not key.is_cpu:
            raise TypeError(
                f"fusedrnn: the task t in bank(t, x) must be an int or a str, got {as_text(key)}: "
                "keep it on the host, since Python has to know which module to call"
            )
    if not is_bool:
        with suppress(TypeError):
            return index(key)
    raise TypeError(
        f"fusedrnn: a task must be an int or a str, got {as_text(key)}: call bank(t, x) with task t"
    )


def as_text(value: Any) -> str:
    """A value in a message, short however large it is."""
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if isinstance(value, nn.Module):
        return f"a module {kind}"
    if isinstance(value, Tensor):
        return f"a {kind} of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    if isinstance(shape, tuple):
        return f"a {kind} of shape {shape}"
    if isinstance(value, tuple | list | Mapping):
        return f"a {kind} of {len(value)}"
    return reprlib.repr(value)


def check_pair(item: Any) -> Any:
    """What ``prefetching`` takes."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(
            "fusedrnn: prefetching takes pairs (task, batch), where a batch may be a tuple; got "
            f"{as_text(item)}"
        )
    return item


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
