"""The bank as a module: tasks by name, calls, and what torch does to a module.

Longer than 350 lines, because all that users and torch call is here, with its documentation.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.types import Device as DeviceLike

from . import ranks
from .backward_passes import Pass
from .bank_arguments import (
    as_text,
    check_choice,
    check_free,
    check_inputs,
    check_kind,
    check_like_shared,
    check_pair,
    device_of,
    has_numbered_tasks,
    key_of,
    tasks_of,
    with_zero_weights,
)
from .bank_device import Device
from .bank_plan import BankPlan, plan_of
from .bank_state import BankState
from .engines import Engine
from .file_tasks import File, FileTasks
from .host_tasks import HostTasks
from .optimizer_hooks import watch
from .task import SHARED, Task, TaskKey
from .task_call import TaskCall
from .task_optimizer import TaskOptimizer
from .tensor_conversion import conversion_of

_RUNTIME = ("_generation", "_device", "_end", "_ranks", "_tasks", "_stepping")


class WeightBank(BankState):
    """A list of modules, one for each task t = 1..T, of which the device holds only those in use.

    ``bank(t, ...)`` computes what ``modules[t](...)`` of an ``nn.ModuleList`` does. The weights of
    all tasks stay in host memory, one block per task; a call copies the weights of its task to the
    device at once, and backward copies their gradient to ``.grad`` on the host. So the device needs
    memory for ``slots`` tasks, however many there are. On a CPU a call just calls the module.

    ``bank[t]`` is the module of a task, with its tensors on the host: initialise, load, freeze or
    inspect them there. Any optimizer of torch steps them; ``optimizer()`` makes one that does not
    look at idle tasks. The state dict is that of an ``nn.ModuleList``, or of an ``nn.ModuleDict``.

    With several ranks the gradients of tasks in use are averaged at the end of each backward pass,
    and nothing is sent for other tasks: call ``WeightBank.exclude(model)`` before
    ``DistributedDataParallel(model)``, and pass ``ignored_params=set(bank.task_parameters())`` to
    ``fully_shard``. All ranks must run the same number of backward passes through the bank; a rank
    whose backward trains no task calls ``sync_gradients()``. All ranks must begin with the same
    weights, which the bank does not send.

    Args:
        modules: A list or a dict of modules, which may differ in shape; or one module, which is
            copied for each of ``tasks``.
        tasks: The number of copies, or a name for each.
        device: The device that computes calls: the accelerator if there is one, else the CPU;
            ``model.to(device)`` changes it.
        shared: "add": the weights of a task are those of the module plus its own, which start as
            0. The module is ``bank.shared``, stays on the device, and is trained too. Its buffers
            are not used: each task has its own.
        slots: The number of tasks that the device has memory for; with 2, the next task is copied
            while one is in use.
        average: How gradients are averaged over ranks. "world": the mean over all ranks, as in
            DistributedDataParallel; "users": the mean over the ranks that used the task.
        process_group: The process group of torch.distributed; None for all ranks.
        step_on: Where optimizers step the tasks in use: on the "host", or on the "device", where
            their weights, gradients and states are copied for the step.

    Raises:
        TypeError, ValueError: An argument is of another kind; tasks have no or the same names, or
            share a tensor; a module is of TorchScript, or has a bank in it; a tensor is a
            subclass, on the meta device, or not strided.
        RuntimeError: From a call: it is within a DistributedDataParallel that did not exclude the
            bank, or in a replica of DataParallel. From backward: weights have changed since
            forward, or ranks have diverged. The message says which.
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module] | Mapping[Any, nn.Module],
        tasks: int | Sequence[str] | None = None,
        *,
        device: DeviceLike = None,
        shared: Literal["add"] | None = None,
        slots: int = 2,
        average: ranks.Average = "world",
        process_group: Any = None,
        step_on: Literal["host", "device"] = "host",
    ) -> None:
        super().__init__()
        check_choice("shared", shared, (None, "add"))
        check_choice("step_on", step_on, ("host", "device"))
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"fusedrnn: slots must be an int of at least 1, got {slots!r}")
        self._is_list, self._adds = has_numbered_tasks(modules, tasks), shared is not None
        self._slot_count, self._step_on = slots, step_on
        self._average, self._group = average, process_group
        self._target = device_of(device)
        if shared is not None and isinstance(modules, nn.Module):
            self._modules[SHARED] = modules
        self._make_parts()
        self._hosted.take(tasks_of(self, modules, tasks, shared))
        if self._shared is not None:
            self._shared.to(self._target)  # after copies were made of it

    @classmethod
    def open(
        cls,
        file: str | Path,
        module: nn.Module,
        *,
        device: DeviceLike = None,
        slots: int = 2,
        prefix: str = "",
        shared: Literal["add"] | None = None,
    ) -> WeightBank:
        """A bank for inference whose tasks stay in a file, and are read when they are used.

        It is for more tasks than the host has memory for. Weights have no gradient, modules are in
        eval mode, and the bank's own state dict does not have the tasks. The modules of the 64
        tasks used last are kept in memory; other modules lose what was set on them, such as a hook.
        Each task is a copy of ``module``, so register hooks there before.

        Args:
            file: A safetensors file with the state dict of a bank: ``3.rnn.weight_ih_l0``.
            module: Has the structure, shapes and dtypes of every task; its weights are not used.
            prefix: The bank's place in the file of a whole model: "heads.".
            shared: "add" for the file of a bank that was made with it: ``shared.weight`` is added.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: The file is not a safetensors file, or has other tensors.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"fusedrnn: open takes a module, got {as_text(module)}")
        check_kind(module, "of the file")
        check_choice("shared", shared, (None, "add"))
        opened = File(file, module, prefix, has_shared=shared is not None)
        bank = cls([nn.Identity()], device=device, slots=slots)
        bank._modules.clear()
        bank._tasks = FileTasks(opened)
        bank._is_list = all(isinstance(key, int) for key in opened.keys.values())
        if shared is not None:
            bank._adds = True
            bank._modules[SHARED] = opened.read(SHARED).to(bank._target)
        bank._use_engine(None)
        return bank

    def _make_parts(self) -> None:
        self._tasks: HostTasks | FileTasks = HostTasks(self)
        self._ranks = ranks.Ranks(self._average, self._group)
        self._stepping = {}
        self._generation = 0
        self._use_engine(None)
        watch(self)

    def _use_engine(self, engine: Engine | None) -> None:
        """Makes the device's memory, or that of an engine, anew at the next call."""
        if "_end" in vars(self):
            self._end()
        # A graph keeps the device, which does not keep the bank: the two are in a circle through
        # nodes of autograd, where Python's collector does not see it, until this ends.
        me = weakref.ref(self)
        self._device = Device(
            self._target,
            slots=self._slot_count,
            shared=self._shared,
            most=lambda: 0 if (bank := me()) is None else bank._tasks.nbytes_of_largest(),
            deliver=lambda passed: _deliver(me(), passed),
            keeps=lambda: (bank := me()) is not None and bank._ranks.are_several(),
            engine=engine,
        )
        self._end: weakref.finalize[[], WeightBank] = weakref.finalize(
            self, self._device.forget_views
        )
        self._end.atexit = False
        self._tasks.use_engine(self._device.engine)

    @property
    def device(self) -> torch.device:
        """Where calls are computed."""
        return self._target

    # --- a list, or a dictionary, of modules ------------------------------------------------------

    @property
    def _hosted(self) -> HostTasks:
        """The tasks of a bank that may change."""
        if isinstance(self._tasks, FileTasks):
            raise RuntimeError(
                "fusedrnn: a bank of a file is read-only: its tasks cannot be added or deleted"
            )
        return self._tasks

    @property
    def _memories(self) -> list[Tensor]:
        """The blocks of host memory that have tasks."""
        return self._tasks.memories()

    def _follow_shared(self) -> None:
        """Has calls add the module that ``bank.shared`` is now."""
        if self._shared is None:
            raise RuntimeError('fusedrnn: with shared="add" a WeightBank needs bank.shared')
        for task in itertools.islice(self._tasks.values(), 1):
            check_like_shared(task, self._shared)
        self._use_engine(self._device.engine)
        self._count_change()

    def add(self, key: TaskKey, module: nn.Module | None = None) -> None:
        """Adds a task.

        With ``shared="add"`` the module has what is added, in shared's shapes; without a module it
        is 0, as that of a new bank.
        """
        tasks, key = self._hosted, key_of(key)
        check_free(self, key)
        if module is None:
            if self._shared is None:
                raise TypeError('fusedrnn: add takes a module, unless the bank has shared="add"')
            ((_, module),) = with_zero_weights([(key, copy.deepcopy(self._shared))])
        tasks.add(key, module)

    def __delitem__(self, key: TaskKey) -> None:
        """Removes a task; the names of others stay as they are."""
        self._hosted.remove(str(self._get(key).key))

    def __getitem__(self, key: TaskKey) -> nn.Module:
        """The module of a task, with its tensors on the host."""
        return self._get(key).module

    def _get(self, key: Any) -> Task:
        self._end_steps()
        if self._device.shared is not self._shared:
            self._follow_shared()
        task = self._find(key)
        if task is None:
            names = list(self._tasks)
            listed = ", ".join(names if len(names) <= 5 else [*names[:4], f"…, {names[-1]}"])
            raise KeyError(f"fusedrnn: task must be one of {listed or 'none'}, got {as_text(key)}")
        return task

    def _find(self, key: Any) -> Task | None:
        name = key if type(key) in (int, str) else key_of(key)
        task = self._tasks.get(str(name))
        if task is None and self._is_list and isinstance(name, int) and -len(self) <= name < 0:
            task = self._tasks[list(self._tasks)[name]]  # as of a list
        return task

    def task_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all tasks; not those of ``shared``, which each call adds."""
        return (parameter for module in self.values() for parameter in module.parameters())

    def __contains__(self, key: object) -> bool:
        try:
            return self._find(key) is not None
        except TypeError:
            return False

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Any]:
        """Modules, as those of a list; names, as those of a dict."""
        return iter(self.values() if self._is_list else self.keys())

    def keys(self) -> list[TaskKey]:
        """The names of tasks."""
        return self._tasks.keys_of_tasks()

    def values(self) -> Iterator[nn.Module]:
        """The modules of tasks."""
        return (task.module for task in self._tasks.values())

    def items(self) -> Iterator[tuple[TaskKey, nn.Module]]:
        """Names and modules of tasks."""
        return ((task.key, task.module) for task in self._tasks.values())

    # --- calls ------------------------------------------------------------------------------------

    def forward(self, task: TaskKey, /, *args: Any, **kwargs: Any) -> Any:
        """``bank[task](*args, **kwargs)`` on the device.

        Raises:
            KeyError: There is no such task.
            ValueError: The inputs are on another device than the bank.
        """
        if self._is_direct():
            return self._get(task).module(*args, **kwargs)
        check_inputs([*args, *kwargs.values()], self._target)
        with self.active(task) as module:
            return module(*args, **kwargs)

    def active(
        self, task: TaskKey, *, slot: int | None = None
    ) -> AbstractContextManager[nn.Module]:
        """The module of a task, with its weights on the device, for several calls or methods.

        Args:
            slot: The slot to take, from 0 on. Its memory does not move, so a CUDA graph that was
                captured over one task can be replayed for another in the same slot.

        Raises:
            KeyError: There is no such task.
            RuntimeError: The slot is in use.
        """
        found = self._get(task)
        if slot is not None and not (type(slot) is int and 0 <= slot < self._slot_count):
            raise ValueError(
                f"fusedrnn: slot must be an int from 0 to {self._slot_count - 1}, got {slot!r}"
            )
        return TaskCall(self, found, slot)

    def prefetch(self, task: TaskKey) -> None:
        """Begins to bring a task's weights to the device, where the next call finds them.

        Announce a task after the ``step()`` that changes it; what comes before is brought again.
        """
        found = self._get(task)
        if self._device.engine is not None:
            with self._device.lock:
                self._device.resident(found, ahead=True)

    def prefetching(self, batches: Iterable[tuple[TaskKey, Any]]) -> Iterator[tuple[TaskKey, Any]]:
        """The pairs (task, batch) of ``batches``, with the weights of the next one on their way."""
        source = map(check_pair, batches)
        now = next(source, None)
        while now is not None:
            self.prefetch(now[0])
            following = next(source, None)
            if following is not None and self._slot_count > 1:
                self.prefetch(following[0])
            yield now
            now = following

    def refresh(self, task: TaskKey | None = None) -> None:
        """After a change that torch does not count, such as a write to ``.data`` or through NumPy:
        forgets what the device has of a task, or of all.

        With the environment variable FUSEDRNN_CHECK=1 every use of weights that are on the device
        compares them with the host's, and an error names a change that was not told.
        """
        if task is None:
            self._refresh_all()
        else:
            self._get(task).refresh()

    # --- training ---------------------------------------------------------------------------------

    def optimizer(self, cls: Callable[..., Optimizer], **options: Any) -> TaskOptimizer:
        """One optimizer for each task, made at its first gradient, with one state dict.

        Equal to ``cls(bank.parameters(), **options)``, which looks at all tasks in each step.

        Args:
            cls: Of torch.optim, such as ``torch.optim.AdamW``.
            options: Its arguments. On a CPU ``fused=True`` is the fastest.
        """
        return TaskOptimizer(self, cls, options)

    def sync_gradients(self) -> None:
        """Averages over ranks the gradients since the last exchange, and adds them to ``.grad``.

        A backward pass through the bank does it at its end. A rank whose backward pass trains
        no task of the bank calls it after that pass, since every rank takes part. Within
        ``no_sync()`` it does nothing, as that pass does not.
        """
        if isinstance(self._tasks, FileTasks):
            return  # nobody trains them
        if self._ranks.are_several() and self._ranks.is_synced:
            self._ranks.exchange(self._tasks.in_one_order(), self._device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients add up in ``.grad`` of this rank; the next backward pass after it
        averages that.

        As DistributedDataParallel's, of which it is no part: enter both.
        """
        return self._ranks.no_sync()

    @staticmethod
    def exclude(model: nn.Module) -> nn.Module:
        """Has DistributedDataParallel leave the tasks of all banks in ``model`` to the banks.

        Call it before ``DistributedDataParallel(model)``. Returns ``model``.
        """
        names = []
        for path, bank in model.named_modules():
            if isinstance(bank, WeightBank) and isinstance(bank._tasks, HostTasks):
                bank._ranks.path = path
                for key, task in bank._tasks.items():
                    prefix = f"{path}.{key}" if path else key
                    names += [f"{prefix}.{name}" for place in task.places for name in place.names]
        ranks.exclude(model, names)
        return model

    # --- what it takes ----------------------------------------------------------------------------

    def plan(
        self,
        *,
        gb_per_s: Sequence[float] = (25.0, 55.0, 400.0),
        tflops: Sequence[float] = (50.0, 100.0, 300.0),
    ) -> BankPlan:
        """Bytes on the device and on the host, and when copies take no time; print it.

        Args:
            gb_per_s: Rates of copies: PCIe 4, PCIe 5 and NVLink-C2C.
            tflops: What the device reaches in the products of a training step.
        """
        return plan_of(self._tasks, self._slot_count, self._step_on, gb_per_s, tflops)

    def extra_repr(self) -> str:
        shared = ', shared="add"' if self._shared is not None else ""
        return f"tasks={len(self)}, device={self._target}, slots={self._slot_count}{shared}"

    # --- what torch does to a module --------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WeightBank:
        """Moves the bank's device, and converts the weights, which stay on the host."""
        found = conversion_of(fn, self._tasks.dtypes())
        if isinstance(self._tasks, FileTasks) and found.dtypes:
            raise RuntimeError(
                "fusedrnn: the weights of a bank of a file cannot be converted to another dtype: "
                "save a file with the dtypes you want"
            )
        super()._apply(fn, recurse=False)
        if not recurse:
            return self
        for name, module in self._modules.items():
            if module is not None and name not in self._tasks:
                module._apply(fn)
        if found.function is not None and isinstance(self._tasks, HostTasks):
            self._tasks.convert(found.function)
        self._target = device_of(found.device)
        self._use_engine(None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise RuntimeError(
                "fusedrnn: a WeightBank with a process_group cannot be pickled, since a group "
                "exists only in running processes: pickle its state_dict()"
            )
        return self._state()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightBank:
        memo[id(self)] = twin = self.__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._state(), memo) | {"_group": self._group})
        return twin

    def _state(self) -> dict[str, Any]:
        if isinstance(self._tasks, FileTasks):
            raise TypeError(
                "fusedrnn: a bank of a file cannot be copied or pickled: open the file again"
            )
        state = {name: value for name, value in vars(self).items() if name not in _RUNTIME}
        return state | {"_group": None, "_keys": self.keys()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        keys = state.pop("_keys")
        super().__setstate__(state)
        self._make_parts()
        modules = [cast(nn.Module, self._modules[str(key)]) for key in keys]
        self._hosted.take(map(Task, keys, modules))


def _deliver(bank: WeightBank | None, passed: Pass) -> None:
    """At the end of a pass, which may be longer there than the bank."""
    if bank is None or not bank._ranks.are_several():
        # Another thread may add to the same parameters.
        with nullcontext() if bank is None else bank._device.lock:
            for gradient in passed.gradients.values():
                gradient.accumulate()
        return
    bank._ranks.take(passed, bank._device.lock)
    bank.sync_gradients()
