"""Gradients of a bank among ranks: only those of tasks that a rank has used are exchanged."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gradients import Gradient, GradientLayout, gradient_layout
from .layout import Place
from .task import Task
from .waiting import Waiting

if TYPE_CHECKING:
    from .device import Device

Average = Literal["world", "users"]
_FAILED = -1


class Ranks:
    """How the gradients of a bank are averaged."""

    def __init__(self, average: Average, group: Any) -> None:
        if average not in ("world", "users"):
            raise ValueError(f'fusedrnn: average must be "world" or "users", got {average!r}')
        self.average: Average = average
        self.group = group
        self.is_synced = True
        self.steps = 0
        """Of optimizers that have weights of the bank."""
        self.exchanged_bytes = self.header_bytes = self.exchanges = 0
        self._local: dict[Task, Waiting] = {}
        self._host_group: Any = None
        self._compared: weakref.WeakSet[Task] = weakref.WeakSet()
        """Tasks whose weights were found to be those of other ranks."""
        self._digest: weakref.WeakKeyDictionary[Task, int] = weakref.WeakKeyDictionary()
        self._checked: weakref.ref[nn.Module] | None = None
        """The last DistributedDataParallel that a call was in."""

    def are_several(self) -> bool:
        """Whether there are other ranks to exchange gradients with."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.group) > 1

    def is_known_to_ddp(self, parameters: Callable[[], Iterable[Tensor]]) -> bool:
        """Whether the DistributedDataParallel whose forward is running sends these gradients."""
        ddp = (
            nn.parallel.DistributedDataParallel._active_ddp_module if dist.is_available() else None
        )
        if ddp is None or (self._checked is not None and self._checked() is ddp):
            return False
        sent = {id(parameter) for parameter in ddp._module_parameters}
        if any(id(parameter) in sent for parameter in parameters()):
            return True
        self._checked = weakref.ref(ddp)  # it takes no other parameters later
        return False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_synced = self.is_synced, False
        try:
            yield
        finally:
            self.is_synced = before

    def keep(self, gradients: Sequence[Gradient], device: Device) -> None:
        """Adds gradients of a pass to those that wait. Within no_sync() ``.grad`` shows these."""
        with device.lock:
            known = {g.task: self._local[g.task] for g in gradients if g.task in self._local}
            waiting = {task: own.gradient for task, own in known.items() if own.hide()}
            for gradient in gradients:
                before = waiting.get(gradient.task, gradient)
                if before.layout.places != gradient.layout.places:
                    for own in known.values():
                        own.show()
                    raise RuntimeError(
                        f"fusedrnn: parameters of {gradient.task.name} were frozen or unfrozen "
                        "while gradients waited for other ranks: call sync_gradients() of the bank "
                        "before, or zero_grad()"
                    )
            for gradient in gradients:
                if gradient.task in waiting:
                    waiting[gradient.task].join(gradient)
                else:
                    self._local[gradient.task] = Waiting(gradient)
                if not self.is_synced:
                    self._local[gradient.task].show()

    def exchange(self, tasks: Sequence[Task], device: Device) -> None:
        """Averages the waiting gradients over ranks and adds them to ``.grad``. All ranks call it.

        What one rank alone can find wrong it tells the others, so that all raise.

        Raises:
            RuntimeError: Ranks have other tasks or weights, or are at other steps.
        """
        with device.lock:
            local = {task: own.gradient for task, own in self._local.items() if own.hide()}
            self._local = {}
        ours = [self.steps, len(tasks), self._digests(tasks)]
        for rank, theirs in enumerate(self._of_all(ours)):
            if theirs != ours:
                raise _diverged(
                    f"rank {rank} is at step {theirs[0]} of its optimizer and has {theirs[1]} "
                    f"tasks, this one at step {ours[0]} with {ours[1]}"
                    + (" of other names or shapes" if theirs[2] != ours[2] else "")
                )
        users = torch.tensor([int(task in local) for task in tasks], dtype=torch.int32)
        self._reduce(users, self._group_for_host())
        self.header_bytes += users.nbytes
        used = [(task, count) for task, count in zip(tasks, users.tolist(), strict=True) if count]
        layouts = self._layouts([task for task, _ in used], local)
        divisor = dist.get_world_size(self.group)
        averaged = []
        for task, count in used:
            gradient = local.get(task) or Gradient(task, layouts[task], device.home)
            with device.lock:
                self._average(gradient, count if self.average == "users" else divisor)
            averaged.append(gradient)
        self.exchanges += 1
        # Hooks, which may raise, come after all messages.
        for gradient in averaged:
            gradient.accumulate()

    def _layouts(
        self, used: Sequence[Task], local: dict[Task, Gradient]
    ) -> dict[Task, GradientLayout]:
        """Where the gradients of each task lie, which is the same place on all ranks."""
        layouts, failed, ours = {}, None, [_FAILED, _FAILED]
        try:
            for task in used:
                task.check()
                known = local.get(task)
                layout = gradient_layout(task, task.trained()) if known is None else known.layout
                layouts[task] = layout
            new = [_sums(task) for task in used if task not in self._compared]
            ours = [_digest_of([layouts[task].places for task in used]), _digest_of(new)]
        except RuntimeError as error:  # of a module that has other tensors now
            failed = error
        of_all = self._of_all(ours)
        if failed is not None:
            raise failed
        for rank, theirs in enumerate(of_all):
            if theirs[0] == _FAILED:
                raise _diverged(f"rank {rank} has raised an error")
            if theirs[0] != ours[0]:
                raise _diverged(
                    f"rank {rank} trains other parameters of the tasks in use than this one: "
                    "freeze the same ones on all ranks"
                )
            if theirs[1] != ours[1]:
                raise _diverged(
                    f"rank {rank} has other weights than this one in tasks that are used for the "
                    "first time. Nobody sends weights of a bank: seed all ranks alike before the "
                    "modules are made, or load the same state dict on all"
                )
        self._compared.update(used)
        return layouts

    def _average(self, gradient: Gradient, divisor: int) -> None:
        for flat, grads in gradient.to_reduce():
            with torch.no_grad():
                grads.div_(divisor)  # before the sum, which in 16 bits may be too large
                numbers = torch.view_as_real(flat) if flat.is_complex() else flat
                self._reduce(numbers, self._group_for(flat.device))
            self.exchanged_bytes += flat.nbytes
        gradient.was_reduced()

    # --- messages ---------------------------------------------------------------------------------

    def _of_all(self, ours: list[int]) -> list[list[int]]:
        """These numbers of each rank."""
        mine = torch.tensor(ours, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(found, mine, group=self._group_for_host())
        except RuntimeError as error:
            raise RuntimeError(
                "fusedrnn: not all ranks came to exchange the gradients of a WeightBank. Each rank "
                "runs as many backward passes through its bank as the others; one whose backward "
                f"does not touch it calls bank.sync_gradients(). Underneath: {error}"
            ) from error
        self.header_bytes += mine.nbytes
        return [theirs.tolist() for theirs in found]

    def _digests(self, tasks: Sequence[Task]) -> int:
        """Of names and shapes of all tasks."""
        for task in tasks:
            if task not in self._digest:
                self._digest[task] = _digest_of((str(task.key), _shapes(task.places)))
        return _digest_of([self._digest[task] for task in tasks])

    def _reduce(self, tensor: Tensor, group: Any) -> None:
        dist.all_reduce(tensor, group=group)

    def _group_for(self, where: torch.device) -> Any:
        """A group that takes tensors of a device."""
        found: Any = self.group if self.group is not None else dist.group.WORLD
        is_taken = where.type != "cpu" and where.type in {d.type for d in found._device_types}
        return self.group if is_taken else self._group_for_host()

    def _group_for_host(self) -> Any:
        """A group for tensors of the host, so that headers do not wait for a GPU.

        It is this bank's alone: where ranks have diverged, a message must not meet one of somebody
        else, of which gloo would take the process down.
        """
        if self._host_group is None:
            self._host_group = dist.new_group(
                dist.get_process_group_ranks(self.group),
                backend="gloo",
                timeout=_timeout_of(self.group),
                use_local_synchronization=True,
            )
        return self._host_group


def _timeout_of(group: Any) -> timedelta | None:
    """How long messages may take; None if its backend does not say."""
    found: Any = group if group is not None else dist.group.WORLD
    try:
        timeout: timedelta = found._get_backend(found._device_types[0]).options._timeout
        return timeout
    except (AttributeError, RuntimeError):
        return None


def _diverged(how: str) -> RuntimeError:
    return RuntimeError(
        f"fusedrnn: ranks that exchange the gradients of a WeightBank have diverged: {how}"
    )


def _shapes(places: Sequence[Place]) -> list[tuple[Any, ...]]:
    return [(place.names, place.shape, str(place.dtype)) for place in places]


def _digest_of(what: Any) -> int:
    return zlib.crc32(repr(what).encode())


def _sums(task: Task) -> list[int]:
    """Numbers that change with any bit of its weights."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for place, tensor in zip(task.places, task.tensors, strict=True):
        if place.is_parameter:
            weights = tensor.detach()
            weights = torch.view_as_real(weights) if weights.is_complex() else weights
            sums.append(int(weights.view(integers[weights.itemsize]).sum()))
    return sums


def exclude(model: nn.Module, names: Sequence[str]) -> None:
    """Has DistributedDataParallel leave tensors of a model alone, besides those it leaves alone."""
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, sorted(known | set(names)))
