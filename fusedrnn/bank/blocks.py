"""Memory for gradients: two blocks on the device, and a pool of blocks on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .engines import Engine, Event
from .memory import HostPool

if TYPE_CHECKING:
    from .gradients import Gradient, GradientLayout


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

    def take(self, owner: Gradient, nbytes: int) -> Block:
        """The block on the device that is longest out of use, for the gradients of ``owner``."""
        assert self.engine is not None
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
        block.owner = owner
        return block
