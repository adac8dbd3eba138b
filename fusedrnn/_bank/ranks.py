"""Gradients of a bank among ranks: only those of tasks that a rank has used are exchanged."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .backward_passes import Pass
from .bank_device import Device
from .block_layout import GradientLayout
from .rank_digests import describe_places, digest_of, weight_checksums
from .task import Task
from .task_gradients import Gradient, gradient_layout

Average = Literal["world", "users"]
_FAILED = -1


class Used(NamedTuple):
    """A task that some rank has a gradient of."""

    task: Task
    users: int
    is_whole: bool
    """Whether all of ``.grad`` is averaged, since a rank has accumulated."""


class Ranks:
    """How the gradients of a bank are averaged."""

    def __init__(self, average: Average, group: Any) -> None:
        if average not in ("world", "users"):
            raise ValueError(f'fusedrnn: average must be "world" or "users", got {average!r}')
        self.average: Average = average
        self.group = group
        self.is_synced = True
        self.path = ""
        """Of the bank in its model, as far as ``exclude`` has seen it."""
        self.steps = 0
        """Of optimizers that have weights of the bank."""
        self.exchanged_bytes = self.header_bytes = self.exchanges = 0
        self._known: tuple[Any, int, list[tuple[Task, Tensor]]] = None, 0, []
        """The parameters: of which list of tasks, and when."""
        self._used: set[str] = set()
        """Names of tasks that passes have used, whose gradients are in ``.grad``."""
        self._new: dict[Task, Gradient] = {}
        """Of the last pass, which are in no ``.grad`` yet."""
        self._host_group: Any = None
        self._made_for: Any = None
        """The group that it was made for."""
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

    def take(self, passed: Pass, lock: AbstractContextManager[Any]) -> None:
        """Takes the gradients of a pass. Within no_sync() they are added to ``.grad``."""
        gradients = list(passed.gradients.values())
        of_task = Counter(gradient.task for gradient in gradients)
        with lock:
            self._used |= {str(task.key) for task in passed.returned}
            for gradient in gradients:
                # A task whose weights were frozen between two calls has two.
                if self.is_synced and of_task[gradient.task] == 1:
                    self._new[gradient.task] = gradient
                else:
                    gradient.accumulate()
                    self._used.add(str(gradient.task.key))

    def exchange(self, tasks: Sequence[Task], device: Device) -> None:
        """Averages over ranks what they have not seen of each other. All ranks call it.

        Of most tasks that is the gradient of the last pass, which is then added to ``.grad``. Where
        ``.grad`` of a rank has changed otherwise, by passes within no_sync() or by a penalty on the
        weights themselves, it is all of ``.grad``, as under DistributedDataParallel.

        What one rank alone can find wrong it tells the others, so that all raise.

        Raises:
            RuntimeError: Ranks have other tasks or weights, or are at other steps.
        """
        new, self._new = self._new, {}
        unseen = self._unseen(tasks)
        users = {task for task in unseen if str(task.key) in self._used} | new.keys()
        ours = [self.steps, len(tasks), self._digests(tasks), digest_of(self.path)]
        for rank, theirs in enumerate(self._of_all(ours)):
            if theirs[3] != ours[3]:
                self._forget_first_group()
                raise _diverged(
                    f"this rank exchanges gradients of {self.path!r}, and rank {rank} those of "
                    "another bank. Backward passes must go through several banks in the same order "
                    "on all ranks"
                )
            if theirs != ours:
                self._forget_first_group()
                how = " of other names or shapes" if theirs[2] != ours[2] else ""
                raise _diverged(
                    f"rank {rank} is at step {theirs[0]} of its optimizer and has {theirs[1]} "
                    f"tasks, this one at step {ours[0]} with {ours[1]}{how}"
                )
        of_this = [[task in users, unseen.get(task, False), task in unseen] for task in tasks]
        counts = torch.tensor(of_this, dtype=torch.int32, device="cpu")
        self._reduce(counts, self._group_for_host())
        self.header_bytes += counts.nbytes
        used = []
        for task, (by, fresh, changed) in zip(tasks, counts.tolist(), strict=True):
            # Where no pass has used the task there may be a penalty on its weights.
            among = by or fresh
            if among or (changed and self.average == "world"):
                used.append(Used(task, among, changed > 0))
            if not by and unseen.get(task, False):
                users.add(task)
        layouts = self._layouts(used, new)
        world = dist.get_world_size(self.group)
        averaged = []
        for task, count, is_whole in used:
            layout = layouts[task]
            gradient = new.get(task) or Gradient(task, layout, device.home)
            with device.lock:
                gradient = gradient.in_layout(layout)
                # With average="users" others have none of it, and take the result.
                if is_whole and (task in users or self.average == "world"):
                    gradient.add_from_host([parameter.grad for parameter in layout.parameters])
                self._average(gradient, count if self.average == "users" else world)
            averaged.append((gradient, is_whole))
        self.exchanges += 1
        self._used.clear()
        for gradient, is_whole in averaged:
            gradient.replace() if is_whole else gradient.accumulate()
            for parameter in gradient.layout.parameters:
                if parameter.grad is not None:
                    _mark_seen(parameter.grad)

    def _unseen(self, tasks: Sequence[Task]) -> dict[Task, bool]:
        """Those whose ``.grad`` has what other ranks have not seen.

        And whether some of it is new, so that it is more than a change of what all have.
        """
        when = Task.exchanges_of_tensors
        if self._known[0] is not tasks or self._known[1] != when:
            pairs = [(task, parameter) for task in tasks for parameter in task.parameters()]
            self._known = tasks, when, pairs
        found: dict[Task, bool] = {}
        for task, parameter in [pair for pair in self._known[2] if pair[1].grad is not None]:
            grad = parameter.grad
            if grad is not None and _is_unseen(grad) and (task.swaps or task.has_grad()):
                found[task] = found.get(task, False) or not hasattr(grad, "_seen_version")
        return found

    def _layouts(
        self, used: Sequence[Used], new: dict[Task, Gradient]
    ) -> dict[Task, GradientLayout]:
        """Where the gradients of each task lie, which is the same place on all ranks."""
        failed, ours = None, [_FAILED, _FAILED, 0]
        trained: dict[Task, set[int]] = {}
        wanted: dict[Task, set[int]] = {}
        try:
            for task, _, is_whole in used:
                task.check()
                trained[task] = set(task.trained())
                wanted[task] = {*trained[task], *(new[task].layout.indices if task in new else ())}
                if is_whole:
                    wanted[task] |= {i for i, t in enumerate(task.tensors) if t.grad is not None}
            places = [[task.places[i] for i in sorted(trained[task])] for task in trained]
            fresh = [weight_checksums(task) for task in trained if task not in self._compared]
            digests = [digest_of([describe_places(some) for some in places]), digest_of(fresh)]
            ours = [*digests, int(wanted != trained)]
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
                    f"rank {rank} trains other parameters of the tasks in use than this rank: "
                    "freeze the same ones on all ranks"
                )
            if theirs[1] != ours[1]:
                self._forget_first_group()
                raise _diverged(
                    f"rank {rank} has other weights than this rank in tasks that are used for the "
                    "first time. Ranks do not send weights of a bank to each other: seed all ranks "
                    "alike before the modules are made, or load the same state dict on all. If a "
                    "model has several banks, backward passes must go through them in the same "
                    "order on all ranks"
                )
        self._compared.update(trained)
        if any(theirs[2] for theirs in of_all):  # some were frozen since they got a gradient
            wanted = self._of_any(wanted)
        return {task: gradient_layout(task, sorted(wanted[task])) for task in wanted}

    def _of_any(self, wanted: dict[Task, set[int]]) -> dict[Task, set[int]]:
        """Indices that any rank has."""
        marks = [i in wanted[task] for task in wanted for i in range(len(task.tensors))]
        of_any = torch.tensor(marks, dtype=torch.uint8, device="cpu")
        dist.all_reduce(of_any, dist.ReduceOp.MAX, self._group_for_host())
        found = iter(of_any.tolist())
        return {task: {i for i in range(len(task.tensors)) if next(found)} for task in wanted}

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
        mine = torch.tensor(ours, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(found, mine, group=self._group_for_host())
        except RuntimeError as error:
            raise RuntimeError(
                "fusedrnn: not all ranks came to exchange the gradients of a WeightBank. Each rank "
                "runs as many backward passes through its bank as the others, and where there are "
                "several banks in the same order; one whose backward does not touch it calls "
                f"bank.sync_gradients(). Underneath: {error}"
            ) from error
        self.header_bytes += mine.nbytes
        return [theirs.tolist() for theirs in found]

    def _forget_first_group(self) -> None:
        """Where ranks begin with different banks, groups of different banks have met."""
        if not self.exchanges:
            self._host_group = None

    def _digests(self, tasks: Sequence[Task]) -> int:
        """Of names and shapes of all tasks."""
        for task in tasks:
            if task not in self._digest:
                self._digest[task] = digest_of((str(task.key), describe_places(task.places)))
        return digest_of([self._digest[task] for task in tasks])

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
        found: Any = self.group if self.group is not None else dist.group.WORLD
        if self._host_group is None or self._made_for is not found:  # torch may have begun anew
            self._made_for = found
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


def _is_unseen(grad: Tensor) -> bool:
    known = getattr(grad, "_seen_version", None)
    if known == grad._version:
        return False
    numbers = grad if grad.layout == torch.strided else grad._values()
    if known is None or numbers.any():
        return True
    _mark_seen(grad)  # of zero_grad(set_to_none=False), which all ranks call
    return False


def _mark_seen(grad: Tensor) -> None:
    """All ranks have this gradient. A later one is another tensor, or of another version."""
    grad._seen_version = grad._version  # type: ignore[attr-defined]


def exclude(model: nn.Module, names: Sequence[str]) -> None:
    """Has DistributedDataParallel leave tensors of a model alone, besides those it leaves alone."""
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, sorted(known | set(names)))
