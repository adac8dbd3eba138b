"""Gradients of a bank among ranks: only those of tasks that a rank has used are exchanged."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gradients import Gradient, GradientLayout, gradient_layout
from .layout import Place
from .task import Task

if TYPE_CHECKING:
    from .device import Device

Average = Literal["world", "users"]


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
        self._local: dict[Task, Gradient] = {}
        """Gradients that other ranks have not seen."""
        self._host_group: Any = None

    def are_several(self) -> bool:
        """Whether there are other ranks to exchange gradients with."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.group) > 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_synced = self.is_synced, False
        try:
            yield
        finally:
            self.is_synced = before

    def keep(self, gradients: Sequence[Gradient]) -> None:
        """Adds gradients of a pass to those that wait."""
        for gradient in gradients:
            known = self._local.get(gradient.task)
            if known is not None and known.layout.places != gradient.layout.places:
                raise RuntimeError(
                    f"fusedrnn: parameters of {gradient.task.name} were frozen or unfrozen while "
                    "gradients waited for other ranks: call sync_gradients() of the bank before"
                )
            if known is None:
                self._local[gradient.task] = gradient
            else:
                known.join(gradient)
            if not self.is_synced:
                gradient.send()  # so that blocks of the device are free

    def exchange(self, tasks: Sequence[Task], device: Device) -> None:
        """Averages the waiting gradients over ranks and adds them to ``.grad``. All ranks call it.

        Raises:
            RuntimeError: Ranks have other tasks, or are at other steps.
        """
        local, self._local = self._local, {}
        group = self._group_for_host(device)
        self._check_same(
            group,
            [self.steps, len(tasks), _digest(tasks)],
            lambda rank, theirs, ours: (
                f"rank {rank} is at step {theirs[0]} of its optimizer and has {theirs[1]} tasks, "
                f"this one at step {ours[0]} with {ours[1]}"
                + (" of other names or shapes" if theirs[2] != ours[2] else "")
            ),
        )
        users = torch.tensor([int(task in local) for task in tasks], dtype=torch.int32)
        self._reduce(users, group)
        self.header_bytes += users.nbytes
        used = [(task, count) for task, count in zip(tasks, users.tolist(), strict=True) if count]
        layouts = {task: self._layout(task, local) for task, _ in used}
        self._check_same(
            group,
            [_digest_of([layouts[task].places for task, _ in used])],
            lambda rank, theirs, ours: (
                f"rank {rank} trains other parameters of the tasks in use than this one: freeze "
                "the same ones on all ranks"
            ),
        )
        ranks = dist.get_world_size(self.group)
        for task, count in used:
            layout = layouts[task]
            gradient = local.get(task) or Gradient(task, layout, device.home)
            divisor = count if self.average == "users" else ranks
            with device.lock:
                self._average(gradient, device, divisor)
            gradient.accumulate()
        self.exchanges += 1

    def _layout(self, task: Task, local: dict[Task, Gradient]) -> GradientLayout:
        if task in local:
            return local[task].layout
        task.check()
        return gradient_layout(task, task.trained())

    def _average(self, gradient: Gradient, device: Device, divisor: int) -> None:
        memory, present = gradient.to_reduce()
        layout = gradient.layout
        group = self._group_for(memory.device, device)
        with torch.no_grad():
            for place, has in zip(layout.places, present, strict=True):
                if not has:
                    place.view(memory).zero_()
            for segment in layout.segments:
                counts = memory[segment.counts : segment.end].view(segment.dtype)
                here = [float(present[i]) for i in segment.members]
                counts.copy_(torch.tensor(here, dtype=segment.dtype))
                flat = memory[segment.begin : segment.end].view(segment.dtype)
                numbers = torch.view_as_real(flat) if flat.is_complex() else flat
                self._reduce(numbers, group)
                self.exchanged_bytes += flat.nbytes
                flat[: (segment.counts - segment.begin) // flat.itemsize].div_(divisor)
        gradient.was_reduced()

    # --- messages ---------------------------------------------------------------------------------

    def _check_same(
        self, group: Any, ours: list[int], explain: Callable[[int, list[int], list[int]], str]
    ) -> None:
        mine = torch.tensor(ours, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        try:
            dist.all_gather(found, mine, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                "fusedrnn: not all ranks came to exchange the gradients of a WeightBank. Each rank "
                "runs as many backward passes through its bank as the others; one whose backward "
                f"does not touch it calls bank.sync_gradients(). Underneath: {error}"
            ) from error
        self.header_bytes += mine.nbytes
        for rank, theirs in enumerate(found):
            if theirs.tolist() != ours:
                raise RuntimeError(
                    "fusedrnn: ranks that exchange the gradients of a WeightBank have diverged: "
                    + explain(rank, theirs.tolist(), ours)
                )

    def _reduce(self, tensor: Tensor, group: Any) -> None:
        dist.all_reduce(tensor, group=group)

    def _group_for(self, where: torch.device, device: Device) -> Any:
        """A group that takes tensors of a device."""
        takes = _devices_of(self.group)
        return self.group if where.type in takes else self._group_for_host(device)

    def _group_for_host(self, device: Device) -> Any:
        """A group that takes tensors of the host, so that headers do not wait for a GPU."""
        if "cpu" in _devices_of(self.group):
            return self.group
        if self._host_group is None:
            if self.group is None:
                self._host_group = dist.new_group(backend="gloo")
            else:
                ranks = dist.get_process_group_ranks(self.group)
                self._host_group = dist.new_group(
                    ranks, backend="gloo", use_local_synchronization=True
                )
        return self._host_group


def _devices_of(group: Any) -> set[str]:
    found = group if group is not None else dist.group.WORLD
    return {device.type for device in found._device_types}


def _digest(tasks: Sequence[Task]) -> int:
    return _digest_of([(str(task.key), _shapes(task.places)) for task in tasks])


def _shapes(places: Sequence[Place]) -> list[tuple[Any, ...]]:
    return [(place.names, place.shape, str(place.dtype)) for place in places]


def _digest_of(what: Any) -> int:
    return zlib.crc32(repr(what).encode())


def exclude(model: nn.Module, names: Sequence[str]) -> None:
    """Has DistributedDataParallel leave tensors of a model alone, besides those it leaves alone."""
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, sorted(known | set(names)))


def is_known_to_ddp(parameters: Sequence[Tensor]) -> bool:
    """Whether the DistributedDataParallel whose forward is running sends these gradients."""
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None or not parameters:
        return False
    ignored = ddp.parameters_to_ignore
    wanted = {id(parameter) for parameter in parameters}
    return any(
        id(parameter) in wanted and name not in ignored
        for name, parameter in ddp.module.named_parameters()
    )
