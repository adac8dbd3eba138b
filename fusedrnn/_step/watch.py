"""Random numbers of a step: torch's functions that draw, seen as the step calls them."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from .._tracers import is_compiling
from .noise import NumberSource
from .torch_draws import DRAWS


class Watch(TorchFunctionMode):
    """Within, torch's functions draw from a :class:`NumberSource`."""

    def __init__(self, noise: NumberSource) -> None:
        super().__init__()
        self._noise, self._level = noise, _level()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs and kwargs.get("generator") is not None:
            raise ValueError(
                "fusedrnn: a step must not draw from a generator of its own, since backward cannot "
                "draw its numbers again; draw without one, and pass generator= to the call of the "
                "whole sequence"
            )
        draw = DRAWS.get(function)
        # Within torch.func.vmap a step sees one of many shapes; torch draws for all of them.
        if draw is None or _level() != self._level:
            return function(*args, **kwargs)
        kwargs.pop("generator", None)
        if not is_compiling() and _is_in_checkpoint(sys._getframe(1)):
            raise RuntimeError(
                "fusedrnn: the step draws random numbers within torch.utils.checkpoint, which "
                "would draw others in backward; draw them outside the checkpointed part"
            )
        return draw(self._noise, *args, **kwargs)


_CHECKPOINT = torch.utils.checkpoint.__file__
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def _is_in_checkpoint(frame: FrameType | None) -> bool:
    """Whether a step, which this package has called, has called torch.utils.checkpoint."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def _level() -> int:
    """How many transforms of torch.func are around."""
    if is_compiling() or not torch._C._are_functorch_transforms_active():
        return 0
    return torch._C._functorch.maybe_current_level() or 0
