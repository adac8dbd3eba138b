"""Memory for gradients: two blocks on the device, and a pool of blocks on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .block_layout import Place
from .engines import Engine, Event
from .host_memory import HostPool


class Owner(Protocol):
    """Who has numbers in a block that are nowhere else."""

    def send(self) -> None:
        """Has them copied to the host, and leaves the block."""


class Block:
    """One block on the device."""

    def __init__(self, engine: Engine) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.owner: Owner | None = None
        self._engine, self._process = engine, os.getpid()
        self._packed: tuple[Hashable, Event] | None = None
        """The stream that has last written to it, and when."""
        self._sent: tuple[Event] | None = None
        """When its last copy to the host has been done."""
        self._views: tuple[Sequence[Place], Tensor, list[Tensor]] | None = None

    def __del__(self) -> None:
        """torch gives the memory to others, who do not wait for what is under way here."""
        if not sys.is_finalizing() and os.getpid() == self._process:  # else CUDA may be gone
            self._settle()

    def views(self, places: Sequence[Place]) -> list[Tensor]:
        """Its gradients, which lie at these places."""
        known = self._views
        if known is None or known[0] is not places or known[1] is not self.memory:
            views = [place.view(self.memory) for place in places]
            known = self._views = places, self.memory, views
        return known[2]

    def begin(self, nbytes: int, device: torch.device) -> None:
        """The caller's stream waits until it may write ``nbytes``."""
        if self._sent is not None:
            self._engine.wait(self._sent[0])
        if self.memory.nbytes < nbytes:
            self._settle()  # the former memory may be of another stream than the caller's
            with torch.inference_mode(False):
                self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def was_packed(self) -> None:
        """The caller's stream has written to it."""
        stream = self._engine.stream()
        self._packed = stream, self._engine.mark(stream)

    def wait(self) -> None:
        """The caller's stream waits for what another has written."""
        if self._packed is not None and self._packed[0] != self._engine.stream():
            self._engine.wait(self._packed[1])

    def send(self, to: Tensor) -> Event:
        """Has it copied to the host. Returns when it is there."""
        self.wait()
        event = self._engine.send(to, self.memory[: to.nbytes])
        self._packed, self._sent = None, (event,)
        return event

    def _settle(self) -> None:
        """The host waits for all that uses the memory."""
        for event in [*(self._packed or ())[1:], *(self._sent or ())]:
            self._engine.host_wait(event)
        self._packed = self._sent = None


class Home:
    """The blocks on the device, and those on the host."""

    def __init__(self, engine: Engine | None, device: torch.device, blocks: int = 2) -> None:
        self.engine, self.device = engine, device
        if engine is None:
            self.pool = HostPool(lambda memory: None, lambda event: None)
        else:
            self.pool = HostPool(engine.pin, engine.host_wait)
        self.blocks = [Block(engine) for _ in range(blocks)] if engine is not None else []
        self.most = 0
        """Bytes of the largest gradients so far."""
        self.nbytes_out = 0

    def take(self, owner: Owner, nbytes: int) -> Block:
        """The block on the device that is longest out of use, for the gradients of ``owner``."""
        block = next((b for b in self.blocks if b.owner is None), self.blocks[0])
        if block.owner is not None:
            block.owner.send()
        self.blocks.remove(block)
        self.blocks.append(block)
        self.most = max(self.most, nbytes)
        block.begin(self.most if block.memory.nbytes < nbytes else nbytes, self.device)
        block.owner = owner
        return block
