"""Tasks whose weights stay in a file: more of them than the host has memory for."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .block_layout import Layout, lay_out
from .engines import Engine, Event
from .host_memory import allocate
from .task import SHARED, Task, TaskKey, Version

_MOST_KEPT = 64
"""Modules of tasks that were used last, which are views of the file and take little memory."""


class File:
    """A file of safetensors with the state dict of a bank, by the name of each task."""

    def __init__(
        self, path: str | Path, module: nn.Module, prefix: str = "", *, has_shared: bool = False
    ) -> None:
        """
        Args:
            prefix: Of the bank's tensors in the file of a whole model.
            has_shared: The bank has weights that all tasks add.
        """
        self._file = _open_safetensors(path)
        self.path, self.module = path, module
        self._prefix = prefix and prefix.rstrip(".") + "."
        names = self._names(list(self._file.keys()))
        expected = module.state_dict()
        for key in [key for key in names if key != SHARED] or names:
            self._check(key, names[key], expected, list(names))
        if has_shared != (SHARED in names):
            known = ", ".join(list(names)[:8])
            raise ValueError(
                f'fusedrnn: shared="add" needs a file with tensors {SHARED}.…; {path} has {known}'
                if has_shared
                else f"fusedrnn: {path} has tensors {SHARED}.…, which are added to the weights of "
                'all tasks: open it with shared="add"'
            )
        if has_shared:
            self._check(SHARED, names[SHARED], expected, list(names))
        tasks = (key for key in names if not (has_shared and key == SHARED))
        self.keys: dict[str, TaskKey] = dict(
            sorted(((k, _key_of(k)) for k in tasks), key=_numbers_first)
        )
        """Of tasks, and what they stand for."""

    def _names(self, full: list[str]) -> dict[str, list[str]]:
        """The tensors of each task."""
        names: dict[str, list[str]] = {}
        for whole in full:
            key, dot, name = whole.removeprefix(self._prefix).partition(".")
            if whole.startswith(self._prefix):
                if not (key and dot and name):
                    raise ValueError(
                        f"fusedrnn: {whole} in {self.path} belongs to no task: a bank's tensors "
                        "are named like 3.weight, with the task before the first dot"
                    )
                names.setdefault(key, []).append(name)
        if not names:
            there = ", ".join(sorted({whole.partition(".")[0] + "." for whole in full})[:8])
            raise ValueError(
                f"fusedrnn: {self.path} has no tensor with a name that begins with "
                f"{self._prefix!r}; they begin with {there}"
                if full
                else f"fusedrnn: {self.path} has no tensors"
            )
        return names

    def _check(
        self, key: str, found: list[str], expected: dict[str, Tensor], keys: list[str]
    ) -> None:
        if set(found) != expected.keys():
            differ = sorted(set(found) ^ expected.keys())
            raise ValueError(
                f"fusedrnn: task {key!r} in {self.path} must have the tensors of the module, "
                f"{', '.join(sorted(expected)[:4])}, …; only one of the two has "
                f"{', '.join(differ[:4])}. If the file has a whole model, pass the place of the "
                f"bank as prefix=: under {self._prefix!r} it has {', '.join(keys[:8])}"
            )
        for name in found:
            shape = tuple(self._file.get_slice(f"{self._prefix}{key}.{name}").get_shape())
            if shape != tuple(expected[name].shape):
                raise ValueError(
                    f"fusedrnn: {name} of task {key!r} in {self.path} must have the module's shape "
                    f"{tuple(expected[name].shape)}, got {shape}"
                )

    def read(self, key: str) -> nn.Module:
        """The module of a task, whose tensors are those of the file, read when they are used."""
        # All but what the file has, so each task has its own buffers that are not persistent.
        known = self.module.state_dict(keep_vars=True).values()
        memo: dict[int, Any] = {id(tensor): tensor for tensor in known}
        module = copy.deepcopy(self.module, memo)
        expected = module.state_dict()
        state = {name: self._file.get_tensor(f"{self._prefix}{key}.{name}") for name in expected}
        for name, tensor in state.items():
            if tensor.dtype != expected[name].dtype:
                raise ValueError(
                    f"fusedrnn: {name} of task {key!r} in {self.path} must be "
                    f"{expected[name].dtype} as in the module, got {tensor.dtype}"
                )
        module.load_state_dict(state, assign=True)
        return module.requires_grad_(False).eval()


def _open_safetensors(path: str | Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "fusedrnn: WeightBank.open reads a file of safetensors: pip install safetensors"
        ) from error
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"fusedrnn: {path} is not a safetensors file ({error}): make one by "
            "safetensors.torch.save_file(bank.state_dict(), path)"
        ) from error


def _key_of(name: str) -> TaskKey:
    """The number that a name is, if it is written as Python does."""
    is_number = name.isascii() and name.isdecimal() and str(int(name)) == name
    return int(name) if is_number else name


def _numbers_first(item: tuple[str, TaskKey]) -> tuple[bool, int, str]:
    """Numbers first."""
    name, key = item
    return isinstance(key, str), 0 if isinstance(key, str) else key, name


class FileTask(Task):
    """A task that is read when it is used."""

    def __init__(self, key: TaskKey, module: nn.Module, layout: Layout, tasks: FileTasks) -> None:
        self._tasks = tasks
        super().__init__(key, module, layout)
        self.tensors = [where[name] for (where, name), *_ in self._owners]
        self._refreshed = 0

    def refresh(self, indices: Iterable[int] | None = None) -> None:
        self._refreshed += 1

    def check(self) -> None:
        """Nobody trains them."""

    def version(self) -> Version:
        return Version((), tuple((self._refreshed, 0) for _ in self.tensors))

    def bytes(self) -> Tensor:
        assert self._tasks.staging is not None
        return self._tasks.staging.fill(self)

    def was_read(self, event: Event) -> None:
        assert self._tasks.staging is not None
        self._tasks.staging.event = event


class Staging:
    """One block of host memory, through which weights go from the file to the device."""

    def __init__(self, nbytes: int, engine: Engine) -> None:
        self._memory, self._engine = allocate(nbytes), engine
        engine.pin(self._memory)
        self.event: Event | None = None
        """When the last copy out of it is done."""

    def fill(self, task: FileTask) -> Tensor:
        """The bytes of a task."""
        if self.event is not None:
            self._engine.host_wait(self.event)
        with torch.no_grad():
            for place, tensor in zip(task.places, task.tensors, strict=True):
                place.view(self._memory).copy_(tensor)
        return self._memory[: task.nbytes]


class FileTasks(Mapping[str, Task]):
    """The tasks of a file; those used last are kept."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._layout = lay_out(file.module, "the module")
        self._kept: OrderedDict[str, FileTask] = OrderedDict()
        self.staging: Staging | None = None

    def use_engine(self, engine: Engine | None) -> None:
        """Weights go to the device of this engine."""
        self.staging = None if engine is None else Staging(self._layout.nbytes, engine)

    def keys_of_tasks(self) -> list[TaskKey]:
        return list(self._file.keys.values())

    def nbytes_of_largest(self) -> int:
        return self._layout.nbytes

    def dtypes(self) -> set[torch.dtype]:
        return {place.dtype for place in self._layout.places}

    def memories(self) -> list[Tensor]:
        """Blocks that have tasks: none."""
        return []

    def __getitem__(self, key: str) -> FileTask:
        if key not in self._file.keys:
            raise KeyError(key)
        task = self._kept.pop(key, None)
        if task is None:
            task = FileTask(self._file.keys[key], self._file.read(key), self._layout, self)
        self._kept[key] = task
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return task

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys)

    def __len__(self) -> int:
        return len(self._file.keys)
