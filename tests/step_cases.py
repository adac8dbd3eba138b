"""Single steps of every cell, by the operators for a step and by a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import MODULES
from torch import Tensor

from fusedrnn import _call as call

CELLS = [f"{module.__name__}Cell" for module in MODULES.values()]


def arguments(
    name: str, batch: tuple[int, ...], sizes: tuple[int, int], **kwargs: Any
) -> tuple[Tensor, Any, dict[str, Any]]:
    input_size, hidden_size = sizes
    x = torch.randn(*batch, input_size, **kwargs)
    h, c = (torch.randn(*batch, hidden_size, **kwargs) for _ in range(2))
    noise = {"eps": torch.randn(*batch, hidden_size, **kwargs)} if "Stochastic" in name else {}
    return x, (h, c) if name == "LSTMCell" else h, noise


class Spy:
    """Counts the calls of a function."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


def as_layer(patch: pytest.MonkeyPatch) -> None:
    """Has cells take their steps as layers do, as where something else than autograd looks."""
    patch.setattr(call, "is_alone", lambda: False)
