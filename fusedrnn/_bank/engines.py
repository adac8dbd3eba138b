"""How bytes move between host and device.

An engine gives out *marks* of a moment in a stream of the device, and *tickets* of copies; both are
events. ``bring`` is a copy to the device, ``send`` one to the host, each on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from .host_memory import Registry, pin

Event = Any


class Engine(Protocol):
    """For one device."""

    def stream(self) -> Hashable:
        """The stream that the caller's operations go to."""

    def mark(self, stream: Hashable) -> Event:
        """A mark behind all that this stream has been given so far."""

    def bring(self, to: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copies to the device as soon as these events have come."""

    def wait(self, event: Event) -> None:
        """The caller's stream waits for an event; the host does not."""

    def send(self, to: Tensor, source: Tensor) -> Event:
        """Copies to the host, after all that the caller's stream has been given so far."""

    def host_wait(self, event: Event) -> None:
        """The host waits for an event."""

    def pin(self, memory: Tensor) -> None:
        """Called with each new block of host memory that copies are to come from or go to."""


class Immediate:
    """Every copy is done when it is asked for."""

    def stream(self) -> Hashable:
        return None

    def mark(self, stream: Hashable) -> Event:
        return None

    def bring(self, to: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        to.copy_(source)

    def wait(self, event: Event) -> None: ...

    def send(self, to: Tensor, source: Tensor) -> Event:
        to.copy_(source)

    def host_wait(self, event: Event) -> None: ...

    def pin(self, memory: Tensor) -> None: ...


class Runtime(Registry, Protocol):
    """What ``Streams`` needs of a GPU's runtime."""

    def new_stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def record(self, stream: Any) -> Event: ...

    def wait(self, stream: Any, event: Event) -> None: ...

    def copy(self, to: Tensor, source: Tensor, stream: Any) -> None: ...

    def synchronize(self, event: Event) -> None: ...


class Streams:
    """Two streams beside those of the user, one for each direction.

    torch records no events for host memory that it has not allocated, so nothing but the events
    here decides when memory may be written again.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._incoming, self._outgoing = runtime.new_stream(), runtime.new_stream()
        self._has_warned = False

    def stream(self) -> Hashable:
        return self._runtime.current_stream()

    def mark(self, stream: Hashable) -> Event:
        return self._runtime.record(stream)

    def bring(self, to: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        for event in after:
            self._runtime.wait(self._incoming, event)
        self._runtime.copy(to, source, self._incoming)
        return self._runtime.record(self._incoming)

    def wait(self, event: Event) -> None:
        self._runtime.wait(self._runtime.current_stream(), event)

    def send(self, to: Tensor, source: Tensor) -> Event:
        self._runtime.wait(self._outgoing, self.mark(self.stream()))
        self._runtime.copy(to, source, self._outgoing)
        return self._runtime.record(self._outgoing)

    def host_wait(self, event: Event) -> None:
        self._runtime.synchronize(event)

    def pin(self, memory: Tensor) -> None:
        if not pin(memory, self._runtime, warns=not self._has_warned):
            self._has_warned = True


class Cuda:
    """CUDA's runtime, as torch offers it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, to: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def register(self, address: int, nbytes: int) -> str:
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
            if int(error) == 0:
                return ""
            with suppress(RuntimeError):  # takes CUDA's last error, which others would report
                torch.ones(1, device=self._device)
        return torch.cuda.cudart().cudaGetErrorString(error)

    def unregister(self, address: int) -> None:
        torch.cuda.synchronize(self._device)  # a copy may still be under way
        torch.cuda.cudart().cudaHostUnregister(address)


def engine_of(device: torch.device) -> Engine | None:
    """The engine for a device; None for the CPU, where nothing has to move."""
    if device.type == "cpu":
        return None
    return Streams(Cuda(device)) if device.type == "cuda" else Immediate()
