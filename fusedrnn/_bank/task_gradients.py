"""The way of gradients home: from the device to ``.grad`` of a task's parameters on the host.

The gradients of a task are packed into one block on the device, and cross in one copy, while
backward goes on. When the pass ends the host waits for the copies, and adds them to ``.grad`` as
autograd would have done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .block_layout import GradientLayout, Place, Segment, aligned
from .engines import Event
from .gradient_blocks import Block, Home
from .task import Task


def gradient_layout(task: Task, trained: Sequence[int]) -> GradientLayout:
    """The gradients of the tensors with indices ``trained``, by dtype."""
    key = tuple(trained)
    if key not in task.gradient_layouts:
        task.gradient_layouts[key] = _gradient_layout(task, trained)
    return task.gradient_layouts[key]


def _gradient_layout(task: Task, trained: Sequence[int]) -> GradientLayout:
    parameters = [task.tensors[i] for i in trained]
    places: dict[int, Place] = {}
    segments, end = [], 0
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        members = tuple(i for i, p in enumerate(parameters) if p.dtype == dtype)
        begin = end = aligned(end)
        for i in members:
            # In the strides of autograd's own: those of a parameter without gaps, else contiguous.
            like = torch.empty_like(parameters[i], device="meta")
            names = task.places[trained[i]].names
            places[i] = Place(names, True, end, tuple(like.shape), like.stride(), dtype)
            end = aligned(end + places[i].span)
        counts, end = end, end + len(members) * dtype.itemsize
        segments.append(Segment(dtype, members, begin, counts, end))
    ordered = tuple(places[i] for i in range(len(parameters)))
    return GradientLayout(tuple(trained), tuple(parameters), ordered, tuple(segments), aligned(end))  # type: ignore[arg-type]


class Part(NamedTuple):
    """Gradients on the host, or on their way there."""

    memory: Tensor
    has: list[bool]
    """Of each gradient, whether it is one of them."""
    arrival: Event
    """When they are there; None if they are."""


class Gradient:
    """The gradients of one task in one pass."""

    def __init__(self, task: Task, layout: GradientLayout, home: Home) -> None:
        self.task, self.layout = task, layout
        self.block: Block | None = None
        """On the device."""
        self._home = home
        self._parts: list[Part] = []
        """To be added up."""
        self._in_block: list[bool] = []
        """What the block has."""
        self._sparse: dict[int, Tensor] = {}
        """Sparse gradients, on the host."""
        self._source: Tensor | None = None
        """Of a copy to the device that may be under way."""

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Packs gradients into a block, or adds them to those that are in one."""
        dense: dict[int, Tensor] = {}
        for i, grad in enumerate(grads):
            if grad is not None and grad.layout == torch.strided:
                dense[i] = grad
            elif grad is not None:
                self._add_sparse(i, grad.detach().to("cpu"))
        if not dense:
            return
        places, has = self._open()
        new, known = [i for i in dense if not has[i]], [i for i in dense if has[i]]
        with torch.no_grad():
            if new:
                torch._foreach_copy_([places[i] for i in new], [dense[i] for i in new])
            if known:
                torch._foreach_add_([places[i] for i in known], [dense[i] for i in known])
        for i in new:
            has[i] = True
        if self.block is not None:
            self.block.was_packed()

    def _add_sparse(self, i: int, grad: Tensor) -> None:
        self._sparse[i] = self._sparse[i] + grad if i in self._sparse else grad

    def _open(self) -> tuple[list[Tensor], list[bool]]:
        """Where the caller's stream may write gradients, and which are there already."""
        if self._home.engine is None:
            if not self._parts:
                self._parts.append(self._no_part())
            memory, has, _ = self._parts[0]
            return [place.view(memory) for place in self.layout.places], has
        if self.block is None:
            self._take_block([False] * len(self.layout.places))
        else:
            self.block.wait()
        assert self.block is not None
        return self.block.views(self.layout.places), self._in_block

    def _no_part(self) -> Part:
        memory = self._home.pool.take(self.layout.nbytes)
        return Part(memory, [False] * len(self.layout.places), None)

    def _take_block(self, has: list[bool]) -> Tensor:
        self.block, self._in_block = self._home.take(self, self.layout.nbytes), has
        return self.block.memory[: self.layout.nbytes]

    def send(self) -> None:
        """Has what is on the device copied to the host, behind all that has been done there."""
        if self.block is None:
            return
        home, nbytes = self._home, self.layout.nbytes
        memory = home.pool.take(nbytes)
        event = self.block.send(memory[:nbytes])
        home.pool.fills(memory, event)
        home.nbytes_out += nbytes
        self._parts.append(Part(memory, self._in_block, event))
        self.block.owner = None
        self.block = None

    def on_host(self) -> Part:
        """All dense gradients, added up."""
        self.send()
        for part in self._parts:
            if self._home.engine is not None and part.arrival is not None:
                self._home.engine.host_wait(part.arrival)
        memory, has, _ = self._parts[0] if self._parts else self._no_part()
        has = list(has)
        with torch.no_grad():
            for more, also, _ in self._parts[1:]:
                for i, place in enumerate(self.layout.places):
                    if also[i] and has[i]:
                        place.view(memory).add_(place.view(more))
                    elif also[i]:
                        place.view(memory).copy_(place.view(more))
                    has[i] = has[i] or also[i]
        self._parts = [Part(memory, has, None)]
        return self._parts[0]

    def results(self) -> list[Tensor | None]:
        """On the host: each gradient, or None."""
        memory, has, _ = self.on_host()
        found: list[Tensor | None] = []
        for i, place in enumerate(self.layout.places):
            grad = place.view(memory) if has[i] else None
            sparse = self._sparse.get(i)
            if sparse is not None:
                grad = sparse if grad is None else grad + sparse
            found.append(grad)
        return found

    # --- among ranks ------------------------------------------------------------------------------

    def to_reduce(self) -> list[tuple[Tensor, Tensor]]:
        """What ranks add up, a pair for each dtype: all of it, and the gradients in it alone.

        It is where they are computed. A gradient that this rank has not is 0. Behind the gradients
        is a number for each of them: how many ranks have it.
        """
        memory, has = self._together()
        found = []
        with torch.no_grad():
            for place, is_here in zip(self.layout.places, has, strict=True):
                if not is_here:
                    place.view(memory).zero_()
            for segment in self.layout.segments:
                counts = memory[segment.counts : segment.end].view(segment.dtype)
                here = [float(has[i]) for i in segment.members]
                counts.copy_(torch.tensor(here, dtype=segment.dtype, device="cpu"))
                grads = memory[segment.begin : segment.counts].view(segment.dtype)
                found.append((memory[segment.begin : segment.end].view(segment.dtype), grads))
        return found

    def _together(self) -> tuple[Tensor, list[bool]]:
        """One block with all of them, and what it has."""
        for i, grad in self._sparse.items():  # ranks need not have the same rows of one
            dense = grad.to_dense().to(self._home.device)
            self.add([dense if j == i else None for j in range(len(self.layout.places))])
        self._sparse.clear()
        engine = self._home.engine
        if engine is None:
            memory, has, _ = self.on_host()
            return memory, has
        if self._parts:
            self._source, has, _ = self.on_host()
            self._parts.clear()
            memory = self._take_block(has)
            mark = engine.mark(engine.stream())
            engine.wait(engine.bring(memory, self._source[: memory.nbytes], [mark]))
        elif self.block is None:
            self._take_block([False] * len(self.layout.places))
        else:
            self.block.wait()
        assert self.block is not None
        return self.block.memory, self._in_block

    def was_reduced(self) -> None:
        """What ``to_reduce`` has returned is that of all ranks now."""
        if self.block is not None:
            self.block.was_packed()
            self._in_block = [True] * len(self.layout.places)
        memory = self.on_host().memory
        self._source = None
        has = [False] * len(self.layout.places)
        for segment in self.layout.segments:
            counts = memory[segment.counts : segment.end].view(segment.dtype)
            for i, count in zip(segment.members, counts.tolist(), strict=True):
                has[i] = count != 0
        self._parts = [Part(memory, has, None)]

    def in_layout(self, layout: GradientLayout) -> Gradient:
        """The same in another layout of the task."""
        if layout.places == self.layout.places:
            return self
        other = Gradient(self.task, layout, self._home)
        known = dict(zip(self.layout.indices, self.results(), strict=True))
        other.add_from_host([known.get(i) for i in layout.indices])
        return other

    def add_from_host(self, grads: Sequence[Tensor | None]) -> None:
        """As ``add``."""
        self.add([g if g is None else g.detach().to(self._home.device) for g in grads])

    def replace(self) -> None:
        """Writes them to ``.grad``."""
        for parameter, grad in zip(self.layout.parameters, self.results(), strict=True):
            if grad is None:
                continue
            if parameter.grad is None or parameter.grad.layout != grad.layout:
                parameter.grad = grad
            else:
                parameter.grad.detach().copy_(grad)

    def accumulate(self) -> None:
        """Adds them to ``.grad``, as autograd does when they come to a leaf."""
        with torch.no_grad():
            for parameter, grad in zip(self.layout.parameters, self.results(), strict=True):
                if grad is None or not parameter.requires_grad:
                    continue
                known = parameter.grad
                if known is None:
                    parameter.grad = grad
                elif known.layout == torch.strided:
                    parameter.grad = (
                        known.add_(grad) if grad.layout == known.layout else known + grad
                    )
                else:
                    parameter.grad = grad + known
