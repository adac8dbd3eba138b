"""The work of a chunk as a CUDA graph.

A step of small products waits for its launches. A graph records those of one chunk, and launches
all of them at once for each other chunk of the same call: its inputs are copied to where the first
chunk had them. Each call records anew, so that a graph never outlives what it reads: weights,
closed-over tensors and whatever Python decides in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._step.gradients import nodes_behind
from .._warnings import warn

T = TypeVar("T")

LEAST_CHUNKS = 3
"""With fewer whole chunks in a sequence nothing is won: one of forward runs as it is, and one is
recorded."""


class Recorder(Protocol):
    """Records the work of a device, and repeats it on the same memory."""

    def record(self, function: Callable[[], T]) -> T:
        """Records ``function()``, without running it on the device; gives where results will be."""

    def replay(self) -> None:
        """Runs what was recorded."""


@dataclass
class _Place:
    """Where graphs are recorded."""

    stream: Any
    """Of its own, since the default stream cannot."""
    pool: Any
    """Their memory."""
    last: Any = None
    """The graph that was recorded last, without which the memory would be lost until
    torch.cuda.empty_cache()."""


_free_places: dict[tuple[torch.device, int], list[_Place]] = {}
"""By device and number of the stream on which graphs are launched.

A graph has its place for itself as long as it lives, and the next one may then overwrite all that
it has left. Before, none may: it would take over memory of this graph's temporary tensors for its
results, and a replay would overwrite them. So two graphs of which neither has ended, as of calls
within a step, in two threads or in backward passes that autograd runs in turn on one thread, have
two places; and no two threads ever record on one stream. The next graph on the same place is
launched on the same stream, so that it waits for what this one still does on the device.
"""

_failed: list[Any] = []
"""Graphs whose recording could not even end: the allocator of pinned memory has pointers to them,
and no function that would take them away."""


class CudaGraph:
    """A CUDA graph, recorded on a stream of its own."""

    _key: tuple[torch.device, int]
    _place: _Place | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def __del__(self) -> None:
        if self._place is not None:
            _free_places.setdefault(self._key, []).append(self._place)

    def record(self, function: Callable[[], T]) -> T:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._key = (current.device, current.cuda_stream)
            place = _take_place(self._key)
            place.stream.wait_stream(current)
            torch.clear_autocast_cache()  # a graph casts weights itself, and keeps its casts
            try:
                with torch.cuda.stream(place.stream):
                    result = self._capture(place, function)
            finally:
                torch.clear_autocast_cache()
            current.wait_stream(place.stream)
        place.last, self._place = self._graph, place
        return result

    def _capture(self, place: _Place, function: Callable[[], T]) -> T:
        """After an error nobody gets the place again, and torch is as before."""
        try:
            # Other threads may do what no graph can record: those of a data loader do.
            self._graph.capture_begin(place.pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # a second error, that nothing more was recorded
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        except BaseException:
            self._clean_up(place)
            raise
        return result

    def _clean_up(self, place: _Place) -> None:
        """Ends what a recording has begun that CUDA has broken off.

        capture_end() raises then before it has done so: allocations, which would look for the
        graph, and in some releases of torch the generator, which would refuse to draw.
        """
        try:
            torch._C._cuda_endAllocateToPool(place.stream.device_index, place.pool)
            torch._C._cuda_releasePool(place.stream.device_index, place.pool)
        except (AttributeError, RuntimeError):
            return  # capture_end() has, or this torch has no such function
        _failed.append(self._graph)
        fresh, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(fresh), suppress(RuntimeError):  # the first error is the reason
            graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=fresh.device)
            graph.capture_end()

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


def _take_place(key: tuple[torch.device, int]) -> _Place:
    try:
        return _free_places.setdefault(key, []).pop()
    except IndexError:
        return _Place(torch.cuda.Stream(), torch.cuda.graph_pool_handle())


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}
"""By the type of the device."""


class CannotRecord(RuntimeError):
    """The reason why work could not be recorded."""


class Recorded(Generic[T]):
    """A function of tensors whose work is recorded at its first call, and then repeated.

    It gets trees of tensors of the same kinds each time. What it returns is good until the next
    call.
    """

    def __init__(self, function: Callable[..., T], device: torch.device) -> None:
        self._function, self._device = function, device
        self._recorder: Recorder
        self._given: list[Any] | None = None
        self._result: T

    def __call__(self, *trees: Any) -> T:
        leaves, spec = pytree.tree_flatten(trees)
        if self._given is None:
            try:
                self._record(leaves, spec)
            except Exception as error:
                first_line = str(error).strip().split("\n")[0]
                raise CannotRecord(
                    f"recording raises {type(error).__name__}: {first_line}"
                ) from error
        else:
            for own_leaf, leaf in zip(self._given, leaves, strict=True):
                if isinstance(leaf, Tensor):
                    own_leaf.copy_(leaf)
        self._recorder.replay()
        return self._result

    def _record(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        with suppress(torch.OutOfMemoryError):
            return self._record_once(leaves, spec)
        # Once more, for the allocator cannot do this while a graph is being recorded.
        torch.cuda.empty_cache()
        return self._record_once(leaves, spec)

    def _record_once(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        recorder = RECORDERS[self._device.type](self._device)
        given = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own = pytree.tree_unflatten(given, spec)
        self._result = recorder.record(lambda: self._function(*own))
        self._recorder, self._given = recorder, given


def _copy(tensor: Tensor) -> Tensor:
    """With memory of its own for each element, which a tensor that is expanded has not."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass
class Graphs:
    """What calls with the same kinds of tensors know of their graphs."""

    obstacle: str | None = None
    """Why there are none; "" for nothing; None if nobody has looked."""
    has_run: set[str] = field(default_factory=set)
    """Which work has run to the end, with graphs or without."""
    _late_obstacle: str = ""
    """Why the call that runs now goes on without."""

    def recorded(
        self, what: str, function: Callable[..., T], device: torch.device
    ) -> Recorded[T] | None:
        """``function`` to be recorded, unless something is against it.

        Args:
            what: The kind of work. It runs as it is in the first call, since a device may load
                kernels then, and the compiler compile.
        """
        self._late_obstacle = ""
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.obstacle or what not in self.has_run or is_captured:
            return None
        return Recorded(function, device)

    def note_end(self, what: str) -> None:
        """Some work has run to the end."""
        self.has_run.add(what)
        if self._late_obstacle:
            self.obstacle, self._late_obstacle = self._late_obstacle, ""
            warn(f"fusedrnn: the steps run without CUDA graphs, because {self.obstacle}")

    def give_up(self, error: CannotRecord) -> None:
        """From now on without, if this call then succeeds: else its steps themselves may fail."""
        self._late_obstacle = str(error)


class Unrecordable(TorchDispatchMode):
    """Looks for what no graph can record: work whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.reason = self.reason or self._reason(function, args, result)
        return result

    def _reason(self, function: Any, args: Any, result: Any) -> str:
        tensors = [leaf for leaf in pytree.tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        name, tags = function.name(), function.tags
        if name in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            waits = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        else:
            waits = (
                torch.Tag.data_dependent_output in tags
                or torch.Tag.dynamic_output_shape in tags
                or name in _WAITING
            )
        if waits:
            return (
                f"waits for the values of a tensor, in {name}, as tensor.item() does, and "
                "torch.distributions unless validate_args=False"
            )
        # Else a CPU tensor without dimensions is a number, which a kernel gets as its argument.
        devices = {leaf.device for leaf in tensors if leaf.dim() or name in _COPYING}
        if len(devices) > 1 or (name == "aten::lift_fresh" and result.is_cuda):
            return f"copies from one device to another, in {name}"
        return ""


_INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_"}
_COPYING = {"aten::_to_copy", "aten::copy_"}
_WAITING = {"aten::is_nonzero", "aten::_linalg_check_errors"}
_WAITING_BACKWARD = {"ProdBackward0", "ProdBackward1", "CumprodBackward0"}
"""They look for zeros, but not below a mode, so that :class:`Unrecordable` sees nothing."""


def waits_in_backward(results: Sequence[Tensor]) -> str:
    """The node of the graph of ``results`` that is known to wait; "" for none."""
    nodes: list[Any] = [leaf.grad_fn for leaf in results if leaf.grad_fn is not None]
    names = (node.name() for node in (*nodes, *nodes_behind(nodes)))
    return next((name for name in names if name in _WAITING_BACKWARD), "")
