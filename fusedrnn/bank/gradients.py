"""The way of gradients home: from the device to ``.grad`` of a task's parameters on the host.

The gradients of a task are packed into one block on the device, and cross in one copy, while
backward goes on. When the pass ends the host waits for the copies, and adds them to ``.grad`` as
autograd would have done.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .engines import Engine, Event
from .layout import Place, aligned
from .memory import HostPool
from .task import Task

_DONE = object()
"""In place of an event: the copy is there."""


class Segment(NamedTuple):
    """The gradients of one dtype within a block."""

    dtype: torch.dtype
    members: tuple[int, ...]
    """Indices of the gradients."""
    begin: int
    """In bytes."""
    counts: int
    """Where a number for each member says how many ranks have it, in bytes."""
    end: int


class GradientLayout(NamedTuple):
    """Where gradients of a task lie in one block of bytes."""

    parameters: tuple[nn.Parameter, ...]
    places: tuple[Place, ...]
    segments: tuple[Segment, ...]
    nbytes: int


def gradient_layout(task: Task, trained: Sequence[int]) -> GradientLayout:
    """The gradients of the tensors with indices ``trained``, by dtype."""
    key = tuple(trained)
    if key not in task.gradient_layouts:
        task.gradient_layouts[key] = _gradient_layout(task, trained)
    found: GradientLayout = task.gradient_layouts[key]
    return found


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
    return GradientLayout(tuple(parameters), ordered, tuple(segments), aligned(end))  # type: ignore[arg-type]


class Block:
    """One block on the device."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.owner: Gradient | None = None
        """Whose numbers it has that are nowhere else."""
        self.sent: Event = None
        """When its last copy to the host has been done."""
        self.is_sent = False
        self._views: tuple[GradientLayout, Tensor, list[Tensor]] | None = None

    def views(self, layout: GradientLayout) -> list[Tensor]:
        """Its gradients, for a layout."""
        known = self._views
        if known is None or known[0] is not layout or known[1] is not self.memory:
            views = [place.view(self.memory) for place in layout.places]
            known = self._views = layout, self.memory, views
        return known[2]


class Home:
    """The blocks on the device, and those on the host."""

    def __init__(self, engine: Engine | None, device: torch.device, blocks: int = 2) -> None:
        self.engine, self.device = engine, device
        self.pool = HostPool(engine.pin if engine is not None else lambda memory: None)
        self.blocks = [Block() for _ in range(blocks)] if engine is not None else []
        self.most = 0
        """Bytes of the largest gradients so far."""
        self.nbytes_out = 0

    def take(self, owner: Gradient, nbytes: int) -> Tensor:
        """Memory of the device for the gradients of ``owner``; without a device, of the host."""
        if self.engine is None:
            owner.block = None
            return self.pool.take(nbytes)
        block = next((b for b in self.blocks if b.owner is None), self.blocks[0])
        if block.owner is not None:
            block.owner.send()
        self.blocks.remove(block)
        self.blocks.append(block)
        if block.is_sent:
            self.engine.wait(block.sent)
        self.most = max(self.most, nbytes)
        if block.memory.nbytes < nbytes:
            if block.is_sent:  # the former memory may be of another stream than the caller's
                self.engine.host_wait(block.sent)
            with torch.inference_mode(False):
                block.memory = torch.empty(self.most, dtype=torch.uint8, device=self.device)
        block.owner, owner.block = owner, block
        return block.memory


class Gradient:
    """The gradients of one task in one pass, or in several before ranks exchange them."""

    def __init__(self, task: Task, layout: GradientLayout, home: Home) -> None:
        self.task, self.layout = task, layout
        self.block: Block | None = None
        self.present = [False] * len(layout.places)
        """Of each gradient, whether there is one."""
        self._home = home
        self._on_host: list[tuple[Tensor, list[bool], Event]] = []
        """Parts to be added up: the memory, what it has, and when."""
        self._packed: tuple[Hashable, Event] = None, None
        self._here: list[bool] = []
        """What the block on the device has."""
        self._apart: dict[int, Tensor] = {}
        """Sparse gradients, on the host."""
        self._shown: dict[int, tuple[Tensor, bool, int]] = {}
        """What ``.grad`` was after ``show``, whether it is the one from here, and its version."""

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Packs gradients into a block, or adds them to those that are in one."""
        dense = list(grads)
        for i, grad in enumerate(grads):
            if grad is not None and grad.layout != torch.strided:
                home = grad.detach().to("cpu")
                self._apart[i] = self._apart[i] + home if i in self._apart else home
                dense[i] = None
        here = [grad is not None for grad in dense]
        self.present = [a or b is not None for a, b in zip(self.present, grads, strict=True)]
        if not any(here):
            return
        views: list[Tensor] = []
        given: list[Tensor] = []
        added: list[Tensor] = []
        to_add: list[Tensor] = []
        engine = self._home.engine
        is_new = self.block is None
        memory = self._home.take(self, self.layout.nbytes) if is_new else self.block.memory  # type: ignore[union-attr]
        if is_new:
            self._here = [False] * len(dense)
        elif engine is not None and self._packed[0] != engine.stream():
            engine.wait(self._packed[1])
        if self.block is None:
            places = [place.view(memory) for place in self.layout.places]
        else:
            places = self.block.views(self.layout)
        for view, grad, has in zip(places, dense, self._here, strict=True):
            if grad is not None:
                (added if has else views).append(view)
                (to_add if has else given).append(grad)
        with torch.no_grad():
            if views:
                torch._foreach_copy_(views, given)
            if added:
                torch._foreach_add_(added, to_add)
        self._here = [a or b for a, b in zip(self._here, here, strict=True)]
        if engine is None:
            self._on_host.append((memory, self._here, _DONE))
        else:
            self._packed = engine.stream(), engine.mark(engine.stream())

    def send(self) -> None:
        """Has what is on the device copied to the host, behind all that has been done there."""
        if self.block is None:
            return
        home, block, nbytes = self._home, self.block, self.layout.nbytes
        assert home.engine is not None
        if self._packed[0] != home.engine.stream():
            home.engine.wait(self._packed[1])
        memory = home.pool.take(nbytes)
        block.sent, block.is_sent = home.engine.send(memory[:nbytes], block.memory[:nbytes]), True
        home.nbytes_out += nbytes
        self._on_host.append((memory, self._here, block.sent))
        block.owner = self.block = None

    def join(self, later: Gradient) -> None:
        """Adds the gradients of a later pass."""
        later.send()
        self.send()
        self._on_host += later._on_host
        self.present = [a or b for a, b in zip(self.present, later.present, strict=True)]
        for i, grad in later._apart.items():
            self._apart[i] = self._apart[i] + grad if i in self._apart else grad

    def show(self) -> None:
        """Has them in ``.grad`` while they wait, so that who discards that discards them, too."""
        for i, grad in enumerate(self.results()):
            if grad is not None:
                parameter = self.layout.parameters[i]
                is_own = parameter.grad is None
                if is_own:
                    parameter.grad = grad
                assert parameter.grad is not None
                self._shown[i] = parameter.grad, is_own, parameter.grad._version

    def hide(self) -> bool:
        """Undoes ``show``, and forgets what was discarded since. Returns whether some are left."""
        for i, (shown, is_own, version) in self._shown.items():
            parameter = self.layout.parameters[i]
            is_kept = parameter.grad is shown
            if is_kept and is_own:
                parameter.grad = None
            elif is_kept and shown._version != version:
                is_kept = bool(shown.any())  # zero_grad(set_to_none=False)
            if not is_kept:
                self.present[i] = False
                self._apart.pop(i, None)
                for _, has, _ in self._on_host:
                    has[i] = False
        self._shown.clear()
        return any(self.present)

    def on_host(self) -> Tensor:
        """All dense gradients in one block of the host, zeros where there is none."""
        self.send()
        for _, _, event in self._on_host:
            if self._home.engine is not None and event is not _DONE:
                self._home.engine.host_wait(event)
        if not self._on_host:
            memory = self._home.pool.take(self.layout.nbytes)
            self._on_host = [(memory, [False] * len(self.present), _DONE)]
        memory, has, _ = self._on_host[0]
        has = list(has)
        with torch.no_grad():
            for more, also, _ in self._on_host[1:]:
                for i, place in enumerate(self.layout.places):
                    if also[i] and has[i]:
                        place.view(memory).add_(place.view(more))
                    elif also[i]:
                        place.view(memory).copy_(place.view(more))
                    has[i] = has[i] or also[i]
        self._on_host = [(memory, has, _DONE)]
        self._here = has
        return memory

    def to_reduce(self) -> tuple[Tensor, list[bool]]:
        """One block with all of them, on the device if there is one, and what it has."""
        apart, self._apart = self._apart, {}
        for i, grad in apart.items():  # ranks need not have the same rows of a sparse one
            dense = grad.to_dense().to(self._home.device)
            self.add([dense if j == i else None for j in range(len(self.present))])
        engine = self._home.engine
        if engine is None:
            memory = self.on_host()
            return memory, self._here
        if self._on_host:
            whole = self.on_host()
            here = self._on_host.pop()[1]
            memory = self._home.take(self, self.layout.nbytes)
            if any(here):
                n = self.layout.nbytes
                engine.wait(engine.bring(memory[:n], whole[:n], [engine.mark(engine.stream())]))
                self._staged = whole
            self._here = here
        elif self.block is None:
            memory, self._here = (
                self._home.take(self, self.layout.nbytes),
                [False] * len(self.present),
            )
        else:
            memory = self.block.memory
            if self._packed[0] != engine.stream():
                engine.wait(self._packed[1])
        self._packed = engine.stream(), None
        return memory, self._here

    def was_reduced(self) -> None:
        """The block has what all ranks have."""
        self._here = [True] * len(self.present)
        if self._home.engine is not None:
            self.send()
        memory = self.on_host()
        present = [False] * len(self.present)
        for segment in self.layout.segments:
            counts = memory[segment.counts : segment.end].view(segment.dtype)
            for i, count in zip(segment.members, counts.tolist(), strict=True):
                present[i] = count != 0
        self._on_host = [(memory, present, _DONE)]
        self.present = self._here = present

    def results(self) -> list[Tensor | None]:
        """On the host: each gradient, or None."""
        memory = self.on_host()
        has = self._on_host[0][1]
        found: list[Tensor | None] = []
        for i, place in enumerate(self.layout.places):
            grad = place.view(memory) if has[i] else None
            apart = self._apart.get(i)
            if apart is not None:
                grad = apart if grad is None else grad + apart
            found.append(grad)
        return found

    def accumulate(self) -> None:
        """Adds them to ``.grad``, and calls hooks of parameters."""
        for parameter, grad in zip(self.layout.parameters, self.results(), strict=True):
            if grad is not None:
                accumulate(parameter, grad)


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """What autograd does when a gradient comes to a leaf."""
    with torch.no_grad():
        for hook in list((parameter._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        if parameter.grad is None:
            parameter.grad = grad
        elif parameter.grad.layout != grad.layout or grad.layout != torch.strided:
            parameter.grad = parameter.grad + grad
        else:
            parameter.grad += grad
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(parameter)
