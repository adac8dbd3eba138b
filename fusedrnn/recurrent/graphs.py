"""The work of a chunk as a CUDA graph.

A step of small products waits for its launches. A graph records those of one chunk, and launches
all of them at once for each other chunk of the same call: its inputs are copied to where the first
chunk had them. Each call records anew, so that a graph never outlives what it reads: weights,
closed-over tensors and whatever Python decides in a step.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
    """What the graphs have in common that one thread launches on one stream."""

    stream: Any
    """On which they are recorded, since the default stream cannot."""
    pool: Any
    """Their memory. They run one after another, so one may take what an earlier one has left."""
    last: Any = None
    """The graph that was recorded last, without which the memory would be lost until
    torch.cuda.empty_cache()."""


class _Places(threading.local):
    """Of a thread, by device and stream: two threads cannot record on one stream at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, int], _Place] = {}

    def current(self) -> _Place:
        """Of the current stream."""
        stream = torch.cuda.current_stream()
        key = (stream.device, stream.cuda_stream)
        if key not in self._known:
            self._known[key] = _Place(torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        return self._known[key]


class CudaGraph:
    """A CUDA graph, recorded on a stream of its own."""

    _places = _Places()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], T]) -> T:
        with torch.cuda.device(self._device):
            current, place = torch.cuda.current_stream(), self._places.current()
            place.stream.wait_stream(current)
            torch.clear_autocast_cache()  # a graph casts weights itself, and keeps its casts
            try:
                with torch.cuda.stream(place.stream):
                    # Other threads may do what no graph can record: those of a data loader do.
                    self._graph.capture_begin(place.pool, capture_error_mode="thread_local")
                    try:
                        result = function()
                    finally:
                        self._graph.capture_end()
            finally:
                torch.clear_autocast_cache()
            place.last = self._graph
            current.wait_stream(place.stream)
        return result

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


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
        self._function = function
        self._recorder = RECORDERS[device.type](device)
        self._given: list[Any] | None = None
        self._result: T

    def __call__(self, *trees: Any) -> T:
        leaves, spec = pytree.tree_flatten(trees)
        if self._given is None:
            given = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own = pytree.tree_unflatten(given, spec)
            try:
                self._result = self._recorder.record(lambda: self._function(*own))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                first_line = str(error).strip().split("\n")[0]
                raise CannotRecord(f"it raises {type(error).__name__}: {first_line}") from error
            self._given = given
        else:
            for own_leaf, leaf in zip(self._given, leaves, strict=True):
                if isinstance(leaf, Tensor):
                    own_leaf.copy_(leaf)
        self._recorder.replay()
        return self._result


def _copy(tensor: Tensor) -> Tensor:
    """With memory of its own for each element, which a tensor that is expanded has not."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass
class Graphs:
    """What calls with the same kinds of tensors know of their graphs."""

    obstacle: str | None = None
    """Why there are none; "" for nothing; None if nobody has looked."""
    _has_run: set[str] = field(default_factory=set)

    def recorded(
        self, what: str, function: Callable[..., T], device: torch.device
    ) -> Recorded[T] | None:
        """``function`` to be recorded, unless something is against it.

        Args:
            what: The kind of work. It runs as it is in the first call, since a device may load
                kernels then, and the compiler compile.
        """
        if self.obstacle or what not in self._has_run or _is_capturing(device):
            return None
        return Recorded(function, device)

    def has_run(self, what: str) -> None:
        self._has_run.add(what)

    def give_up(self, error: CannotRecord) -> None:
        """From now on without."""
        self.obstacle = str(error)
        warnings.warn(
            f"fusedrnn: the steps run without CUDA graphs, because while one was recorded {error}",
            stacklevel=2,
        )


def _is_capturing(device: torch.device) -> bool:
    """Whether the user records a graph already."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
                f"waits for the values of a tensor, in {name}, as tensor.item() does and "
                "torch.distributions without validate_args=False"
            )
        # Else a CPU tensor without dimensions is a number, which a kernel gets as its argument.
        devices = {leaf.device for leaf in tensors if leaf.dim() or name in _COPYING}
        if len(devices) > 1 or (name == "aten::lift_fresh" and result.is_cuda):
            return f"copies from one device to another, in {name}"
        return ""


_INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_"}
_COPYING = {"aten::_to_copy", "aten::copy_"}
_WAITING = {"aten::is_nonzero", "aten::_linalg_check_errors"}
