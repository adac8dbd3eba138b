"""The state of a cell before the first step, where a call gives none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._modules.base import RNNCellBase


def initial_state(cell: nn.Module, input: Tensor, rows: int) -> Any:
    """Zeros for cells of torch and of this package, else what the cell says.

    Raises:
        ValueError: It says nothing.
    """
    own = getattr(cell, "initial_state", None)
    if callable(own):
        return own(rows)
    if isinstance(cell, nn.RNNCellBase | RNNCellBase):
        zeros = input.new_zeros((rows, cell.hidden_size))
        has_two = isinstance(cell, nn.LSTMCell) or getattr(cell, "_cell", "") == "lstm"
        return (zeros, torch.zeros_like(zeros)) if has_two else zeros
    raise ValueError(
        f"fusedrnn: no initial state: pass state, or give {type(cell).__name__} a method "
        "initial_state(batch) that returns one"
    )
